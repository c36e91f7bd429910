"""The GPU backend: fused kernels that are compiled for the device at hand, and whole-array operations for the rest.

CuPy is imported when the backend is first used or queried, never before, so that a machine without a GPU has no cost.
"""

import os
import sys
from importlib import import_module
from typing import Any

from sdpa_ref.backend import Gradients, Problem, Result, Sums
from sdpa_ref.blocks import alone, divided, merged
from sdpa_ref.storage import arrays_in

from . import nvrtc
from .ahead import details, warmup
from .plan import fused
from .tracing import traced

__all__ = ["ARRAYS", "TASKS", "add", "details", "finish", "forward", "unavailable", "unsupported", "vjp", "warmup"]

ARRAYS, TASKS = "cupy", frozenset({"add", "details", "vjp", "warmup"})
OLDEST = 75
_INSTALL = "pip install 'sdpa-ref[cupy13]' for CUDA 13, 'sdpa-ref[cupy12]' for CUDA 12"


def unavailable() -> str | None:
    """Return why the backend cannot run here, None where it can."""
    try:
        import cupy
        import platformdirs  # noqa: F401  # where compiled kernels are kept
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        reason = f"{error.name} is not installed" if missing else f"CuPy cannot be imported ({error})"
        return f"{reason}: {_INSTALL}"
    return _no_device(cupy) or nvrtc.missing()


def unsupported(problem: Problem) -> str | None:
    """Return why the backend cannot solve the problem, None where it can."""
    device = sys.modules["cupy"].cuda.Device()
    own = device.id
    _, query, key, value, out = problem[:5]
    arrays: tuple[Any, ...] = query, key, value, out
    if not problem.plain:
        parts = (*arrays_in(key), *arrays_in(value)) if problem.stored else (key, value)
        arrays = (query, *parts, out, problem.keep, *problem.biases)
    for array in arrays:
        if array is not None and array.device.id != own:
            elsewhere = {array.device.id for array in arrays if array is not None} - {own}
            return (
                f"its arrays lie on device {', '.join(map(str, sorted(elsewhere)))} and the current device is {own}: "
                f"bring them together, and call it in `with cupy.cuda.Device(...)`"
            )
    if problem.form.dtype.char != "f" or os.environ.get("CUPY_TF32", "0") in ("", "0"):
        return None
    problem = problem._replace(blockwise=False) if problem.blockwise else problem
    arch = int(device.compute_capability)
    reason = fused(problem, frozenset(), arch)
    if reason:
        reason = fused(traced(problem), frozenset(), arch)
        accuracy = "CuPy's own matrix products are not of float32 accuracy with CUPY_TF32 set: unset it"
        return reason and f"{reason}, and {accuracy}"
    return None


def forward(problem: Problem, want: frozenset[str]) -> Result:
    """Return what is wanted of output, lse and weights, on the current device and stream."""
    loaded = sys.modules.get("sdpa_cupy.launch.cuda") or import_module("sdpa_cupy.launch.cuda")  # it imports CuPy
    result: Result = loaded.forward(problem, want)
    return result


def vjp(problem: Problem, grad_output: Any, grad_lse: Any, result: Result | None = None) -> Gradients:
    """Return the gradients in canonical order, those of broadcast inputs not yet summed."""
    from sdpa_cupy.launch.cuda import vjp as launched

    return launched(problem, grad_output, grad_lse, result)


def add(problem: Problem, sums: Sums | None) -> Sums:
    """Return the sums with the keys of a problem added."""
    own = alone(sys.modules[__name__], problem, problem.acc_dtype)
    return own if sums is None else merged(sums, own)


def finish(problem: Problem, sums: Sums, want: frozenset[str]) -> Result:
    """Return what the sums come to, with the sink of a problem that has no keys left."""
    return divided(problem, sums)


def _no_device(cupy: Any) -> str | None:
    """Return why there is no device for the kernels, which importing CuPy does not tell."""
    runtime = cupy.cuda.runtime
    if runtime.is_hip:
        return f"CuPy is built for ROCm, on which nothing of this was tried: {_INSTALL}"
    driver, toolkit = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        return f"CuPy {cupy.__version__} is installed, but there is no NVIDIA driver: install the one for your GPU"
    if driver // 1000 < toolkit // 1000:
        return (
            f"the NVIDIA driver is for CUDA {driver // 1000} and CuPy for CUDA {toolkit // 1000}: "
            f"update the driver, or pip install 'sdpa-ref[cupy{driver // 1000}]' in place of this CuPy"
        )
    if not cupy.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        return f"the NVIDIA driver shows no GPU to this process{hint}: see what nvidia-smi lists"
    arch = int(cupy.cuda.Device().compute_capability)
    if arch < OLDEST:
        return f"the GPU has compute capability {arch / 10}, and the kernels need {OLDEST / 10} (Turing) or later"
    return None
