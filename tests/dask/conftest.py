"""Tests of Dask arrays: skipped with the reason where Dask is not installed, unless it is required."""

import os

import pytest

collect_ignore_glob = []
if "dask" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    try:
        import dask.array  # noqa: F401
    except ImportError:
        collect_ignore_glob = ["test_*.py"]


def pytest_report_header():
    return "tests/dask: skipped, Dask is not installed" if collect_ignore_glob else None


@pytest.fixture
def sync():
    """Compute in this thread."""
    import dask

    with dask.config.set(scheduler="synchronous"):
        yield
