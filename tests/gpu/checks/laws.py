"""The laws of the conformance suite on the device, and small problems that reach every kernel."""

from functools import partial

import numpy as np

import sdpa_ref as sr
from sdpa_ref._problem import pose
from sdpa_ref.testing import Capabilities, Target, assert_close, check, device, resolve
from sdpa_ref.testing.cases import case

SMALL = [
    dict(L=70, S=65, E=64, Ev=64, dtype="float16", heads=(4, 2), mask=("causal",), offset="end"),
    dict(L=33, S=80, E=33, Ev=65, dtype="float16", mask=("array",), poison=True),
    dict(L=20, S=40, E=128, Ev=128, dtype="bfloat16", bias=("row",)),
    dict(L=33, S=40, E=16, Ev=24, dtype="float32", dropout=0.3, heads=(2, 2)),
    dict(L=5, S=40, E=8, Ev=70, dtype="float64", mask=("segments",)),
    dict(L=1, S=700, E=64, Ev=64, dtype="float16", heads=(8, 2), mask=("key lengths",), batch=(3,)),
]


def laws(dry, seconds=130):
    """Yield the outcome of each law."""
    rounds = []

    def progress(law, n, failures):
        if n not in rounds:
            rounds.append(n)
            print(f"  round {n}, {failures} failures", flush=True)

    target = _whole_arrays() if dry else resolve("cupy")
    for outcome in check(target, rounds=1 if dry else 100, seconds=seconds, progress=progress).outcomes:
        message = outcome.failure.message if outcome.failure else ""
        cases = sum(outcome.cases.values())
        yield {"what": outcome.law.name, "cases": cases, "found": message, "ok": outcome.status != "failed"}


def small(dry):
    """Yield whether small problems come out right; the sanitizer watches them, too."""
    if not dry:
        import cupy

        cupy.cuda.set_allocator(None)  # each array by itself, so that the sanitizer knows where it ends
    for words in SMALL:
        if not dry:
            it = case(0, **words)
            assert_close(device.over(sr.sdpa, "cupy")(*it.arrays, **it.options), *it.arrays, **it.options)
            weights = device.over(sr.sdpa_weights, "cupy")(it.query, it.key, **it.options)
            assert_close(weights, it.query, it.key, None, what="weights", **it.options)
        yield {"what": " ".join(f"{name}={value}" for name, value in words.items()), "ok": None if dry else True}


def _whole_arrays():
    """Return the array-level path over NumPy as a target."""
    from sdpa_cupy import arrays
    from sdpa_cupy.strips import in_strips

    def forward(query, key, value, **options):
        problem, caller = pose(query, key, value, **options)
        result = in_strips(problem, frozenset({"output"}), np.empty, partial(arrays.attend, xp=np))
        return caller.output(result.output)

    left_out = dict.fromkeys(("lse", "weights", "gradients", "lse_gradients"), False)
    return Target("arrays", forward, Capabilities.everything(**left_out))
