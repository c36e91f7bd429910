"""NVRTC and the disk cache of the kernels it compiles: what is found again, what must not be, and what may go wrong."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("platformdirs", reason="the cache of compiled kernels lies where platformdirs says")

from sdpa_cupy import nvrtc
from sdpa_cupy.compile import cache_directory, compilation, compiled, resources

with_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
KERNEL = """#include "factor.h"
extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= FACTOR * TIMES; }
"""
TWICE = (("TIMES", 2),)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a small kernel, beside an empty cache."""
    monkeypatch.setenv("SDPA_REF_CACHE_DIR", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "scale.cu").write_text(KERNEL)
    (sources / "factor.h").write_text("#define FACTOR 3.0f\n")
    return sources


@pytest.fixture
def compilations(monkeypatch):
    """Return a list that grows with each compilation."""
    done, translate = [], nvrtc.translate
    monkeypatch.setattr(nvrtc, "translate", lambda *given: done.append(given) or translate(*given))
    return done


@with_nvrtc
def test_a_kernel_is_compiled_once(folder, compilations):
    first = compiled("scale.cu", TWICE, 80, "ptx", folder)
    assert compiled("scale.cu", TWICE, 80, "ptx", folder) == first
    assert len(compilations) == 1
    assert b".target sm_80" in first
    assert b"0f40C00000" in first  # 6


@with_nvrtc
@pytest.mark.parametrize(
    "other",
    [
        lambda folder: compiled("scale.cu", (("TIMES", 4),), 80, "ptx", folder),
        lambda folder: compiled("scale.cu", TWICE, 90, "ptx", folder),
        lambda folder: compiled("scale.cu", TWICE, "90a", "ptx", folder),
        lambda folder: compiled("scale.cu", TWICE, 80, "cubin", folder),
    ],
)
def test_options_make_another_file(folder, compilations, other):
    assert other(folder) != compiled("scale.cu", TWICE, 80, "ptx", folder)
    assert len(compilations) == 2


@with_nvrtc
def test_a_change_in_a_header_is_seen(folder):
    before = compiled("scale.cu", TWICE, 80, "ptx", folder)
    (folder / "factor.h").write_text("#define FACTOR 5.0f\n")
    assert compiled("scale.cu", TWICE, 80, "ptx", folder) != before


@with_nvrtc
@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: b"", lambda content: content[:40] + b"!" + content[41:]]
)
def test_a_damaged_file_is_compiled_again(folder, compilations, damage):
    whole = compiled("scale.cu", TWICE, 80, "cubin", folder)
    [file] = cache_directory(folder).iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert compiled("scale.cu", TWICE, 80, "cubin", folder) == whole
    assert compiled("scale.cu", TWICE, 80, "cubin", folder) == whole
    assert len(compilations) == 2


@with_nvrtc
def test_without_a_folder_it_works(folder, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SDPA_REF_CACHE_DIR", str(tmp_path / "file"))
    assert compiled("scale.cu", TWICE, 80, "cubin", folder).startswith(b"\x7fELF")


@with_nvrtc
def test_old_directories_go(folder):
    for n in range(12):
        (folder / "factor.h").write_text(f"#define FACTOR {n}.0f\n")
        compiled("scale.cu", TWICE, 80, "ptx", folder)
    assert len(list(cache_directory(folder).parent.iterdir())) == 8


@with_nvrtc
def test_processes_do_not_disturb_each_other(folder):
    script = (
        "from pathlib import Path; from sdpa_cupy.compile import compiled; import sys, zlib\n"
        "print([zlib.crc32(compiled('scale.cu', (('TIMES', n % 3),), 80, 'ptx', Path(sys.argv[1]))) for n in range(6)])"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(3)
    ]
    printed = {process.communicate(timeout=600)[0] for process in started}
    assert len(printed) == 1
    assert all(process.returncode == 0 for process in started)
    assert len(list(cache_directory(folder).iterdir())) == 3  # and nothing temporary


@with_nvrtc
def test_the_log_says_what_is_wrong(folder):
    with pytest.raises(nvrtc.CompilationError, match=r'(?s)cannot compile scale\.cu with .*-DTIMES=nothing.*"nothing"'):
        compiled("scale.cu", (("TIMES", "nothing"),), 80, "cubin", folder)
    with pytest.raises(nvrtc.CompilationError, match="sm_12"):
        compiled("scale.cu", TWICE, 12, "cubin", folder)


@with_nvrtc
def test_the_log_says_what_a_kernel_takes(folder):
    used = resources(compilation("scale.cu", TWICE, 80, "cubin", folder).log)
    assert used.keys() == {"scale"}
    assert 2 <= used["scale"].registers <= 32
    assert used["scale"][1:] == (0, 0, 0)


def test_resources_of_several_kernels():
    log = """ptxas info    : Compiling entry function 'b' for 'sm_80'
ptxas info    : Function properties for b
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 520 bytes cmem[0]
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers"""
    assert resources(log) == {"b": (255, 16, 8, 12), "a": (40, 0, 0, 0)}


def test_what_is_missing_is_said_with_the_command(monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)  # whose CUDA it would name alone
    monkeypatch.setattr(nvrtc, "_files", lambda major: iter(["libnvrtc-of-nobody.so"]))
    nvrtc.library.cache_clear()
    try:
        assert nvrtc.missing().endswith(
            "pip install nvidia-cuda-nvrtc for CUDA 13, or nvidia-cuda-nvrtc-cu12 for CUDA 12"
        )
    finally:
        nvrtc.library.cache_clear()
