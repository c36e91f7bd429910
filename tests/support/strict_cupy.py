"""A stand-in for CuPy whose arrays lie in the host's memory and mix with NumPy's as little as CuPy's do.

It has the functions of CuPy that the backend and the core use, and refuses what CuPy refuses: NumPy arrays as operands,
implicit conversion to NumPy, `flags.aligned`. What it launches, `launch` runs.
"""

import pickle
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import strict_device
from strict_device import RawModule, Stream, current

FUNCTIONS = (
    "abs arange broadcast_to clip concatenate empty exp flatnonzero frexp full isfinite isinf ldexp log logical_and "
    "logical_or maximum minimum ones ones_like rint stack sum swapaxes tanh where zeros zeros_like"
).split()
METHODS = "all any argmax astype copy max min repeat reshape sum swapaxes view".split()
live = strict_device.live  # the arrays that a kernel may touch


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    def __init__(self, host):
        self.host = host
        self.device = SimpleNamespace(id=current[0].id)
        live[id(self)] = self
        for name in ("shape", "dtype", "ndim", "size", "itemsize", "strides", "nbytes"):  # which cost next to nothing
            setattr(self, name, getattr(host, name))
        self.data = SimpleNamespace(ptr=host.ctypes.data)

    flags = property(lambda self: SimpleNamespace(c_contiguous=self.host.flags.c_contiguous))
    T = property(lambda self: ndarray(self.host.T))

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        if ufunc is np.matmul:  # CuPy's own of several 16-bit matrices are slow or fail
            assert all(matrix.ndim == 2 and matrix.dtype.itemsize > 2 for matrix in args)
        return wrapped(getattr(ufunc, method)(*map(bare, args), **{name: bare(x) for name, x in kwargs.items()}))

    def __array_function__(self, function, types, args, kwargs):
        assert function.__name__ in FUNCTIONS, f"the stand-in has no {function.__name__}"
        return call(function, *args, **kwargs)

    def __getitem__(self, index):
        return wrapped(self.host[bare(index)])

    def __setitem__(self, index, value):
        self.host[bare(index)] = bare(value)

    def __bool__(self):
        return bool(self.host)

    def __int__(self):
        return int(self.host)

    def __float__(self):
        return float(self.host)

    def __len__(self):
        return len(self.host)

    def tolist(self):
        return self.host.tolist()

    def get(self):
        return self.host.copy()


def bare(value):
    """Return what NumPy computes with, for what CuPy would take."""
    if isinstance(value, ndarray):
        return value.host
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    is_sequence = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
    return type(value)(map(bare, value)) if is_sequence else value


def wrapped(value):
    if isinstance(value, tuple):
        return tuple(map(wrapped, value))
    return ndarray(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) else value


def call(function, *args, **kwargs):
    return wrapped(function(*map(bare, args), **{name: bare(x) for name, x in kwargs.items()}))


def _method(name):
    return lambda self, *args, **kwargs: wrapped(getattr(self.host, name)(*args, **kwargs))


for _name in METHODS:
    setattr(ndarray, _name, _method(_name))


def asarray(value, dtype=None):
    """Return a copy of NumPy's numbers, or the array itself."""
    if isinstance(value, ndarray):
        return value if dtype is None or value.dtype == dtype else value.astype(dtype)
    return ndarray(np.array(value, dtype))


def encoded(source, defines, arch):
    """Return in the place of machine code what it would be made of."""
    return pickle.dumps((source, defines))


def module(arch=80, driver=13000, toolkit=13000, available=True):
    """Return the module ``cupy`` of a machine with one such device."""
    cupy, stream = ModuleType("cupy"), Stream()
    for name in FUNCTIONS:
        setattr(cupy, name, partial(call, getattr(np, name)))
    cupy.ndarray, cupy.asarray, cupy.array, cupy.RawModule = ndarray, asarray, asarray, RawModule
    strided = SimpleNamespace(as_strided=partial(call, np.lib.stride_tricks.as_strided))
    cupy.__version__, cupy.lib = "14.0", SimpleNamespace(stride_tricks=strided)
    runtime = SimpleNamespace(
        is_hip=False,
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: toolkit,
        getDeviceProperties=lambda n: {"name": b"A card"},
    )
    device = SimpleNamespace(id=0, compute_capability=str(arch), mem_info=(0, 2**34))
    cupy.cuda = SimpleNamespace(
        runtime=runtime, is_available=lambda: available, Device=lambda: device, get_current_stream=lambda: stream
    )
    cupy.stream, cupy.device = strict_device.streams[0], current[0] = stream, device
    return cupy


def qkv(L=5, S=7, E=16, Ev=24, Hq=4, Hkv=2, batch=(2,), dtype=np.float32):
    """Return NumPy arrays to be moved."""
    rng = np.random.default_rng(5)
    shapes = (*batch, Hq, L, E), (*batch, Hkv, S, E), (*batch, Hkv, S, Ev)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def plain(s, b, h, i, j):
    """Return scores that depend on all that a `score_mod` gets, by a method of arrays, which kernels have not."""
    return np.where(j > 3, s.copy() - 0.5 * h, s + 0.25 * (i + b))
