"""What a law draws beyond what `draws.draw` draws freely: functions ``(rng, claims) -> words``."""

from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_ref.testing import draws
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import EDGES, LOUD, SHAPES
from sdpa_ref.testing.recipes import Words

LENGTHS = "key lengths", "key starts", "query lengths"
OTHERS = "prefix", "chunked", "first tokens", "segments", "packed", "tree", "function"


def some_of(*words: str) -> Callable[..., Words]:
    """Return a focus on one of these masks, with any alignment."""

    def focus(rng: np.random.Generator, claims: Capabilities) -> Words:
        known = [word for word in words if claims.mask or word in claims.masks]
        return {"mask": (str(rng.choice(known)),), "offset": draws.an_offset(rng, claims)}

    return focus


def narrow(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on few keys of width 1, so that infinite scores of one sign are common, and a mask."""
    few = {"S": int(rng.integers(1, 4)), "E": 1} if rng.random() < 0.5 else {}
    return few | masked_and()(rng, claims)


def padded(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on lengths, many of them joined with a causal mask or a window, which may count from them."""
    focus = some_of(*LENGTHS)(rng, claims)
    if (claims.mask or claims.mask_algebra) and rng.random() < 0.6:
        focus["mask"] = (*focus["mask"], str(rng.choice(("&causal", "&window"))))
        if rng.random() < 0.5 and (claims.mask or "end" in claims.offsets):
            focus["offset"] = "end"
    return focus


def masked_and(**words: Any) -> Callable[..., Words]:
    """Return a focus on these words, with a mask where one is claimed."""

    def focus(rng: np.random.Generator, claims: Capabilities) -> Words:
        masked = (claims.mask or claims.masks) and rng.random() < 0.7 and ("bias" not in words or claims.mask_and_bias)
        mask = {"mask": draws.any_mask(rng, claims), "offset": draws.an_offset(rng, claims)} if masked else {}
        return mask | {name: word(rng, claims) if callable(word) else word for name, word in words.items()}

    return focus


def empty(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on masks that leave rows without keys."""
    words: list[str] = [word for word in ("causal", "key lengths", "query lengths", "segments") if word in claims.masks]
    words = words or ["causal", "rows", "array", "key lengths"]
    word = str(rng.choice(words))
    offset = "end" if claims.mask or "end" in claims.offsets else draws.an_offset(rng, claims)
    S = int(rng.integers(1, 9)) if rng.random() < 0.7 else draws.tile_edge(rng, min(300, claims.max_length or 300))
    return {"mask": (word,), "offset": offset, "L": draws.length(rng), "S": S}


def scaled(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on a scale, mostly at a width that a kernel may be compiled for, its scale with it."""
    focus = masked_and(scale=draws.a_scale)(rng, claims)
    if rng.random() < 0.8:
        L, S = (int(rng.integers(1, most)) for most in (5, 40))
        focus |= {"E": draws.a_width(rng, claims), "L": L, "S": S}
    return focus


def stateful(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a word for each option but a sink, which states do not have."""
    return draws.everything(rng, claims, sink=False)


def mergeable(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on a mask and a bias that can be cut into pieces of the keys."""
    bias = ("array",) if claims.bias != "none" and claims.mask_and_bias and rng.random() < 0.3 else ()
    return {"mask": draws.any_mask(rng, claims), "bias": bias, "offset": draws.an_offset(rng, claims)}


def differentiable(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a word for each option, without scores so low that their lse cannot tell one key from many."""
    words = draws.everything(rng, claims)
    words["bias"] = tuple("array" if word == LOUD else word for word in words.get("bias", ()))
    return words


def alone(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on two batch entries and more."""
    mask = draws.any_mask(rng, claims) if (claims.mask and claims.mask_rows) and rng.random() < 0.5 else ()
    rank = max(claims.ranks)
    most = 4 if rng.random() < 0.7 else 10
    batch = tuple(int(n) for n in rng.integers(2, most, rank - 3)) if rank > 2 else None
    return {"mask": mask, "batch": batch, "L": int(rng.integers(1, 9)), "S": int(rng.choice(EDGES))}


def leveled(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on problems whose bias may be chosen: with a mask, a sink, dropout, where they are claimed."""
    sink = "number" if claims.sink and rng.random() < 0.4 else None
    dropout = draws.a_dropout(rng, claims) if claims.dropout and rng.random() < 0.1 else 0.0
    return masked_and(bias=(), sink=sink, dropout=dropout)(rng, claims)


def leveled_states(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on problems whose bias may be chosen, without a sink."""
    return masked_and(bias=())(rng, claims)


def vast(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on scores of any size."""
    words = masked_and(numbers=one_of("ties", "ties", "needles", "huge", "low"))(rng, claims)
    words["dtype"] = dtype = str(rng.choice(claims.dtypes))
    if rng.random() < 0.6:  # what the faster kernels require
        words["E"] = words["Ev"] = int(rng.choice((8, 16, 32)))
    if claims.scale != "none":  # in 16 bits the scale alone may leave the range of kernels that apply it there
        words["scale"] = float(10 ** rng.uniform(0, 4 if dtype.endswith("16") else 30))
    return words


def few_heads(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on several heads of one batch entry."""
    few = (6, 2) if claims.grouped_heads else (3, 3)
    heads = few if rng.random() < 0.5 else draws.many_heads(rng, claims)
    return {"heads": heads, "batch": draws.plain_batch(claims)}


def grouped(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on groups of heads, with a mask where one is claimed."""
    heads = ((4, 2), (6, 2), (6, 3), (8, 1))
    few = heads[rng.integers(len(heads))]
    return masked_and(heads=few if rng.random() < 0.3 else draws.many_heads(rng, claims))(rng, claims)


def long(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on so many keys that a kernel takes them in several blocks, for few queries and for many."""
    sizes = {"L": rng.choice((1, 2, 4, 16, 33, 65)), "E": rng.choice((2, 8)), "Ev": rng.choice((3, 8))}
    few = {"batch": draws.plain_batch(claims), "heads": (1, 1), **{name: int(n) for name, n in sizes.items()}}
    few["S"] = draws.tile_edge(rng, claims.max_length or 4097) if rng.random() < 0.8 else int(rng.integers(200, 2100))
    return few | masked_and(numbers=one_of("needles", "normal", "one key"))(rng, claims)


def far(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on rows and keys beyond the first tiles, and what depends on positions."""
    n = draws.tile_edge(rng, min(520, claims.max_length or 520))
    known = [
        word for word in ("causal", "causal", "window", "prefix", "chunked") if claims.mask or word in claims.masks
    ]
    words: Words = {"L": n, "S": n if rng.random() < 0.6 else draws.tile_edge(rng, n), "E": 8, "Ev": 2}
    words |= {"batch": draws.plain_batch(claims), "heads": (1, 1), "offset": draws.an_offset(rng, claims)}
    return words | {"mask": (str(rng.choice(known)),), "numbers": str(rng.choice(("needles", "normal", "ties")))}


def vast_lengths(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on lengths whose indices need more than 15 or 16 bits, now and then, and else on long ones."""
    most = claims.max_length or 1 << 17
    words: Words = {"batch": draws.plain_batch(claims), "heads": (1, 1), "E": 2, "Ev": 1, "numbers": "needles"}
    if rng.random() < 0.25 and most > max(draws.BEYOND_16_BITS):
        n = int(rng.choice(draws.BEYOND_16_BITS))
        return words | ({"S": n, "L": 4} if rng.random() < 0.8 else {"L": n, "S": int(rng.integers(1, 5))})
    if rng.random() < 0.25 and most > max(draws.BEYOND_4097):
        return words | {"S": int(rng.choice(draws.BEYOND_4097)), "L": int(rng.integers(1, 5))}
    return words | {"S": draws.tile_edge(rng, min(most, 1100)), "L": int(rng.integers(1, 9))}


def small(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on all options at small sizes, in memory that may be written to."""
    sizes = {"L": int(rng.integers(1, 9)), "S": int(rng.choice((1, 2, 7, 16, 33, 70))), "E": int(rng.choice((1, 4, 8)))}
    words = draws.everything(rng, claims) | {"memory": "plain", "poison": False, "numbers": "normal"}
    return words | sizes | {"Ev": int(rng.choice((1, 3, 8)))}


def fresh(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on small problems, many of them so plain that the result is an argument: one key, one row."""
    if rng.random() < 0.6:
        return small(rng, claims)
    L = 1 if rng.random() < 0.7 else int(rng.integers(1, 5))
    E, heads = int(rng.choice((1, 4, 8))), int(rng.integers(1, 3))
    return {"L": L, "S": 1, "E": E, "Ev": E, "heads": (heads, heads), "memory": "plain"}


def square(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on as many queries as keys, of one width, in as many heads."""
    n, E, H = int(rng.choice((1, 3, 17, 40))), int(rng.choice((1, 4, 16))), int(rng.integers(1, 4))
    return small(rng, claims) | {"L": n, "S": n, "E": E, "Ev": E, "heads": (H, H)}


def stored(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on few or some hundreds of keys in contiguous arrays, with masks that any number of keys fits."""
    known = [word for word in (*POSITIONAL, "array", "keys") if claims.mask or word in claims.masks]
    words = draws.everything(rng, claims) | {"memory": "plain", "poison": False, "mask": ()}
    if known and rng.random() < 0.5 and (claims.mask_and_bias or not words.get("bias")):
        words["mask"] = (str(rng.choice(known)),)
    S = draws.tile_edge(rng, min(300, claims.max_length or 300)) if rng.random() < 0.5 else draws.length(rng)
    rank, entries = max(claims.ranks), (1, 2, 3)
    batch = None if rank == 2 else tuple(int(n) for n in rng.choice(entries, rank - 3))
    E = int(rng.choice((4, 8, 64, 96, 128)))
    words |= {"L": int(rng.integers(1, 5)), "S": S, "E": E, "Ev": E if rng.random() < 0.7 else 8, "batch": batch}
    return words | {"numbers": str(rng.choice(("normal", "needles", "needles", "one key")))}


POSITIONAL = "causal", "window", "chunked", "first tokens"


def placed_by(claims: Capabilities) -> str:
    """Return that nothing is claimed that depends on positions, or ""."""
    return "" if claims.alibi or set(POSITIONAL) & set(claims.masks) else f"masks: {', '.join(POSITIONAL)}"


def placed(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on a mask object that depends on positions, or on ALiBi."""
    words = stored(rng, claims) | {"mask": (), "bias": (), "offset": "end" if "end" in claims.offsets else "number"}
    known = [*(word for word in POSITIONAL if word in claims.masks), *(["alibi"] if claims.alibi else [])]
    word = str(rng.choice(known))
    return (
        words
        | ({"bias": ("alibi",)} if word == "alibi" else {"mask": (word,)})
        | ({"offset": "number"} if "number" in claims.offsets and rng.random() < 0.5 else {})
    )


def growing(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on a few tokens, with nothing beside them."""
    n = int(rng.integers(1, 9)) if rng.random() < 0.4 else int(rng.choice(EDGES[:6]))
    return {"L": n, "S": n, "E": 8, "Ev": 8, "memory": "plain", "numbers": str(rng.choice(("normal", "needles")))}


def loud_behind_a_mask(claims: Capabilities) -> Words:
    """Return the words of a key that a mask drops beside one whose bias is the lowest finite number."""
    if not (claims.mask and claims.mask_and_bias):
        return {}
    sizes = {"heads": (1, 1), "L": 1, "S": 2, "E": 1, "Ev": 1, "batch": draws.plain_batch(claims)}
    plain = {"numbers": "normal", "memory": "plain", "layout": claims.layouts[0]}
    plain["dtype"] = "float32" if "float32" in claims.dtypes else claims.dtypes[0]
    return {"bias": (LOUD,), "mask": ("function",), **sizes, **plain}


def mask_arrays(rng: np.random.Generator, claims: Capabilities) -> Words:
    """Return a focus on boolean arrays of every shape, many of them square, which a kernel may read by columns."""
    n = int(rng.choice((5, 17, 33, 64)))
    square = {"L": n, "S": n} if rng.random() < 0.4 else {}
    return {"mask": (str(rng.choice(SHAPES)),), **square}


def one_of(*words: str) -> Callable[..., str]:
    """Return the function that draws one of these words."""
    return lambda rng, claims: str(rng.choice(words))
