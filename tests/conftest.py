"""Backends, Hypothesis profiles and the loopback distribution, for all tests."""

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "loopback"))  # a distribution with real entry points
sys.path.insert(0, str(Path(__file__).parent / "support"))  # what several test files import

import sdpa_ref

settings.register_profile("dev", deadline=None, max_examples=25)
settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=1000)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what is to run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or Ctrl-C could not be tested, here and in children

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # in the workers that xdist starts: they share the processors

STAND_INS = {"broken", "picky", "missing", "loopback"}  # they exist to fail, or to prove the way to a backend
OTHER_ARRAYS = {"cupy", "dask"}
ON_REQUEST = {"arrays", "fibers"}  # by SDPA_TEST_REQUIRE; tests/gpu holds all of these to the laws
REQUIRED = set(filter(None, os.environ.get("SDPA_TEST_REQUIRE", "").split(",")))


def usable(name):
    """Return a parameter for this backend: skipped with the reason where it cannot run, unless it is required."""
    try:
        sdpa_ref.load(name)
    except sdpa_ref.BackendUnavailable as reason:
        marks = [] if name in REQUIRED else [pytest.mark.skip(reason=str(reason))]
        return pytest.param(name, marks=marks)
    return pytest.param(name)


BACKENDS = [usable(name) for name in sdpa_ref.names() if name not in STAND_INS | OTHER_ARRAYS | (ON_REQUEST - REQUIRED)]


def pytest_generate_tests(metafunc):
    """Run a test that asks for a `backend` on each of them, for a `gradient_backend` on each that has gradients."""
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS)
    if "fast_backend" in metafunc.fixturenames:  # the reference agrees with itself
        metafunc.parametrize("fast_backend", [backend for backend in BACKENDS if backend.values[0] != "reference"])
    if "gradient_backend" in metafunc.fixturenames:
        able = [backend for backend in BACKENDS if backend.marks or "vjp" in sdpa_ref.load(backend.values[0]).TASKS]
        metafunc.parametrize("gradient_backend", able)


def pytest_report_header():
    return f"sdpa_ref backends: {', '.join(sdpa_ref.names())}; required: {', '.join(sorted(REQUIRED)) or 'none'}"
