"""Loops of small calls as programs make them: what each step passes to this library and to PyTorch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref import ALiBi, Causal, KeyLengths, Window, alibi_slopes

Step = Callable[[int], Any]
_HEADS, _WIDTH, _TOKENS = 8, 64, 16
_ROOM = 1024  # keys of the cache that grows
_FIRST = 16  # keys of its first step
_STATIC = 256  # keys of the cache whose valid length changes
_WINDOW = 128
_LONGEST = 400


class Loop(NamedTuple):
    """A loop of `steps` different calls, each by its number.

    Attributes
    ----------
    ours : callable
        ``ours(sdpa, data)`` returns the function that makes a step with `sdpa`, or whatever takes its arguments.
    torch : callable
        ``torch(torch, data)`` returns the function that makes the same step with PyTorch; `data` are tensors.
    """

    name: str
    steps: int
    ours: Callable[[Any, Any], Step]
    torch: Callable[[Any, Any], Step]


def data(of: Callable[[Any], Any] = lambda array: array) -> Any:
    """Return the arrays of all loops, as `of` makes them of NumPy's: the same numbers in every run."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    memory = normal(_HEADS * _LONGEST * _WIDTH)
    lengths = [memory[: _HEADS * n * _WIDTH].reshape(1, _HEADS, n, _WIDTH) for n in range(1, _LONGEST + 1)]
    i = np.arange(_TOKENS)
    tokens = normal(1, _HEADS, _TOKENS, _WIDTH)
    slopes = alibi_slopes(_HEADS).astype(np.float32)
    sinks = normal(_HEADS)
    arrays = {
        "one": normal(1, 9, 1, _WIDTH), "key": normal(1, 3, _ROOM, _WIDTH), "value": normal(1, 3, _ROOM, _WIDTH),
        "tokens": tokens, "tokens_first": np.ascontiguousarray(tokens.swapaxes(1, 2)), "plain": tokens[0, 0],
        "keep": np.tri(_TOKENS, dtype=bool), "bias": normal(_HEADS, _TOKENS, _TOKENS),
        "distances": -slopes[:, None, None] * abs(i[:, None] - i).astype(np.float32), "out": np.empty_like(tokens),
        "sinks": sinks, "column": np.pad(sinks[:, None, None], ((0, 0), (0, 0), (_TOKENS, 0))),
        "places": np.arange(_STATIC),
    }  # fmt: skip
    return SimpleNamespace(
        **{name: of(array) for name, array in arrays.items()}, lengths=[of(array) for array in lengths]
    )


def _growing(**options: Any) -> Callable[[Any, Any], Step]:
    """Return the loop over a cache that grows by one key."""
    return lambda sdpa, d: lambda i: sdpa(d.one, d.key[:, :, : _FIRST + i], d.value[:, :, : _FIRST + i], **options)


def _growing_in_torch(seen: int = _ROOM) -> Callable[[Any, Any], Step]:
    """Return the same for PyTorch, which is given the last keys only."""

    def loop(torch: Any, d: Any) -> Step:
        attend = torch.nn.functional.scaled_dot_product_attention

        def step(i: int) -> Any:
            stop = _FIRST + i
            start = max(0, stop - seen)
            return attend(d.one, d.key[:, :, start:stop], d.value[:, :, start:stop], enable_gqa=True)

        return step

    return loop


def _static(torch: Any, d: Any) -> Step:
    attend = torch.nn.functional.scaled_dot_product_attention
    key, value = d.key[:, :, :_STATIC], d.value[:, :, :_STATIC]
    return lambda i: attend(d.one, key, value, attn_mask=(d.places <= i)[None], enable_gqa=True)


def _tokens(**options: Any) -> Callable[[Any, Any], Step]:
    """Return the loop of one call with 16 tokens; an option that names one of the arrays is that array."""

    def loop(sdpa: Any, d: Any) -> Step:
        given = {name: getattr(d, option) if type(option) is str else option for name, option in options.items()}
        return lambda i: sdpa(d.tokens, d.tokens, d.tokens, **given)

    return loop


def _tokens_in_torch(mask: str = "") -> Callable[[Any, Any], Step]:
    def loop(torch: Any, d: Any) -> Step:
        attend, keep = torch.nn.functional.scaled_dot_product_attention, getattr(d, mask) if mask else None
        return lambda i: attend(d.tokens, d.tokens, d.tokens, attn_mask=keep)

    return loop


def _sink(torch: Any, d: Any) -> Step:
    """Return a call whose sink is the logit of one more key, of zeros."""
    attend, pad = torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.pad

    def step(i: int) -> Any:
        longer = pad(d.tokens, (0, 0, 0, 1))
        return attend(d.tokens, longer, longer, attn_mask=d.column)

    return step


def _tokens_first(torch: Any, d: Any) -> Step:
    attend = torch.nn.functional.scaled_dot_product_attention

    def step(i: int) -> Any:
        x = d.tokens_first.transpose(1, 2)
        return attend(x, x, x).transpose(1, 2)

    return step


def _in_turn(first: int, **options: Any) -> Callable[[Any, Any], Step]:
    """Return the loop over sequences of other lengths."""

    def loop(sdpa: Any, d: Any) -> Step:
        def step(i: int) -> Any:
            x = d.lengths[first - 1 + i]
            return sdpa(x, x, x, **options)

        return step

    return loop


def _in_turn_in_torch(first: int, **options: Any) -> Callable[[Any, Any], Step]:
    ours = _in_turn(first, **options)
    return lambda torch, d: ours(torch.nn.functional.scaled_dot_product_attention, d)


LOOPS = (
    Loop("calls-decode", 1000, _growing(), _growing_in_torch()),
    Loop("calls-decode-causal", 1000, _growing(mask=Causal(), query_offset="end"), _growing_in_torch()),
    Loop(
        "calls-decode-window", 1000,
        _growing(mask=Causal() & Window(_WINDOW - 1, 0), query_offset="end"), _growing_in_torch(_WINDOW),
    ),
    Loop(
        "calls-static-cache", _STATIC,
        lambda sdpa, d: lambda i: sdpa(
            d.one, d.key[:, :, :_STATIC], d.value[:, :, :_STATIC], mask=KeyLengths(i + 1)
        ),
        _static,
    ),
    Loop("calls-HLE", 1, _tokens(), _tokens_in_torch()),
    Loop(
        "calls-LHE", 1,
        lambda sdpa, d: lambda i: sdpa(d.tokens_first, d.tokens_first, d.tokens_first, layout="LHE"), _tokens_first,
    ),
    Loop(
        "calls-two-axes", 1,
        lambda sdpa, d: lambda i: sdpa(d.plain, d.plain, d.plain),
        lambda torch, d: lambda i: torch.nn.functional.scaled_dot_product_attention(d.plain, d.plain, d.plain),
    ),
    Loop("calls-boolean", 1, _tokens(mask="keep"), _tokens_in_torch("keep")),
    Loop("calls-bias", 1, _tokens(bias="bias"), _tokens_in_torch("bias")),
    Loop("calls-alibi", 1, _tokens(bias=ALiBi(alibi_slopes(_HEADS))), _tokens_in_torch("distances")),
    Loop("calls-sink", 1, _tokens(sink="sinks"), _sink),
    Loop("calls-out", 1, _tokens(out="out"), _tokens_in_torch()),
    Loop("calls-sentences", 57, _in_turn(4), _in_turn_in_torch(4)),
    Loop("calls-lengths", _LONGEST, _in_turn(1, mask=Causal()), _in_turn_in_torch(1, is_causal=True)),
)  # fmt: skip
