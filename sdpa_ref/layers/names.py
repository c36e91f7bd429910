"""What models call the weights of a layer: the beginning of the names of one layer, and tables of other names."""

import re
from collections.abc import Mapping
from typing import Any

Names = Mapping[str, str | None]  # from a name of theirs, or what stands before its last dot, to ours; None: left out

ATTENTION: Names = {
    # BERT and its relatives, and after the prefix "...attention." vision transformers; DistilBERT
    **{f"{inside}.{name}": name for inside in ("self", "attention") for name in ("query", "key", "value")},
    "output.dense": "output",
    "output.LayerNorm": None,  # which BERT counts to attention; it is a layer of its own
    **{"q_lin": "query", "k_lin": "key", "v_lin": "value", "out_lin": "output"},
    # Llama, Mistral, Qwen, Gemma; BART, Whisper, CLIP; T5; GGUF after the prefix "blk.0.attn_"
    **{"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output", "out_proj": "output"},
    **{"q": "query", "k": "key", "v": "value", "o": "output"},
    **{"q_norm": "query_norm", "k_norm": "key_norm"},
    "rotary_emb.inv_freq": None,
    # PyTorch's own module, in parts where their widths differ; vision transformers of timm
    "q_proj_weight": "query.weight",
    "k_proj_weight": "key.weight",
    "v_proj_weight": "value.weight",
    "qkv.weight": "in_proj_weight",
    "qkv.bias": "in_proj_bias",
    "proj": "output",
    # GPT-2, whose two buffers hold the causal mask
    "c_attn.weight": "in_proj_weight",
    "c_attn.bias": "in_proj_bias",
    "c_proj": "output",
    "bias": None,
    "masked_bias": None,
}


def of_one_layer(entries: Mapping[str, Any], prefix: str, table: Names) -> dict[str, Any]:
    """Return the entries whose names begin with the prefix, under our names.

    Raises
    ------
    ValueError
        No name begins so, or two have one name here.
    """
    ours: dict[str, str] = {}
    for whole in beginning(list(entries), prefix):
        own = ours_of(whole.removeprefix(prefix) if prefix else whole, table)
        if own is None:
            continue
        if own in ours:
            raise ValueError(f"{ours[own]} and {whole} are both {own} here: leave one out, with None in names=")
        ours[own] = whole
    return {own: entries[whole] for own, whole in ours.items()}


class UnknownPrefix(ValueError):
    """No name begins so."""


def beginning(names: list[str], prefix: str) -> list[str]:
    """Return the names that begin with the prefix; a prefix of none is an error."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, got {type(prefix).__name__}")
    found = [name for name in names if name.startswith(prefix)] if prefix else names
    if prefix and not found:
        parts = list(dict.fromkeys(map(part_of, names)))
        there = ", ".join(parts[:8]) + (" and others" if len(parts) > 8 else "")
        raise UnknownPrefix(f"prefix must be how some names begin, got {prefix!r}; there are {there or 'no entries'}")
    return found


def part_of(name: str) -> str:
    """Return the part of a model that an entry is of: ``encoder.layer.*`` for ``encoder.layer.3.output.bias``."""
    numbered = re.match(r"(.*?\.)\d+\.", name)
    if numbered:
        return f"{numbered[1]}*"
    return f"{name.partition('.')[0]}.*" if "." in name else name


def ours_of(name: str, table: Names) -> str | None:
    """Return our name of an entry."""
    if name in table:
        return table[name]
    if not isinstance(name, str) or "." not in name:
        return name
    part, _, last = name.rpartition(".")
    own = table.get(part, part)
    return None if own is None else f"{own}.{last}"


def fitting(names: list[str], wanted: Mapping[str, Any], table: Names) -> list[str]:
    """Return the prefixes after which there is a layer with all the weights that are wanted."""
    some = next(iter(wanted), "")
    theirs = [some, *_theirs(some, table)]
    found = dict.fromkeys(
        name.removesuffix(other) for name in names for other in theirs if name.endswith(other) and name != other
    )
    fit = []
    for prefix in found:
        own = {ours_of(name.removeprefix(prefix), table) for name in names if name.startswith(prefix)}
        if set(wanted) <= own:
            fit.append(prefix)
    return fit


def _theirs(own: str, table: Names) -> list[str]:
    """Return all names of the table that an entry of ours may have."""
    part, _, last = own.rpartition(".")
    return [name if ours == own else f"{name}.{last}" for name, ours in table.items() if ours in (own, part)]
