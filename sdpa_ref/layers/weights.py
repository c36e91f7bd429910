"""Weights by name: checked against the shapes that a layer states in terms of its sizes, and their file format."""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from typing import Any

import numpy as np

from sdpa_ref.arrays import FLOATS, Array, as_array, is_float

Axes = Mapping[str, str]  # the name of each weight, and its shape: "3*heads*dim_head dim 1 1"


def checked_weights(
    layer: str, entries: Mapping[str, Any], weights: Axes, biases: Axes, given: Mapping[str, int]
) -> tuple[dict[str, Array], dict[str, int]]:
    """Return the entries as arrays and all sizes of the layer, or raise one error that lists all that is wrong."""
    if not isinstance(entries, Mapping):
        raise TypeError(f"the weights must be a mapping of names to arrays, got {type(entries).__name__}")
    expected = {**weights, **(biases if any(name in entries for name in biases) else {})}
    faults = [f"missing: {name}" for name in expected if name not in entries]
    faults += [f"unexpected: {name}" for name in entries if name not in expected]
    arrays = {}
    for name in expected:
        if name in entries:
            try:
                arrays[name] = as_array(name, entries[name])
            except TypeError as error:
                faults.append(str(error))
    sizes = {**given, **_told([(expected[name], array.shape) for name, array in arrays.items()], given)}
    for name, array in arrays.items():
        shape = None
        with suppress(KeyError):  # a size that no shape tells
            shape = shape_of(expected[name], sizes)
        if array.shape != shape:
            numbers = "" if shape is None else f" = {shape}"
            faults.append(f"{name} must have shape ({', '.join(expected[name].split())}){numbers}, got {array.shape}")
        if not is_float(array.dtype):
            faults.append(f"{name} must be {FLOATS}, got {array.dtype}")
    if faults:
        raise ValueError("\n  ".join([f"{layer} cannot take these weights:", *faults]))
    return arrays, sizes


def shape_of(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape with these sizes."""
    return tuple(math.prod(int(f) if f.isdigit() else sizes[f] for f in axis.split("*")) for axis in axes.split())


def _told(shapes: list[tuple[str, tuple[int, ...]]], given: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that most shapes agree on, so that one wrong shape is reported and not all the others."""
    votes: dict[str, Counter[int]] = {}
    for axes, shape in shapes:
        if len(axes.split()) != len(shape):
            continue
        for axis, length in zip(axes.split(), shape, strict=True):
            factors = axis.split("*")
            known = math.prod(int(f) if f.isdigit() else given.get(f, 1) for f in factors)
            unknown = [f for f in factors if not f.isdigit() and f not in given]
            if unknown and length and length % known == 0:
                votes.setdefault(unknown[0], Counter())[length // known] += 1
    return {size: counter.most_common(1)[0][0] for size, counter in votes.items()}


def checked_input(name: str, value: Any, axes: str, **sizes: int) -> Array:
    """Return `value` as an array whose last axes are these."""
    array, wanted = as_array(name, value), axes.split()
    if array.ndim < len(wanted) or any(
        sizes.get(axis, length) != length
        for axis, length in zip(wanted, array.shape[array.ndim - len(wanted) :], strict=True)
    ):
        numbers = ", ".join(str(sizes.get(axis, axis)) for axis in wanted)
        raise ValueError(f"{name} must have shape (..., {', '.join(wanted)}) = (..., {numbers}), got {array.shape}")
    return array


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the type of weights to be drawn."""
    drawn: np.dtype[Any] = np.dtype(dtype)
    if not is_float(drawn):
        raise TypeError(f"dtype must be {FLOATS}, got {drawn}")
    return drawn


def read(path: str | PathLike[str]) -> dict[str, Array]:
    """Return the entries of a safetensors file."""
    with suppress(ImportError):
        import ml_dtypes  # noqa: F401  # from here on NumPy knows bfloat16
    try:
        entries: dict[str, Array] = safetensors().load_file(path)
    except (OSError, ModuleNotFoundError):
        raise
    except Exception as error:  # the class is SafetensorError, or what NumPy says of a type it does not know
        hint = "; bfloat16 needs ml_dtypes: pip install 'sdpa-ref[half]'" if "bfloat16" in str(error) else ""
        raise ValueError(f"NumPy cannot read {path} as a safetensors file: {error}{hint}") from None
    return entries


def safetensors() -> Any:
    """Return the module that reads and writes the files."""
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("weight files need safetensors: pip install 'sdpa-ref[weights]'") from error
    return safetensors.numpy
