"""Projections that models keep in one array: query, key and value, one behind the other."""

from typing import Any

from sdpa_ref.arrays import as_array
from sdpa_ref.layers.coded import of_rows
from sdpa_ref.layers.projected import PROJECTIONS
from sdpa_ref.layers.weights import checked_weights
from sdpa_ref.stored.quantized import Quantized

_WEIGHTS = {"in_proj_weight": "3*hidden_size hidden_size", "output.weight": "hidden_size hidden_size"}
_BIASES = {"in_proj_bias": "3*hidden_size", "output.bias": "hidden_size"}


def separate(layer: str, entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries with those of `in_proj_weight` and `in_proj_bias` apart; others stay."""
    if "in_proj_weight" not in entries:
        bias = as_array("in_proj_bias", entries.get("in_proj_bias", []))
        if "query.weight" not in entries or bias.ndim != 1 or bias.size % 3 or not bias.size:
            return entries
        apart = {f"{part}.bias": third for part, third in zip(PROJECTIONS, bias.reshape(3, -1), strict=True)}
        return {name: array for name, array in entries.items() if name != "in_proj_bias"} | apart
    fused = entries["in_proj_weight"]
    if not isinstance(fused, Quantized):
        fused = as_array("in_proj_weight", fused)
        if fused.ndim == 2 and fused.shape[1] == 3 * fused.shape[0]:  # GPT-2 has its weights the other way round
            entries = {**entries, **{name: as_array(name, entries[name]).T for name in _WEIGHTS if name in entries}}
    others = {name: array for name, array in entries.items() if name in ("bias_k", "bias_v")}
    entries = {name: array for name, array in entries.items() if name not in others}
    arrays, _ = checked_weights(layer, entries, _WEIGHTS, _BIASES, {})
    apart = {name: array for name, array in arrays.items() if not name.startswith("in_proj_")} | others
    for name in ("weight", "bias"):
        if f"in_proj_{name}" in arrays:
            whole = arrays[f"in_proj_{name}"]
            third = whole.shape[0] // 3
            for n, part in enumerate(PROJECTIONS):
                apart[f"{part}.{name}"] = of_rows(whole, slice(n * third, (n + 1) * third))
    return apart
