"""The kernels of the CuPy backend, run from the PTX that NVRTC makes of them: right, without races, within memory.

By default each problem runs for one of two architectures, and few faults are planted; for the rest, and for a proof
that every barrier is needed, say ``pytest --hypothesis-profile nightly``.
"""

import re
import shutil

import numpy as np
import pytest
from hypothesis import settings

pytest.importorskip("ml_dtypes", reason="the interpreter of PTX rounds to bfloat16 with ml_dtypes")
pytest.importorskip("platformdirs", reason="the cache of compiled kernels lies where platformdirs says")

from sdpa_cupy import nvrtc
from sdpa_cupy.compile import KERNELS
from sdpa_cupy.launch import forward
from sdpa_cupy.launch.ptx import Fault, Interpreter
from sdpa_cupy.plan import fused

from sdpa_ref._problem import pose
from sdpa_ref.testing import assert_within, error_budget
from sdpa_ref.testing.cases import case

pytestmark = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))

NIGHTLY = settings.default.max_examples >= 1000
ARCHS = (80, 90)
CASES = [
    # types and widths
    dict(L=70, S=65, E=64, Ev=64, dtype="float16", heads=(4, 2)),
    dict(L=33, S=40, E=16, Ev=16, dtype="float16"),
    dict(L=33, S=33, E=16, Ev=16, dtype="bfloat16"),
    dict(L=20, S=33, E=128, Ev=128, dtype="bfloat16"),
    dict(L=33, S=33, E=16, Ev=16, dtype="float32", numbers="needles"),
    dict(L=17, S=33, E=5, Ev=7, dtype="float32"),
    dict(L=5, S=40, E=8, Ev=70, dtype="float64"),
    dict(L=9, S=20, E=33, Ev=65, dtype="bfloat16", memory="sliced"),
    dict(L=33, S=17, E=16, Ev=16, dtype="float16", memory="transposed"),
    dict(L=33, S=17, E=16, Ev=16, dtype="float16", memory="negative", batch=(2,)),
    dict(L=33, S=17, E=16, Ev=16, dtype="bfloat16", memory="repeated", batch=(2, 2), layout="LHE"),
    # masks
    dict(L=40, S=40, E=16, Ev=16, dtype="float16", mask=("causal",)),
    dict(L=40, S=90, E=16, Ev=16, dtype="float16", mask=("causal",), offset="end", heads=(2, 2)),
    dict(L=33, S=80, E=16, Ev=16, dtype="float16", mask=("window",), offset="number"),
    dict(L=33, S=80, E=16, Ev=16, dtype="float16", mask=("key lengths", "&causal"), batch=(3,), poison=True),
    dict(L=33, S=80, E=16, Ev=16, dtype="float16", mask=("prefix", "|window"), batch=(2,), poison=True),
    dict(L=33, S=40, E=16, Ev=16, dtype="bfloat16", mask=("packed",), poison=True),
    dict(L=33, S=30, E=16, Ev=16, dtype="float16", mask=("segments", "|~first tokens")),
    dict(L=33, S=40, E=16, Ev=16, dtype="float16", numbers="huge"),
    dict(L=33, S=40, E=16, Ev=16, dtype="bfloat16", numbers="low", scale=1e-3),
    # hardly anything
    dict(L=33, S=0, E=16, Ev=16, dtype="float16", sink="number"),
    dict(L=0, S=5, E=16, Ev=16, dtype="float16"),
    dict(L=33, S=5, E=0, Ev=16, dtype="float16"),
    # few rows and many keys
    dict(L=1, S=1030, E=16, Ev=16, dtype="float16", heads=(4, 1)),
    dict(L=3, S=600, E=16, Ev=16, dtype="float16", mask=("window",), offset="end", heads=(4, 2), sink="heads"),
    # what the kernels ask of each score
    dict(L=33, S=80, E=16, Ev=16, dtype="float16", mask=("array",), heads=(2, 2), poison=True),
    dict(L=33, S=30, E=16, Ev=16, dtype="float32", mask=("rows", "&chunked"), poison=True),
    dict(L=20, S=30, E=4, Ev=4, dtype="float64", mask=("keys", "&query lengths"), batch=(2,), poison=True),
    dict(L=33, S=40, E=16, Ev=16, dtype="float16", bias=("array",), heads=(2, 2), batch=(2,)),
    dict(L=33, S=40, E=16, Ev=16, dtype="bfloat16", bias=("holes",)),
    dict(L=33, S=40, E=16, Ev=16, dtype="float32", bias=("row",), softcap=2.0),
    dict(L=33, S=40, E=16, Ev=16, dtype="float16", bias=("alibi",), heads=(2, 2), offset="number"),
    dict(L=20, S=40, E=8, Ev=8, dtype="float64", bias=("alibi",), sink="heads", offset="batch", batch=(2,)),
    dict(L=33, S=40, E=16, Ev=16, dtype="float16", sink="number", scale=-0.3),
    dict(L=33, S=40, E=16, Ev=16, dtype="float16", softcap=1.5, dropout=0.3, heads=(2, 2), batch=(2,)),
    dict(L=33, S=40, E=16, Ev=16, dtype="float32", dropout=0.5, mask=("causal",)),
    dict(L=33, S=40, E=16, Ev=16, dtype="float16", mask=("function",)),
]  # fmt: skip


def check(words, arch, seed=0, folder=KERNELS):
    """Raise what is wrong with the results of a problem; what kernels leave out stays NaN, inputs are read-only."""
    given = case(seed, **words)
    arrays = [array.view() for array in given.arrays]
    for array in arrays:
        array.flags.writeable = False
    problem, caller = pose(*arrays, **given.options)
    out = problem.new_output()
    out[...] = float("nan")
    problem = problem._replace(out=out)
    want = frozenset({"output", "lse", "weights", "m", "z"})
    if not problem.blockwise:
        assert fused(problem, want, arch) is None
    result = forward(problem, want, arch, Interpreter(arch, folder))
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(result.m + np.log(result.z), result.lse, rtol=1e-5, atol=1e-5)
    for what in ("output", "lse", "weights"):
        got = getattr(result, what)
        budget = error_budget(*given.arrays, what=what, **given.options)
        turned = {"output": caller.turned, "weights": caller.weights}.get(what, caller.lse)
        assert_within(turned(got), budget, what=what)


def check_all(problems, arch, **where):
    for words in problems:
        check(words, arch, **where)


@pytest.mark.parametrize("n", range(len(CASES)))
def test_problems(n):
    for arch in (75, *ARCHS, 120) if NIGHTLY else (ARCHS[2 * n // len(CASES)],):
        check(CASES[n], arch)


@pytest.mark.parametrize("n", [1, 2])
def test_turing_has_instructions_of_its_own(n):
    check(CASES[n], 75)


FAULTS = {  # file, what stands there, what is put in its place, the type of the problem that must show it
    "b of mma swapped": ("hardware.h", '"r"(b[0]), "r"(b[1]))', '"r"(b[1]), "r"(b[0]))', "float16"),
    "loaded without .trans": ("hardware.h", "x4.trans.shared", "x4.shared", "float16"),
    "one group too few waited for": ("hardware.h", '"n"(N)', '"n"(N + 1)', "float16"),
    "no barriers": ("hardware.h", "__syncthreads();", "", "float16"),
    "halves of a word swapped": ("hardware.h", "a.bits | (u32)b.bits << 16", "b.bits | (u32)a.bits << 16", "bfloat16"),
    "copies from beyond the end": ("tiles.h", "if (from) copy_async_16", "if (true) copy_async_16", "float16"),
    "a of mma swapped": ("hardware.h", '"r"(a[1]), "r"(a[2])', '"r"(a[2]), "r"(a[1])', "float16"),
    "a of mma swapped for TF32": ("hardware.h", '"r"(a[1]), "r"(a[2])', '"r"(a[2]), "r"(a[1])', "float32"),
    "d of mma swapped": ("hardware.h", '"+f"(d[1]), "+f"(d[2])', '"+f"(d[2]), "+f"(d[1])', "float16"),
    "d of mma not added to": ("hardware.h", "{%8, %9}, {%0, %1, %2, %3};", "{%8, %9}, {%0, %1, %2, %2};", "float16"),
    "mma of the other type": ("hardware.h", "f32.bf16.bf16.f32", "f32.f16.f16.f32", "bfloat16"),
    "loaded with .trans": ("hardware.h", "m8n8.x4.shared", "m8n8.x4.trans.shared", "float16"),
    "groups of copies never closed": ("hardware.h", '"cp.async.commit_group;"', '""', "float16"),
    "copies never waited for": ("hardware.h", '"cp.async.wait_group %0;"', '"// %0"', "float16"),
    "copies of 8 bytes": ("hardware.h", "[%0], [%1], 16;", "[%0], [%1], 16, 8;", "float16"),
    "shuffles among half a warp": ("hardware.h", "__shfl_xor_sync(0xffffffffu", "__shfl_xor_sync(0xffffu", "float16"),
    "a logarithm for a power": ("hardware.h", "ex2.approx.ftz.f32 %0", "lg2.approx.ftz.f32 %0", "float16"),
    "TF32 without its small part": ("products.h", "to_tf32(float_of(bits) - float_of(whole))", "0", "float32"),
    "rows misaligned": ("tiles.h", "(int)sizeof(Element) + 16;", "(int)sizeof(Element) + 8;", "float16"),
}  # fmt: skip
EVERY_DAY = 5
BARRIERS = [
    (file.name, match.start())
    for file in sorted(KERNELS.iterdir())
    if file.name != "hardware.h" and not file.name.startswith("pull_")  # those are in test_gradient_kernels.py
    for match in re.finditer(r"\bbarrier\(\);", file.read_text())
]
WITH_BARRIERS = [  # several tiles, queries of several warps, outputs wider than queries, values that are repaired
    dict(L=70, S=140, E=16, Ev=48, dtype="float16"),
    dict(L=33, S=140, E=16, Ev=16, dtype="float16", memory="sliced", mask=("causal",), poison=True),
    dict(L=17, S=70, E=70, Ev=70, dtype="float64"),
]  # fmt: skip


def changed(folder, file, change):
    """Return a copy of the kernels in which the text of a file is changed."""
    shutil.copytree(KERNELS, folder / "kernels")
    path = folder / "kernels" / file
    before = path.read_text()
    path.write_text(change(before))
    assert path.read_text() != before, "the fault is no longer one: the kernels do not have what it replaces"
    return folder / "kernels"


@pytest.mark.parametrize("name", list(FAULTS)[: None if NIGHTLY else EVERY_DAY])
def test_planted_faults(name, tmp_path):
    file, old, new, dtype = FAULTS[name]
    folder = changed(tmp_path, file, lambda text: text.replace(old, new))
    with pytest.raises((AssertionError, Fault)):
        check(dict(L=33, S=70, E=16, Ev=16, dtype=dtype), 80, folder=folder)


@pytest.mark.skipif(not NIGHTLY, reason="every barrier is a build: in the profile nightly")
@pytest.mark.parametrize(("file", "at"), BARRIERS)
def test_every_barrier_is_missed(file, at, tmp_path):
    folder = changed(tmp_path, file, lambda text: text[:at] + text[at:].replace("barrier();", ";", 1))
    with pytest.raises(Fault, match="race"):
        check_all(WITH_BARRIERS, 80, folder=folder)
