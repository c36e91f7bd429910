"""The laws that a target is held to, each a plain function ``(target, case) -> Failure | None``.

The command line, the pytest plugin and this project's own tests run the same list, `PROPERTIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import sdpa_ref as sr
from sdpa_ref.testing import draws
from sdpa_ref.testing.bounds import wide
from sdpa_ref.testing.capabilities import OBJECTS, Capabilities
from sdpa_ref.testing.cases import Array, Case, poisoned
from sdpa_ref.testing.compare import assert_same_bits
from sdpa_ref.testing.gradients import gradient_budget
from sdpa_ref.testing.judge import Failure, against, called, judged
from sdpa_ref.testing.target import Target, merged

Check = Callable[[Target, Case], Failure | None]
_LONG = (255, 257, 500, 512, 513, 777, 1000, 1023, 1024, 1025, 1600, 2048)


@dataclass(frozen=True)
class Property:
    """A law, the claims that it needs, and the cases that are drawn for it.

    Attributes
    ----------
    name : str
    about : str
        What must hold, in one sentence.
    check : callable
    needs : callable
        Returns which capability is missing, or "" where the target claims all that the law needs.
    focus : mapping or callable
        What `draws.draw` shall not draw freely, or a function ``(rng, claims)`` that returns it.
    """

    name: str
    about: str
    check: Check
    needs: Callable[[Capabilities], str] = lambda claims: ""
    focus: Any = field(default_factory=dict)

    def draw(self, rng: np.random.Generator, claims: Capabilities) -> tuple[draws.Words, int]:
        """Return the words and the seed of a case."""
        focus = self.focus(rng, claims) if callable(self.focus) else self.focus
        return draws.draw(rng, claims, focus), int(rng.integers(2**31))


def agrees(target: Target, case: Case) -> Failure | None:
    """Return the failure of an output outside the budget."""
    return judged(called(target.forward, case, *case.arrays, **case.options), case, target.capabilities)


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
    got = called(target.state, case, *case.arrays, **case.options)
    if isinstance(got, Failure):
        return got
    return judged(got[0], case, target.capabilities) or judged(got[1], case, target.capabilities, "lse")


def returns_weights(target: Target, case: Case) -> Failure | None:
    """Return the failure of the weights."""
    got = called(target.weights, case, case.query, case.key, **case.options)
    return judged(got, replace(case, value=case.key), target.capabilities, "weights")


def merges(target: Target, case: Case) -> Failure | None:
    """Return the failure of the merge of the states over three pieces of the keys, the second of them empty or small."""
    axis, mask = _length_axis(case), draws.dense(*case.arrays, case.options)
    S = case.key.shape[axis]
    cuts = sorted({0, S // 3, min(S // 3 + 1, S), S})
    bias = case.options.get("bias")
    plain = {name: option for name, option in case.options.items() if name not in ("mask", "query_offset", "bias")}
    whole = replace(case, options=plain | {"mask": mask} | ({} if bias is None else {"bias": bias}))
    total: Any = None
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        key, value = (array.take(range(start, stop), axis) for array in (case.key, case.value))
        options = plain | {"mask": mask[..., start:stop]}
        if bias is not None:
            options["bias"] = bias[..., start:stop]
        part = called(target.state, whole, case.query, key, value, **options)
        if isinstance(part, Failure):
            return part
        total = part if total is None else called(target.merge or merged, whole, total, part)
        if isinstance(total, Failure):
            return total
    if total is None:
        return None
    claims, times = target.capabilities, len(cuts) - 2
    return judged(total[0], whole, claims, merges=times) or judged(total[1], whole, claims, "lse", merges=times)


def differentiates(target: Target, case: Case) -> Failure | None:
    """Return the failure of a gradient."""
    problem_output = sr.sdpa(*case.arrays, backend="reference", **case.options)
    rng = np.random.default_rng(problem_output.size)
    grad_output = rng.standard_normal(problem_output.shape).astype(problem_output.dtype)
    got = called(target.vjp, case, *case.arrays, grad_output, **case.options)
    if isinstance(got, Failure):
        return got
    budgets = gradient_budget(*case.arrays, grad_output, **case.options)
    for name, gradient, budget in zip(budgets._fields, got, budgets, strict=False):
        pairs = zip(gradient, budget, strict=True) if isinstance(budget, tuple) else [(gradient, budget)]
        for one, allowed in pairs:
            if allowed is not None:
                failure = against(one, allowed, case, f"gradient of {name}")
                if failure:
                    return failure
    return None


def is_safe_from_poison(target: Target, case: Case) -> Failure | None:
    """Return the failure of an output that changes when NaN and infinity stand where no row looks."""
    headless = case.query.ndim == 2
    arrays = [array[None] if headless else _heads_first(array, case) for array in case.arrays]
    canonical = {name: option for name, option in case.options.items() if name != "layout"}
    bad = poisoned(np.random.default_rng(0), *arrays, canonical)
    worse = [array[0] if headless else _heads_first(array, case) for array in bad]
    return _unchanged(target, case, worse, "NaN or infinity in what no row sees")


def sees_only_its_keys(target: Target, case: Case) -> Failure | None:
    """Return the failure of rows that change with numbers that they do not see: NaN where claimed, else large ones."""
    keep = draws.dense(*case.arrays, case.options)
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
    name = str(rng.choice(["key", "value"]))
    return agrees(target, replace(case, **{name: _with(getattr(case, name), _length_axis(case), j, bad)}))


def is_alone_in_the_batch(target: Target, case: Case) -> Failure | None:
    """Return the failure of a batch entry whose bits differ from those of the same entry alone."""
    lead = np.broadcast_shapes(*(array.shape[:-3] for array in case.arrays))
    if case.query.ndim < 3 or not lead or not lead[0]:
        return None
    full = [np.broadcast_to(array, (*lead, *array.shape[-3:])) for array in case.arrays]
    mask = draws.dense(*case.arrays, case.options) if "mask" in case.options else None
    options = {name: option for name, option in case.options.items() if name not in ("mask", "query_offset")}
    together = replace(case, options=options | ({} if mask is None else {"mask": mask}))
    got = called(target.forward, together, *case.arrays, **together.options)
    if isinstance(got, Failure):
        return got
    n = lead[0] - 1
    some = {"mask": mask[n:]} if mask is not None else {}
    alone = called(target.forward, together, *(np.array(array[n:]) for array in full), **options, **some)
    return alone if isinstance(alone, Failure) else _same(got[n:], alone, together, "the same entry alone in the batch")


def is_alone_among_heads(target: Target, case: Case) -> Failure | None:
    """Return the failure of heads whose bits differ from those of the same heads alone."""
    axis = -2 if case.options.get("layout") == "LHE" else -3
    if case.query.ndim < 3 or not case.query.shape[axis]:
        return None
    Hkv, group = case.key.shape[axis], case.query.shape[axis] // case.key.shape[axis]
    last = (Hkv - 1) * group
    arrays = case.query.take(range(last, Hkv * group), axis), *(a.take([Hkv - 1], axis) for a in (case.key, case.value))
    got = called(target.forward, case, *case.arrays, **case.options)
    alone = called(target.forward, case, *arrays, **case.options)
    for result in (got, alone):
        if isinstance(result, Failure):
            return result
    return _same(got.take(range(last, Hkv * group), axis), alone, case, "the same heads alone")


def ignores_memory(target: Target, case: Case) -> Failure | None:
    """Return the failure of an output whose bits depend on how the arrays lie in memory."""
    got = called(target.forward, case, *case.arrays, **case.options)
    plain = [np.array(array, array.dtype.newbyteorder("="), order="C") for array in case.arrays]
    copied = called(target.forward, case, *plain, **case.options)
    for result in (got, copied):
        if isinstance(result, Failure):
            return result
    return _same(got, copied, case, "plain copies of the arrays")


def repeats_and_keeps_inputs(target: Target, case: Case) -> Failure | None:
    """Return the failure of a call that writes to its arguments, or gives other bits the second time."""
    given = [array.copy() for array in case.arrays]
    first = called(target.forward, case, *given, **case.options)
    if isinstance(first, Failure):
        return first
    first = first.copy()
    for name, before, after in zip(("query", "key", "value"), case.arrays, given, strict=True):
        if before.tobytes() != after.tobytes():
            return Failure(case, f"it wrote to {name}")
    second = called(target.forward, case, *given, **case.options)
    return (
        second if isinstance(second, Failure) else _same(second, first, case, "the first call with the same arguments")
    )


def _unchanged(target: Target, case: Case, arrays: list[Array], why: str, rows: Array | None = None) -> Failure | None:
    """Return the failure of an output that other arrays change, in all rows or in those of `rows`."""
    got = called(target.forward, case, *case.arrays, **case.options)
    other = called(target.forward, case, *arrays, **case.options)
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
    changed[(..., j, *(slice(None),) * (-axis - 1))] = number
    return changed


def _need(*names: str) -> Callable[[Capabilities], str]:
    """Return the function that names the first of the capabilities that is not claimed."""

    def missing(claims: Capabilities) -> str:
        return next((name for name in names if getattr(claims, name) in (False, "none", ())), "")

    return missing


def _object(*words: str) -> Callable[[Capabilities], str]:
    """Return the function that says that neither an object of these nor an array is claimed."""
    return lambda claims: "" if claims.mask or set(words) & set(claims.masks) else f"masks: {', '.join(words)}"


def _some_of(*words: str) -> Callable[..., draws.Words]:
    """Return a focus on one of these masks, with any alignment."""

    def focus(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
        known = [word for word in words if claims.mask or word in claims.masks]
        return {"mask": (str(rng.choice(known)),), "offset": draws.an_offset(rng, claims)}

    return focus


def _masked_and(**words: Any) -> Callable[..., draws.Words]:
    """Return a focus on these words, with a mask where one is claimed."""

    def focus(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
        masked = (claims.mask or claims.masks) and rng.random() < 0.7 and ("bias" not in words or claims.mask_and_bias)
        mask = {"mask": draws.any_mask(rng, claims), "offset": draws.an_offset(rng, claims)} if masked else {}
        return mask | {name: word(rng, claims) if callable(word) else word for name, word in words.items()}

    return focus


def _empty(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    """Return a focus on masks that leave rows without keys."""
    words = [word for word in ("causal", "key lengths", "query lengths", "segments") if word in claims.masks]
    words = words or ["causal", "rows", "array", "key lengths"]
    word = str(rng.choice(words))
    offset = "end" if claims.mask or "end" in claims.offsets else draws.an_offset(rng, claims)
    return {"mask": (word,), "offset": offset, "L": draws.length(rng, claims), "S": int(rng.integers(1, 9))}


def _stateful(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    return draws.everything(rng, claims, sink=False)


def _mergeable(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    bias = ("array",) if claims.bias != "none" and claims.mask_and_bias and rng.random() < 0.3 else ()
    return {"mask": draws.any_mask(rng, claims), "bias": bias, "offset": draws.an_offset(rng, claims)}


def _no_score_mod(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    return {name: word for name, word in draws.everything(rng, claims).items() if name not in ("score_mod", "dropout")}


def _alone(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    mask = draws.any_mask(rng, claims) if (claims.mask and claims.mask_rows) and rng.random() < 0.5 else ()
    rank = max(claims.ranks)
    return {"mask": mask, "batch": tuple(int(n) for n in rng.integers(2, 4, rank - 3)) if rank > 3 else ()}


def _few_heads(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    return {"heads": (6, 2) if claims.grouped_heads else (3, 3), "batch": () if 3 in claims.ranks else (2,)}


def _grouped(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    heads = ((4, 2), (6, 2), (6, 3), (8, 1))
    return _masked_and(heads=heads[rng.integers(len(heads))])(rng, claims)


def _long(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    S = int(rng.choice(_LONG))
    batch = () if 3 in claims.ranks else (1,)
    return {"batch": batch, "heads": (1, 1), "L": int(rng.integers(1, 5)), "S": min(S, claims.max_length or S),
            "numbers": str(rng.choice(("needles", "normal", "one key")))}  # fmt: skip


PROPERTIES: tuple[Property, ...] = (
    Property("plain", "Attention without options agrees with the reference.", agrees),
    Property("needles", "A query that is a copy of one key finds it, at tile edges too.", agrees, focus={"numbers": "needles"}),
    Property("long rows", "Hundreds of keys lose none and count none twice.", agrees, focus=_long),
    Property("one-hot values", "With one-hot values the output is the weights.", reads_weights,
             focus=_masked_and(Ev=lambda rng, claims: 16 if claims.value_width else 32)),
    Property("constant values", "Where all values are alike the output repeats them.", keeps_constants,
             focus=lambda rng, claims: draws.everything(rng, replace(claims, sink=False, dropout=False))),
    Property("huge scores", "Scores of 1e5 neither overflow nor lose the small differences.", agrees,
             focus=_masked_and(numbers="huge")),
    Property("low scores", "Rows all of whose scores are far below zero are ordinary rows.", agrees,
             focus=_masked_and(numbers="low")),
    Property("ties", "Equal scores share equally.", agrees, focus=_masked_and(numbers="ties")),
    Property("integers", "Small integers come out right.", agrees, focus=_masked_and(numbers="integers")),
    Property("tiny values", "Values near the smallest numbers of the type survive.", agrees, focus={"numbers": "tiny"}),
    Property("one loud key", "One key that drowns all others may come late or be masked.", agrees,
             focus=_masked_and(numbers="one key")),
    Property("scale", "Any finite scale is applied once.", agrees, _need("scale"), _masked_and(scale=draws.a_scale)),
    Property("softcap", "The soft cap bends scores before bias and mask.", agrees, _need("softcap"),
             _masked_and(softcap=draws.a_softcap)),
    Property("sink", "The sink only adds to the denominator, once.", agrees, _need("sink"), _masked_and(sink=draws.a_sink)),
    Property("bias", "A bias is added to the scaled scores, and -inf drops a key.", agrees, _need("bias"),
             _masked_and(bias=lambda rng, claims: (str(rng.choice(("array", "row", "holes"))),))),
    Property("alibi", "ALiBi subtracts the slope times the distance.", agrees, _need("alibi"),
             lambda rng, claims: {"bias": ("alibi",), "offset": draws.an_offset(rng, claims)}),
    Property("score_mod", "A function of scores and indices is applied to each score.", agrees, _need("score_mod"),
             _masked_and(score_mod=True)),
    Property("dropout", "Dropout keeps the bits of Philox at (b, h, i, j).", agrees, _need("dropout"), _masked_and(dropout=0.3)),
    Property("mask arrays", "A boolean array keeps where it is True.", agrees, _need("mask"),
             lambda rng, claims: {"mask": (str(rng.choice(("array", "rows", "keys", "heads"))),)}),
    Property("causal", "A query sees itself and what is before it, by the alignment that was asked for.", agrees,
             _object("causal"), _some_of("causal")),
    Property("window", "Both ends of a window are inclusive.", agrees, _object("window"), _some_of("window")),
    Property("lengths", "Keys and queries beyond their lengths do not count.", agrees,
             _object("key lengths", "key starts", "query lengths"), _some_of("key lengths", "key starts", "query lengths")),
    Property("other masks", "Prefixes, chunks, segments, packed documents and trees.", agrees,
             _object("prefix", "chunked", "first tokens", "segments", "packed", "tree", "function"),
             _some_of("prefix", "chunked", "first tokens", "segments", "packed", "tree", "function")),
    Property("joined masks", "Masks joined by and, or and not.", agrees,
             lambda claims: "" if claims.mask or claims.mask_algebra else "mask_algebra", _masked_and()),
    Property("empty rows", "A row that sees no key gives what the target claims: 0, or else its own rule.", agrees,
             _object(*OBJECTS), _empty),
    Property("grouped heads", "Query head h reads key head h // group.", agrees, _need("grouped_heads"), _grouped),
    Property("everything", "All options together.", agrees, focus=draws.everything),
    Property("lse", "The lse is the logarithm of the sum of the exponentials.", returns_lse, _need("lse"), _stateful),
    Property("merge", "States over pieces of the keys merge to the whole.", merges,
             lambda claims: _need("lse", "mask")(claims), _mergeable),
    Property("weights", "The weights are those of the output.", returns_weights, _need("weights"), draws.everything),
    Property("gradients", "The gradients lie within their budget.", differentiates, _need("gradients"), _no_score_mod),
    Property("poison", "NaN and infinity that no row sees change no bit.", is_safe_from_poison, _need("poison"), _masked_and()),
    Property("hidden keys", "Numbers that a row does not see change no bit of it.", sees_only_its_keys, _need("private"),
             _masked_and()),
    Property("visible NaN", "A visible NaN or infinity reaches the rows that see it, and no others.", spreads_nan,
             _need("nonfinite"), _masked_and()),
    Property("batch", "A batch entry has the bits that it has alone.", is_alone_in_the_batch, _need("invariant"), _alone),
    Property("heads", "Heads have the bits that they have alone.", is_alone_among_heads, _need("invariant"), _few_heads),
    Property("memory", "Strides, byte order and alignment change no bit.", ignores_memory,
             _need("invariant", "strides"), {"memory": lambda rng, claims: str(rng.choice(("transposed", "negative", "sliced",
             "repeated", "unaligned", "swapped", "read-only")))}),
    Property("repeatable", "The same call gives the same bits, and its arguments are left alone.", repeats_and_keeps_inputs,
             _need("repeatable")),
)  # fmt: skip
"""All laws, in the order in which they are run."""

BY_NAME: Mapping[str, Property] = {law.name: law for law in PROPERTIES}
