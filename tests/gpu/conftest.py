"""The stand-in for CuPy in its place."""

import shutil
import sys

import pytest
import strict_cupy
import strict_device
from sdpa_cupy.plan import Launch

import sdpa_ref as sr


@pytest.fixture
def machine(monkeypatch):
    """Return a function that puts the stand-in for CuPy in its place, for a machine with a card of some kind."""
    pytest.importorskip("platformdirs", reason="the cache of compiled kernels lies where platformdirs says")

    def put(**kind):
        cupy = strict_cupy.module(**kind)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.delitem(sys.modules, "sdpa_cupy.launch.cuda", raising=False)
        monkeypatch.delattr("sdpa_cupy.launch.cuda", raising=False)
        monkeypatch.setattr("sdpa_cupy.compile.compiled", strict_cupy.encoded)
        monkeypatch.setattr("sdpa_cupy.nvrtc.missing", lambda: None)
        sr.registry.load.cache_clear()
        return cupy

    yield put
    sr.registry.load.cache_clear()


@pytest.fixture
def launches(monkeypatch):
    """Return the list of launches that were asked for, which do nothing."""
    found = []
    monkeypatch.setattr(strict_device.Kernel, "launch", lambda kernel, *launch: found.append(launch), raising=False)
    return found


@pytest.fixture
def by_fibers(monkeypatch):
    """Let the emulation in this package run what is launched on the stand-in for CuPy."""
    fibers = pytest.importorskip("sdpa_cupy.launch.fibers")
    if fibers.unavailable():
        pytest.skip(fibers.unavailable())

    def run(kernel, name, source, defines, grid, block, parameters, shared):
        emulated = fibers.Fibers(int(strict_device.current[0].compute_capability))
        for array in list(strict_cupy.live.values()):
            emulated.address(array.host)
        emulated.run(Launch(name, source, defines, grid, *block, shared), parameters)

    monkeypatch.setattr(strict_device.Kernel, "launch", run, raising=False)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Return a copy of the kernels, which leaves no libraries in the user's cache."""
    fibers = pytest.importorskip("sdpa_cupy.launch.fibers")
    machine = fibers.build.runtime().parent
    shutil.copytree(machine, tmp_path / "cache" / "fibers" / machine.name)
    monkeypatch.setenv("SDPA_REF_CACHE_DIR", str(tmp_path / "cache"))
    return shutil.copytree(fibers.build.KERNELS, tmp_path / "kernels")
