"""What counts as an array: its kind (whose memory it is), how foreign arrays come in, which types are legal."""

import math
import sys
from contextlib import suppress
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from sdpa_ref.extras import install

Array: TypeAlias = Any  # a NumPy or CuPy array; the two share the interface that the core uses
FLOATS = "float16, bfloat16, float32 or float64"
_UNMASK = {
    "key": "pass key.filled(0), and the keys that count as mask=",
    "value": "pass value.filled(0), and the keys that count as mask=",
    "mask": "mask.filled(False) drops the pairs where it is masked",
    "bias": "bias.filled(-numpy.inf) drops the keys where it is masked",
}
_REFUSALS = (
    TypeError, ValueError, AttributeError, RuntimeError, BufferError, LookupError, ArithmeticError, AssertionError,
    Warning,
)  # fmt: skip
"""What conversions of other libraries raise; anything else, such as a TimeoutError, comes from a handler of signals."""

_CPU = (1, 3, 11)  # DLPack device types whose memory the host reads: CPU, pinned CUDA and pinned ROCm


def as_array(name: str, value: Any) -> Array:
    """Return `value` as a NumPy, CuPy or Dask array, without a copy where the memory allows."""
    if type(value) is np.ndarray or kind(value) == "cupy":
        return value
    if hasattr(value, "__dask_graph__") and _is_lazy(name, value):
        return value
    if _is_masked(value):
        hint = _UNMASK.get(name, f"pass {name}.filled(0), or another number, in its place")
        raise TypeError(f"{name} is a masked array, whose mask would be lost: {hint}")
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        return _from_dlpack(name, value)
    if hasattr(value, "__cuda_array_interface__"):
        return _from_device(name, value)
    try:
        array = np.asarray(value)
    except _REFUSALS as error:
        if hasattr(value, "dtype"):  # a tracer of a library without DLPack
            raise _not_taken(name, value, error) from None
        raise TypeError(f"{name} must be an array, got {type(value).__name__} ({error})") from None
    if array.dtype == object:
        raise TypeError(f"{name} must be an array of numbers, got {_described(value, array)}")
    return array


def memory_array(name: str, value: Any) -> Array:
    """Return `value` as an array whose numbers are there, a NumPy or CuPy array."""
    array = as_array(name, value)
    if kind(array) == "dask":
        raise TypeError(f"{name} must be an array in memory, got a dask array: pass it with .compute()")
    return array


def host_array(name: str, value: Any) -> Array:
    """Return numbers that the host has to read, such as lengths, as a NumPy array."""
    try:
        array = as_array(name, value)
    except TypeError as error:
        if isinstance(value, (list, tuple)) and isinstance(error.__context__, ValueError):  # lists of several lengths
            raise ValueError(f"{name} must have one shape, got {value!r:.60}") from None
        raise
    if kind(array) != "numpy":
        remedy = ".get()" if kind(array) == "cupy" else ".compute()"
        raise TypeError(f"{name} must be readable by the host, got a {kind(array)} array: pass it with {remedy}")
    return array


def as_integer(name: str, value: Any, hint: str = "") -> int:
    """Return `value` as a Python int: an integer of Python or NumPy, or an array without axes of any library."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if hasattr(value, "dtype"):
        array = host_array(name, value)
        if array.ndim == 0 and array.dtype.kind in "iu":
            return int(array)
        got = f"{type(value).__name__} of {array.dtype} and shape {array.shape}" if array.ndim else array.dtype
    else:
        got = type(value).__name__
    raise TypeError(f"{name} must be an integer, got {got}{hint}")


def real_number(name: str, value: Any) -> float:
    """Return a finite number."""
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        array = as_array(name, value)  # NumPy's own scalars and arrays without axes
        if array.ndim or kind(array) == "dask" or not (is_float(array.dtype) or array.dtype.kind in "iu"):
            raise TypeError(f"{name} must be a real number, got {type(value).__name__} {value!r:.40}")
    try:
        number = float(value)
    except OverflowError:
        number = np.inf
    if not np.isfinite(number):
        raise ValueError(f"{name} must be finite (in float64), got {value!r:.40}")
    return number


def kind(array: Any) -> str:
    """Return whose memory this is, ``"cupy"`` or ``"numpy"``, or ``"dask"`` for what is only computed later."""
    cupy = sys.modules.get("cupy")  # a CuPy array cannot exist before CuPy is imported
    if cupy is not None and isinstance(array, cupy.ndarray):
        return "cupy"
    lazy = getattr(sys.modules.get("dask.array.core"), "Array", ())  # another thread may be importing it just now
    return "dask" if isinstance(array, lazy) else "numpy"


def module_of(kind: str) -> Any:
    """Return the library of these arrays, ``numpy``, ``cupy`` or ``dask.array``."""
    if kind in ("numpy", "store"):
        return np
    return sys.modules["cupy" if kind == "cupy" else "dask.array"]


def is_aligned(array: Array | None) -> bool:
    """Return whether the numbers of an array lie at multiples of their size; None is aligned."""
    if array is None:
        return True
    if type(array) is np.ndarray or kind(array) == "numpy":
        return bool(array.flags.aligned)
    size = array.itemsize
    if array.data.ptr % size:
        return False
    return not any([stride % size and n > 1 for stride, n in zip(array.strides, array.shape, strict=True)])


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of this type can be attended over."""
    return dtype.char in "efd" or dtype.name == "bfloat16"


def result_dtype(**dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """Return the common type of arrays of these types, in native byte order; a TypeError names the odd one."""
    for name, dtype in dtypes.items():
        if not is_float(dtype):
            hint = f"; convert it with {name}.astype(numpy.float32)" if dtype.kind in "iub" else ""
            raise TypeError(f"{name} must be {FLOATS}, got {dtype}{hint}")
    try:
        return np.result_type(*dtypes.values()).newbyteorder("=")
    except TypeError:
        got = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"{' and '.join(dtypes)} have no common type: {got}; convert one of them") from None


def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which backends sum: float64 for float64, else float32."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def summed_to(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Return a gradient summed over the axes along which an array of this shape was broadcast."""
    lead = gradient.ndim - len(shape)
    axes = tuple(axis for axis, size in enumerate(shape, lead) if size == 1 and gradient.shape[axis] != 1)
    return gradient.sum((*range(lead), *axes), keepdims=True).reshape(shape) if lead or axes else gradient


def _from_dlpack(name: str, value: Any) -> Array:
    try:
        on_host = int(value.__dlpack_device__()[0]) in _CPU
    except _REFUSALS as refused:  # a JAX array on several devices, a tracer, a tensor without memory
        if not _is_of_jax_on_host(value):
            raise _not_taken(name, value, refused) from None
        on_host = True
    if not on_host:
        return _from_device(name, value)
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    try:
        return _from_torch(torch, value) if is_tensor else np.from_dlpack(value)
    except _REFUSALS as refused:
        with suppress(*_REFUSALS):
            if not is_tensor:
                return np.asarray(value)  # JAX's bfloat16 has no DLPack form in NumPy, but this one
        raise _not_taken(name, value, refused) from None


def _is_lazy(name: str, value: Any) -> bool:
    """Return whether this is a Dask array that calls can go on with, or raise the error of one that they cannot.

    A wrapper without a graph, such as an xarray object in memory, is none.
    """
    if kind(value) == "dask":
        if any(math.isnan(n) for n in value.shape):
            raise ValueError(
                f"{name} is a Dask array whose chunk sizes are unknown, shape {value.shape}: "
                f"call {name}.compute_chunk_sizes() first"
            )
        return True
    if value.__dask_graph__() is None:
        return False
    cls = type(value)
    hint = "convert it to a dask.array.Array, or pass .compute()"
    if "expr" in cls.__module__ or cls.__module__.partition(".")[0] == "dask_array":
        hint = (
            "array expressions cannot be cut into blocks yet: set the Dask option array.query-planning to False before "
            "dask.array is imported, and build the array with dask.array"
        )
    elif hasattr(value, "to_dask_array"):
        hint = "pass .to_dask_array(lengths=True)"
    elif hasattr(value, "data"):
        hint = "pass .data"
    raise TypeError(f"{name} is a {cls.__module__}.{cls.__qualname__}, of which only Dask can compute a part: {hint}")


def _is_of_jax_on_host(value: Any) -> bool:
    """Return whether this is a JAX array all of whose devices are the host: NumPy puts its shards together."""
    try:
        return all(device.platform == "cpu" for device in value.devices())
    except _REFUSALS:  # a tracer, or not of JAX
        return False


def _not_taken(name: str, value: Any, reason: Exception) -> TypeError:
    lines = str(reason).splitlines() or [type(reason).__name__]
    return TypeError(
        f"{name} must be an array with numbers in the host's memory, got {type(value).__module__}."
        f"{type(value).__name__}, which NumPy cannot take ({lines[0]}); for tracers and gradients see docs/bridges.md"
    )


def _from_device(name: str, value: Any) -> Array:
    try:
        import cupy
    except ImportError:
        raise TypeError(f"{name} lives on a device; device arrays need CuPy, which is not installed") from None
    try:
        return cupy.from_dlpack(value) if hasattr(value, "__dlpack__") else cupy.asarray(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as refused:
        raise TypeError(f"{name} lives on a device, and CuPy cannot take it ({refused})") from None


def _from_torch(torch: Any, tensor: Any) -> Array:
    """Return a tensor by its own `numpy`, which refuses what DLPack would pass on wrongly."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError("it requires a gradient; use tensor.detach()")
    tensor = tensor.detach().resolve_neg()
    tensor.untyped_storage().data_ptr()  # an error where a transformation of functions keeps the numbers elsewhere
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    bits = tensor.view(torch.int16).numpy()
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError(f"bfloat16 arrays need ml_dtypes: {install('half')}") from None
    return bits.view(bfloat16)


def _is_masked(value: Any) -> bool:
    """Return whether this is a masked array of NumPy, or a sequence that holds one."""
    if isinstance(value, (list, tuple)):
        return any(_is_masked(item) for item in value)
    return isinstance(value, np.ma.MaskedArray)


def _described(value: Any, array: Array) -> str:
    if isinstance(value, np.ndarray):
        return f"{array.dtype} array"
    name = type(value).__name__
    return f"{name} of Python objects: convert it, as with .to_numpy(float)" if hasattr(value, "to_numpy") else name
