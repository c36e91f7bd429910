"""The launcher for a device: CuPy's current stream and memory, cubins for the exact architecture.

The status of every launch is checked, and a launch that fails raises at once. What a kernel does wrong while it runs
shows at a later call, as always in CUDA; with ``CUDA_LAUNCH_BLOCKING=1`` it shows at the launch.

A call that becomes part of a CUDA graph neither loads modules nor moves numbers to the device: the same call before
the capture has done both. All memory that the graph touches is kept for ever, as the end of a graph is not reported.
"""

from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import cupy
import numpy as np

from sdpa_cupy.calls import attend
from sdpa_cupy.compile import compiled
from sdpa_cupy.gradients import differentiate
from sdpa_cupy.launch import by_any_way, by_rows, takes_kernels
from sdpa_cupy.parameters import AXES
from sdpa_cupy.plan import Launch, fused, is_numbers
from sdpa_cupy.pulls import unpulled
from sdpa_cupy.tracing import traced
from sdpa_ref.backend import Gradients, Problem, Result
from sdpa_ref.masks import Intervals
from sdpa_ref.storage import Stored

_COLD = "make this call once on this stream before it is captured: {} not on the device yet"
_captured: list[Any] = []  # what graphs read and write
_shared: dict[tuple[int, int], Any] = {}  # by device and stream, what the calls of its present capture share


class Cuda(NamedTuple):
    """The launcher for the current device."""

    device: int
    arch: int

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new array, or bytes that only the launches of one call use."""
        return self._bytes(*shape) if dtype is np.uint8 else cupy.empty(shape, dtype)

    def address(self, array: Any) -> int:
        """Return where an array begins, 0 for None."""
        return 0 if array is None else array.data.ptr

    def moved(self, array: np.ndarray[Any, Any] | None) -> Any:
        """Return a small array's numbers on the device, None of None."""
        moved = _moved(array)
        if array is not None and capturing():
            _captured.append(moved)
        return moved

    def run(self, launch: Launch, parameters: np.ndarray[Any, Any]) -> None:
        """Launch a kernel on the current stream, with the parameter block by value.

        Raises
        ------
        RuntimeError
            What the driver says, with the launch.
        """
        try:
            name, source, defines, grid, threads, shared = launch
            kernel = _kernel_of(self.device, self.arch, source, defines, name, shared)
            kernel(grid, (threads,), (parameters,), shared_mem=shared)
        except RuntimeError as error:
            error.add_note(f"at {launch} on device {self.device} of compute capability {self.arch / 10}")
            raise

    def _bytes(self, size: int) -> Any:
        """Return memory that is used again, in the order of the stream; the calls of one capture share theirs."""
        place = _place()
        if not capturing():
            _shared.pop(place, None)  # of a capture that has ended
            return cupy.empty(size, np.uint8)
        if place not in _shared or _shared[place].size < size:
            _shared[place] = cupy.empty(size, np.uint8)  # CuPy's pool has it from the call before the capture
            _captured.append(_shared[place])
        return _shared[place]


def forward(problem: Problem, want: frozenset[str]) -> Result:
    """Return what is wanted, on the current device and stream.

    Raises
    ------
    RuntimeError
        In the capture of a graph: for a problem that needs the host, and for what has not run before.
    """
    launcher, captured = current(), capturing()
    result = attend(problem, want, launcher.arch, launcher)
    if result is None:
        problem = traced(problem)
        reason = _uncapturable(problem, want, launcher.arch) if captured else None
        if reason is not None:
            raise RuntimeError(f"this call cannot be captured: {reason}")
        kernels = takes_kernels(problem, want, launcher.arch)
        problem = on_device(problem, kernels)
        result = by_any_way(problem, want, launcher.arch, launcher, cupy, kernels)
    if captured:
        _captured.append((problem, result))
    return result


def vjp(problem: Problem, grad_output: Any, grad_lse: Any, result: Result | None) -> Gradients:
    """Return the gradients, on the current device and stream.

    Raises
    ------
    RuntimeError
        In the capture of a graph.
    """
    if capturing():
        raise RuntimeError("gradients cannot be captured: their arrays and sums need memory of their own")
    launcher = current()
    problem = on_device(problem, unpulled(problem, launcher.arch) is None)
    return differentiate(problem, grad_output, grad_lse, result, launcher.arch, launcher, cupy)


def current() -> Cuda:
    """Return the launcher for the current device."""
    device = cupy.cuda.Device()
    return _launcher(device.id, device.compute_capability)


@cache
def _launcher(device: int, capability: str) -> Cuda:
    return Cuda(device, int(capability))


def capturing() -> bool:
    """Return whether the current stream is being captured, which a default stream cannot be."""
    stream = cupy.cuda.get_current_stream()
    return stream.ptr > 1 and bool(stream.is_capturing())


def _uncapturable(problem: Problem, want: frozenset[str], arch: int) -> str | None:
    """Return what a call does besides launches, whose memory others could get while a graph still uses it."""
    if isinstance(problem.sink, cupy.ndarray):
        return "its sink has to be made float64, which NumPy's numbers would be beforehand"
    if len(problem.form.batch) > AXES:
        return f"more than {AXES} leading axes"
    return fused(problem, want, arch)


def on_device(problem: Problem, tables: bool = True) -> Problem:
    """Return the problem with what the host has made of mask, positions, slopes and sink in the device's memory.

    So are the tables of pages, where kernels read them. Whole arrays need a number a row.
    """
    if problem.plain or (problem.visible is None and problem.slopes is None and problem.sink is None
                         and problem.key_positions is None and not problem.stored):  # fmt: skip
        return problem
    problem = by_rows(problem)
    if not tables:
        positions = None if problem.slopes is None else problem.stands()
        problem = problem._replace(visible=problem.intervals, positions=positions)
    elif is_numbers(problem.visible) and not (problem.slopes is not None or problem.sink is not None or problem.stored):
        return problem
    visible = problem.visible
    key, value = (
        part._replace(table=_moved(part.table)) if tables and type(part) is Stored else part
        for part in (problem.key, problem.value)
    )
    return problem._replace(
        key=key,
        value=value,
        visible=Intervals(*map(_moved, visible)) if isinstance(visible, Intervals) else visible,
        positions=_moved(problem.positions),
        key_positions=_moved(problem.key_positions),
        slopes=_moved(problem.slopes),
        sink=_moved(problem.sink),
    )


def _moved(array: Any) -> Any:
    """Return a small array's numbers on the device, where they stay for the next call with the same."""
    if not isinstance(array, np.ndarray):
        return array
    few = array
    if 0 in array.strides:
        few = array[tuple([slice(1) if stride == 0 else slice(None) for stride in array.strides])]
    return _constant(_place(), array.shape, few.shape, array.dtype.str, few.tobytes())


@lru_cache(maxsize=256)
def _constant(place: tuple[int, int], shape: tuple[int, ...], few: tuple[int, ...], dtype: str, numbers: bytes) -> Any:
    if capturing():
        raise RuntimeError(_COLD.format("its mask, positions, slopes or sink are"))
    moved = cupy.asarray(np.frombuffer(numbers, dtype).reshape(few))
    return moved if few == shape else cupy.broadcast_to(moved, shape)


def _place() -> tuple[int, int]:
    """Return device and stream, in whose order memory is used again."""
    return cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr


@cache
def _kernel_of(
    device: int, arch: int, source: str, defines: tuple[tuple[str, Any], ...], name: str, shared: int
) -> Any:
    """Return a kernel that is loaded on the current device, and may have so many bytes of shared memory."""
    kernel = _kernel(device, arch, source, defines, name)
    if shared > kernel.max_dynamic_shared_size_bytes:
        kernel.max_dynamic_shared_size_bytes = shared
    return kernel


@cache
def _kernel(device: int, arch: int, source: str, defines: tuple[tuple[str, Any], ...], name: str) -> Any:
    """Return a kernel that is loaded on the current device."""
    if capturing():
        raise RuntimeError(_COLD.format(f"the kernel {name} is"))
    with TemporaryDirectory() as folder:
        file = Path(folder, "kernels.cubin")  # CuPy loads machine code from files
        file.write_bytes(compiled(source, defines, arch))
        return cupy.RawModule(path=str(file)).get_function(name)
