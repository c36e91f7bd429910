"""The laws as plain functions ``(target, case) -> Failure | None``; `sdpa_ref.testing.properties` lists them."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

import sdpa_ref as sr
from sdpa_ref.testing import recipes
from sdpa_ref.testing.bounds import wide
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.cases import Case, poisoned
from sdpa_ref.testing.compare import assert_same_bits
from sdpa_ref.testing.gradients import gradient_budget
from sdpa_ref.testing.judge import Failure, against, called, incoming, judged
from sdpa_ref.testing.target import Target


def agrees(target: Target, case: Case) -> Failure | None:
    """Return the failure of an output outside the budget."""
    return judged(called(target, "forward", case, *case.arrays, **case.options), case, target.capabilities)


def reads_weights(target: Target, case: Case) -> Failure | None:
    """Return the failure of an output for one-hot values, which is a part of the weights."""
    S, Ev = case.value.shape[_length_axis(case)], case.value.shape[-1]
    columns = np.eye(S, dtype=case.value.dtype)[:, np.arange(Ev) % max(S, 1) if S else []]
    return agrees(target, replace(case, value=_rows_for(case, columns) if S else case.value))


def keeps_constants(target: Target, case: Case) -> Failure | None:
    """Return the failure of an output for values that are all alike, which it must repeat."""
    level = np.linspace(-3, 3, case.value.shape[-1]).astype(case.value.dtype)
    return agrees(target, replace(case, value=np.broadcast_to(level, case.value.shape).copy()))


def returns_lse(target: Target, case: Case) -> Failure | None:
    """Return the failure of an lse, or of the output beside it."""
    got = called(target, "state", case, *case.arrays, **case.options)
    if isinstance(got, Failure):
        return got
    return judged(got[0], case, target.capabilities) or judged(got[1], case, target.capabilities, "lse")


def returns_weights(target: Target, case: Case) -> Failure | None:
    """Return the failure of the weights."""
    got = called(target, "weights", case, case.query, case.key, **case.options)
    return judged(got, replace(case, value=case.key), target.capabilities, "weights")


def merges(target: Target, case: Case) -> Failure | None:
    """Return the failure of the merge of the states over three pieces of the keys, the second a single key."""
    axis, mask = _length_axis(case), recipes.dense(case)
    S = case.key.shape[axis]
    cuts = sorted({0, S // 3, min(S // 3 + 1, S), S})
    bias = case.options.get("bias")
    plain = {name: option for name, option in case.options.items() if name not in ("mask", "query_offset", "bias")}
    whole = replace(case, options=plain | {"mask": mask} | ({} if bias is None else {"bias": bias}))
    total = merged(target, whole, cuts)
    if total is None or isinstance(total, Failure):
        return total
    claims, times = target.capabilities, len(cuts) - 2
    if claims.empty_row != "zero":  # such a row has no lse that could say what share its pieces have
        claims = replace(claims, empty_row="any")
    return judged(total[0], whole, claims, merges=times) or judged(total[1], whole, claims, "lse", merges=times)


def merged(target: Target, whole: Case, cuts: list[int]) -> Any:
    """Return the merge of the states over the pieces between the cuts, or the Failure of a step; None without any.

    A mask in the case is a boolean array with all its axes, and so is a bias.
    """
    axis, mask, bias = _length_axis(whole), whole.options.get("mask"), whole.options.get("bias")
    plain = {name: option for name, option in whole.options.items() if name not in ("mask", "bias")}
    total: Any = None
    for start, stop in pairwise(cuts):
        key, value = (array.take(range(start, stop), axis) for array in (whole.key, whole.value))
        parts = {name: x[..., start:stop] for name, x in (("mask", mask), ("bias", bias)) if x is not None}
        part = called(target, "state", whole, whole.query, key, value, **plain, **parts)
        if isinstance(part, Failure):
            return part
        total = part if total is None else called(target, "merge", whole, total, part)
        if isinstance(total, Failure):
            return total
    return total


def differentiates(target: Target, case: Case) -> Failure | None:
    """Return the failure of a gradient."""
    output = sr.sdpa(*case.arrays, backend="reference", **case.options)
    rng = np.random.default_rng(output.size)
    grad_output = incoming(target.capabilities, case, rng.standard_normal(output.shape).astype(output.dtype))
    if grad_output is None:
        return None
    options = dict(case.options)
    if target.capabilities.lse_gradients and rng.random() < 0.5:
        options["grad_lse"] = rng.standard_normal(output.shape[:-1])
    got = called(target, "vjp", case, *case.arrays, grad_output, **options)
    if isinstance(got, Failure):
        return got
    budgets = gradient_budget(*case.arrays, grad_output, **target.capabilities.arithmetic, **options)
    for name, gradient, budget in zip(budgets._fields, got, budgets, strict=True):
        if isinstance(budget, tuple) and not (isinstance(gradient, tuple | list) and len(gradient) == len(budget)):
            return Failure(case, f"gradient of {name} must be a tuple of {len(budget)}", "gradient")
        pairs = zip(gradient, budget, strict=True) if isinstance(budget, tuple) else [(gradient, budget)]
        for one, allowed in pairs:
            if allowed is not None:
                failure = against(np.asarray(one), allowed, case, f"gradient of {name}")
                if failure:
                    return failure
    return None


def is_safe_from_poison(target: Target, case: Case) -> Failure | None:
    """Return the failure of an output that changes when NaN and infinity stand where no row looks."""
    headless = case.query.ndim == 2
    arrays = [array[None] if headless else _heads_first(array, case) for array in case.arrays]
    canonical = {name: option for name, option in case.options.items() if name != "layout"}
    query, key, value = arrays
    bad = poisoned(np.random.default_rng(0), query, key, value, canonical)
    worse = [array[0] if headless else _heads_first(array, case) for array in bad]
    return _unchanged(target, case, worse, "NaN or infinity in what no row sees")


def sees_only_its_keys(target: Target, case: Case) -> Failure | None:
    """Return the failure of rows that change with numbers that they do not see: NaN where claimed, else large ones."""
    keep = recipes.dense(case)
    S = keep.shape[-1]
    if not S:
        return None
    for j in dict.fromkeys((S - 1, S // 2, 0)):
        blind = ~keep[..., j]
        if not blind.any():
            continue
        bad = np.nan if target.capabilities.poison else 64.0
        axis = _length_axis(case)
        key, value = (_with(array, axis, j, bad) for array in (case.key, case.value))
        rows = np.moveaxis(blind, -1, -2) if case.options.get("layout") == "LHE" else blind
        message = f"other numbers at key {j}, which the row does not see"
        failure = _unchanged(target, case, [case.query, key, value], message, rows=rows)
        if failure:
            return failure
    return None


def spreads_nan(target: Target, case: Case) -> Failure | None:
    """Return the failure of a result where one key holds NaN or infinity, which the rows that see it must show."""
    S = case.key.shape[_length_axis(case)]
    if not S or not case.value.shape[-1]:
        return None
    rng = np.random.default_rng(case.value.size)
    j, bad = int(rng.integers(S)), float(rng.choice([np.nan, np.inf, -np.inf]))
    key, value = case.key, case.value
    if rng.random() < 0.5:
        key = _with(key, _length_axis(case), j, bad)
    else:
        value = _with(value, _length_axis(case), j, bad)
    return agrees(target, replace(case, key=key, value=value))


def is_alone_in_the_batch(target: Target, case: Case) -> Failure | None:
    """Return the failure of a batch entry whose bits differ from those of the same entry alone."""
    lead = np.broadcast_shapes(*(array.shape[:-3] for array in case.arrays))
    if case.query.ndim < 3 or not lead or not lead[0]:
        return None
    full = [np.broadcast_to(array, (*lead, *array.shape[-3:])) for array in case.arrays]
    mask = recipes.dense(case) if "mask" in case.options else None
    options = {name: option for name, option in case.options.items() if name not in ("mask", "query_offset")}
    together = replace(case, options=options | ({} if mask is None else {"mask": mask}))
    got = called(target, "forward", together, *case.arrays, **together.options)
    if isinstance(got, Failure):
        return got
    n = lead[0] - 1
    some = {"mask": mask[n:]} if mask is not None else {}
    alone = called(target, "forward", together, *(np.array(array[n:]) for array in full), **options, **some)
    return alone if isinstance(alone, Failure) else _same(got[n:], alone, together, "the same entry alone in the batch")


def is_alone_among_heads(target: Target, case: Case) -> Failure | None:
    """Return the failure of heads whose bits differ from those of the same heads alone."""
    axis = -2 if case.options.get("layout") == "LHE" else -3
    if case.query.ndim < 3 or not case.query.shape[axis]:
        return None
    Hkv, group = case.key.shape[axis], case.query.shape[axis] // case.key.shape[axis]
    last = (Hkv - 1) * group
    arrays = case.query.take(range(last, Hkv * group), axis), *(a.take([Hkv - 1], axis) for a in (case.key, case.value))
    got = called(target, "forward", case, *case.arrays, **case.options)
    alone = called(target, "forward", case, *arrays, **case.options)
    for result in (got, alone):
        if isinstance(result, Failure):
            return result
    return _same(got.take(range(last, Hkv * group), axis), alone, case, "the same heads alone")


def ignores_memory(target: Target, case: Case) -> Failure | None:
    """Return the failure of an output whose bits depend on how the arrays lie in memory."""
    got = called(target, "forward", case, *case.arrays, **case.options)
    plain = [np.array(array, array.dtype.newbyteorder("="), order="C") for array in case.arrays]
    copied = called(target, "forward", case, *plain, **case.options)
    for result in (got, copied):
        if isinstance(result, Failure):
            return result
    return _same(got, copied, case, "plain copies of the arrays")


def repeats_and_keeps_inputs(target: Target, case: Case) -> Failure | None:
    """Return the failure of a call that writes to its arguments, or gives other bits the second time."""
    given = [array.copy() for array in case.arrays]
    first = called(target, "forward", case, *given, **case.options)
    if isinstance(first, Failure):
        return first
    first = first.copy()
    for name, before, after in zip(("query", "key", "value"), case.arrays, given, strict=True):
        if before.tobytes() != after.tobytes():
            return Failure(case, f"it wrote to {name}")
    second = called(target, "forward", case, *given, **case.options)
    return (
        second if isinstance(second, Failure) else _same(second, first, case, "the first call with the same arguments")
    )


def _unchanged(target: Target, case: Case, arrays: list[Array], why: str, rows: Array | None = None) -> Failure | None:
    """Return the failure of an output that other arrays change, in all rows or in those of `rows`."""
    got = called(target, "forward", case, *case.arrays, **case.options)
    other = called(target, "forward", case, *arrays, **case.options)
    for result in (got, other):
        if isinstance(result, Failure):
            return result
    if rows is not None:
        other = np.where(rows[..., None], other, got)
    return _same(other, got, replace(case, query=arrays[0], key=arrays[1], value=arrays[2]), f"that without {why}")


def _same(got: Array, expected: Array, case: Case, than: str) -> Failure | None:
    try:
        assert_same_bits(got, expected)
    except AssertionError as error:
        message = f"the output must have the bits of {than}: {error}"
        if got.shape != expected.shape:
            return Failure(case, message)
        return Failure(case, message, "output", wide(expected), wide(got), np.zeros(got.shape))
    return None


def _length_axis(case: Case) -> int:
    return -3 if case.options.get("layout") == "LHE" else -2


def _heads_first(array: Array, case: Case) -> Array:
    return array.swapaxes(-2, -3) if case.options.get("layout") == "LHE" else array


def _rows_for(case: Case, rows: Array) -> Array:
    """Return a value whose length and width axes are `rows`, the same for all heads."""
    rows = rows[:, None] if case.options.get("layout") == "LHE" else rows
    return np.broadcast_to(rows, case.value.shape).copy()


def _with(array: Array, axis: int, j: int, number: float) -> Array:
    """Return a copy in which all numbers of one key are `number`."""
    changed = np.array(array)
    np.moveaxis(changed, axis, 0)[j] = number
    return changed
