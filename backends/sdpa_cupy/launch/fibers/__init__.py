"""The kernels' own source, built by g++ and run on the CPU: every thread of a block is a fiber of one processor thread.

What a GPU leaves undefined is an error here: lanes of a warp at different collectives, barriers that some threads miss,
races in shared memory, asynchronous copies that were not waited for, accesses outside every array or not aligned.
"""

import ctypes
import subprocess
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from sdpa_cupy.compile import KERNELS
from sdpa_cupy.launch.fibers.build import BuildError, library, unavailable
from sdpa_cupy.plan import Launch

__all__ = ["SCHEDULES", "BuildError", "Fault", "Fibers", "Report", "unavailable"]

Order = Literal["up", "down", "random"]
Array = np.ndarray[Any, np.dtype[Any]]
SCHEDULES: tuple[tuple[Order, bool], ...] = tuple(product(get_args(Order), (True, False)))
"""All pairs of `Fibers.order` and `Fibers.late`: the results must have the same bits in each."""

_COUNTS = ("switches", "barriers", "products", "matrices", "shuffles", "copies")
_PLACES = 1024


class Fault(RuntimeError):
    """What a kernel did that it must not do, with the line of its source."""


class Report(NamedTuple):
    """What one launch did.

    Attributes
    ----------
    kernel : str
    library : Path
        Of which `places` are the offsets.
    switches, barriers, products, matrices, shuffles, copies : int
        Changes of fibers, barriers of blocks, products of tiles, 8 x 8 matrices loaded, shuffles, asynchronous copies.
    places : tuple of (int, int, int)
        Instructions that touch shared memory: where, in how many steps the banks served them, and the least possible.
    """

    kernel: str
    library: Path
    switches: int
    barriers: int
    products: int
    matrices: int
    shuffles: int
    copies: int
    places: tuple[tuple[int, int, int], ...]

    @property
    def conflicts(self) -> dict[str, float]:
        """Lines with bank conflicts, and in how many times the least number of steps they were served."""
        return {_line(self.library, place): steps / least for place, steps, least in self.places if steps > least}

    @property
    def factor(self) -> float:
        """The same for all lines together: 1 where there are no bank conflicts."""
        steps, least = (sum(place[n] for place in self.places) for n in (1, 2))
        return steps / least if least else 1.0


@dataclass
class Fibers:
    """A launcher over NumPy arrays.

    Attributes
    ----------
    arch : int
    order : {"up", "down", "random"}
        In which order threads and blocks run: greedily, or mixed.
    late : bool
        Whether asynchronous copies land when they are waited for, or at once.
    folder : Path
        Where the sources are.
    sanitize : bool
        Whether the library is built with the compiler's sanitizers, instead of with this package's checks of accesses.
    first : int
        Number of the first block that runs; those before it are left out.
    reports : list of Report
        One for each launch.
    """

    arch: int = 80
    order: Order = "up"
    late: bool = True
    folder: Path = KERNELS
    sanitize: bool = False
    first: int = 0
    reports: list[Report] = field(default_factory=list)
    _arrays: list[Array] = field(default_factory=list)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array whose bytes are all 0xff: NaN in every float type."""
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    def address(self, array: Array | None) -> int:
        """Return where an array begins, which kernels may touch from now on; 0 for None."""
        if array is None:
            return 0
        self._arrays.append(array)
        return int(array.ctypes.data)

    def moved(self, array: Array | None) -> Array | None:
        """Return the array, which kernels can read where it lies."""
        return array

    def run(self, launch: Launch, parameters: Array) -> None:
        """Run one kernel.

        Raises
        ------
        Fault
            For what it must not do.
        BuildError
            Where the compiler refuses it.
        """
        path = library(launch.source, launch.defines, self.arch, self.folder, self.sanitize)
        code = _loaded(path)
        threads = ctypes.c_int.in_dll(code, f"{launch.kernel}_threads").value
        if launch.threads > threads:
            raise Fault(f"{launch.kernel} is built for {threads} threads a block, and launched with {launch.threads}")
        spans = [_Span(*_span(array), array.flags.writeable) for array in self._arrays]
        job = _Job(
            entry=ctypes.cast(getattr(code, launch.kernel), ctypes.c_void_p),
            parameters=parameters.ctypes.data,
            parameters_size=parameters.nbytes,
            grid=launch.grid,
            threads=launch.threads,
            shared=launch.shared,
            order=get_args(Order).index(self.order),
            late=self.late,
            first=self.first,
            arch=self.arch,
            watched=not self.sanitize,
            spans=(_Span * len(spans))(*spans),
            span_count=len(spans),
        )
        outcome = _Outcome()
        if not code.fibers_run(ctypes.byref(job), ctypes.byref(outcome)):
            raise Fault(self._described(launch, path, outcome))
        self.reports.append(_report(launch.kernel, path, outcome))

    def _described(self, launch: Launch, path: Path, outcome: "_Outcome") -> str:
        """Return the message of a fault: the thread, the fault, the place in the source, and which array is nearest."""
        text = f"{launch.kernel}, block {tuple(outcome.block)}, thread {outcome.thread}: {outcome.message.decode()}"
        near = ""
        if outcome.address and self._arrays:
            array = min(self._arrays, key=lambda one: _distance(one, outcome.address))
            offset = outcome.address - _span(array)[0]
            near = f", at {offset:+,} of the {array.nbytes:,} bytes of an array {array.dtype} {array.shape}"
        return f"{text}{near} ({_line(path, outcome.place)})" if outcome.place else text


class _Span(ctypes.Structure):
    _fields_ = (("start", ctypes.c_size_t), ("stop", ctypes.c_size_t), ("writable", ctypes.c_int))


class _Job(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("parameters_size", ctypes.c_uint64),
        ("grid", ctypes.c_int * 3),
        *((name, ctypes.c_int) for name in ("threads", "shared", "order", "late", "first", "arch", "watched")),
        ("spans", ctypes.POINTER(_Span)),
        ("span_count", ctypes.c_int),
    )


class _Conflicts(ctypes.Structure):
    _fields_ = (("place", ctypes.c_size_t), ("steps", ctypes.c_int64), ("least", ctypes.c_int64))


class _Outcome(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _COUNTS),
        ("message", ctypes.c_char * 512),
        ("place", ctypes.c_size_t),
        ("address", ctypes.c_size_t),
        ("block", ctypes.c_int * 3),
        ("thread", ctypes.c_int),
        ("conflicts", _Conflicts * _PLACES),
        ("places", ctypes.c_int),
    )


@cache
def _loaded(path: Path) -> ctypes.CDLL:
    ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)  # which the library is not linked with
    code = ctypes.CDLL(str(path))
    code.fibers_run.restype = ctypes.c_bool
    return code


def _span(array: Array) -> tuple[int, int]:
    """Return the addresses of the first byte of an array with any strides and of the one after its last."""
    if not array.size:
        return 0, 0
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    start = array.ctypes.data + sum(r for r in reach if r < 0)
    return start, start + sum(map(abs, reach)) + array.itemsize


def _distance(array: Array, address: int) -> int:
    start, stop = _span(array)
    return max(start - address, address - stop, 0)


def _report(kernel: str, path: Path, outcome: _Outcome) -> Report:
    counts = {name: getattr(outcome, name) for name in _COUNTS}
    places = tuple((place.place, place.steps, place.least) for place in outcome.conflicts[: outcome.places])
    return Report(kernel, path, **counts, places=places)


@cache
def _line(path: Path, place: int) -> str:
    """Return the line of the source that an instruction came from, and those of the calls around it."""
    try:
        command = ["addr2line", "-i", "-s", "-e", str(path), hex(place - 1)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return f"{path.name}+{place:#x}"
    lines = [line.partition(" ")[0] for line in found if "?" not in line and not line.startswith("hardware.h:")]
    inner = lines[:-1] or lines  # the last is the head of the kernel
    return " in ".join(inner) or f"{path.name}+{place:#x}"
