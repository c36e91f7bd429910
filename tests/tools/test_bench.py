"""`sdpa-ref bench`: what is counted and compared, with numbers made by hand; what is wrong or missing; a real run."""

import json
import sys
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import sdpa_ref
from sdpa_ref.bench import calls, clock, contenders, measure, process, stored
from sdpa_ref.bench.cases import CASES, Case, inputs, truth
from sdpa_ref.bench.loops import LOOPS, Loop
from sdpa_ref.bench.stored import STORES, Store
from sdpa_ref.cli import main

PEERS = ("torch", "onnxruntime", "openvino", "jax")
SMALL = Case("small", 2, 4, 2, 3, 5, 8)


def timed(median):
    return {"way": "a way", "error": 0.0, "median": median, "quartiles": [median, median], "samples": 5}


def measured(case, times, yardstick=None, **refused):
    """Return what the measuring process says about a case."""
    found = {name: timed(time) for name, time in times.items()} | refused
    return {"case": case, "budget": 1e-6, "contenders": found, "yardstick": yardstick}


def judged(monkeypatch, capsys, results, *arguments, code=0):
    """Return the JSON of the command, were these the results."""
    monkeypatch.setattr(process, "results", lambda order: iter(results))
    assert main(["bench", "--backend", "reference", "--json", *arguments]) == code
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    assert main(["bench", *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("mask", "L", "S", "pairs"),
    [
        ("full", 3, 5, 2 * 3 * 5),
        ("causal", 4, 4, 2 * (1 + 2 + 3 + 4)),
        ("window", 258, 258, 2 * (256 * 257 // 2 + 2 * 256)),  # two rows see no more than 256 keys
        ("padding", 3, 6, 3 * (6 + 3)),
    ],
)
def test_pairs_and_operations(mask, L, S, pairs):
    case = Case("case", 2, 4, 2, L, S, 8, mask=mask)
    assert case.pairs == pairs
    assert case.flops == 2 * 2 * 8 * 4 * pairs  # two products, a multiplication and an addition each, four heads


def test_names_are_unique():
    names = [each.name for each in (*CASES, *LOOPS, *STORES)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("loop", LOOPS, ids=[loop.name for loop in LOOPS])
def test_every_step_of_a_loop_is_right_for_everybody(loop):
    for name in ("reference", *(["torch"] if find_spec("torch") else [])):
        assert "reason" not in calls._judged(loop, calls._step(loop, name, 1)), name


def test_a_loop_is_timed_as_it_is_and_at_one_length():
    made = []

    def ours(sdpa, data):
        x = data.lengths[4]
        return lambda i: made.append(i) or sdpa(x, x, x)

    found = calls.measure(Loop("calls-three", 3, ours, ours), ["reference", "missing"], 1, 0.0)
    mine = found["contenders"]["reference"]
    assert 0 < mine["quartiles"][0] <= mine["median"]
    assert mine["fixed"] > 0
    assert "missing" in found["contenders"]["missing"]["reason"]
    assert {0, 1, 2} == set(made)
    middle = "".join(map(str, made))
    assert "1" * 200 in middle  # the loop at one length
    assert "012" * 60 in middle


def test_a_wrong_step_is_not_timed():
    right = LOOPS[0]
    wrong = right._replace(ours=lambda sdpa, d: lambda i: 1.01 * right.ours(sdpa, d)(i))
    step = calls._step(wrong, "reference", 1)
    assert calls._judged(right, step)["wrong"]


def test_loops_in_the_report(monkeypatch, capsys):
    results = [
        {"loop": "calls-decode", "contenders": {"reference": timed(4e-6) | {"fixed": 3.2e-6}, "torch": timed(8e-6)}},
        {"loop": "calls-LHE", "contenders": {"reference": timed(4e-6), "torch": timed(3.2e-5)}},
        {"loop": "calls-out", "contenders": {"reference": timed(5e-6), "torch": {"reason": "no", "wrong": False}}},
    ]
    orders = []
    monkeypatch.setattr(process, "results", lambda order: orders.append(order) or iter(results))
    assert main(["bench", "--backend", "reference", "--cases", "tiny,calls-*", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (orders[0]["cases"], orders[0]["calls"]) == (["tiny"], [loop.name for loop in LOOPS])
    growing, layout, missing = found["calls"]
    assert (growing["ratio"], growing["by_fixed"]) == (2.0, 1.25)
    assert layout["ratio"] == 8.0
    assert "by_fixed" not in layout
    assert "ratio" not in missing
    assert found["summary"]["calls"] == pytest.approx(4.0)
    pytest.importorskip("rich")
    assert main(["bench", "--backend", "reference", "--peers", "torch", "--cases", "calls-*"]) == 0
    out = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    assert lines[0] == ["loop", "reference us", "fixed", "torch us", "fixed", "torch / ours", "ours / fixed"]
    assert lines[2] == ["calls-decode", "4.0", "3.2", "8.0", "-", "2.00", "1.25"]
    assert "geometric mean of torch / ours, loops of calls: 4.00\n" in out
    assert "- torch: no (calls-out)\n" in out


def test_every_way_of_storing_is_right(monkeypatch):
    monkeypatch.setattr(stored, "LONG", 256)
    for store in (Store("decode", 2, 4, 2, 1, 256, 32), Store("prefill", 1, 2, 2, 128, 128, 32)):
        ways = {way: run() for way, run in stored._ways(store, "reference").items()}
        dense = ways.pop("dense")
        for way, output in ways.items():
            if way.startswith("pages"):
                np.testing.assert_array_equal(output, dense)
            elif way.startswith("lengths"):
                np.testing.assert_array_equal(output[-1], dense[-1])
                assert not np.array_equal(output[0], dense[0])
            else:
                assert abs(output - dense).max() < (0.2 if way.startswith("Int8") else 1)
        if find_spec("torch"):
            theirs = {way: run().numpy() for way, run in stored._in_torch(store, 1).items()}
            np.testing.assert_allclose(theirs["torch"], dense, atol=1e-5)
            np.testing.assert_allclose(theirs["torch float16"], dense, atol=1e-2)
    steps = {way: run() for way, run in stored._token("reference").items()}
    np.testing.assert_array_equal(steps["attend over 16"], steps["the same sdpa"])


def test_stored_keys_in_the_report(monkeypatch, capsys):
    monkeypatch.setattr(stored, "LONG", 256)
    ways = {"dense": timed(8e-6), "Int8()": timed(2e-6), "torch float16": timed(6e-6)}
    results = [{"stored": "caches-1x-1024", "shape": [1, 32, 8, 1, 1024, 128], "contenders": ways}]
    orders = []
    monkeypatch.setattr(process, "results", lambda order: orders.append(order) or iter(results))
    assert main(["bench", "--backend", "reference", "--peers", "torch", "--cases", "caches-*", "--json"]) == 0
    assert orders[0]["stored"] == [store.name for store in STORES]
    (row,) = json.loads(capsys.readouterr().out)["stored"]
    assert (row["contenders"]["Int8()"]["by_dense"], row["contenders"]["Int8()"]["by_half"]) == (4.0, 3.0)
    assert "by_half" not in row["contenders"]["torch float16"]
    pytest.importorskip("rich")
    results[:] = [stored.measure(Store("caches-token"), "reference", [], 1, 0.0), *results]
    assert main(["bench", "--backend", "reference", "--peers", "torch", "--cases", "caches-*"]) == 0
    out = capsys.readouterr().out
    assert "| caches-1x-1024 | 1, 32, 8, 1, 1024, 128 | Int8()" in out
    assert "the same sdpa" in out


@pytest.mark.parametrize("mask", ["full", "causal", "window", "padding"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_truth_is_that_of_the_whole_problem(mask, dtype):
    L = S = 300
    case = Case("case", 2, 2, 1, L, S, 8, dtype, mask)
    given = inputs(case)
    exact = truth(case, given)
    i, j = np.arange(L)[:, None], np.arange(S)
    lengths = np.array([300, 150])[:, None, None, None]
    keep = {"full": j >= 0, "causal": j <= i, "window": (j <= i) & (j > i - 256), "padding": j < lengths}[mask]
    q, k, v = (array.astype(np.float64) for array in (given.query, given.key, given.value))
    whole = sdpa_ref.sdpa(q, k, v, mask=keep, backend="reference")
    assert set(exact.rows) >= {0, L - 1}
    np.testing.assert_allclose(exact.output, whole[:, :, exact.rows])
    assert given.query.dtype == dtype


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_a_backward_case_is_output_and_gradients(mask):
    case = Case("case", 2, 3, 3, 40, 40, 8, mask=mask, backward=True)
    given, options = inputs(case), {"mask": np.tri(40, dtype=bool)} if mask == "causal" else {}
    assert case.flops == 2 * 7 * 8 * 3 * case.pairs
    arrays = [array.astype(np.float64) for array in (given.query, given.key, given.value, given.grad)]
    whole = [sdpa_ref.sdpa(*arrays[:3], **options, backend="reference")]
    whole += sdpa_ref.sdpa_vjp(*arrays, **options, backend="reference")[:3]
    exact = truth(case, given)
    np.testing.assert_allclose(exact.output, np.concatenate([array[:1, :1] for array in whole], axis=2))
    found = measure.measure(case, ["reference", "torch", "onnxruntime"], 1, 0.0)["contenders"]
    assert 0 < found["reference"]["error"] <= exact.budget
    assert found["onnxruntime"]["reason"] in ("it has no gradients", "No module named 'onnxruntime'")
    assert find_spec("torch") is None or found["torch"]["error"] <= exact.budget


def test_runs_take_turns():
    calls = []
    samples = clock.by_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 0.0)
    assert [len(samples[name]) for name in "ab"] == [5, 5]
    assert all(0 < time < 1e-3 for name in "ab" for time in samples[name])
    assert sum(one != other for one, other in pairwise(calls)) >= 5  # not all of one, then all of the other


def test_a_sample_begins_when_woken_threads_have_processors_of_their_own(monkeypatch):
    """On a clock that calls move: for 20 ms after a pause they take twice the time."""
    now = alone_until = 0.0

    def sleep(seconds):
        nonlocal now, alone_until
        now += seconds
        alone_until = now + 0.02

    def run():
        nonlocal now
        now += 2e-3 if now < alone_until else 1e-3

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now, process_time=lambda: 0.0, sleep=sleep))
    assert clock.by_turns({"a": run, "b": run}, 0.0)["b"] == pytest.approx([1e-3] * 5)


def test_reading_counts_every_byte():
    run, size = clock.reading((np.zeros((3, 4, 8), np.float32), np.zeros((2, 4), np.float16)), 2)
    run()
    assert size == 3 * 4 * 8 * 4 + 2 * 4 * 2


def test_who_is_wrong_is_not_timed(monkeypatch):
    def off(case, given, threads):
        return contenders.Call(lambda: truth(case, given).output * 1.01, lambda output: output)

    monkeypatch.setattr(measure, "ways", lambda name: {"off": off})
    found = measure.measure(SMALL, ["anybody"], 1, 0.0)["contenders"]["anybody"]
    assert found["wrong"]
    assert found["reason"].startswith("wrong by ")
    assert "median" not in found


def test_who_is_not_installed_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found = measure.measure(SMALL, ["reference", "torch"], 1, 0.0)["contenders"]
    assert "torch" in found["torch"]["reason"]
    assert not found["torch"]["wrong"]
    low, high = found["reference"]["quartiles"]
    assert 0 < low <= found["reference"]["median"] <= high


def test_the_faster_of_two_ways_is_timed(monkeypatch):
    def way(patience):
        def prepare(case, given, threads):
            exact = np.zeros((2, 4, 3, 8))
            exact[:, :, truth(case, given).rows] = truth(case, given).output
            return contenders.Call(lambda: [exact for _ in range(patience)], lambda outputs: outputs[0])

        return prepare

    monkeypatch.setattr(measure, "ways", lambda name: {"slow": way(100_000), "fast": way(1)})
    assert measure.measure(SMALL, ["anybody"], 1, 0.0)["contenders"]["anybody"]["way"] == "fast"


def test_ratios_and_means(monkeypatch, capsys):
    results = [
        measured("tiny", {"reference": 2e-3, "torch": 4e-3, "jax": 3e-3}, openvino={"reason": "no", "wrong": False}),
        measured("tiny-single", {"reference": 1e-3, "torch": 6e-3}),
        measured("decode-float16", {"reference": 1e-3, "torch": 8e-3}),
        measured("decode-bfloat16", {"torch": 1e-3}, reference={"reason": "no", "wrong": False}),
    ]
    found = judged(monkeypatch, capsys, results)
    tiny, single, half, missing = found["cases"]
    assert tiny["ratios"] == {"torch": 2.0, "jax": 1.5}
    assert (tiny["best"], tiny["ratio"]) == ("jax", 1.5)
    assert tiny["shape"] == [4, 4, 4, 64, 64, 12]
    assert tiny["gflops"] == pytest.approx(4 * 4 * 64 * 64 * 12 * 4 / 2e-3 / 1e9)
    assert (single["ratio"], half["ratio"]) == (6.0, 8.0)
    assert "ratio" not in missing
    means = found["summary"]["geometric_mean"]
    assert means["float32"] == pytest.approx(3.0)  # of 1.5 and 6
    assert means["half"] == pytest.approx(8.0)
    assert means["all"] == pytest.approx(72 ** (1 / 3))


def test_fractions_of_the_machine(monkeypatch, capsys):
    results = [
        measured("prefill-512", {"reference": 0.5}, timed(0.5) | {"of": "matrix product", "amount": 2**30}),
        measured("decode", {"reference": 0.5}, timed(0.4) | {"of": "reading", "amount": 100}),
        {"memory_rate": 7.0},
    ]
    found = judged(monkeypatch, capsys, results)
    prefill, decode = found["cases"]
    assert prefill["fraction"] == pytest.approx(0.5)  # 2**29 operations against 2**30 in the same time
    assert decode["fraction"] == pytest.approx(0.8)
    assert found["memory_rate"] == 7.0


def test_growth(monkeypatch, capsys):
    times = {
        "prefill-512": 4.0,
        "prefill-512-causal": 2.0,
        "window-4096": 1.0,
        "window-8192": 2.0,
        "window-32768": 10.0,
    }
    found = judged(monkeypatch, capsys, [measured(case, {"reference": time}) for case, time in times.items()])
    assert found["summary"]["full_by_causal"] == {"prefill-512": 2.0}
    assert found["summary"]["window_by_linear"] == {"8192": 1.0, "32768": 1.25}


def test_a_wrong_backend_fails_the_command(monkeypatch, capsys):
    results = [measured("tiny", {"torch": 1.0}, reference={"reason": "wrong by 1", "wrong": True})]
    judged(monkeypatch, capsys, results, code=1)


def test_table_notes_and_chart(monkeypatch, capsys, tmp_path):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    refusal = {"reason": "no bfloat16 here", "wrong": False}
    results = [
        measured("tiny", {"reference": 2e-3, "torch": 3e-3}),
        measured("decode-bfloat16", {"reference": 1e-3}, timed(5e-4) | {"of": "reading", "amount": 9}, torch=refusal),
    ]
    monkeypatch.setattr(process, "results", lambda order: iter(results))
    picture = tmp_path / "ratios.png"
    assert main(["bench", "--backend", "reference", "--peers", "torch", "--threads", "1", "--out", str(picture)]) == 0
    out = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    assert lines[0][:4] == ["case", "B, Hq, Hkv, L, S, E", "reference ms", "torch ms"]
    assert lines[2][:5] == ["tiny", "4, 4, 4, 64, 64, 12", "2", "3", "1.50"]
    assert lines[3][3:5] == ["-", "-"]
    assert lines[3][-1] == "50% reading"
    assert "- torch: no bfloat16 here (decode-bfloat16)\n" in out
    assert ", 1 threads, " in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_usage(capsys):
    assert "no case is called 'huge'; there are prefill-512, " in refused(capsys, "--cases", "tiny,huge")
    assert "unknown peer 'numpy'; there are torch, " in refused(capsys, "--peers", "numpy")
    assert "unknown backend 'fast'; there are reference" in refused(capsys, "--backend", "fast")
    assert "at least 1" in refused(capsys, "--threads", "0")
    assert "at least 0" in refused(capsys, "--seconds", "nan")
    assert "--out" in refused(capsys, "--cases", "tiny", "--out", "no/such/folder/ratios.png")
    assert "the chart is a PNG, call it ratios.png" in refused(capsys, "--cases", "tiny", "--out", "ratios.svg")
    assert "needs --peers and --cases" in refused(capsys, "--peers", "", "--out", "ratios.png")
    assert "--threads 9999: this process has " in refused(capsys, "--threads", "9999")


def test_a_real_run(capsys):
    arguments = ["--backend", "reference", "--cases", "tiny-single", "--seconds", "0", "--threads", "1", "--json"]
    assert main(["bench", *arguments]) == 0
    out, err = capsys.readouterr()
    (row,) = json.loads(out)["cases"]
    assert "1/1 tiny-single: reference " in err
    for name in ("reference", *PEERS):
        found = row["contenders"][name]
        if name != "reference" and find_spec(name) is None:
            assert name in found["reason"]
        elif name != "onnxruntime" or find_spec("onnx") is not None:
            assert found["error"] <= row["budget"]
            assert found["samples"] == 5


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process can be reset on Linux only")
def test_memory(capsys):
    assert main(["bench", "--backend", "reference", "--peers", "", "--cases", "", "--memory", "512", "--json"]) == 0
    (peak,) = json.loads(capsys.readouterr().out)["memory"]
    assert (peak["backend"], peak["L"]) == ("reference", 512)
    assert peak["packed"] == 2 * (2 * 512 * 64) * 4
    assert peak["extra"] > 2 * 512 * 512 * 8  # the reference has all scores at once
