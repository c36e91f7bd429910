"""Calls of the Numba backend from everywhere: the same bits, no new compilation, little memory, whoever calls."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

import sdpa_numba
from sdpa_numba import strips
from sdpa_numba.kernels import few_rows, many_rows

import sdpa_ref
from sdpa_ref import Causal, Window, sdpa, sdpa_state
from sdpa_ref.cli import main
from sdpa_ref.testing import assert_close, assert_same_bits
from sdpa_ref.testing.strategies import cases

EXAMPLES = 20_000 if settings.default.max_examples >= 1000 else 40  # for the profile "nightly"


@pytest.fixture(autouse=True)
def threads():
    before = sdpa_ref.get_num_threads()
    yield
    sdpa_ref.set_num_threads(before)


def draw(seed, *shapes, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def python(script, timeout=600, **environment):
    """Return what a script prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@settings(max_examples=EXAMPLES)
@given(case=cases())
def test_fuzz_against_the_reference(case):
    assert_close(sdpa(*case.arrays, **case.options, backend="numba"), *case.arrays, **case.options)


CALLS = {
    "prefill": ((2, 4, 300, 24), (2, 4, 700, 24), (2, 4, 700, 40), "float32", {}),
    "causal": ((3, 450, 16), (3, 450, 16), (3, 450, 16), "float32", {"mask": Causal()}),
    "decode": ((2, 1, 20), (2, 5000, 20), (2, 5000, 33), "float32", {}),
    "grouped": ((6, 1, 20), (2, 3000, 20), (2, 3000, 33), "float32", {"mask": Window(2500, 0), "query_offset": "end"}),
    "float16": ((6, 400, 20), (3, 400, 20), (3, 400, 12), "float16", {"mask": Causal()}),
}


@pytest.mark.parametrize("call", CALLS)
def test_any_number_of_threads_gives_the_same_bits(call):
    *shapes, dtype, options = CALLS[call]
    arrays = draw(0, *shapes, dtype=dtype)
    states = []
    for n in (1, 2, 7):
        sdpa_ref.set_num_threads(n)
        states += [sdpa_state(*arrays, **options, backend="numba") for _ in range(3)]
    for state in states[1:]:
        assert_same_bits(state.output, states[0].output)
        assert_same_bits(state.lse, states[0].lse)


def test_eight_python_threads_with_different_shapes():
    failures = []

    def work(seed):
        try:
            for repeat in range(4):
                L, S = 1 + (37 * seed + 11 * repeat) % 130, 60 + 113 * seed
                q, k, v = draw(seed, (4, L, 12), (2, S, 12), (2, S, 5))
                options = {"mask": Causal(), "query_offset": "end"} if seed % 2 else {}
                assert_close(sdpa(q, k, v, **options, backend="numba"), q, k, v, **options)
        except BaseException as error:
            failures.append(error)

    sdpa_ref.set_num_threads(3)
    callers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(600)
    assert not failures
    assert not any(caller.is_alive() for caller in callers)


def test_queries_in_chunks_have_the_bits_of_all_at_once():
    q, k, v = draw(1, (4, 1200, 24), (2, 1200, 24), (2, 1200, 17))
    whole = sdpa_state(q, k, v, mask=Causal(), backend="numba")
    for cuts in ([1, 2, 9, 57, 400, 1199], [512, 1024], [48, 96, 1000]):
        for i, j in zip([0, *cuts], [*cuts, 1200], strict=True):
            chunk = sdpa_state(q[:, i:j], k[:, :j], v[:, :j], mask=Causal(), query_offset=i, backend="numba")
            assert_same_bits(chunk.output, whole.output[:, i:j])
            assert_same_bits(chunk.lse, whole.lse[:, i:j])


def test_new_lengths_masks_and_strides_compile_nothing():
    script = """
import numpy as np
from numba.core import event
import sdpa_ref
from sdpa_ref import ALiBi, Causal, KeyLengths, Window

def call(L, S, E, layout="HLE", **options):
    x = np.ones((2, 2, max(L, S), E), np.float32)
    x = x if layout == "HLE" else x.swapaxes(-2, -3)
    short = (lambda n: x[..., :n, :]) if layout == "HLE" else (lambda n: x[:, :n])
    sdpa_ref.sdpa(short(L), short(S), short(S), layout=layout, query_offset="end", backend="numba", **options)

def calls(n):
    for L in (1, n):
        for options in ({}, {"mask": Causal()}, {"mask": Window(3, 1)}, {"mask": KeyLengths(np.array([2, 3]))},
                        {"sink": 0.5}):
            call(L, n, n - 9, **options)
        for options in ({"softcap": 2.0}, {"mask": np.ones((L, n), bool)}, {"bias": np.ones((L, n), np.float16)},
                        {"bias": ALiBi(0.5)}, {"dropout": sdpa_ref.Dropout(0.1, 3)}):
            call(L, n, n - 9, **options)
    call(n, n, 8, layout="LHE")

calls(20)
call(1, 1500, 16); call(500, 500, 16)  # several chunks, a packed copy
with event.install_recorder("numba:compile") as recorder:
    for n in (33, 60, 131):
        calls(n)
    call(1, 2100, 16); call(700, 450, 16)
print(len(recorder.buffer))
"""
    assert python(script) == "0\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_and_spawned_children_compute_the_same(tmp_path):
    (tmp_path / "children.py").write_text("""
import multiprocessing, warnings
import numpy as np
import sdpa_ref

warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads

def attend(n):
    x = np.random.default_rng(n).standard_normal((4, n, 16), np.float32)
    return sdpa_ref.sdpa(x, x, x, backend="numba").tobytes()

if __name__ == "__main__":
    sdpa_ref.set_num_threads(3)
    here = [attend(n) for n in (300, 301)]
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(attend, (300, 301)) == here
    assert [attend(n) for n in (300, 301)] == here
    print("same")
""")
    assert python(f"import runpy; runpy.run_path({str(tmp_path / 'children.py')!r}, run_name='__main__')") == "same\n"


def test_a_cache_that_cannot_be_written_and_two_processes_that_compile_at_once(tmp_path):
    script = """
import numpy as np
import sdpa_ref
print(sdpa_ref.gelu(np.array([-9, 0, 9], np.float16), backend="numba").tolist())
"""  # a small kernel
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("not a folder")
    command, environment = [sys.executable, "-c", script], os.environ | {"SDPA_REF_CACHE_DIR": str(folder)}
    running = [
        subprocess.Popen(command, env=environment | {"SDPA_REF_CACHE_DIR": str(place)}, stdout=-1, stderr=-1, text=True)
        for place in (folder, folder, file)
    ]
    for process in running:
        assert process.communicate(timeout=600) == ("[-0.0, 0.0, 9.0]\n", "")
    assert len([path for path in folder.rglob("gelu-*") if path.is_file()]) == 1
    assert file.read_text() == "not a folder"


def test_no_array_of_all_scores_is_made():
    script = """
import resource, sys
import numpy as np
import sdpa_ref
S = 16384
x = np.ones((S, 8), np.float32)
small = x[:600]
for options in ({}, {"mask": sdpa_ref.Causal()}):
    sdpa_ref.sdpa(small, small, small, backend="numba", **options)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for options in ({}, {"mask": sdpa_ref.Causal() & sdpa_ref.Window(300, 0)}):
    sdpa_ref.sdpa(x, x, x, backend="numba", **options)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // (1 if sys.platform == "darwin" else 1024))
"""
    assert int(python(script)) < 32  # MiB, where one float32 for each score would take 1024


def test_kernels_of_users_do_not_pile_up():
    kernels = few_rows.kernel, many_rows.kernel
    assert [cache.cache_info().maxsize for cache in (strips.compiled, *kernels)] == [64, 64, 64]
    misses = sum(cache.cache_info().misses for cache in kernels)
    q, k, v = draw(2, (2, 5, 4), (2, 6, 4), (2, 6, 3))
    for slope in range(100):
        sdpa(q, k, v, score_mod=lambda s, b, h, i, j, slope=slope: s - slope * (i - j), backend="numba")
    assert sum(cache.cache_info().misses for cache in kernels) <= misses + 1


def test_a_function_sees_what_changed_since_the_last_call():
    table = np.zeros(6)
    q, k, v = draw(3, (2, 5, 4), (2, 6, 4), (2, 6, 3))

    def score_mod(s, b, h, i, j):
        return s + table[j]

    for _ in range(2):
        assert_close(sdpa(q, k, v, score_mod=score_mod, backend="numba"), q, k, v, score_mod=score_mod)
        table[2:4] = 5


def test_warmup_offers_every_kernel():
    steps = sdpa_numba.warmup()
    assert len(steps) == len(set(steps)) >= 12
    assert all(any(dtype in step for step in steps) for dtype in ("float16", "bfloat16", "float32", "float64"))
    steps["float32, few rows"]()
    script = """
import numpy as np
from numba.core import event
import sdpa_numba, sdpa_ref
for name, step in sdpa_numba.warmup().items():
    if "float32, few" in name or "float32, merging" in name:
        step()
with event.install_recorder("numba:compile") as recorder:
    x = np.ones((1, 1500, 4), np.float32)
    sdpa_ref.sdpa(x[:, :1], x, x, backend="numba")
print(len(recorder.buffer))
"""
    assert python(script) == "0\n"


def test_warmup_says_where_it_cannot_write(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    command = [sys.executable, "-m", "sdpa_ref", "warmup"]
    environment = os.environ | {"SDPA_REF_CACHE_DIR": str(file)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr.startswith(f"sdpa-ref warmup: error: numba: kernels cannot be kept in {file}")


def test_info_tells_what_the_backend_tells(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for name, text in sdpa_numba.details().items():
        assert name in out
        assert text in out
