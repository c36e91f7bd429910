"""The mark of tests that build kernels with g++: skipped where there is none, unless it is required."""

import os

import pytest
from sdpa_cupy.launch.fibers import unavailable

_required = "g++" in os.environ.get("SDPA_TEST_REQUIRE", "").split(",")
needs_compiler = pytest.mark.skipif(unavailable() is not None and not _required, reason=str(unavailable()))
