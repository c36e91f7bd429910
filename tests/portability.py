"""Run the tests of the Numba backend for other processors, Pythons and NumPys. For nights: some minutes each.

    python tests/portability.py                        # all that can run here
    python tests/portability.py processors             # or: pythons, numpys, arm
    python tests/portability.py numpys --tests tests/backends tests/rules
    python tests/portability.py arm --arm path/to/run  # a command that starts a Python for arm64, NumPy and Numba in it

Each run has kernels and, where it needs other packages, an environment of its own in a folder that is removed. What
cannot run is skipped with the reason. The exit code is 1 where a run failed. docs/portability.md has results.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/backends/test_numba.py", "tests/backends/test_numba_wide.py", "tests/rules/test_formula.py")
PACKAGES = ("pytest>=8,<10", "hypothesis>=6.100,<7", "ml_dtypes>=0.5,<1")
BASELINE = "+fma,+f16c"  # what the backend needs of x86, beyond any level below v3
PROCESSORS = {
    "vectors of 128 bits (SSE4.2)": {"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": f"{BASELINE},-avx2"},
    "vectors of 256 bits (AVX2)": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""},
    "vectors of 512 bits (AVX-512)": {"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": ""},
}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
NUMPYS = ("numpy==1.26.*", "numpy>=2,<3")


@dataclass
class Run:
    """One line of the table: a command, or why there is none."""

    name: str
    python: Path | str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    install: tuple[str, ...] = ()  # into an environment made with `python`; none: run `python` as it is
    check: bool = False  # only the conformance suite, where tests would start processes that cannot be started
    skip: str = ""


def processors() -> Iterator[Run]:
    """Yield the runs for kinds of vectors, on a processor of x86 that has them."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        yield Run("vectors of x86", skip=f"this is {platform.machine()}")
        return
    for name, environment in PROCESSORS.items():
        lacks = missing("avx512f") if "512 bits" in name else ""
        yield Run(name, environment=environment, skip=lacks)


def missing(feature: str) -> str:
    """Return that this processor has no such feature, or nothing."""
    import llvmlite.binding

    return "" if llvmlite.binding.get_host_cpu_features().get(feature) else f"this processor has no {feature}"


def pythons() -> Iterator[Run]:
    """Yield a run for each supported Python that is found."""
    for version in PYTHONS:
        found = interpreter(version)
        yield Run(f"Python {version}", found or "", install=PACKAGES, skip="" if found else f"no python{version} here")


def interpreter(version: str) -> str:
    """Return the path of a Python of this version that starts, or nothing."""
    path = shutil.which(f"python{version}")
    if not path:
        return ""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return path if done.returncode == 0 and f"Python {version}." in done.stdout else ""


def numpys() -> Iterator[Run]:
    """Yield a run for the oldest and the newest supported NumPy, with the oldest Python found."""
    found = next(filter(None, map(interpreter, PYTHONS)), sys.executable)
    for requirement in NUMPYS:
        yield Run(requirement, found, install=(*PACKAGES, requirement))


def arm(command: str | None) -> Iterator[Run]:
    """Yield the run under emulation."""
    skip = "" if command else "name a Python for arm64: --arm COMMAND"
    yield Run("arm64 (NEON)", command or "", check=True, skip=skip)


def execute(run: Run, tests: list[str], seconds: int) -> tuple[str, float]:
    """Return how a run ended and the processor time that it took."""
    with tempfile.TemporaryDirectory(prefix="sdpa-portability-") as folder:
        python = str(run.python)
        if run.install:
            subprocess.run([python, "-m", "venv", f"{folder}/venv"], check=True)
            python = f"{folder}/venv/" + ("Scripts/python.exe" if os.name == "nt" else "bin/python")
            pip = [python, "-m", "pip", "install", "-q", "-e", f"{ROOT}[numba]", *run.install]
            if subprocess.run(pip, check=False).returncode:
                return "skipped: not installed", 0.0
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
        environment = kept | {"SDPA_REF_CACHE_DIR": f"{folder}/kernels", "SDPA_TEST_REQUIRE": "numba"} | run.environment
        command = ["-m", "sdpa_ref", "check", "numba", "--seconds", str(seconds)]
        if not run.check:
            command = ["-m", "pytest", "-q", "-k", "not reference", "-p", "no:cacheprovider", *tests]
        before = sum(os.times()[2:4])
        done = subprocess.run(
            [python, *command], cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8", check=False
        )
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing printed"]
        if done.returncode:
            print("\n".join(said[-30:]), file=sys.stderr)
        return ("" if done.returncode == 0 else "FAILED: ") + said[-1].strip("= "), sum(os.times()[2:4]) - before


def main() -> int:
    """Run what was chosen, print a table as it goes, return the exit code."""
    groups = ("processors", "pythons", "numpys", "arm")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", nargs="*", help="processors, pythons, numpys, arm; all by default")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="files or folders for pytest")
    parser.add_argument("--arm", help="the command that starts a Python for arm64")
    parser.add_argument("--seconds", type=int, default=900, help="of the conformance suite under emulation")
    chosen = parser.parse_args()
    if unknown := set(chosen.group) - set(groups):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(groups)}")
    runs = {"processors": processors, "pythons": pythons, "numpys": numpys, "arm": lambda: arm(chosen.arm)}
    failed = False
    for group in chosen.group or groups:
        for run in runs[group]():
            start = time.perf_counter()
            ended, used = (f"skipped: {run.skip}", 0.0) if run.skip else execute(run, chosen.tests, chosen.seconds)
            failed |= ended.startswith("FAILED")
            print(
                f"{run.name:32} {ended} ({used:.0f} s of processor time, {time.perf_counter() - start:.0f} s)",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
