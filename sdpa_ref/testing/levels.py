"""The laws of large scores: a number added to all scores of a row changes nothing, and weights sum to 1.

Where scores are large the bounds are wide: the scores themselves are uncertain. So these laws test what does not
depend on that. Keys of 0 leave the bias alone to make the scores, which are then exact, and equal within a row but for
keys far below. What is right follows from the same problem without the level, whose bounds are narrow.
"""

import math
from dataclasses import replace

import numpy as np

import sdpa_ref as sr
from sdpa_ref.arrays import accumulation_dtype, result_dtype
from sdpa_ref.testing import recipes
from sdpa_ref.testing.bounds import ARITHMETIC, finfo, gamma, unit, wide
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.cases import Case
from sdpa_ref.testing.gradients import gradient_budget
from sdpa_ref.testing.judge import Failure, against, called, empty_rows, incoming, judged
from sdpa_ref.testing.laws import merged
from sdpa_ref.testing.target import Target

IDIOMS = -1e9, -65504.0, -3.3895313892515355e38, -1e4  # what people add to mask a key


def ignores_a_level(target: Target, case: Case) -> Failure | None:
    """Return the failure of an output that depends on what is added to all scores of a row."""
    loud, calm = _leveled(target, case)
    got = called(target, "forward", loud, *loud.arrays, **loud.options)
    return _of(loud, judged(got, calm, target.capabilities))


def merges_at_a_level(target: Target, case: Case) -> Failure | None:
    """Return the failure of a merge whose shares depend on what is added to all scores of a row."""
    loud, calm = _leveled(target, _with_mask_array(case))
    S = loud.options["bias"].shape[-1]
    cuts = sorted({0, S // 7, S // 3, S})
    total = merged(target, loud, cuts)
    if total is None or isinstance(total, Failure):
        return total
    return _of(loud, judged(total[0], calm, target.capabilities, merges=max(0, len(cuts) - 2)))


def differentiates_at_a_level(target: Target, case: Case) -> Failure | None:
    """Return the failure of a gradient that depends on what is added to all scores of a row."""
    loud, calm = _leveled(target, case)
    grad_output, flow = _positive(target, loud), {}
    if grad_output is None:
        return None
    if target.capabilities.lse_gradients:
        flow["grad_lse"] = np.ones(grad_output.shape[:-1], np.float32)
    got = called(target, "vjp", loud, *loud.arrays, grad_output, **(loud.options | flow))
    if isinstance(got, Failure):
        return got
    budgets = gradient_budget(*calm.arrays, grad_output, **target.capabilities.arithmetic, **(calm.options | flow))
    for name, gradient, allowed in zip(budgets._fields, got, budgets, strict=True):
        failure = None if allowed is None else against(np.asarray(gradient), allowed, loud, f"gradient of {name}")
        if failure:
            return failure
    return None


def weighs_to_one(target: Target, case: Case) -> Failure | None:
    """Return the failure of gradients of values that do not add up to what flows in, as weights that sum to 1 do."""
    grad_output = _positive(target, case)
    if grad_output is None:
        return None
    got = called(target, "vjp", case, *case.arrays, grad_output, **case.options)
    if isinstance(got, Failure):
        return got
    gradient = np.asarray(got[2])
    flows = np.where(empty_rows(case)[0][..., None], 0, wide(grad_output))
    expected, total = map(_summed, (flows, gradient))
    dtype = result_dtype(query=case.query.dtype, key=case.key.dtype, value=case.value.dtype)
    by = ARITHMETIC[target.capabilities.precision]
    u, narrow = unit(np.dtype(by.acc or accumulation_dtype(dtype))), unit(dtype)
    narrow = max(narrow, by.weight) + by.operand + 8 * target.capabilities.exp_error
    n = flows.size // max(1, flows.shape[-1]) + recipes.dense(case).shape[-1] + 64  # rows, keys, and the weight itself
    limit = target.capabilities.error_factor * (gamma(n, u) + 3 * narrow) * expected
    limit = limit + gradient.size * float(finfo(dtype).tiny)
    if (abs(total - expected) <= limit).all():
        return None
    message = "the gradients of the values must add up to the incoming gradients of the rows that see a key"
    return Failure(case, message, "sum of the gradient of value", expected, total, limit)


def _leveled(target: Target, case: Case) -> tuple[Case, Case]:
    """Return a case whose scores are a level, and those of some keys far below, and the same without the level."""
    rng = np.random.default_rng(recipes.parse(case.recipe)[1])
    claims, options = target.capabilities, {name: x for name, x in case.options.items() if name != "bias"}
    case = replace(case, key=np.zeros_like(case.key), options=options)
    keep = recipes.dense(case)
    dtype = result_dtype(query=case.query.dtype, key=case.key.dtype, value=case.value.dtype)
    acc = np.dtype(ARITHMETIC[claims.precision].acc or accumulation_dtype(dtype))
    given = dtype if claims.bias == "same" else np.dtype(rng.choice(["float32", "float64"]))
    most = min(float(finfo(kind).max) for kind in (given, acc))
    size = 10.0 ** rng.uniform(4, 30)
    level = np.clip(rng.choice([*IDIOMS, -most, size, -size]), -most, most)
    below = np.where((rng.random(keep.shape) < 0.2) & ("sink" not in options), abs(level) / 2, 0)
    with np.errstate(over="ignore"):
        exact = (np.clip(x, -most, most).astype(given).astype(acc) for x in (level, level - below))
        level, loud = map(wide, exact)
    top = np.where(keep, loud, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    calm = np.clip(loud - np.where(top > -np.inf, top, 0), -1e4, 0)
    with_sink = [{"sink": np.full(np.shape(options["sink"]), x)} if "sink" in options else {} for x in (level, 0.0)]
    pair = zip((loud, calm), with_sink, strict=True)
    a, b = (replace(case, options=options | {"bias": x.astype(given)} | sink) for x, sink in pair)
    return a, b


def _with_mask_array(case: Case) -> Case:
    plain = {name: option for name, option in case.options.items() if name not in ("mask", "query_offset")}
    return replace(case, options=plain | {"mask": recipes.dense(case)})


def _positive(target: Target, case: Case) -> Array | None:
    """Return gradients of the output that are all positive, but for empty rows, as `judge.incoming` does."""
    output = sr.sdpa(*case.arrays, backend="reference", **case.options)
    rng = np.random.default_rng(output.size)
    return incoming(target.capabilities, case, rng.uniform(0.5, 2, output.shape).astype(output.dtype))


def _summed(array: Array) -> Array:
    """Return the sum over all axes but the last: along memory, where NumPy sums in pairs and equal errors stay few."""
    *lead, width = array.shape
    total: Array = np.ascontiguousarray(wide(array).reshape(math.prod(lead), width).T).sum(-1)
    return total


def _of(case: Case, failure: Failure | None) -> Failure | None:
    return None if failure is None else replace(failure, case=case)
