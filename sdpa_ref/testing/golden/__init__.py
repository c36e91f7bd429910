"""Golden vectors: some 200 small cases of attention with every stage, computed in 50 digits and rounded once.

They are for implementers in any language: ``v1.json`` says what the cases are, ``v1.safetensors`` holds their tensors,
and the format is in the documentation under "Golden vectors". `load` reads them for Python.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from importlib.resources import as_file, files
from operator import and_
from typing import Any

import numpy as np

import sdpa_ref as sr
from sdpa_ref.layers.files import read_weights
from sdpa_ref.testing.golden import stored

Array = np.ndarray[Any, np.dtype[Any]]
VERSION = 1
_GIVEN = ("query", "key", "value", "mask", "bias", "slopes", "sink", "grad_output", "grad_lse")


@dataclass(frozen=True)
class Golden:
    """One case.

    Attributes
    ----------
    name, about : str
    query, key, value : array; key and value also Paged or Quantized
        ``(B, Hq, L, E)``, ``(B, Hkv, S, E)``, ``(B, Hkv, S, Ev)``.
    options : dict
        The keywords of `sdpa`.
    grad_output, grad_lse : array or None
        What flows into the gradients; None for cases with a visible NaN.
    expected : mapping of str to array
        float64: raw, scaled, capped, biased, keep (bool), lse (the sink included), weights, output, and d_query, d_key,
        d_value, d_bias, d_sink where there are gradients.
    """

    name: str
    about: str
    query: Array
    key: Any
    value: Any
    options: dict[str, Any]
    grad_output: Array | None
    grad_lse: Array | None
    expected: Mapping[str, Array]

    def __repr__(self) -> str:
        return f"<golden vector {self.name}: {self.about}>"


def load(collection: str = "dense") -> dict[str, Golden]:
    """Return the cases by name.

    Parameters
    ----------
    collection : {"dense", "stored"}
        Cases of dense arrays, or of keys and values in pages and codes, whose `key` and `value` may be `Paged` and
        `Quantized`, and which have output, lse and weights only.

    Raises
    ------
    ModuleNotFoundError
        Without safetensors: ``pip install 'sdpa-ref[weights,half]'``.
    ValueError
        Without ml_dtypes, which the bfloat16 cases need.

    Examples
    --------
    >>> case = load()["causal-wide-end"]
    >>> output = sr.sdpa(case.query, case.key, case.value, **case.options)
    >>> bool(abs(output - case.expected["output"]).max() < 1e-6)
    True
    """
    makers: dict[str, Any] = {"dense": _golden, "stored": _golden_stored}
    if collection not in makers:
        raise ValueError(f'collection must be "dense" or "stored", got {collection!r}')
    folder, prefix = files(__name__), "" if collection == "dense" else "stored-"
    index = json.loads((folder / f"{prefix}v{VERSION}.json").read_text(encoding="utf-8"))
    with as_file(folder / index["file"]) as path:
        numbers = read_weights(path)
    make = makers[collection]
    return {
        entry["name"]: make(entry, {part: numbers[f"{entry['name']}/{part}"] for part in entry["tensors"]})
        for entry in index["cases"]
    }


def _golden(entry: dict[str, Any], tensors: Mapping[str, Array]) -> Golden:
    return Golden(
        entry["name"], entry["about"], tensors["query"], tensors["key"], tensors["value"],
        _options(entry["options"], tensors), tensors.get("grad_output"), tensors.get("grad_lse"),
        {name: tensor for name, tensor in tensors.items() if name not in _GIVEN},
    )  # fmt: skip


def _golden_stored(entry: dict[str, Any], tensors: dict[str, Array]) -> Golden:
    key, value = (stored.stored(entry, side, tensors) for side in ("key", "value"))
    options = _options(entry["options"], {})
    if "key_positions" in entry["options"]:
        options["key_positions"] = np.array(entry["options"]["key_positions"])
    if not any(isinstance(part, sr.Paged) for part in (key, value)):
        lengths = sr.KeyLengths(entry["lengths"])
        options["mask"] = options["mask"] & lengths if "mask" in options else lengths
    expected = {name: tensors[name] for name in ("output", "lse", "weights")}
    return Golden(entry["name"], entry["about"], tensors["query"], key, value, options, None, None, expected)


def _options(written: dict[str, Any], tensors: Mapping[str, Array]) -> dict[str, Any]:
    """Return the keywords of `sdpa` for options as the index writes them."""
    options: dict[str, Any] = {name: written[name] for name in ("scale", "softcap", "query_offset") if name in written}
    masks: list[Any] = [getattr(sr, rule[0])(*rule[1:]) for rule in written.get("mask", ())]
    masks += [tensors["mask"]] if "mask" in tensors else []
    if masks:
        options["mask"] = reduce(and_, masks)
    biases: list[Any] = [tensors["bias"]] if "bias" in tensors else []
    biases += [sr.ALiBi(tensors["slopes"])] if "slopes" in tensors else []
    if biases:
        options["bias"] = biases[0] if len(biases) == 1 else tuple(biases)
    if "sink" in tensors:
        options["sink"] = tensors["sink"]
    if "dropout" in written:
        options["dropout"] = sr.Dropout(**written["dropout"])
    return options
