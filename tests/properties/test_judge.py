"""The judge of kernels sees what begins at a size or with a call, says what it did not see, and passes the right."""

import json
import re

import numpy as np
import pytest
import right_kernels
from hypothesis import settings

import sdpa_ref
from sdpa_ref import cli, sdpa
from sdpa_ref.masks import leaves
from sdpa_ref.testing import Capabilities, Target, check, error_budget, museum, runner
from sdpa_ref.testing import findings as found_in
from sdpa_ref.testing.cases import case
from sdpa_ref.testing.coverage import Drawn
from sdpa_ref.testing.properties import BY_NAME
from sdpa_ref.testing.strides import MEMORIES, stored

NIGHTLY = settings.default.max_examples >= 1000
STATE = ["own result", "no memory", "arguments", "one array", "threads"]


def right(query, key, value, **options):
    return sdpa(query, key, value, backend="reference", **options)


def columns_past_64_ignored(query, key, value, *, scale=None):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return right(query[..., :64], key[..., :64], value, scale=scale)


def scale_wrong_at_65(query, key, value):
    return right(query, key, value, scale=(64 if query.shape[-1] == 65 else query.shape[-1]) ** -0.5)


def last_key_lost(query, key, value):
    S = key.shape[-2]
    return right(query, key, value, mask=np.arange(S) < S - (S in (65, 129, 1025)))


def others_than_the_first_entry_are_0(query, key, value):
    output = right(query, key, value)
    output[1:] = 0
    return output


@pytest.mark.parametrize("kernel", [columns_past_64_ignored, scale_wrong_at_65], ids=lambda f: f.__name__)
def test_a_fault_that_begins_beyond_width_64_is_seen_by_default(kernel):
    run = check(kernel, stop_at_first=True)
    assert run.failures
    assert run.seconds < 60


@pytest.mark.parametrize("width", [65, 72, 80, 96, 127, 128, 129, 160, 192, 256, 257, 320, 512])
def test_a_scale_that_is_ignored_at_one_width_is_seen_by_default(width):
    def kernel(query, key, value, *, mask=None, scale=None, query_offset=None):
        scale = None if query.shape[-1] == width else scale
        return right(query, key, value, mask=mask, scale=scale, query_offset=query_offset)

    assert check(kernel, laws=["scale"], rounds=60, seconds=float("inf"), stop_at_first=True).failures


@pytest.mark.parametrize(
    ("kernel", "law", "pattern"),
    [
        (columns_past_64_ignored, "needles", "E of 65 and more"),
        (last_key_lost, "long rows", r"S of 65, 129, 1025; keys without weight: key \d+, the last"),
        (others_than_the_first_entry_are_0, "plain", "wrong are only batch entries 1"),
    ],
)
def test_the_pattern_of_a_fault_is_named(kernel, law, pattern):
    run = check(kernel, laws=[law], seconds=float("inf"))
    (one,) = found_in.findings(run, "kernel")
    assert re.search(pattern, one.pattern), one.pattern
    assert one.stability == "fails every time"


# --- right kernels ---

SOME = list(right_kernels.RIGHT)[:: 1 if NIGHTLY else 3]
LESS = [name for name, (_, claims) in right_kernels.RIGHT.items() if {"precision", "exp_error"} & claims.keys()]


@pytest.mark.parametrize("name", SOME)
def test_a_right_kernel_passes_when_it_says_what_it_is(name):
    run = check(right_kernels.target(name), rounds=100 if NIGHTLY else 2, seconds=float("inf"))
    assert [f"{o.law.name}: {o.failure.case}\n{o.failure.message}" for o in run.failures] == []


@pytest.mark.parametrize("name", LESS)
def test_it_fails_when_it_does_not_say_so(name):
    honest = check(right_kernels.target(name, precision="float32", exp_error=0.0), rounds=10, laws=["needles", "ties"])
    assert honest.failures


def test_less_precision_does_not_hide_a_wrong_kernel():
    kernel = right_kernels.RIGHT["tf32"][0]

    def off_by_5_percent(query, key, value):
        return kernel.forward(query, key, value, scale=1.05 * query.shape[-1] ** -0.5)

    assert check(off_by_5_percent, capabilities={"precision": "tf32"}, laws=["needles"], rounds=20).failures


def test_errors_of_operands_act_in_the_exponent():
    """Scores of 100 err by 100 times as much as scores of 1."""
    q, k, v = case(0, L=4, S=9, E=16, Ev=4).arrays
    calm, loud = (error_budget(s * q, k, v, what="lse", precision="tf32").bound.max() for s in (1, 100))
    assert loud > 50 * calm
    with pytest.raises(ValueError, match=r"precision must be .* tf32"):
        error_budget(q, k, v, precision="tf33")


# --- state ---


@pytest.mark.parametrize("name", [fault.name for fault in museum.ROOMS["calls"]][:: 1 if NIGHTLY else 5])
def test_the_laws_of_state_see_what_other_laws_may_not(name):
    laws = ["plain", *STATE, "repeatable", "everything"]
    run = check(museum.FAULTS[name].target, rounds=15, laws=laws, stop_at_first=True)
    assert run.failures


def test_a_kernel_that_is_not_for_threads_may_say_so():
    run = check(right, capabilities={"threads": False}, rounds=1, laws=["threads"])
    assert run.outcomes[0].status == "not claimed"


KERNELS = """
import numpy as np
from sdpa_ref import sdpa

calls = [0]
seen = {}

def right(query, key, value):
    return sdpa(query, key, value, backend="reference")

def every_third(query, key, value):
    calls[0] += 1
    return right(query, key, value) + (calls[0] % 3 == 0)

def cached_by_length(query, key, value):
    power = int(np.frexp(abs(value).max())[1])
    return right(query, key, np.ldexp(value, seen.setdefault(key.shape[-2], power) - power))
"""


@pytest.fixture
def kernels(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    return path


@pytest.mark.parametrize(
    ("kernel", "stability"),
    [
        ("every_third", r"fails [1-9] of 10 times"),
        ("cached_by_length", "only after another call: in a process of its own the case passes; the command repeats"),
    ],
)
def test_what_fails_now_and_then_is_told_with_a_command_that_shows_it(kernels, capsys, kernel, stability):
    few = [word for name in ("plain", "needles", "ties") for word in ("--property", name)]
    assert cli.main(["check", f"{kernels}:{kernel}", "--rounds", "30", *few, "--json"]) == 1
    laws = json.loads(capsys.readouterr().out)["properties"]
    told = [law["failure"] for law in laws if law["failure"]]
    assert told
    for one in told:
        assert re.match(stability, one["stability"]), one["stability"]
        assert one["again"].startswith("sdpa-ref check ")


# --- what was drawn ---


def test_a_run_says_what_it_drew_and_what_it_did_not(kernels, capsys):
    assert (
        cli.main(["check", f"{kernels}:right", "--rounds", "3", "--property", "plain", "--property", "long rows"]) == 0
    )
    out = capsys.readouterr().out
    assert re.search(r"^  S: \d+ to \d+, \d+ values$", out, re.M)
    assert "warning: never drawn: " in out


def test_a_claim_that_no_case_used_is_a_warning():
    run = check(right, capabilities={"sink": True, "softcap": True}, rounds=2, laws=["sink"])
    assert run.drawn.unexercised(run.target.capabilities) == ["softcap"]


def test_a_default_run_reaches_every_size_that_is_claimed():
    drawn, claims = Drawn(), Capabilities.everything()
    for law in BY_NAME.values():
        for n in range(60):
            words, _ = law.draw(np.random.default_rng([n, len(law.name)]), claims)
            drawn.add(words, law.name)
    assert drawn.never(claims) == []
    assert drawn.unexercised(claims) == []


def test_no_size_beyond_the_claimed_is_drawn():
    claims = Capabilities(max_width=96, max_length=200, value_width=True)
    for law in BY_NAME.values():
        if not law.needs(claims):
            for n in range(40):
                words, _ = law.draw(np.random.default_rng(n), claims)
                assert max(words["E"], words["Ev"]) <= 96
                assert max(words["L"], words["S"]) <= 200


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("dtype", [np.float32, np.int64, bool])
def test_every_memory_holds_the_numbers(memory, dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    lies = stored(array, memory)
    assert lies.shape == array.shape
    if "repeated" not in memory:
        np.testing.assert_array_equal(lies, array)
    else:
        assert 0 in lies.strides


@pytest.mark.parametrize(
    "mask", [("tree", "&key lengths"), ("key lengths", "&~tree"), ("rows", "&tree", "&key lengths")]
)
def test_key_lengths_leave_the_nodes_of_a_tree(mask):
    lengths = set()
    for seed in range(60):
        made = case(seed, batch=(2,), L=9, S=12, mask=mask, offset="start")
        assert sdpa(*made.arrays, **made.options, backend="reference").shape == (2, 1, 9, 1)
        lengths |= {int(n) for part in leaves(made.options["mask"]) if type(part) is sdpa_ref.KeyLengths
                    for n in np.ravel(part.n)}  # fmt: skip
    assert lengths == {0, 9, 10, 11, 12}


def test_offsets_of_32_bits_are_seen_where_memory_allows():
    def narrow(query, key, value):
        for array in (query, key, value):
            last = sum((n - 1) * stride // array.itemsize for n, stride in zip(array.shape, array.strides, strict=True))
            if last >= 1 << 31:
                return np.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
        return right(query, key, value)

    if stored(np.zeros((2, 1), np.float32), "far apart").strides[0] < 1 << 31:
        pytest.skip("this system does not reserve so many addresses")
    assert check(narrow, capabilities={"strides": True, "invariant": True}, laws=["memory"], rounds=60).failures


# --- the Python interface ---


def test_check_is_a_function_and_takes_what_the_command_takes(kernels):
    assert callable(sdpa_ref.testing.check)
    few = {"rounds": 2, "laws": ["plain", "softcap"]}
    assert check("reference", **few).passed
    assert check(f"{kernels}:right", **few).passed
    run = check(right, capabilities={"softcap": True}, strict=True, seed=3, **few)
    assert run.passed
    assert run.target.capabilities.poison
    assert check(Target("mine", right, Capabilities()), **few).passed


def test_a_manifest_adds_to_what_is_inferred():
    def kernel(query, key, value, *, mask=None):
        return right(query, key, value, mask=mask)

    claims = check(kernel, capabilities={"grouped_heads": True}, rounds=1, laws=["plain"]).target.capabilities
    assert claims.mask
    assert claims.grouped_heads


def test_limits_are_processor_time(monkeypatch):
    """On a loaded machine hours may pass: nothing looks at the clock on the wall."""
    for clock in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(runner.time, clock, lambda: pytest.fail("the clock on the wall"))
    assert check(right, rounds=1, laws=["plain"]).passed
