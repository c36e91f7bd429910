"""The laws of the conformance suite on the device, and small problems that reach every kernel."""

import time
from dataclasses import replace
from functools import partial

import numpy as np

import sdpa_ref as sr
from sdpa_ref.testing import assert_close, assert_within, check, device, gradient_budget, resolve
from sdpa_ref.testing.cases import case
from sdpa_ref.testing.properties import PROPERTIES

DRY = ("plain", "causal", "grouped heads", "poison", "dropout", "gradients")  # what the emulation is tried with

SMALL = [
    dict(L=70, S=65, E=64, Ev=64, dtype="float16", heads=(4, 2), mask=("causal",), offset="end"),
    dict(L=33, S=80, E=33, Ev=65, dtype="float16", mask=("array",), poison=True),
    dict(L=20, S=40, E=128, Ev=128, dtype="bfloat16", bias=("row",)),
    dict(L=33, S=40, E=16, Ev=24, dtype="float32", dropout=0.3, heads=(2, 2)),
    dict(L=5, S=40, E=8, Ev=70, dtype="float64", mask=("segments",)),
    dict(L=1, S=700, E=64, Ev=64, dtype="float16", heads=(8, 2), mask=("key lengths",), batch=(3,)),
]


def tried(what, check, **more):
    """Return a row: whether a check went well, with its error where it did not."""
    try:
        found = check()
    except Exception as error:
        return {"what": what, **more, "found": f"{type(error).__name__}: {error}"[:500], "ok": False}
    return {"what": what, **more, "found": found or "", "ok": True}


def laws(dry, seconds=90):
    """Yield the outcome of each law."""
    rounds = []

    def progress(law, n, failures):
        if n not in rounds:
            rounds.append(n)
            print(f"  round {n}, {failures} failures", flush=True)

    if dry:
        target, some = resolve("fibers"), [law for law in PROPERTIES if law.name in DRY]
        run = check(_narrow(target), rounds=1, seconds=float("inf"), laws=some, progress=progress)
    else:
        run = check(resolve("cupy"), rounds=100, seconds=seconds, progress=progress)
    for outcome in run.outcomes:
        message = outcome.failure.message if outcome.failure else ""
        cases = sum(outcome.cases.values())
        yield {"what": outcome.law.name, "cases": cases, "found": message, "ok": outcome.status != "failed"}


def small(dry):
    """Yield whether small problems come out right; the sanitizer watches them, too."""
    if not dry:
        import cupy

        cupy.cuda.set_allocator(None)  # each array by itself, so that the sanitizer knows where it ends
    for words in SMALL[::3] if dry else SMALL:
        yield tried(
            " ".join(f"{name}={value}" for name, value in words.items()), partial(_solved, dry, case(0, **words))
        )


def fuzz(dry, seconds=40):
    """Yield whether random problems come out right, each of which a seed states."""
    end = time.monotonic() + seconds
    for seed in range(3 if dry else 10_000):
        if time.monotonic() > end and not dry:
            return
        words = _words(np.random.default_rng(seed), dry)
        yield tried(f"seed {seed}: {words}", partial(_solved, dry, case(seed, **words)))


def _words(rng, dry):
    """Return a random problem; without a GPU one of few widths, each of which is another build."""
    one = lambda *of: of[rng.integers(len(of))]  # noqa: E731
    words = {
        "dtype": "float16" if dry else one("float16", "bfloat16", "float32", "float64"),
        "E": 16 if dry else int(rng.integers(1, 257)), "Ev": 16 if dry else int(rng.integers(1, 257)),
        "L": int(rng.integers(1, 100)), "S": int(rng.integers(1, 200 if dry else 2000)),
        "heads": one((1, 1), (2, 2), (4, 2), (6, 1)), "batch": one((), (2,), (2, 1)), "offset": "end",
    }  # fmt: skip
    more = {
        "mask": one(("causal",), ("window",), ("key lengths", "&causal"), ("array",), ("packed",)),
        "bias": one(("array",), ("holes",), ("row",), ("alibi",)),
        "dropout": 0.3, "softcap": 2.0, "sink": one("number", "heads"),
        "memory": one("sliced", "transposed", "negative"),
    }  # fmt: skip
    return words | {name: option for name, option in more.items() if rng.random() < 0.3}


def _solved(dry, it):
    """Raise an AssertionError where output, weights or gradients are not within their budgets."""
    sdpa, weights, vjp = (_over(function, dry) for function in (sr.sdpa, sr.sdpa_weights, sr.sdpa_vjp))
    assert_close(sdpa(*it.arrays, **it.options), *it.arrays, **it.options)
    assert_close(weights(it.query, it.key, **it.options), it.query, it.key, None, what="weights", **it.options)
    grad = np.random.default_rng(0).standard_normal((*it.query.shape[:-1], it.value.shape[-1])).astype(it.query.dtype)
    budgets = gradient_budget(*it.arrays, grad, **it.options)
    for name, gradient, budget in zip(budgets._fields, vjp(*it.arrays, grad, **it.options), budgets, strict=True):
        if budget is not None and not isinstance(budget, tuple):
            assert_within(gradient, budget, what=f"gradient of {name}")


def _over(function, dry):
    return partial(function, backend="fibers") if dry else device.over(function, "cupy")


def _narrow(target):
    """Return the emulation, for few widths: each is another build."""
    return replace(target, capabilities=replace(target.capabilities, max_width=16, dtypes=("float16",)))
