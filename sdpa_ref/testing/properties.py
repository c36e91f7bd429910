"""The laws that a target is held to, with the claims that each needs and the cases that are drawn for it.

The command line, the pytest plugin and this project's own tests run the same list, `PROPERTIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sdpa_ref.testing import draws, foci, laws, levels, memories, stores
from sdpa_ref.testing.capabilities import OBJECTS, Capabilities
from sdpa_ref.testing.case_options import LOUD
from sdpa_ref.testing.cases import Case
from sdpa_ref.testing.judge import Failure
from sdpa_ref.testing.recipes import Words
from sdpa_ref.testing.strides import MEMORIES
from sdpa_ref.testing.target import Target

Check = Callable[[Target, Case], Failure | None]
Focus = Mapping[str, Any] | Callable[[np.random.Generator, Capabilities], Words]
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
        Returns all words of the first case, whose seed is 1, or none: what real kernels get wrong and draws meet late,
        so that a target with a second a call is tested, too.
    """

    name: str
    about: str
    check: Check
    needs: Callable[[Capabilities], str] = lambda claims: ""
    focus: Focus = field(default_factory=dict)
    first: Callable[[Capabilities], Words] = lambda claims: {}

    def __str__(self) -> str:
        return self.name

    def draw(self, rng: np.random.Generator, claims: Capabilities, *, first: bool = False) -> tuple[Words, int]:
        """Return the words and the seed of a case."""
        kept = self.first(claims) if first else {}
        if kept:
            return kept, 1
        focus = self.focus(rng, claims) if callable(self.focus) else self.focus
        return draws.draw(rng, claims, focus), int(rng.integers(2**31))


def _need(*names: str) -> Callable[[Capabilities], str]:
    """Return the function that names the first of the capabilities that is not claimed."""

    def missing(claims: Capabilities) -> str:
        return next((name for name in names if getattr(claims, name) in (False, "none", ())), "")

    return missing


def _object(*words: str) -> Callable[[Capabilities], str]:
    """Return the function that says that neither an object of these nor an array is claimed."""
    return lambda claims: "" if claims.mask or set(words) & set(claims.masks) else f"masks: {', '.join(words)}"


PROPERTIES: tuple[Property, ...] = (
    Property("plain", "Attention without options agrees with the reference.", laws.agrees),
    Property(
        "needles", "A query that is a copy of one key finds it, at tile edges too.", laws.agrees,
        focus={"numbers": "needles"},
    ),
    Property("long rows", "Of hundreds of keys none is lost and none counts twice.", laws.agrees, focus=foci.long),
    Property(
        "vast lengths", "Indices of more than 16 bits reach the key that is meant.", laws.agrees,
        focus=foci.vast_lengths
    ),
    Property(
        "one-hot values", "With one-hot values the output is the weights.", laws.reads_weights,
        focus=foci.masked_and(Ev=lambda rng, claims: 16 if claims.value_width else 32),
    ),
    Property(
        "constant values", "Where all values are alike the output repeats them.", laws.keeps_constants,
        focus=lambda rng, claims: draws.everything(rng, replace(claims, sink=False, dropout=False)),
    ),
    Property(
        "huge scores", "Scores of 1e5 neither overflow nor lose the small differences.", laws.agrees,
        focus=foci.masked_and(numbers="huge"),
    ),
    Property(
        "low scores", "Rows all of whose scores are far below zero are ordinary rows.", laws.agrees,
        focus=foci.masked_and(numbers="low"),
    ),
    Property("ties", "Equal scores share equally.", laws.agrees, focus=foci.masked_and(numbers="ties")),
    Property("integers", "Small integers come out right.", laws.agrees, focus=foci.masked_and(numbers="integers")),
    Property("tiny values", "Values near the smallest numbers survive.", laws.agrees, focus={"numbers": "tiny"}),
    Property(
        "one loud key", "A key with a far larger score than all others may come late or be masked.", laws.agrees,
        focus=foci.masked_and(numbers="one key"),
    ),
    Property("scale", "Any finite scale is applied once.", laws.agrees, _need("scale"), foci.scaled),
    Property(
        "softcap", "The soft cap is applied before bias and mask.", laws.agrees, _need("softcap"),
        foci.masked_and(softcap=draws.a_softcap),
    ),
    Property(
        "sink", "The sink only adds to the denominator, once.", laws.agrees, _need("sink"),
        foci.masked_and(sink=draws.a_sink),
    ),
    Property(
        "bias", "A bias is added to the scaled scores, and -inf drops a key.", laws.agrees, _need("bias"),
        foci.masked_and(bias=lambda rng, claims: draws.any_bias(rng, replace(claims, alibi=False))),
        foci.loud_behind_a_mask,
    ),
    Property(
        "alibi", "ALiBi subtracts the slope times the distance.", laws.agrees, _need("alibi"),
        lambda rng, claims: {"bias": (draws.slopes(rng, claims),), "offset": draws.an_offset(rng, claims)},
    ),
    Property(
        "score_mod", "A function of scores and indices is applied to each score.", laws.agrees, _need("score_mod"),
        foci.masked_and(score_mod=True),
    ),
    Property(
        "dropout", "Dropout keeps the bits of Philox at (b, h, i, j).", laws.agrees, _need("dropout"),
        foci.masked_and(dropout=draws.a_dropout),
    ),
    Property(
        "mask arrays", "A boolean array keeps where it is True.", laws.agrees, _need("mask"),
        foci.mask_arrays,
    ),
    Property(
        "causal", "A query sees itself and what is before it, with the alignment that is given.", laws.agrees,
        _object("causal"), foci.some_of("causal"),
    ),
    Property(
        "far positions", "The diagonal is where it is beyond the first tiles, too.", laws.agrees,
        _object("causal", "window", "prefix", "chunked"), foci.far,
    ),
    Property("window", "Both ends of a window are inclusive.", laws.agrees, _object("window"), foci.some_of("window")),
    Property(
        "lengths", "Keys and queries beyond their lengths do not count.", laws.agrees, _object(*foci.LENGTHS),
        foci.padded
    ),
    Property(
        "other masks", "Prefixes, chunks, segments, packed documents and trees.", laws.agrees, _object(*foci.OTHERS),
        foci.some_of(*foci.OTHERS),
    ),
    Property(
        "joined masks", "Masks joined by and, or and not.", laws.agrees,
        lambda claims: "" if claims.mask or claims.mask_algebra else "mask_algebra", foci.masked_and(),
    ),
    Property(
        "empty rows", "A row that sees no key gives 0, or what the target claims instead.", laws.agrees,
        _object(*OBJECTS), foci.empty,
    ),
    Property(
        "grouped heads", "Query head h reads key head h // group.", laws.agrees, _need("grouped_heads"), foci.grouped
    ),
    Property("everything", "All options together.", laws.agrees, focus=draws.everything),
    Property(
        "lse", "The lse is the logarithm of the sum of the exponentials.", laws.returns_lse, _need("lse"), foci.stateful
    ),
    Property(
        "merge", "States over pieces of the keys merge to the whole.", laws.merges, _need("lse", "mask"), foci.mergeable
    ),
    Property("weights", "The weights are right.", laws.returns_weights, _need("weights"), draws.everything),
    Property(
        "gradients", "The gradients lie within their budget.", laws.differentiates, _need("gradients"),
        foci.differentiable
    ),
    Property(
        "gradients with a sink", "The sink has its gradient, and its share in the lse.", laws.differentiates,
        _need("gradients", "sink"), foci.masked_and(sink=foci.one_of("heads", LOUD)),
    ),
    Property(
        "levels", "A number added to all scores of a row changes nothing, however large it is.", levels.ignores_a_level,
        _need("bias"), foci.leveled,
    ),
    Property(
        "levels of states", "States merge in the right shares, however large their scores are.",
        levels.merges_at_a_level, _need("lse", "exact_merge", "bias", "mask", "mask_and_bias"), foci.leveled_states,
    ),
    Property(
        "levels of gradients", "Gradients do not depend on a number added to all scores of a row either.",
        levels.differentiates_at_a_level, _need("gradients", "bias"), foci.leveled,
    ),
    Property(
        "gradient sums", "The weights of the backward pass sum to 1, however large the scores are.",
        levels.weighs_to_one, _need("gradients"), foci.vast,
    ),
    Property(
        "poison", "NaN and infinity that no row sees change no bit.", laws.is_safe_from_poison, _need("poison"),
        foci.masked_and(),
    ),
    Property(
        "hidden keys", "Numbers that a row does not see change no bit of it.", laws.sees_only_its_keys,
        _need("private"), foci.masked_and(),
    ),
    Property(
        "visible NaN", "A visible NaN or infinity reaches the rows that see it, and no others.", laws.spreads_nan,
        _need("nonfinite"), foci.narrow,
    ),
    Property(
        "batch", "A batch entry has the same bits as alone.", laws.is_alone_in_the_batch, _need("invariant"),
        foci.alone
    ),
    Property(
        "heads", "Heads have the same bits as alone.", laws.is_alone_among_heads, _need("invariant"),
        foci.few_heads
    ),
    Property(
        "pages", "Keys count wherever they lie in pages, and nothing else in pages and tables is read.",
        stores.reads_pages, _need("paged"), foci.stored,
    ),
    Property(
        "codes", "Codes mean scale * (code - zero) + offset.", stores.reads_codes, _need("quantized"), foci.stored,
    ),
    Property(
        "key positions", "Masks and ALiBi count in the positions of the keys, not in slots.",
        stores.counts_in_positions,
        lambda claims: _need("key_positions")(claims) or foci.placed_by(claims), foci.placed,
    ),
    Property(
        "decode loop", "Tokens that are written one at a time into one buffer give what they give at once.",
        stores.decodes, lambda claims: "" if claims.paged else _object("key lengths")(claims), foci.growing,
    ),
    Property(
        "memory", "Strides, byte order and alignment change no bit.", laws.ignores_memory,
        _need("invariant", "strides"), {"memory": foci.one_of(*_MEMORIES)},
    ),
    Property(
        "repeatable", "The same call gives the same bits, and its arguments are left alone.",
        laws.repeats_and_keeps_inputs, _need("repeatable"),
    ),
    Property(
        "own result", "A result is new memory, which no later call changes.", memories.owns_its_result, focus=foci.fresh
    ),
    Property(
        "no memory", "A call does not depend on those before it, whatever the same arrays held then.", memories.forgets,
        focus=foci.small,
    ),
    Property(
        "arguments", "Arguments are not written to, not even to be put back.", memories.leaves_arguments_alone,
        focus=foci.small,
    ),
    Property(
        "one array", "The same array may be query, key and value.", memories.takes_one_array_thrice, focus=foci.square
    ),
    Property(
        "threads", "Calls from several threads at once do not disturb one another.", memories.works_in_threads,
        _need("threads"), foci.small,
    ),
)  # fmt: skip
"""All laws, in the order in which they are run."""

BY_NAME: Mapping[str, Property] = {law.name: law for law in PROPERTIES}
