"""What is remembered from one call to the next: never an answer, and never more the more calls there are."""

import gc
import inspect
import itertools
import multiprocessing
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import numpy as np
import one_call
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sdpa_ref as sr
from sdpa_ref import options as declared
from sdpa_ref import reference, registry
from sdpa_ref._problem import arrays_of
from sdpa_ref.testing.case_options import BIASES

RNG = np.random.default_rng(12)


def arrays(L=3, S=5, E=8, H=2, batch=(), dtype=np.float32):
    """Return query, key and value."""
    return tuple(RNG.standard_normal((*batch, H, n, E)).astype(dtype) for n in (L, S, S))


# ---- the choice of a backend


@pytest.fixture
def whimsical(monkeypatch):
    """Return a backend that comes first by default, and refuses as long as its `refusal` is a text."""
    backend = SimpleNamespace(
        ARRAYS="numpy", TASKS=frozenset(), refusal=None, solved=[], unavailable=lambda: None,
        unsupported=lambda problem: backend.refusal,
        forward=lambda problem, want: backend.solved.append(problem) or reference.forward(problem, want),
    )  # fmt: skip
    load = registry.load
    monkeypatch.setattr(registry, "load", lambda name: backend if name == "whimsical" else load(name))
    monkeypatch.setitem(registry._BY_DEFAULT, "numpy", ("whimsical", "reference"))
    return backend


def test_the_default_choice_asks_again_for_every_call(whimsical):
    q, k, v = arrays()
    for refusal, times in ((None, 1), (None, 2), ("it is Monday", 2), (None, 3), ("it is Monday", 3)):
        whimsical.refusal = refusal
        sr.sdpa(q, k, v, mask=sr.Causal(), query_offset="end")
        assert len(whimsical.solved) == times


def test_a_refusal_counts_for_each_function_and_task(whimsical):
    q, k, v = arrays()
    sr.sdpa_weights(q, k)
    sr.sdpa_state(q, k, v)
    assert len(whimsical.solved) == 2
    assert sr.sdpa_vjp(q, k, v, v[:, :3]).query.shape == q.shape  # it has no gradients: the reference has
    sr.sdpa(q, k, v)
    assert len(whimsical.solved) == 3


# ---- sequences of calls


@pytest.fixture(scope="module")
def another_process():
    """Return a function that runs one in another process, which has made none of this process's calls."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


MASKS = [
    (), ("causal",), ("causal", "&window"), ("key lengths",), ("prefix", "&key starts"), ("segments", "&causal"),
    ("segments", "|window"), ("array",), ("function",), ("causal", "&rows"), ("chunked", "|key lengths"),
]  # fmt: skip
WORDS = {
    "seed": [0, 1, 2],
    "batch": [(), None, (2,), (1,)],
    "heads": [(2, 2), (4, 2)],
    "L": [1, 2, 9, 20],
    "S": [20, 21, 70],
    "E": [4, 8],
    "Ev": [4, 8],
    "dtype": ["float32", "float64"],
    "mask": MASKS,
    "bias": [(), *((name,) for name in BIASES), ("row", "alibi")],
    "offset": ["start", "end", "number", "batch"],
    "scale": [None, 0.5],
    "softcap": [None, 2.0],
    "sink": [None, "number", "heads"],
    "dropout": [0.0, 0.25],
    "score_mod": [False, True],
    "layout": ["HLE", "LHE"],
    "memory": ["plain", "sliced", "unaligned"],
}


@st.composite
def sequences(draw):
    """Return calls, each the words of a case and what is wanted of it, that differ from the first in a few words."""
    often = [name for name in WORDS if name not in ("bias", "softcap", "sink", "dropout", "score_mod")]
    first = {name: draw(st.sampled_from(WORDS[name])) for name in often}
    calls = []
    for _ in range(draw(st.integers(2, 8))):
        words = first | {name: draw(st.sampled_from(WORDS[name])) for name in draw(changed)}
        if words["batch"] is None:
            words |= {"heads": (1, 1), "layout": "HLE"}
        calls.append((words, draw(st.sampled_from(one_call.WANTED))))
    return calls


changed = st.lists(st.sampled_from(list(WORDS)), max_size=3, unique=True)


@settings(max_examples=25)
@given(sequence=sequences())
def test_no_call_changes_what_another_returns(another_process, backend, sequence):
    found = [one_call.solved(*call, backend) for call in (*sequence, *sequence)]
    assert found[: len(sequence)] == found[len(sequence) :]
    for call, result in zip(reversed(sequence), reversed(found), strict=False):
        assert result == another_process(one_call.solved_alone, *call, backend), call


@pytest.mark.parametrize(
    "make",
    [
        lambda: sr.Causal() & sr.Window(2, 0),
        lambda: sr.Chunked(3) | sr.Window(1, 1),
        lambda: ~sr.Window(1, 0) & sr.Causal(),
        lambda: sr.Packed([1, 1], [2, 6]) & sr.Causal(),
        lambda: sr.Tree([-1, 0]) | sr.FirstTokens(1),
        lambda: sr.MaskFunction(lambda b, h, i, j: (b + h + i + j) % 3 > 0) & sr.Causal(),
    ],
)
def test_a_mask_that_is_used_again_means_the_same_as_a_new_one(make):
    words = {"L": [2, 3], "S": [8, 11], "batch": [(), (2,)], "H": [1, 2], "alibi": [0, 0.5], "offset": [0, 3, "end"]}
    for last in words:  # each word in turn is what changes from one call to the next
        order, mask = sorted(words, key=last.__eq__), make()
        for values in itertools.product(*(words[name] for name in order)):
            call = dict(zip(order, values, strict=True))
            if "Tree" in repr(mask) and call["L"] != 2:
                continue
            q, k, v = (np.resize(NUMBERS, (*call["batch"], call["H"], n, 4)) for n in (call["L"], call["S"], call["S"]))
            options = {"bias": sr.ALiBi(call["alibi"]) if call["alibi"] else None, "query_offset": call["offset"]}
            found, alone = (sr.sdpa(q, k, v, mask=m, **options, backend="reference") for m in (mask, make()))
            np.testing.assert_array_equal(found, alone, str(call))


NUMBERS = RNG.standard_normal(501)


# ---- memory


def different(n):
    """Make n calls of a few kinds, no two of which have the same numbers."""
    q, k, v = arrays(L=16, S=400, batch=(2,))
    for i in range(n):
        L, S = 1 + i % 7, 16 + i % 384
        mask = (
            None,
            sr.Causal() & sr.Window(i, 0),
            sr.KeyLengths([S - i % 16, S]),
            sr.Segments(np.arange(L) % (2 + i % 5), np.arange(S) % (2 + i % 5)),
            sr.FirstTokens(i) | sr.Window(i % 3, 0) & sr.Causal(),
            RNG.random((L, S)) < 0.5,
        )[i % 6]
        offset = None if isinstance(mask, (np.ndarray, sr.Segments, sr.KeyLengths)) or mask is None else i
        sr.sdpa(q[..., :L, :], k[..., :S, :], v[..., :S, :], mask=mask, query_offset=offset, scale=1 / (i + 1))
        sr.sdpa_weights(q[..., :L, :], k[..., :S, :], dropout=sr.Dropout(0.5, i), softcap=1.0 + i)


def test_memory_does_not_grow_with_the_number_of_different_calls():
    different(90)
    before = one_call.sizes()
    tracemalloc.start()
    different(90)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    different(600)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - held
    tracemalloc.stop()
    assert one_call.sizes() == before
    assert grown < 20_000


def test_what_is_remembered_of_forms_has_a_bound():
    most = arrays_of.cache_info().maxsize
    x = np.zeros((1, 1, 1), np.float32)
    for n in range(most + 100):  # another number of heads each time
        many = np.broadcast_to(x, (n + 1, 1, 1))
        sr.sdpa(many, many, many, backend="reference")
    assert arrays_of.cache_info().currsize == most
    for name, cache in one_call.per_call_caches().items():
        assert name.endswith(".load") or cache.cache_info().maxsize is not None


# ---- the keywords


def keywords(function):
    return {
        name: each.default
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is inspect.Parameter.KEYWORD_ONLY
    }


def test_the_keywords_of_sdpa_are_the_declared_options():
    spelled = keywords(sr.sdpa)
    assert set(spelled) == set(declared.Options.__annotations__)
    assert {name: default for name, default in spelled.items() if default is not None} == declared.DEFAULTS


@pytest.mark.parametrize(
    ("function", "options", "others"),
    [
        (sr.sdpa_state, declared.StateOptions, {}),
        (sr.sdpa_weights, declared.Options, {}),
        (sr.sdpa_stages, declared.GradientOptions, {"backend": "reference"}),
        (sr.sdpa_vjp, declared.GradientOptions, {"grad_lse": None}),
        (sr.sdpa_with_vjp, declared.GradientOptions, {}),
    ],
)
def test_signatures_show_the_options_with_their_defaults(function, options, others):
    ours = keywords(sr.sdpa)
    assert keywords(function) == {name: ours[name] for name in options.__annotations__} | others
    help_text = inspect.getdoc(function)
    for name in options.__annotations__:
        assert f" {name}" in help_text.partition("Returns")[0].replace("\n", " "), name
