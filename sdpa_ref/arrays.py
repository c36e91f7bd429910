"""What counts as an array: its kind (whose memory it is), how foreign arrays come in, which types are legal."""

import sys
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # a NumPy or CuPy array; the two share the interface that the core uses
FLOATS = "float16, bfloat16, float32 or float64"
_CPU = (1, 3, 11)  # DLPack device types whose memory the host reads: CPU, pinned CUDA and pinned ROCm


def as_array(name: str, value: Any) -> Array:
    """Return `value` as a NumPy or CuPy array, without a copy where the memory allows."""
    if type(value) is np.ndarray or kind(value) == "cupy":
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost: pass value.data and mask=~value.mask")
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        return _from_dlpack(name, value)
    if hasattr(value, "__cuda_array_interface__"):
        return _from_device(name, value)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TypeError(f"{name} must be an array, got {type(value).__name__} ({error})") from None
    if array.dtype == object:
        raise TypeError(f"{name} must be an array of numbers, got {_described(value, array)}")
    return array


def kind(array: Any) -> str:
    """Return whose memory this is: ``"cupy"`` or ``"numpy"``."""
    cupy = sys.modules.get("cupy")  # a CuPy array cannot exist before CuPy is imported
    return "cupy" if cupy is not None and isinstance(array, cupy.ndarray) else "numpy"


def module_of(kind: str) -> Any:
    """Return the library of these arrays, ``numpy`` or ``cupy``."""
    return np if kind == "numpy" else sys.modules["cupy"]


def is_aligned(array: Array) -> bool:
    """Return whether the numbers lie at multiples of their size, as all of CuPy do."""
    return bool(getattr(array.flags, "aligned", True))


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


def _from_dlpack(name: str, value: Any) -> Array:
    if int(value.__dlpack_device__()[0]) not in _CPU:
        return _from_device(name, value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        return _bfloat16(name, value.view(torch.int16))
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as refused:
        try:
            return np.asarray(value)  # JAX's bfloat16 has no DLPack form in NumPy, but this one
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{name}: a {type(value).__module__} array that NumPy cannot take ({refused})") from None


def _from_device(name: str, value: Any) -> Array:
    try:
        import cupy
    except ImportError:
        raise TypeError(f"{name} lives on a device; device arrays need CuPy, which is not installed") from None
    try:
        return cupy.from_dlpack(value) if hasattr(value, "__dlpack__") else cupy.asarray(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as refused:
        raise TypeError(f"{name} lives on a device, and CuPy cannot take it ({refused})") from None


def _bfloat16(name: str, bits: Any) -> Array:
    """Return the bits of bfloat16 numbers, for which NumPy's DLPack has no type, as such."""
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError(f"{name} is bfloat16, which NumPy knows with ml_dtypes: pip install 'sdpa-ref[half]'") from None
    return np.from_dlpack(bits).view(bfloat16)


def _described(value: Any, array: Array) -> str:
    return f"{array.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
