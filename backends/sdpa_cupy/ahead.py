"""Before the first call: a description of the device and its versions, and common kernels compiled."""

from collections.abc import Callable
from functools import partial

import numpy as np

from sdpa_ref import disk
from sdpa_ref._problem import problem_of
from sdpa_ref.backend import Problem

from . import nvrtc
from .plan import make_plan
from .stored import TYPES

WIDTHS = (64, 128)


def details() -> dict[str, str]:
    """Return what a bug report needs, for people to read."""
    import cupy

    from .compile import cache_directory  # it needs what is not installed without CuPy

    device, runtime = cupy.cuda.Device(), cupy.cuda.runtime
    versions = {"driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion()}
    major, minor = nvrtc.version()
    return {
        "device": f"{device.id}: {runtime.getDeviceProperties(device.id)['name'].decode()}",
        "compute capability": f"{int(device.compute_capability) / 10}",
        "memory": f"{device.mem_info[1] / 2**30:.0f} GiB",
        **{name: f"CUDA {number // 1000}.{number % 1000 // 10}" for name, number in versions.items()},
        "NVRTC": f"{major}.{minor}",
        "kernel cache": str(disk.state(cache_directory)),
    }


def warmup() -> dict[str, Callable[[], object]]:
    """Return what compiles each common kernel, by the name to show meanwhile.

    Raises
    ------
    OSError
        What would be compiled cannot be kept.
    """
    import cupy

    from .compile import cache_directory, compiled

    kept, arch = disk.state(cache_directory), int(cupy.cuda.Device().compute_capability)
    if kept.reason is not None:
        raise OSError(f"kernels cannot be kept in {kept}: set SDPA_REF_CACHE_DIR to another folder")
    kernels: dict[str, Callable[[], object]] = {}
    for name in TYPES:
        for width in WIDTHS:
            for rows in (1, 512):
                problem = _plain_problem(name, rows, width)
                for launch in make_plan(problem, frozenset({"output"}), arch).launches:
                    label = f"{name}, width {width}, {'few' if rows == 1 else 'many'} rows: {launch.kernel}"
                    kernels[label] = partial(compiled, launch.source, launch.defines, arch)
    return kernels


def _plain_problem(name: str, rows: int, width: int) -> Problem:
    if name == "bfloat16":
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16)
    else:
        dtype = np.dtype(name)
    query, kv = np.empty((1, rows, width), dtype), np.empty((1, 1024, width), dtype)
    return problem_of(query, kv, kv)
