"""Weights by name: checked against the shapes that a layer states in terms of its sizes, and their file format."""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from sdpa_ref.arrays import FLOATS, Array, as_array, is_float
from sdpa_ref.layers.names import Names, fitting, part_of
from sdpa_ref.stored.quantized import Quantized

Axes = Mapping[str, str]  # the name of each weight, and its shape: "3*heads*dim_head dim 1 1"
_USUALLY = {"kdim": "hidden_size", "vdim": "hidden_size"}  # sizes that are mostly another one, for which they speak
_FEW = 8  # names that are listed one by one


def checked_weights(
    layer: str,
    entries: Mapping[str, Any],
    weights: Axes,
    biases: Axes,
    given: Mapping[str, int],
    names: Names | None = None,
) -> tuple[dict[str, Array], dict[str, int]]:
    """Return the entries as arrays and all sizes of the layer, or raise one error that lists all that is wrong."""
    expected = {**weights, **{name: axes for name, axes in biases.items() if name in entries}}
    missing = [name for name in expected if name not in entries]
    unexpected = [str(name) for name in entries if name not in expected]
    faults = [f"missing: {', '.join(missing)}"] * bool(missing)
    if unexpected:
        strange = 2 * len(missing) > len(weights)
        faults += [f"unexpected: {_grouped(unexpected)}", *_advice(unexpected, weights, names or {}, strange)]
    arrays = {}
    for name in expected:
        if name in entries:
            coded = isinstance(entries[name], Quantized) and len(expected[name].split()) == 2
            try:
                arrays[name] = entries[name] if coded else as_array(name, entries[name])
            except TypeError as error:
                faults.append(str(error))
    sizes = {**given, **_told([(expected[name], array.shape) for name, array in arrays.items()], given)}
    for name, array in arrays.items():
        shape = None
        with suppress(KeyError):  # a size that follows from no shape
            shape = shape_of(expected[name], sizes)
        if array.shape != shape:
            numbers = f" = {_as_far_as_known(expected[name], sizes) if shape is None else shape}"
            faults.append(f"{name} must have shape ({', '.join(expected[name].split())}){numbers}, got {array.shape}")
        if not is_float(array.dtype):
            faults.append(f"{name} must be {FLOATS}, got {array.dtype}")
    if faults:
        raise ValueError("\n  ".join([f"{layer} cannot take these weights:", *faults]))
    return arrays, sizes


def _grouped(names: list[str]) -> str:
    """Return a few names, or the parts of a whole model that they are of."""
    if len(names) <= _FEW:
        return ", ".join(names)
    parts = Counter(map(part_of, names))
    shown = [part + (f" ({count} entries)" if count > 1 else "") for part, count in parts.items()]
    if len(shown) > _FEW:
        shown = [*shown[: _FEW - 1], f"and {sum(list(parts.values())[_FEW - 1 :])} more entries"]
    return ", ".join(shown)


def _advice(names: list[str], weights: Axes, table: Names, strange: bool) -> list[str]:
    """Return where in a whole model this layer may be, or what to do if nothing in it is one."""
    prefixes = fitting(names, weights, table)
    if prefixes:
        others = f", one of {len(prefixes)} that do" if len(prefixes) > 1 else ""
        return [f"name one layer of the model: prefix={prefixes[0]!r} fits{others}"]
    if strange:
        own = next(iter(weights)).rpartition(".")[0] or next(iter(weights))
        return [f"no layer in it has these names: names= tells what is what, as in names={{'its name': {own!r}}}"]
    return []


def shape_of(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape with these sizes."""
    return tuple(math.prod(int(f) if f.isdigit() else sizes[f] for f in axis.split("*")) for axis in axes.split())


def _as_far_as_known(axes: str, sizes: Mapping[str, int]) -> str:
    """Return the shape with these sizes, and the names of the others: ``(4*head_size, 6)``."""
    shown = []
    for axis in axes.split():
        known, unknown = _parted(axis, sizes)
        shown.append("*".join([str(known)] * (known > 1 or not unknown) + unknown))
    return f"({', '.join(shown)})"


def _parted(axis: str, sizes: Mapping[str, int]) -> tuple[int, list[str]]:
    """Return the product of the factors that are known, and the names of the others."""
    factors = axis.split("*")
    known = math.prod(int(f) if f.isdigit() else sizes.get(f, 1) for f in factors)
    return known, [f for f in factors if not f.isdigit() and f not in sizes]


def _told(shapes: list[tuple[str, tuple[int, ...]]], given: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that most shapes agree on, so that one wrong shape is reported and not all the others.

    A length tells a size where all its other factors are known, be it from the other lengths.
    """
    votes: dict[str, Counter[int]] = {}
    for axes, shape in shapes:
        if len(axes.split()) != len(shape):
            continue
        for axis, length in zip(axes.split(), shape, strict=True):
            known, unknown = _parted(axis, given)
            if len(unknown) == 1 and length and length % known == 0:
                for size in {unknown[0], _USUALLY.get(unknown[0], unknown[0])} - set(given):
                    votes.setdefault(size, Counter())[length // known] += 1
    told = {size: counter.most_common(1)[0][0] for size, counter in votes.items()}
    return told | _told(shapes, {**given, **told}) if told else told


def checked_input(name: str, value: Any, axes: str, **sizes: int) -> Array:
    """Return `value` as an array whose last axes are these."""
    array, wanted = as_array(name, value), axes.split()
    lengths = array.shape[-len(wanted) :]
    if len(lengths) < len(wanted) or lengths != tuple(map(sizes.get, wanted, lengths)):
        numbers = ", ".join(str(sizes.get(axis, axis)) for axis in wanted)
        raise ValueError(f"{name} must have shape (..., {', '.join(wanted)}) = (..., {numbers}), got {array.shape}")
    return array


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the type of weights to be drawn."""
    drawn: np.dtype[Any] = np.dtype(dtype)
    if not is_float(drawn):
        raise TypeError(f"dtype must be {FLOATS}, got {drawn}")
    return drawn
