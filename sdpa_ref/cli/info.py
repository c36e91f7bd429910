"""``sdpa-ref info``: what there is to compute with."""

import argparse
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import sdpa_ref

HELP = "show versions, backends, processor and threads, for example for a bug report"
EXAMPLES = """examples:
  sdpa-ref info
  sdpa-ref info --json"""
_OPTIONAL = (
    "numba", "llvmlite", "cupy-cuda12x", "cupy-cuda13x", "ml_dtypes", "safetensors", "platformdirs", "rich",
    "matplotlib", "pillow",
)  # fmt: skip
_FEATURES = (
    "AVX2", "FMA3", "F16C", "AVX512F", "AVX512BW", "AVX512VNNI", "AVX512BF16", "AVX512FP16",
    "NEON", "ASIMD", "ASIMDHP", "ASIMDDP", "SVE", "VSX3", "VXE",
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print what `collect` finds."""
    found = collect()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for heading, entries in found.items():
        print(heading)
        width = max(map(len, entries))
        for name, value in entries.items():
            print(f"  {name:<{width}}  {' '.join(value) if isinstance(value, list) else value}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Return versions, backends, processor and the details of the usable backends."""
    found: dict[str, dict[str, Any]] = {
        "versions": {
            "sdpa_ref": sdpa_ref.__version__,
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "numpy": np.__version__,
            **{name: _version(name) for name in _OPTIONAL},
        },
        "backends": {name: unusable(name) or "usable" for name in sdpa_ref.names()},
        "processor": {
            "model": _model(),
            "system": f"{platform.system()} {platform.machine()}",
            "features": _features(),
            "logical processors": _processors(),
        },
    }
    for name, state in found["backends"].items():
        if state == "usable" and "details" in sdpa_ref.load(name).TASKS:
            found[name] = _details(name)
    return found


def unusable(name: str) -> str | None:
    """Return why the backend cannot be used, or None where it can."""
    try:
        sdpa_ref.load(name)
    except sdpa_ref.BackendUnavailable as error:
        return str(error)
    except Exception as error:  # a broken plug-in is reported like one that cannot run
        return f"backend {name!r} is broken: {type(error).__name__}: {error}"
    return None


def _details(name: str) -> dict[str, str]:
    """Return the details of a backend, or its error."""
    try:
        return dict(sdpa_ref.load(name).details())
    except Exception as error:  # a wrong setting should be shown here
        return {"error": f"{type(error).__name__}: {error}"}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _model() -> str:
    """Return the name of the processor, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (named or [platform.processor()])[0] or "unknown"


def _features() -> list[str]:
    """Return the vector instructions that NumPy has found and that matter to attention."""
    core = getattr(np, "_core", None) or np.core  # NumPy 1.26 has no _core
    present = getattr(core._multiarray_umath, "__cpu_features__", {})
    return [name for name in _FEATURES if present.get(name)]


def _processors() -> int:
    """Return how many logical processors this process may use."""
    if hasattr(os, "process_cpu_count"):
        return os.process_cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
