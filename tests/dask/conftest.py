"""Tests of Dask arrays and of stores: each file skips what is not installed, unless it is required."""

import os

import pytest

if "dask" in os.environ.get("SDPA_TEST_REQUIRE", ""):
    import dask.array  # noqa: F401
    import distributed  # noqa: F401
    import zarr  # noqa: F401


@pytest.fixture
def sync():
    """Compute in this thread."""
    import dask

    with dask.config.set(scheduler="synchronous"):
        yield
