"""The device of the stand-in for CuPy: streams, modules, kernels and graphs, as far as CUDA is strict about them.

A module belongs to the device that was current when it was loaded. A kernel has 48 KiB of shared memory until it is
allowed more, at most what a block of the device may have. A graph reads and writes the memory that its launches were
given, and does not keep it.
"""

import pickle
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from sdpa_cupy.parameters import FLOWS, VIEWS
from sdpa_cupy.variants import SHARED

current = [SimpleNamespace(id=0, compute_capability="80")]  # the device
live = weakref.WeakValueDictionary()  # all arrays of the stand-in
DEFAULT = 48 * 1024


class Stream:
    ptr = 0
    capturing = False

    def is_capturing(self):
        return self.capturing

    def begin_capture(self):
        assert self.ptr > 1, "a default stream cannot be captured"
        self.capturing, self.recorded = True, []

    def end_capture(self):
        self.capturing = False
        return Graph(self.recorded)


class Graph:
    """Launches with the arrays that they touch, which it does not keep."""

    def __init__(self, recorded):
        self.recorded = recorded

    def launch(self):
        for run, owners in self.recorded:
            assert all(owner() is not None for owner in owners), "memory of a captured launch was given back"
            run()


class RawModule:
    """Loads what `encoded` returns, instead of machine code."""

    def __init__(self, path):
        self.source, self.defines = pickle.loads(Path(path).read_bytes())
        self.device = current[0].id

    def get_function(self, name):
        return Kernel(self, name)


class Kernel:
    def __init__(self, module, name):
        self.module, self.name, self._most = module, name, DEFAULT

    @property
    def max_dynamic_shared_size_bytes(self):
        return self._most

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size):
        arch = int(current[0].compute_capability)
        room = next(kib for known, kib in sorted(SHARED.items(), reverse=True) if known <= arch) * 1024
        if size > room:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        self._most = size

    def __call__(self, grid, block, args, *, shared_mem=0):
        if current[0].id != self.module.device:
            raise RuntimeError("CUDA_ERROR_INVALID_HANDLE: invalid resource handle")
        if shared_mem > self._most or any(n >= 2**31 for n in grid) or not all((*grid, *block)):
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        (parameters,) = args
        parameters = parameters.copy()

        def run():
            self.launch(self.name, self.module.source, self.module.defines, grid, block, parameters, shared_mem)

        if getattr(streams[0], "capturing", False) and hasattr(streams[0], "recorded"):
            streams[0].recorded.append((run, owners(parameters)))
        run()


streams = [None]  # the current one


def owners(parameters):
    """Return weak references to the arrays whose memory a parameter block names."""
    views = [name for name in (*VIEWS, *FLOWS) if name in parameters.dtype.names]
    addresses = [int(parameters[0][name]["data"]) for name in views]
    addresses += [int(parameters[0][name]) for name in ("workspace", "bands")]
    found = []
    for address in filter(None, addresses):
        (owner, *_) = [array for array in list(live.values()) if _holds(array.host, address)] or [None]
        assert owner is not None, "a launch was given memory that is no array's"
        found.append(weakref.ref(_base(owner)))
    return found


def _holds(host, address):
    return host.size and (host.ctypes.data == address or host.ctypes.data <= address < host.ctypes.data + host.nbytes)


def _base(array):
    """Return what owns the memory: an array of NumPy's, which lives as long as any view of it."""
    host = array.host
    while isinstance(host.base, np.ndarray):
        host = host.base
    return host
