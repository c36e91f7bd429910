"""The conformance suite: it passes what is right, finds what is wrong, and says which of weights and values it is."""

import dataclasses
import re
import subprocess
import sys

import numpy as np
import pytest

from sdpa_ref import Causal, sdpa, sdpa_state
from sdpa_ref.testing import counterexample, power, report, runner
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.cases import case
from sdpa_ref.testing.diagnose import diagnosed
from sdpa_ref.testing.properties import BY_NAME, PROPERTIES
from sdpa_ref.testing.runner import check, replay
from sdpa_ref.testing.target import Target, TargetError, resolve

FOREVER = float("inf")


def right(query, key, value, **options):
    return sdpa(query, key, value, backend="reference", **options)


def target(forward, **claims):
    return Target("mine", forward, Capabilities.of(claims))


def laws(*names):
    return [BY_NAME[name] for name in names]


def first_failure(forward, *names, rounds=20, **claims):
    """Return the shrunk failure of the first law that fails."""
    run = check(target(forward, **claims), rounds=rounds, seconds=FOREVER, laws=laws(*names), stop_at_first=True)
    assert run.failures, f"{names} do not see it"
    return run.failures[0].failure


def test_every_backend_passes_every_law(backend):
    run = check(resolve(backend), rounds=2, seconds=FOREVER)
    assert [f"{o.law.name}: {o.found.case}\n{o.failure.message}" for o in run.failures] == []
    assert run.passed
    assert run.rounds == 2
    assert {outcome.status for outcome in run.outcomes} <= {"passed", "not claimed"}


def test_a_backend_of_another_distribution_is_reached_by_its_entry_point():
    assert check("loopback", rounds=1, laws=["plain", "lse", "weights", "gradients"], seconds=FOREVER).passed


def test_equal_seeds_draw_equal_cases_and_others_draw_others():
    def drawn(seed):
        seen = []

        def spy(query, key, value, **options):
            seen.append((query.shape, query.dtype.name, float(query.sum())))
            return right(query, key, value, **options)

        some = laws("plain", "long rows", "everything", "own result")
        check(target(spy, dtypes=["float16", "float32"]), seed=seed, rounds=2, seconds=FOREVER, laws=some)
        return seen

    assert drawn(1) == drawn(1) != drawn(2)


def test_after_the_limit_of_time_only_the_first_round_is_finished():
    run = check(target(right), seconds=-1)
    assert run.rounds == 1
    assert run.passed
    assert {sum(outcome.cases.values()) for outcome in run.outcomes if not outcome.missing} == {1}


def test_the_first_failure_can_end_the_run():
    def nothing(query, key, value):
        return np.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)

    run = check(target(nothing), stop_at_first=True)
    assert [outcome.law.name for outcome in run.failures] == ["plain"]
    assert {outcome.status for outcome in run.outcomes} == {"failed", "not run", "not claimed"}
    assert not run.passed


@pytest.mark.parametrize("claims", [{}, {"layouts": ["LHE"], "ranks": [3], "mask": True, "bias": "same"}])
def test_a_target_gets_nothing_that_it_does_not_claim(claims):
    rank, layout = claims.get("ranks", [4])[0], claims.get("layouts", ["HLE"])[0]

    def picky(query, key, value, **options):
        assert "layout" not in options, "it knows the only one that it claims"
        head = -2 if layout == "LHE" else -3
        rows = -3 if layout == "LHE" else -2
        full = (*query.shape[:-3], query.shape[head], query.shape[rows], key.shape[rows])
        for array in (query, key, value):
            assert array.dtype == np.float32
            assert array.ndim == rank
            assert array.flags.c_contiguous
            assert array.flags.aligned
            assert array.shape[head] == query.shape[head]
            assert array.shape[:-3] == query.shape[:-3]
            assert array.size
        assert key.shape[-1] == value.shape[-1]
        if "mask" in options:
            assert options["mask"].dtype == bool
            assert options["mask"].shape == full
        if "bias" in options:
            assert options["bias"].dtype == np.float32
            assert options["bias"].shape == full
        assert options.keys() <= {"mask", "bias"} & claims.keys()
        assert len(options) < 2, "mask_and_bias is not claimed"
        return right(query, key, value, layout=layout, **options)

    run = check(target(picky, **claims), rounds=15, seconds=FOREVER)
    assert [o.failure.message for o in run.failures] == []


def test_what_is_declined_is_counted_with_its_reason():
    def declines(query, key, value):
        if query.shape[-1] > 4:
            raise NotImplementedError("wide heads")
        return right(query, key, value)

    (outcome,) = check(target(declines), rounds=20, seconds=FOREVER, laws=laws("plain")).outcomes
    assert outcome.status == "passed"
    assert list(outcome.declined) == ["wide heads"]
    assert sum(outcome.declined.values()) + sum(outcome.cases.values()) == 20


# --- what is wrong is found ---


def misses_key_16(query, key, value):
    keep = np.ones((query.shape[-2], key.shape[-2]), bool)
    keep[:, 16:17] = False
    return right(query, key, value, mask=keep)


def test_a_failure_is_shrunk_to_the_smallest_case_and_can_be_replayed():
    failure = first_failure(misses_key_16, "plain")
    assert failure.case.key.shape == (1, 1, 17, 1)
    assert failure.case.query.shape == (1, 1, 1, 1)
    again = replay(target(misses_key_16), BY_NAME["plain"], failure.case.recipe)
    assert again.message == failure.message
    assert replay(target(right), BY_NAME["plain"], failure.case.recipe) is None


@pytest.mark.parametrize("text", ["", "case()", "case(1, 2)", "case(1, L=x)", "print(1)", "case(1, M=2)", "case(1"])
def test_only_recipes_are_replayed(text):
    with pytest.raises(ValueError, match="not a case"):
        replay(target(right), BY_NAME["plain"], text)


def test_a_target_that_raises_fails_with_what_it_raised():
    def raises(query, key, value):
        raise RuntimeError("no kernel image")

    line = raises.__code__.co_firstlineno + 1
    message = f"raised RuntimeError: no kernel image\n  at {__file__}, line {line}, in raises"
    assert first_failure(raises, "plain").message == message


def test_a_target_that_raises_elsewhere_names_its_own_line_first():
    def passes_on(query, key, value):
        return right(query, key, value, scale="large")

    places = first_failure(passes_on, "plain").message.splitlines()[1:]
    assert len(places) == 2
    assert places[0] == f"  at {__file__}, line {right.__code__.co_firstlineno + 1}, in right"


def test_a_target_that_exits_fails_and_an_interrupt_ends_the_run():
    def stops(error):
        def forward(query, key, value):
            raise error

        return target(forward)

    for law in laws("plain", "repeatable"):
        assert law.check(stops(SystemExit(0)), case(0)).message.startswith("raised SystemExit: 0\n")
    with pytest.raises(KeyboardInterrupt):
        laws("plain")[0].check(stops(KeyboardInterrupt()), case(0))


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (lambda output: None, "output must be a numpy.ndarray, got NoneType"),
        (lambda output: output.tolist(), "output must be a numpy.ndarray, got list"),
        (
            lambda output: (output, 0),
            "output must be a numpy.ndarray, got tuple; to return (output, lse), give a Target with state=",
        ),
        (lambda output: output[0], "output must have shape"),
        (lambda output: output.astype(object), "output must have dtype float32, got object"),
    ],
)
def test_no_law_breaks_at_a_result_that_is_no_output(made, complaint, monkeypatch):
    monkeypatch.setattr(runner, "_SHRINK_CALLS", 20)  # of every law's failure, and all are alike
    claims = {"mask": True, "poison": True, "invariant": True, "private": True, "nonfinite": True, "strides": True}
    run = check(target(lambda *arrays, **options: made(right(*arrays, **options)), **claims), rounds=1)
    messages = {outcome.failure.message for outcome in run.outcomes if outcome.failure}
    assert all(message.startswith(complaint) for message in messages)
    assert {outcome.law.name for outcome in run.outcomes if outcome.cases} <= {"hidden keys"}


def test_states_and_gradients_are_tuples_of_their_length():
    everything = Capabilities(lse=True, gradients=True, mask=True)
    short = Target("mine", right, everything, state=right, vjp=lambda *arrays, **options: (None,) * 3)
    run = check(short, rounds=1, laws=laws("lse", "merge", "gradients"))
    assert [outcome.failure.message for outcome in run.outcomes] == [
        "state must return (output, lse), got ndarray",
        "state must return (output, lse), got ndarray",
        "vjp must return (d_query, d_key, d_value, d_bias, d_sink), got tuple of 3",
    ]


def test_causal_that_starts_at_the_wrong_end():
    def top_left(query, key, value, *, mask, query_offset):
        return right(query, key, value, mask=mask, query_offset="start")

    claims = {"masks": ["causal"], "offsets": ["end"]}
    failure = first_failure(top_left, "causal", **claims)
    assert failure.case.options == {"mask": Causal(), "query_offset": "end"}
    assert failure.case.query.shape[-2] != failure.case.key.shape[-2]


def test_a_float_that_is_hidden_but_multiplied():
    """The weight of a masked key is 0, and 0 * NaN is NaN (pytorch issue 101967)."""

    def multiplies(query, key, value, *, mask=True):
        s = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1], dtype=query.dtype)
        s = np.where(mask, s, -np.inf)
        p = np.exp(s - np.maximum(s.max(-1, keepdims=True), np.finfo(s.dtype).min))
        z = p.sum(-1, keepdims=True)
        return (p / np.where(z == 0, 1, z)).astype(query.dtype) @ value

    run = check(target(multiplies, mask=True), rounds=10, seconds=FOREVER)
    assert [o.failure.message for o in run.failures] == []
    failure = first_failure(multiplies, "poison", mask=True, poison=True)
    assert np.isnan(failure.got).any()
    assert not np.isnan(failure.expected).any()


def test_an_input_that_is_written_to():
    def scales_in_place(query, key, value):
        query *= query.shape[-1] ** -0.5
        return right(query, key, value, scale=1.0)

    assert first_failure(scales_in_place, "repeatable").message == "it wrote to query"


def test_the_wrong_type():
    def widens(query, key, value):
        return right(query, key, value).astype(np.float64)

    assert first_failure(widens, "plain").message.startswith("output must have dtype float32, got float64")


@pytest.mark.parametrize("rule", ["zero", "mean", "nan", "any"])
def test_the_rule_for_empty_rows_is_the_one_that_is_claimed(rule):
    def with_rule(query, key, value, *, mask):
        output = right(query, key, value, mask=mask)
        mean = right(query, key, value, scale=0.0)
        other = {"zero": 0, "mean": mean, "nan": np.nan, "any": 17}[rule]
        return np.where(mask.any(-1, keepdims=True), output, other).astype(output.dtype)

    failed = {}
    for claim in ("zero", "mean", "nan", "any"):
        run = check(target(with_rule, mask=True, empty_row=claim), rounds=10, seconds=FOREVER, laws=laws("empty rows"))
        failed[claim] = bool(run.failures)
    assert failed == {claim: claim not in (rule, "any") for claim in failed}


@pytest.mark.parametrize("base", ["e", "2"])
def test_the_base_of_the_lse_is_the_one_that_is_claimed(base):
    def state(query, key, value):
        whole = sdpa_state(query, key, value, backend="reference")
        return whole.output, (whole.lse / np.log(2 if base == "2" else np.e)).astype(np.float32)

    for claim in ("e", "2"):
        claims = Capabilities.of({"lse": True, "lse_base": claim})
        run = check(Target("mine", right, claims, state=state), rounds=10, seconds=FOREVER, laws=laws("lse"))
        assert bool(run.failures) == (claim != base)


def test_claims_need_their_functions():
    with pytest.raises(ValueError, match="mine claims gradients but has no function 'vjp'"):
        target(right, gradients=True)


def test_a_wrong_result_without_keys_is_diagnosed():
    def nan(query, key, value):
        return right(query, key, value) if key.size else np.full((*query.shape[:-1], value.shape[-1]), np.nan, "f4")

    failure = BY_NAME["plain"].check(target(nan, empty_axes=True), case(0, S=0))
    assert diagnosed(target(nan), failure).blame == "unknown: there are no keys"


# --- weights or values ---


def rounds_values(query, key, value):
    """Return what the right weights make of values that were rounded, which numbers as round as 0 and 1 do not show."""
    return right(query, key, value.round(1))


def test_weights_are_to_blame_where_one_hot_values_show_it():
    failure = first_failure(misses_key_16, "plain")
    found = diagnosed(target(misses_key_16), failure)
    assert found.blame == "weights"
    assert found.first == ((0,), 0, 0)
    assert found.worst > 10
    assert found.weights[0, 16] == 0 < found.right_weights[0, 16]


def test_values_are_to_blame_where_the_weights_are_right():
    failure = first_failure(rounds_values, "plain")
    assert diagnosed(target(rounds_values), failure).blame == "values"


def test_the_first_wrong_row_is_named():
    def wrong_in_row_2_of_head_1(query, key, value):
        output = right(query, key, value)
        output[-1, 1:2, 2:3] += 1
        return output

    given = case(0, batch=(2,), heads=(2, 2), L=4, S=3, E=2, Ev=2)
    failure = BY_NAME["plain"].check(target(wrong_in_row_2_of_head_1), given)
    assert diagnosed(target(wrong_in_row_2_of_head_1), failure).first == ((1,), 1, 2)


def test_a_failure_is_told_in_words_and_with_its_weights():
    failure = first_failure(misses_key_16, "plain")
    lines = counterexample.described(failure, diagnosed(target(misses_key_16), failure)).splitlines()
    assert re.fullmatch(r"  row 0, keys 9 to 16: expected \[.*\], got \[.* 0\. +\]", lines[-4])
    assert lines[-3].endswith("value (1, 1, 17, 1): L=1, S=17")
    assert "seed" in lines[-1]
    told = counterexample.described(
        dataclasses.replace(failure, case=case(0, S=2, mask=("causal",), bias=("array",), offset="end")),
        diagnosed(target(right), dataclasses.replace(failure, got=None)),
    )
    assert "L=1, S=2, mask=Causal(), bias=[[[" in told
    assert "query_offset='end'" in told


def test_the_diagnosis_and_the_message_agree_on_the_largest_error():
    def far(query, key, value):
        return right(query, key, value) + np.float32(1e30)

    failure = first_failure(far, "plain")
    assert f"{diagnosed(target(far), failure).worst:.3g} times" in failure.message


# --- stored keys ---


def gathers(query, key, value, *, mask=None, query_offset="start", layout="HLE"):
    """Return attention as a kernel that knows nothing of this project: pages and codes become arrays first."""
    options = {"mask": mask}
    if hasattr(key, "table"):
        entries, M = key.table.shape[:-1], key.table.shape[-1]
        P = key.pages.shape[1 if layout == "LHE" else 2]
        used = np.arange(M) * P < key.lengths[..., None]
        keep = (np.arange(M * P) < key.lengths[..., None])[..., None, None, :]
        key, value = (numbers(x.pages)[np.where(used, x.table, 0)] for x in (key, value))
        if layout == "HLE":
            key, value = (x.swapaxes(-3, -4).reshape(*entries, x.shape[-3], M * P, x.shape[-1]) for x in (key, value))
        else:
            key, value = (x.reshape(*entries, M * P, *x.shape[-2:]) for x in (key, value))
        options["mask"] = keep if mask is None else keep & mask
    key, value = (numbers(x).astype(np.float32) for x in (key, value))
    return right(query, key, value, layout=layout, **options)


def numbers(given):
    """Return the numbers of codes whose scales are one a token, or an array as it is."""
    if not hasattr(given, "codes"):
        return given
    if given.bits == 4 or given.codes.dtype.kind not in "iu" or given.scale.shape[-1] > 1 or given.offset is not None:
        raise NotImplementedError("only 8 bits with a scale a token")
    return given.scale * (given.codes.astype(np.float32) - given.zero)


STORED = "pages", "codes", "decode loop"


def test_a_kernel_that_gathers_passes_the_laws_of_stored_keys():
    claims = {"mask": True, "paged": True, "quantized": True, "layouts": ["HLE"], "grouped_heads": True}
    run = check(target(gathers, **claims), rounds=25, seconds=FOREVER, laws=laws(*STORED))
    assert [(o.law.name, o.found.case, o.failure.message) for o in run.failures] == []
    assert all(outcome.cases for outcome in run.outcomes)
    assert run.outcomes[1].declined == {"only 8 bits with a scale a token": run.outcomes[1].declined.total()}


@pytest.mark.parametrize("layout", ["HLE", "LHE"])
def test_stored_keys_lie_as_plainly_as_others_where_nothing_more_is_claimed(layout):
    def looks(query, key, value, **options):
        for given in (key, value):
            given = given.pages if hasattr(given, "table") else given
            parts = [given] if isinstance(given, np.ndarray) else [given.codes, given.scale, given.offset]
            for part in filter(lambda part: part is not None, (*parts, options.get("mask"))):
                assert part.flags.c_contiguous
                assert np.isfinite(part.astype(np.float64)).all(), "poison is not claimed"
        return right(query, key, value, layout=layout, **options)

    claims = {"paged": True, "quantized": True, "layouts": [layout], "mask": True}
    run = check(target(looks, **claims), rounds=15, seconds=FOREVER, laws=laws(*STORED))
    assert [o.failure.message for o in run.failures] == []


def test_stored_keys_are_not_longer_than_claimed():
    def short(query, key, value, **options):
        assert key.shape[-2] <= 20
        return right(query, key, value, **options)

    claims = {"paged": True, "quantized": True, "mask": True, "max_length": 20}
    run = check(target(short, **claims), rounds=20, seconds=FOREVER, laws=laws(*STORED))
    assert [o.failure.message for o in run.failures] == []


def test_key_positions_are_inferred_from_the_keyword():
    def placed(query, key, value, *, key_positions=None): ...

    assert Capabilities.of_signature(placed).key_positions
    assert not Capabilities.of_signature(right).paged


def test_a_counterexample_of_pages_runs_with_numpy_alone(tmp_path):
    def forgets_lengths(query, key, value):
        pages = (
            type(x)(x.pages, x.table % len(x.pages), x.shape[-2]) if hasattr(x, "table") else x for x in (key, value)
        )
        return right(query, *pages)

    failure = first_failure(forgets_lengths, "pages", paged=True)
    mine = target(forgets_lengths, paged=True)
    assert "key Paged(" in counterexample.described(failure, diagnosed(mine, failure))
    script, *_ = counterexample.saved(tmp_path, "pages", "sdpa-ref check", failure, diagnosed(mine, failure))[0]
    ran = subprocess.run([sys.executable, "-I", script], capture_output=True, text=True, check=True)
    assert "wrong: 1 of 1 numbers" in ran.stdout
    assert replay(mine, BY_NAME["pages"], failure.case.recipe).message == failure.message


# --- counterexamples ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_counterexample_runs_with_numpy_alone(tmp_path, dtype):
    failure = first_failure(misses_key_16, "plain", dtypes=[dtype])
    mine = target(misses_key_16, dtypes=[dtype])
    files, reason = counterexample.saved(tmp_path, "plain", "sdpa-ref check", failure, diagnosed(mine, failure))
    script, numbers = files[:2]
    assert numbers == script.with_suffix(".npz")
    code = f"import runpy, sys; sys.modules['sdpa_ref'] = None; runpy.run_path({str(script)!r})"
    isolated = [sys.executable, "-W", "error", "-c", code]
    out = subprocess.run(isolated, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert "wrong: 1 of 1 numbers" in out
    units = float(out.splitlines()[-1].rpartition(":")[2])
    assert units == pytest.approx(diagnosed(mine, failure).worst, rel=1e-6)
    assert reason == ""


def test_the_script_of_a_counterexample_knows_every_option(tmp_path):
    """Its expected numbers are those of the reference, whatever the case is made of."""
    for seed in range(12):
        given = case(
            seed, batch=(2,), heads=(4, 2), L=5, S=9, E=4, Ev=3, dtype="float64", mask=("causal", "|~window"),
            bias=("holes", "alibi"), softcap=2.0, sink="heads", dropout=0.3, score_mod=seed % 2 == 0, offset="number",
            layout="LHE",
        )  # fmt: skip
        mine = target(lambda *arrays, **options: right(*arrays, **options) + 1, layouts=["HLE", "LHE"])
        failure = BY_NAME["plain"].check(mine, given)
        (script, *_), reason = counterexample.saved(tmp_path, str(seed), "", failure, diagnosed(mine, failure))
        names = {"__name__": "script", "__file__": str(script)}
        exec(script.read_text(), names)
        expected = np.swapaxes(failure.expected, -2, -3)
        np.testing.assert_allclose(names["expected"], expected, rtol=0, atol=failure.limit.max())
        assert reason == "the operator has no sink"


def test_a_counterexample_is_an_onnx_node_test(tmp_path):
    onnx = pytest.importorskip("onnx")
    from onnx import numpy_helper
    from onnx.reference import ReferenceEvaluator

    def softcap_after_mask(query, key, value, *, mask=True, softcap=None):
        return right(query, key, value, mask=mask)

    failure = first_failure(softcap_after_mask, "softcap", softcap=True, mask=True, grouped_heads=True)
    mine = target(softcap_after_mask, softcap=True, mask=True, grouped_heads=True)
    files, reason = counterexample.saved(tmp_path, "softcap", "", failure, diagnosed(mine, failure))
    assert reason == ""
    directory = files[-1]
    onnx.checker.check_model(directory / "model.onnx")
    model = onnx.load(directory / "model.onnx")

    def read(name):
        return numpy_helper.to_array(onnx.load_tensor(directory / "test_data_set_0" / name))

    feeds = {given.name: read(f"input_{n}.pb") for n, given in enumerate(model.graph.input)}
    (theirs,) = ReferenceEvaluator(model).run(None, feeds)
    assert theirs.shape == failure.expected.shape
    assert (abs(read("output_0.pb") - failure.expected) <= failure.limit).all()
    assert (abs(theirs - failure.expected) <= failure.limit).all()


# --- claims ---


def test_a_manifest_is_read_from_toml(tmp_path):
    path = tmp_path / "claims.toml"
    path.write_text('dtypes = ["float16"]\nmask = true\nranks = [3, 4]\nbias = "same"\nmax_length = 64\n')
    assert Capabilities.load(path) == Capabilities(
        dtypes=("float16",), mask=True, ranks=(3, 4), bias="same", max_length=64
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("softcapp = true", "unknown capability 'softcapp', did you mean 'softcap'"),
        ('dtypes = ["float8"]', "dtypes: unknown 'float8'; there are float16"),
        ("mask = 1", "mask: must be true or false, got 1"),
        ("ranks = [1]", "ranks: must be integers of at least 2"),
        ("max_width = 0", "max_width: must be an integer of at least 1, got 0"),
        ("error_factor = 0.5", "error_factor: must be a number of at least 1"),
        ("mask = ", "Invalid value"),
    ],
)
def test_a_wrong_manifest_says_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "claims.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        Capabilities.load(path)
    assert str(error.value).startswith(str(path))


def test_claims_survive_a_round_trip():
    everything = Capabilities.everything()
    assert Capabilities.of(everything.as_dict()) == everything


def test_targets_by_name(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(
        "from sdpa_ref import sdpa\n"
        "from sdpa_ref.testing.capabilities import Capabilities\n"
        "from sdpa_ref.testing.target import Target\n"
        "def plain(query, key, value, *, mask=None, scale=None): return sdpa(query, key, value)\n"
        "def claiming(query, key, value, **options): return sdpa(query, key, value, **options)\n"
        "claiming.capabilities = {'softcap': True}\n"
        "made = Target('made', claiming, Capabilities(sink=True))\n"
        "def making(): return made\n"
        "number = 7\n"
    )

    def claims(name):
        return resolve(f"{path}:{name}").capabilities

    assert claims("plain") == Capabilities(mask=True, scale="any")
    assert claims("claiming") == Capabilities(softcap=True)
    assert claims("made") == claims("making") == Capabilities(sink=True)
    assert resolve(f"{path}:plain", Capabilities(sink=True)).capabilities.sink
    for name, message in {"number": "neither a function nor a Target", "nothing": "has no 'nothing'"}.items():
        with pytest.raises(TargetError, match=message):
            resolve(f"{path}:{name}")
    for word in ("nonsense", "no.such.module:f", f"{tmp_path}/none.py:f"):
        with pytest.raises(TargetError):
            resolve(word)


def test_a_target_finds_its_neighbours_and_the_current_folder(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "sdpa_ref_neighbour.py").write_text("from sdpa_ref import sdpa as attention\n")
    (folder / "mine.py").write_text("from sdpa_ref_neighbour import attention\n")
    (tmp_path / "sdpa_ref_current.py").write_text("def attention(query, key, value): ...\nimport sys; sys.exit()\n")
    monkeypatch.chdir(tmp_path)
    before = sys.path[:]
    assert resolve("kernels/mine.py:attention").capabilities.softcap
    with pytest.raises(TargetError, match="importing 'sdpa_ref_current' raised SystemExit"):
        resolve("sdpa_ref_current:attention")
    assert sys.path == before
    del sys.modules["sdpa_ref_neighbour"]


def test_keywords_that_are_never_passed_are_told(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(
        "def foreign(query, key, value, attn_mask=None, is_causal=False, scale=None): ...\n"
        "def ours(query, key, value=None, *, mask=None, **options): ...\n"
    )
    about = resolve(f"{path}:foreign").about
    assert about.startswith("its keywords attn_mask, is_causal are not ours and were never passed; ours: mask, bias, ")
    assert resolve(f"{path}:foreign", Capabilities(scale="any")).about == about
    assert resolve(f"{path}:ours").about == ""


def test_the_names_of_the_laws_are_distinct_and_told():
    assert len(BY_NAME) == len(PROPERTIES)
    for law in PROPERTIES:
        assert law.about.endswith(".")


# --- power ---


def test_the_power_check_knows_what_the_tolerance_sees():
    sees = power.visible(case(0, L=4, S=64, E=16, Ev=4, numbers="needles"))
    assert sees["last key dropped"]
    assert sees["scale halved"]
    drowned = power.visible(case(3, L=1, S=64, E=16, Ev=1, dtype="float16", numbers="one key"))
    assert not drowned["first key dropped"], "the weight of the first key is below the rounding of float16"


def test_a_run_tells_what_its_tolerance_could_not_see():
    one_key = dataclasses.replace(Capabilities(), max_length=1)
    run = check(Target("mine", right, one_key), rounds=8, seconds=FOREVER)
    assert {sight.fault: sight.cases for sight in run.sights}["16 keys in the middle dropped"] == 0
    told = "\n".join(report.unseen(run))
    assert "16 keys in the middle dropped: no case of this run could show it" in told
    assert "wrong group" not in told, "grouped heads are not claimed"
