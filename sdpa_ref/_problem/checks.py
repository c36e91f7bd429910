"""Errors of arguments other than masks: each check returns the canonical form or raises an error with the remedy."""

import sys
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from sdpa_ref.arrays import FLOATS, Array, as_array, as_integer, host_array, is_float, kind, module_of, real_number
from sdpa_ref.biases import ALiBi
from sdpa_ref.floating_point import ieee
from sdpa_ref.masks.checks import broadcastable, check_broadcast
from sdpa_ref.sources import Source
from sdpa_ref.storage import Stored

Shape = tuple[int, ...]


def heads_first(array: Array, layout: str) -> Array:
    """Return a view (..., H, length, width)."""
    if type(array) is Stored or type(array) is Source:
        return array.heads_first(layout)
    if array.ndim == 2:
        return array[None]
    return array.swapaxes(-2, -3) if layout == "LHE" else array


def sizes(shapes: dict[str, Shape], layout: str) -> tuple[Shape, int, int, int, int, int, int]:
    """Return batch, Hq, Hkv, L, S, E, Ev of arrays of these shapes, in which heads come before lengths."""
    lead = {name: (shape[:-2] or (1,)) for name, shape in shapes.items()}
    (Hq, L, E), (Hkv, S, key_width) = ((lead[name][-1], *shapes[name][-2:]) for name in ("query", "key"))
    shown = {
        name: shape if layout == "HLE" or len(shape) < 3 else (*shape[:-3], shape[-2], shape[-3], shape[-1])
        for name, shape in shapes.items()
    }
    got = ", ".join(f"{name} {shape}" for name, shape in shown.items()) + (
        f" in layout {layout}" if layout != "HLE" else ""
    )
    if key_width != E:
        raise ValueError(f"query and key must have the same width E, got {E} and {key_width}: {got}")
    Ev = 0
    if "value" in shapes:
        value_heads, value_length, Ev = lead["value"][-1], *shapes["value"][-2:]
        if value_length != S:
            raise ValueError(f"key and value must have the same length S, got {S} and {value_length}: {got}")
        if value_heads != Hkv:
            raise ValueError(
                f"key and value must have the same number of heads Hkv, got {Hkv} and {value_heads}: {got}"
            )
    if Hq and (Hkv == 0 or Hq % Hkv):
        hint = '; for heads after lengths: layout="LHE"' if layout == "HLE" and S and L and L % S == 0 else ""
        raise ValueError(f"the query heads Hq = {Hq} must be a multiple of the key heads Hkv = {Hkv}: {got}{hint}")
    try:
        batch = np.broadcast_shapes(*(axes[:-1] for axes in lead.values()))
    except ValueError:
        raise ValueError(f"the leading axes of {', '.join(shapes)} must broadcast: {got}") from None
    return batch, Hq, Hkv, L, S, E, Ev


def native(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return the array in this type; a copy only where type or byte order differ."""
    if type(array) is Stored or type(array) is Source or array.dtype == dtype:
        return array
    return ieee(array.astype)(dtype)


def bias_parts(bias: Any, batch: Shape, Hq: int, L: int, S: int) -> tuple[tuple[Array, ...], Array]:
    """Return the bias arrays, and the ALiBi slopes, (Hq,) or (*batch, Hq), or None."""
    if isinstance(bias, ALiBi):
        return (), _slopes(bias, batch, Hq)
    if not isinstance(bias, tuple):
        return (_bias_array(bias, batch, Hq, L, S),), None
    slopes = [_slopes(part, batch, Hq) for part in bias if isinstance(part, ALiBi)]
    arrays = [_bias_array(part, batch, Hq, L, S) for part in bias if not isinstance(part, ALiBi)]
    return tuple(arrays), sum(slopes) if slopes else None


def _slopes(alibi: ALiBi, batch: Shape, Hq: int) -> Array:
    """Return the slopes, one a query head, or one for each batch entry and head."""
    shape = alibi.slopes.shape
    if shape == ():
        return np.full(Hq, alibi.slopes)
    if shape[-1] != Hq or not broadcastable(shape[:-1], batch):
        each = f" or (*batch, Hq) = {(*batch, Hq)}" if batch else ""
        raise ValueError(f"bias: ALiBi slopes must be a number or have shape (Hq,) = ({Hq},){each}, got {shape}")
    return alibi.slopes


def _bias_array(bias: Any, batch: Shape, Hq: int, L: int, S: int) -> Array:
    """Return the array in native byte order."""
    array = bias if type(bias) is np.ndarray else as_array("bias", bias)
    dtype = array.dtype
    if dtype.char not in "fd" and not is_float(dtype):
        if dtype == np.bool_:
            raise TypeError("bias must be float numbers that are added to the scores; pass a boolean array as mask=")
        raise TypeError(f"bias must be {FLOATS}, got {dtype}")
    check_broadcast("bias", array.shape, batch, Hq, L, S)
    return array if dtype.isnative else native(array, dtype.newbyteorder("="))


def sink_logits(sink: Any, Hq: int, acc_dtype: np.dtype[Any]) -> Array:
    """Return the sink as float64 logits (Hq,)."""
    array = host_array("sink", sink) if kind(sink) == "dask" else as_array("sink", sink)
    if not is_float(array.dtype) and array.dtype.kind not in "iu":
        raise TypeError(f"sink must be real numbers, got {array.dtype}")
    if array.shape not in ((), (Hq,)):
        raise ValueError(f"sink must be a number or have shape (Hq,) = ({Hq},), got {array.shape}")
    logits = array.astype(np.float64) if array.ndim else np.broadcast_to(array.astype(np.float64), (Hq,))
    if array.dtype.itemsize > acc_dtype.itemsize or array.dtype.kind in "iu":  # else its type has no larger numbers
        most = float(np.finfo(acc_dtype).max)
        logits = np.where(np.isinf(logits), logits, np.minimum(np.maximum(logits, -most), most))
    return logits


def soft_cap(value: Any) -> float:
    """Return a finite number above 0."""
    try:
        cap = real_number("softcap", value)
    except TypeError:
        raise TypeError(f"softcap must be a real number or None, got {type(value).__name__} {value!r:.40}") from None
    except ValueError:
        cap = 0.0
    if cap <= 0:
        raise ValueError(f"softcap must be finite and above 0 (None turns it off), got {value!r:.40}")
    return cap


def checked_sizes(minimum: int = 1, /, **sizes: Any) -> dict[str, int]:
    """Return the sizes as integers of at least the minimum."""
    for name, size in sizes.items():
        sizes[name] = as_integer(name, size)
        if sizes[name] < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {sizes[name]}")
    return sizes


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return the shape as a tuple of integers of at least 0."""
    if not isinstance(shape, (tuple, list, np.ndarray)):
        raise TypeError(f"shape must be a tuple of integers, got {type(shape).__name__}")
    return tuple(checked_sizes(0, **{f"shape[{axis}]": size for axis, size in enumerate(shape)}).values())


def check_score_mod(score_mod: Any, shape: tuple[int, ...], module: Any = np) -> None:
    """Raise the error of a `score_mod` that cannot be applied, after trying it on one score of this library."""
    if not callable(score_mod):
        raise TypeError(f"score_mod must be a function f(s, b, h, i, j), got {type(score_mod).__name__}")
    if 0 in shape:
        return
    plain = getattr(score_mod, "py_func", score_mod)  # what Numba would first have to compile for arrays
    with np.errstate(all="ignore"):
        result = as_array("the result of score_mod", plain(module.zeros((1, 1)), *module.zeros((4, 1, 1), np.int64)))
    if not (is_float(result.dtype) or result.dtype.kind in "iu"):
        raise TypeError(f"score_mod must return real numbers, got {result.dtype}")
    if not broadcastable(result.shape, (1, 1)):
        raise ValueError(f"score_mod must work elementwise: a score of shape (1, 1) gave {result.shape}")


def one_kind(arrays: dict[str, Array]) -> None:
    """Raise a TypeError unless all arrays live in the same kind of memory."""
    if "cupy" not in sys.modules and "dask.array" not in sys.modules:
        return
    kinds = {name: kind(array.numbers if type(array) is Stored else array) for name, array in arrays.items()}
    if len({*kinds.values()} - ({"numpy", "cupy"} if kinds["query"] == "dask" else set())) > 1:
        got = ", ".join(f"{name} is a {k} array" for name, k in kinds.items())
        raise TypeError(f"all arrays must be of one kind, nothing is moved between host and device: {got}")


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], used: tuple[Array, ...]) -> None:
    """Raise the error of an `out` that cannot receive the result."""
    module = np if type(used[0]) is np.ndarray else module_of(kind(used[0]))
    if type(out) is not module.ndarray and (not isinstance(out, module.ndarray) or isinstance(out, np.ma.MaskedArray)):
        raise TypeError(f"out must be a {module.__name__} array, got {type(out).__name__}")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out must have shape {shape} and dtype {dtype}, got {out.shape} and {out.dtype}")
    flags = out.flags
    if module is np and not flags.writeable:
        raise ValueError("out must be writeable, got a read-only array")
    if not flags.c_contiguous and out.size and _overlaps_itself(out):
        raise ValueError(f"out must not overlap itself, got shape {out.shape} with strides {out.strides}")
    for array in used if module is np else _near(out, used):
        if _overlap(out, array):
            raise ValueError("out must not share memory with query, key, value, mask, bias or sink")


def _overlaps_itself(array: Array) -> bool:
    """Return whether, going from the closest axis to the widest, a step falls within what lies before it."""
    reach = array.itemsize
    for step, size in sorted((abs(step), size) for step, size in zip(array.strides, array.shape, strict=True)):
        if size > 1 and step < reach:
            return True
        reach += step * (size - 1)
    return False


def _overlap(a: Array, b: Array) -> bool:
    """Return whether two arrays share memory, or may do so as far as a short search finds."""
    if type(a) is not np.ndarray or type(b) is not np.ndarray:
        if type(a) is not type(b) and kind(a) != kind(b):
            return False
        a, b = _addresses(a), _addresses(b)
    try:
        return np.may_share_memory(a, b) and np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _near(out: Array, used: tuple[Array, ...]) -> list[Array]:
    """Return which arrays may share memory with a CuPy array, as far as bounds tell."""
    at, near = out.data.ptr, []
    first, last = _bounds(out.shape, out.strides, out.itemsize)
    low, high = at + first, at + last
    for array in used:
        if type(array) is type(out):
            at = array.data.ptr
            first, last = _bounds(array.shape, array.strides, array.itemsize)
            if at + first >= high or at + last <= low:
                continue
        near.append(array)
    return near


@lru_cache(maxsize=1024)
def _bounds(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return where an array's memory begins and ends, in bytes behind its first number."""
    if 0 in shape:
        return 0, 0
    first, last = 0, itemsize
    for n, stride in zip(shape, strides, strict=True):
        if stride < 0:
            first += (n - 1) * stride
        else:
            last += (n - 1) * stride
    return first, last


def _addresses(array: Array) -> Array:
    """Return a NumPy array at the address of a CuPy array, to compare their memory; it must not be read."""
    if type(array) is np.ndarray or kind(array) == "numpy":
        return array
    described = {
        "shape": array.shape, "strides": array.strides, "typestr": f"|V{array.itemsize}",
        "data": (array.data.ptr, True), "version": 3,
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=described))
