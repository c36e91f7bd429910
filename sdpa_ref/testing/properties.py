"""The laws that a target is held to, with the claims that each needs and the cases that are drawn for it.

The command line, the pytest plugin and this project's own tests run the same list, `PROPERTIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sdpa_ref.testing import draws, laws, levels, memories
from sdpa_ref.testing.capabilities import OBJECTS, Capabilities
from sdpa_ref.testing.cases import EDGES, LOUD, MEMORIES, SHAPES, Case
from sdpa_ref.testing.judge import Failure
from sdpa_ref.testing.target import Target

Check = Callable[[Target, Case], Failure | None]
Focus = Mapping[str, Any] | Callable[[np.random.Generator, Capabilities], draws.Words]
_LENGTHS = "key lengths", "key starts", "query lengths"
_OTHERS = "prefix", "chunked", "first tokens", "segments", "packed", "tree", "function"
_MEMORIES = MEMORIES[1:]


@dataclass(frozen=True)
class Property:
    """A law, the claims that it needs, and the cases that are drawn for it.

    Attributes
    ----------
    name : str
    about : str
        What must hold, in one sentence.
    check : callable
        Of `sdpa_ref.testing.laws`.
    needs : callable
        Returns which capability is missing, or "" where the target claims all that the law needs.
    focus : mapping or callable
        What `draws.draw` shall not draw freely, or a function ``(rng, claims)`` that returns it.
    first : callable
        Returns words of the first case, whatever else is drawn: what real kernels get wrong and draws meet late, so
        that a target with a second a call is asked for it, too.
    """

    name: str
    about: str
    check: Check
    needs: Callable[[Capabilities], str] = lambda claims: ""
    focus: Focus = field(default_factory=dict)
    first: Callable[[Capabilities], draws.Words] = lambda claims: {}

    def __str__(self) -> str:
        return self.name

    def draw(self, rng: np.random.Generator, claims: Capabilities, *, first: bool = False) -> tuple[draws.Words, int]:
        """Return the words and the seed of a case."""
        focus = self.focus(rng, claims) if callable(self.focus) else self.focus
        focus = {**focus, **self.first(claims)} if first else focus
        return draws.draw(rng, claims, focus), int(rng.integers(2**31))


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


def _narrow(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    """Return a focus on few keys of width 1, so that infinite scores of one sign are common, and a mask."""
    few = {"S": int(rng.integers(1, 4)), "E": 1} if rng.random() < 0.5 else {}
    return few | _masked_and()(rng, claims)


def _padded(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    """Return a focus on lengths, many of them joined with a causal mask or a window, which may count from them."""
    focus = _some_of(*_LENGTHS)(rng, claims)
    if (claims.mask or claims.mask_algebra) and rng.random() < 0.6:
        focus["mask"] = (*focus["mask"], str(rng.choice(("&causal", "&window"))))
        if rng.random() < 0.5 and (claims.mask or "end" in claims.offsets):
            focus["offset"] = "end"
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
    words: list[str] = [word for word in ("causal", "key lengths", "query lengths", "segments") if word in claims.masks]
    words = words or ["causal", "rows", "array", "key lengths"]
    word = str(rng.choice(words))
    offset = "end" if claims.mask or "end" in claims.offsets else draws.an_offset(rng, claims)
    S = int(rng.integers(1, 9)) if rng.random() < 0.7 else draws.tile_edge(rng, min(300, claims.max_length or 300))
    return {"mask": (word,), "offset": offset, "L": draws.length(rng), "S": S}


def _stateful(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    return draws.everything(rng, claims, sink=False)


def _mergeable(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    bias = ("array",) if claims.bias != "none" and claims.mask_and_bias and rng.random() < 0.3 else ()
    return {"mask": draws.any_mask(rng, claims), "bias": bias, "offset": draws.an_offset(rng, claims)}


def _differentiable(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    """Return a word for each option, without scores so low that their lse cannot tell one key from many."""
    words = draws.everything(rng, claims)
    words["bias"] = tuple("array" if word == LOUD else word for word in words.get("bias", ()))
    return words


def _alone(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    mask = draws.any_mask(rng, claims) if (claims.mask and claims.mask_rows) and rng.random() < 0.5 else ()
    rank = max(claims.ranks)
    most = 4 if rng.random() < 0.7 else 10
    batch = tuple(int(n) for n in rng.integers(2, most, rank - 3)) if rank > 2 else None
    return {"mask": mask, "batch": batch, "L": int(rng.integers(1, 9)), "S": int(rng.choice(EDGES))}


def _leveled(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    """Return a focus on problems whose bias may be chosen: with a mask, a sink, dropout, where they are claimed."""
    sink = "number" if claims.sink and rng.random() < 0.4 else None
    return _masked_and(bias=(), sink=sink, dropout=0.3 if claims.dropout and rng.random() < 0.1 else 0.0)(rng, claims)


def _leveled_states(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    return _masked_and(bias=())(rng, claims)


def _vast(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    """Return a focus on scores of any size."""
    words = _masked_and(numbers=_one_of("ties", "ties", "needles", "huge", "low"))(rng, claims)
    words["dtype"] = dtype = str(rng.choice(claims.dtypes))
    if rng.random() < 0.6:  # what the faster kernels ask for
        words["E"] = words["Ev"] = int(rng.choice((8, 16, 32)))
    if claims.scale != "none":  # in 16 bits the scale alone may leave the range of those who apply it there
        words["scale"] = float(10 ** rng.uniform(0, 4 if dtype.endswith("16") else 30))
    return words


def _few_heads(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    few = (6, 2) if claims.grouped_heads else (3, 3)
    heads = few if rng.random() < 0.5 else draws.many_heads(rng, claims)
    return {"heads": heads, "batch": draws.plain_batch(claims)}


def _grouped(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    heads = ((4, 2), (6, 2), (6, 3), (8, 1))
    few = heads[rng.integers(len(heads))]
    return _masked_and(heads=few if rng.random() < 0.3 else draws.many_heads(rng, claims))(rng, claims)


def _long(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    """Return a focus on so many keys that a kernel takes them in several blocks, for few queries and for many."""
    sizes = {"L": rng.choice((1, 2, 4, 16, 33, 65)), "E": rng.choice((2, 8)), "Ev": rng.choice((3, 8))}
    few = {"batch": draws.plain_batch(claims), "heads": (1, 1), **{name: int(n) for name, n in sizes.items()}}
    few["S"] = draws.tile_edge(rng, claims.max_length or 4097) if rng.random() < 0.8 else int(rng.integers(200, 2100))
    return few | _masked_and(numbers=_one_of("needles", "normal", "one key"))(rng, claims)


def _far(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    """Return a focus on rows and keys beyond the first tiles, and what depends on positions."""
    n = draws.tile_edge(rng, min(520, claims.max_length or 520))
    known = [
        word for word in ("causal", "causal", "window", "prefix", "chunked") if claims.mask or word in claims.masks
    ]
    words: draws.Words = {"L": n, "S": n if rng.random() < 0.6 else draws.tile_edge(rng, n), "E": 8, "Ev": 2}
    words |= {"batch": draws.plain_batch(claims), "heads": (1, 1), "offset": draws.an_offset(rng, claims)}
    return words | {"mask": (str(rng.choice(known)),), "numbers": str(rng.choice(("needles", "normal", "ties")))}


def _vast_lengths(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    """Return a focus on lengths whose indices need more than 15 or 16 bits, now and then, and else on long ones."""
    most = claims.max_length or 1 << 17
    words: draws.Words = {"batch": draws.plain_batch(claims), "heads": (1, 1), "E": 2, "Ev": 1, "numbers": "needles"}
    if rng.random() < 0.25 and most > max(draws.BEYOND_16_BITS):
        n = int(rng.choice(draws.BEYOND_16_BITS))
        return words | ({"S": n, "L": 4} if rng.random() < 0.8 else {"L": n, "S": int(rng.integers(1, 5))})
    return words | {"S": draws.tile_edge(rng, min(most, 1100)), "L": int(rng.integers(1, 9))}


def _small(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    """Return a focus on all options at small sizes, in memory that may be written to."""
    sizes = {"L": int(rng.integers(1, 9)), "S": int(rng.choice((1, 2, 7, 16, 33, 70))), "E": int(rng.choice((1, 4, 8)))}
    words = draws.everything(rng, claims) | {"memory": "plain", "poison": False, "numbers": "normal"}
    return words | sizes | {"Ev": int(rng.choice((1, 3, 8)))}


def _fresh(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    """Return a focus on small problems, many of them so plain that the result is an argument: one key, one row."""
    if rng.random() < 0.6:
        return _small(rng, claims)
    L = 1 if rng.random() < 0.7 else int(rng.integers(1, 5))
    return {"L": L, "S": 1, "E": 4, "Ev": 4, "heads": (2, 2), "memory": "plain"}


def _square(rng: np.random.Generator, claims: Capabilities) -> draws.Words:
    """Return a focus on as many queries as keys, of one width, in as many heads."""
    n, E, H = int(rng.choice((1, 3, 17, 40))), int(rng.choice((1, 4, 16))), int(rng.integers(1, 4))
    return _small(rng, claims) | {"L": n, "S": n, "E": E, "Ev": E, "heads": (H, H)}


def _loud_behind_a_mask(claims: Capabilities) -> draws.Words:
    """Return the words of keys that a mask drops beside keys whose bias is the lowest finite number."""
    words: draws.Words = {"bias": (LOUD,), "mask": ("function",), "S": 5, "L": 3}
    return words if claims.mask and claims.mask_and_bias else {}


def _one_of(*words: str) -> Callable[..., str]:
    return lambda rng, claims: str(rng.choice(words))


PROPERTIES: tuple[Property, ...] = (
    Property("plain", "Attention without options agrees with the reference.", laws.agrees),
    Property(
        "needles", "A query that is a copy of one key finds it, at tile edges too.", laws.agrees,
        focus={"numbers": "needles"},
    ),
    Property("long rows", "Of hundreds of keys none is lost and none counts twice.", laws.agrees, focus=_long),
    Property(
        "vast lengths", "Indices of more than 16 bits reach the key that is meant.", laws.agrees, focus=_vast_lengths
    ),
    Property(
        "one-hot values", "With one-hot values the output is the weights.", laws.reads_weights,
        focus=_masked_and(Ev=lambda rng, claims: 16 if claims.value_width else 32),
    ),
    Property(
        "constant values", "Where all values are alike the output repeats them.", laws.keeps_constants,
        focus=lambda rng, claims: draws.everything(rng, replace(claims, sink=False, dropout=False)),
    ),
    Property(
        "huge scores", "Scores of 1e5 neither overflow nor lose the small differences.", laws.agrees,
        focus=_masked_and(numbers="huge"),
    ),
    Property(
        "low scores", "Rows all of whose scores are far below zero are ordinary rows.", laws.agrees,
        focus=_masked_and(numbers="low"),
    ),
    Property("ties", "Equal scores share equally.", laws.agrees, focus=_masked_and(numbers="ties")),
    Property("integers", "Small integers come out right.", laws.agrees, focus=_masked_and(numbers="integers")),
    Property("tiny values", "Values near the smallest numbers survive.", laws.agrees, focus={"numbers": "tiny"}),
    Property(
        "one loud key", "One key that drowns all others may come late or be masked.", laws.agrees,
        focus=_masked_and(numbers="one key"),
    ),
    Property(
        "scale", "Any finite scale is applied once.", laws.agrees, _need("scale"), _masked_and(scale=draws.a_scale)
    ),
    Property(
        "softcap", "The soft cap bends scores before bias and mask.", laws.agrees, _need("softcap"),
        _masked_and(softcap=draws.a_softcap),
    ),
    Property(
        "sink", "The sink only adds to the denominator, once.", laws.agrees, _need("sink"),
        _masked_and(sink=draws.a_sink),
    ),
    Property(
        "bias", "A bias is added to the scaled scores, and -inf drops a key.", laws.agrees, _need("bias"),
        _masked_and(bias=lambda rng, claims: draws.any_bias(rng, replace(claims, alibi=False))), _loud_behind_a_mask,
    ),
    Property(
        "alibi", "ALiBi subtracts the slope times the distance.", laws.agrees, _need("alibi"),
        lambda rng, claims: {"bias": ("alibi",), "offset": draws.an_offset(rng, claims)},
    ),
    Property(
        "score_mod", "A function of scores and indices is applied to each score.", laws.agrees, _need("score_mod"),
        _masked_and(score_mod=True),
    ),
    Property(
        "dropout", "Dropout keeps the bits of Philox at (b, h, i, j).", laws.agrees, _need("dropout"),
        _masked_and(dropout=0.3),
    ),
    Property(
        "mask arrays", "A boolean array keeps where it is True.", laws.agrees, _need("mask"),
        lambda rng, claims: {"mask": (_one_of(*SHAPES)(rng, claims),)},
    ),
    Property(
        "causal", "A query sees itself and what is before it, by the alignment that was asked for.", laws.agrees,
        _object("causal"), _some_of("causal"),
    ),
    Property(
        "far positions", "The diagonal is where it is beyond the first tiles, too.", laws.agrees,
        _object("causal", "window", "prefix", "chunked"), _far,
    ),
    Property("window", "Both ends of a window are inclusive.", laws.agrees, _object("window"), _some_of("window")),
    Property(
        "lengths", "Keys and queries beyond their lengths do not count.", laws.agrees, _object(*_LENGTHS), _padded
    ),
    Property(
        "other masks", "Prefixes, chunks, segments, packed documents and trees.", laws.agrees, _object(*_OTHERS),
        _some_of(*_OTHERS),
    ),
    Property(
        "joined masks", "Masks joined by and, or and not.", laws.agrees,
        lambda claims: "" if claims.mask or claims.mask_algebra else "mask_algebra", _masked_and(),
    ),
    Property(
        "empty rows", "A row that sees no key gives 0, or what the target claims instead.", laws.agrees,
        _object(*OBJECTS), _empty,
    ),
    Property(
        "grouped heads", "Query head h reads key head h // group.", laws.agrees, _need("grouped_heads"), _grouped
    ),
    Property("everything", "All options together.", laws.agrees, focus=draws.everything),
    Property(
        "lse", "The lse is the logarithm of the sum of the exponentials.", laws.returns_lse, _need("lse"), _stateful
    ),
    Property(
        "merge", "States over pieces of the keys merge to the whole.", laws.merges, _need("lse", "mask"), _mergeable
    ),
    Property("weights", "The weights are right.", laws.returns_weights, _need("weights"), draws.everything),
    Property(
        "gradients", "The gradients lie within their budget.", laws.differentiates, _need("gradients"), _differentiable
    ),
    Property(
        "gradients with a sink", "The sink has its gradient, and its share in the lse.", laws.differentiates,
        _need("gradients", "sink"), _masked_and(sink=_one_of("heads", LOUD)),
    ),
    Property(
        "levels", "A number added to all scores of a row changes nothing, however large it is.", levels.ignores_a_level,
        _need("bias"), _leveled,
    ),
    Property(
        "levels of states", "States merge in the right shares, however large their scores are.",
        levels.merges_at_a_level, _need("lse", "exact_merge", "bias", "mask", "mask_and_bias"), _leveled_states,
    ),
    Property(
        "levels of gradients", "Gradients do not depend on a number added to all scores of a row either.",
        levels.differentiates_at_a_level, _need("gradients", "bias"), _leveled,
    ),
    Property(
        "gradient sums", "The weights of the backward pass sum to 1, however large the scores are.",
        levels.weighs_to_one, _need("gradients"), _vast,
    ),
    Property(
        "poison", "NaN and infinity that no row sees change no bit.", laws.is_safe_from_poison, _need("poison"),
        _masked_and(),
    ),
    Property(
        "hidden keys", "Numbers that a row does not see change no bit of it.", laws.sees_only_its_keys,
        _need("private"), _masked_and(),
    ),
    Property(
        "visible NaN", "A visible NaN or infinity reaches the rows that see it, and no others.", laws.spreads_nan,
        _need("nonfinite"), _narrow,
    ),
    Property(
        "batch", "A batch entry has the bits that it has alone.", laws.is_alone_in_the_batch, _need("invariant"), _alone
    ),
    Property(
        "heads", "Heads have the bits that they have alone.", laws.is_alone_among_heads, _need("invariant"), _few_heads
    ),
    Property(
        "memory", "Strides, byte order and alignment change no bit.", laws.ignores_memory,
        _need("invariant", "strides"), {"memory": _one_of(*_MEMORIES)},
    ),
    Property(
        "repeatable", "The same call gives the same bits, and its arguments are left alone.",
        laws.repeats_and_keeps_inputs, _need("repeatable"),
    ),
    Property(
        "own result", "A result is new memory, which no later call changes.", memories.owns_its_result, focus=_fresh
    ),
    Property(
        "no memory", "A call knows nothing of those before it, whatever the same arrays held then.", memories.forgets,
        focus=_small,
    ),
    Property(
        "arguments", "Arguments are not written to, not even to be put back.", memories.leaves_arguments_alone,
        focus=_small,
    ),
    Property(
        "one array", "The same array may be query, key and value.", memories.takes_one_array_thrice, focus=_square
    ),
    Property(
        "threads", "Calls from several threads at once do not disturb one another.", memories.works_in_threads,
        _need("threads"), _small,
    ),
)  # fmt: skip
"""All laws, in the order in which they are run."""

BY_NAME: Mapping[str, Property] = {law.name: law for law in PROPERTIES}
