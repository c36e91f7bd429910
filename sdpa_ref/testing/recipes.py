"""From words, or the recipe that a case prints, to the case, and to the form in which a target takes it."""

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import sdpa_ref as sr
from sdpa_ref.testing.capabilities import OBJECTS, Capabilities
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.cases import Case, case

Words = dict[str, Any]


def seeded(words: Words, seed: int) -> Case:
    """Return the case of these words."""
    return case(seed, **words)


def fitted(given: Case, claims: Capabilities) -> Case:
    """Return the case with its arguments in the form that the claims allow, and the same meaning.

    Masks whose object is not claimed become arrays, arrays get all their axes, biases the query's type.
    """
    arrays, options = list(given.arrays), dict(given.options)
    if not claims.broadcasting and arrays[0].ndim > 2:
        lead = np.broadcast_shapes(*(array.shape[:-3] for array in arrays))
        full = [(*lead, *array.shape[-3:]) for array in arrays]
        arrays = [  # one that has all axes stays as it lies in memory
            array if array.shape == shape else np.array(np.broadcast_to(array, shape), order="C")
            for array, shape in zip(arrays, full, strict=True)
        ]
    mask = options.get("mask")
    if mask is not None and not _taken(given, claims):
        options["mask"] = dense(given)
        if not _has_alibi(options):
            options.pop("query_offset", None)
    if claims.bias == "same" and "bias" in options and not _has_alibi(options):
        with np.errstate(over="ignore"):
            options["bias"] = np.array(options["bias"]).astype(arrays[0].dtype)
        if not claims.mask_rows:
            full = dense(given).shape
            options["bias"] = np.array(np.broadcast_to(options["bias"], full), order="C")
    return replace(given, query=arrays[0], key=arrays[1], value=arrays[2], options=options)


def dense(given: Case) -> Array:
    """Return the mask alone as a new boolean array ``(..., Hq, L, S)``."""
    positional = {name: given.options[name] for name in ("mask", "query_offset", "layout") if name in given.options}
    return np.array(sr.sdpa_stages(*given.arrays, **positional).keep, order="C")


def parse(recipe: str) -> tuple[Words, int]:
    """Return the words and the seed of a recipe, the text that a `Case` prints.

    Raises
    ------
    ValueError
        For anything else.

    Examples
    --------
    >>> parse("case(7, L=2, mask=('causal',))")
    ({'L': 2, 'mask': ('causal',)}, 7)
    """
    try:
        call = ast.parse(recipe.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "case"):
            raise ValueError
        (seed,) = map(ast.literal_eval, call.args)
        words = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        seeded(words, seed)
    except Exception as error:
        detail = f": {error}" if str(error) else ""
        raise ValueError(f'not a case such as "case(7, L=2, S=3)"{detail}') from None
    return words, seed


def _taken(given: Case, claims: Capabilities) -> bool:
    """Return whether the target takes the mask of the case as it is."""
    words = parse(given.recipe)[0]
    names = [word.lstrip("&|~") for word in words.get("mask", ())]
    single = len(names) == 1 and "~" not in words["mask"][0]
    arrays = claims.mask and (claims.mask_rows or not single)
    known = all(name in claims.masks if name in OBJECTS else arrays for name in names)
    offset = words.get("offset", "start")
    aligned = "query_offset" not in given.options or {"far": "number"}.get(offset, offset) in claims.offsets
    return known and aligned and (single or claims.mask_algebra)


def _has_alibi(options: Mapping[str, Any]) -> bool:
    bias = options.get("bias")
    return any(isinstance(part, sr.ALiBi) for part in (bias if isinstance(bias, tuple) else (bias,)))
