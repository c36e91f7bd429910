"""The settings of Numba that change what it compiles for: kernels run there, or the backend says why not."""

import os
import re
import subprocess
import sys

import pytest
from hypothesis import settings

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

from sdpa_numba.compile import target

SCRIPT = """
import numpy as np, sdpa_ref
from sdpa_ref import Causal, KeyLengths, sdpa, sdpa_vjp
try:
    sdpa_ref.load("numba")
    print("usable")
except sdpa_ref.BackendUnavailable as error:
    print(error)
rng = np.random.default_rng(0)
for dtype in {types}:
    for L in {rows}:
        q, k, v = (rng.standard_normal((2, n, 24)).astype(dtype) for n in (L, 70, 70))
        got, exact = (sdpa(q, k, v, mask=Causal(), query_offset="end", backend=b) for b in (None, "reference"))
        np.testing.assert_allclose(got, exact, rtol=0, atol=0.01 if dtype == "float16" else 1e-5)
x = np.linspace(-9, 9, 50, dtype=np.float16)  # whose kernel is small
np.testing.assert_allclose(sdpa_ref.gelu(x), sdpa_ref.gelu(x, backend="reference"), rtol=1e-3, atol=1e-5)
print("right")
"""
X86 = pytest.mark.skipif(not os.uname().machine == "x86_64" if hasattr(os, "uname") else True, reason="names of x86")


def run(tmp_path, types=("float32",), rows=(1, 33), **settings):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment |= {"SDPA_REF_CACHE_DIR": str(tmp_path)} | settings
    command = [sys.executable, "-c", SCRIPT.format(types=types, rows=rows)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    *said, right = done.stdout.splitlines()
    assert right == "right"
    return "\n".join(said)


UNUSABLE = {
    "generic": ({"NUMBA_CPU_NAME": "generic"}, "NUMBA_CPU_NAME=generic .* lacks .*.fma."),
    "no features": ({"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, "lacks .*.fma."),
    "old": ({"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""}, "lacks .*.fma."),
    "some": ({"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": "+sse4.2"}, "lacks .*.fma..*.f16c."),
    "without half": ({"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": "+avx2,+fma"}, r"lacks .* half .*\(f16c\)$"),
    "not compiled": ({"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT"),
}


@X86
@pytest.mark.parametrize("case", UNUSABLE)
def test_what_numba_cannot_serve_is_unavailable_and_the_default_goes_on(tmp_path, case):
    environment, words = UNUSABLE[case]
    said = run(tmp_path, **environment)
    assert re.search(words, said), said


@X86
def test_the_command_says_so(tmp_path):
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "SDPA_REF_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "sdpa_ref", "info"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "backend 'numba' cannot run here: the processor that NUMBA_CPU_NAME=generic" in done.stdout


NIGHTLY = settings.default.max_examples >= 1000
USABLE = {
    "haswell": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""},
    "a level": {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""},
    "128 bits": {"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": "+fma,+f16c,-avx2"},
    "a name and the features of the host": {"NUMBA_CPU_NAME": "nehalem"},
    "no AVX": {"NUMBA_ENABLE_AVX": "0"},
}


@X86
@pytest.mark.skipif(bool(target.target().missing), reason="this processor has none of it")
@pytest.mark.parametrize("case", USABLE if NIGHTLY else ["haswell"])  # whose kernels are compiled anew
def test_kernels_follow_the_processor_that_is_named(tmp_path, case):
    types = ("float32", "float16") if NIGHTLY and case == "haswell" else ("float32",)
    assert run(tmp_path, types, (1, 33) if NIGHTLY else (), **USABLE[case]) == "usable"


def test_registers_follow_the_processor_that_is_named():
    triple = "x86_64-unknown-linux-gnu"
    registers = {
        ("x86-64-v4", ""): (64, 32),
        ("x86-64-v3", ""): (32, 16),
        ("x86-64-v4", "-avx512f"): (32, 16),
        ("x86-64-v3", "-fma"): (32, 16),
        ("x86-64", ""): (16, 16),
    }
    if not triple.startswith(target.llvm.get_process_triple()[:6]):
        pytest.skip("LLVM has no code generator for x86 here")
    for (name, features), expected in registers.items():
        found = target._probed(triple, name, features)
        assert found[:2] == expected
        assert bool(found.missing) == (name == "x86-64" or features == "-fma")
