"""What a cache stores of a token: the arrays, their types and widths, and what they mean."""

import math
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref._problem.checks import checked_sizes
from sdpa_ref.arrays import FLOATS, Array, as_array, is_float, kind, module_of
from sdpa_ref.stored.quantized import Quantized
from sdpa_ref.stored.recipe import Recipe

Parts = tuple[Array, ...]


class Part(NamedTuple):
    """One array of a cache: what it is called in a file, its width and its type."""

    name: str
    width: int
    dtype: np.dtype[Any]


class Geometry:
    """What a cache stores of a token: heads, widths, types, recipes and the order of axes.

    Attributes
    ----------
    parts : tuple of Part
        The arrays: key and value, or codes and scale of each; a tied value has none.
    module : module
        numpy or cupy, where the arrays are.
    """

    heads: int
    E: int
    Ev: int
    dtype: np.dtype[Any]
    tied: bool
    layout: str
    kind: str
    module: Any
    store: tuple[Recipe | None, Recipe | None]
    parts: tuple[Part, ...]

    def __init__(
        self, heads: int, E: int, Ev: int | None, dtype: Any, store: Any, tied: bool, layout: str, like: Any
    ) -> None:  # fmt: skip
        sizes = checked_sizes(heads=heads, E=E, Ev=E if Ev is None else Ev)
        self.heads, self.E, self.Ev = sizes.values()
        self.dtype = np.dtype(dtype)
        if not is_float(self.dtype):
            raise TypeError(f"dtype must be {FLOATS}, got {self.dtype}; a recipe of codes is passed as store=")
        self.dtype = self.dtype.newbyteorder("=")
        if layout not in ("HLE", "LHE"):
            raise ValueError(f'layout must be "HLE" (..., heads, T, E) or "LHE" (..., T, heads, E), got {layout!r}')
        if not isinstance(tied, (bool, np.bool_)):
            raise TypeError(f"tied must be True or False, got {type(tied).__name__}")
        self.tied, self.layout = bool(tied), layout
        if like is not None and not hasattr(like, "shape"):
            raise TypeError(f"like must be an array, got {type(like).__name__}")
        self.kind = "numpy" if like is None else kind(as_array("like", like))
        self.module = module_of(self.kind)
        self.store = self._recipes(store)
        names = [("key", self.store[0], self.E)] + ([] if tied else [("value", self.store[1], self.Ev)])
        self.parts = tuple(part for name, recipe, E in names for part in self._of_one(name, recipe, E))
        self._same_recipe = not tied and None is not self.store[0] == self.store[1] and self.E == self.Ev
        self._check_tie()

    def _recipes(self, store: Any) -> tuple[Recipe | None, Recipe | None]:
        """Return the recipes of key and value."""
        pair = store if isinstance(store, tuple) else (store, store)
        if len(pair) != 2 or not all(recipe is None or isinstance(recipe, Recipe) for recipe in pair):
            got = [type(recipe).__name__ for recipe in pair]
            raise TypeError(f"store must be a recipe, such as Int8(), or a pair of those, got {', '.join(got)}")
        return (pair[0], None) if self.tied else (pair[0], pair[1])

    def _of_one(self, name: str, recipe: Recipe | None, E: int) -> tuple[Part, ...]:
        """Return the arrays of keys or values."""
        if recipe is None:
            return (Part(name, E, self.dtype),)
        recipe._check((self.heads, 1, E), "HLE", self.kind)
        codes = Part(f"{name}.codes", E * recipe.bits // 8, np.dtype(recipe.codes_dtype))
        return codes, Part(f"{name}.scale", max(E // (recipe.group or max(E, 1)), 1), np.dtype(recipe.scale_dtype))

    def _check_tie(self) -> None:
        """Raise the error of a value that is no part of its key."""
        recipe = self.store[0]
        if not self.tied:
            return
        if self.Ev > self.E:
            raise ValueError(f"the Ev of tied keys must be at most E = {self.E}, got {self.Ev}")
        if recipe is not None and (self.Ev % (recipe.group or 1) or self.Ev * recipe.bits % 8):
            raise ValueError(f"the Ev = {self.Ev} of tied keys must be whole groups and bytes of {recipe!r}")

    def blank(self, pages: int, page: int) -> Parts:
        """Return arrays of zeros, ``(pages, heads, page, width)`` or in "LHE" with heads after slots."""
        first = (pages, self.heads, page) if self.layout == "HLE" else (pages, page, self.heads)
        return tuple(self.module.zeros((*first, part.width), part.dtype) for part in self.parts)

    def by_token(self, arrays: Parts) -> Parts:
        """Return views ``(pages, page, heads, width)``."""
        return arrays if self.layout == "LHE" else tuple(array.swapaxes(-2, -3) for array in arrays)

    def coded(self, key: Array, value: Array | None, layout: str, into: Parts | None = None) -> Parts:
        """Return what is stored of keys and values in this layout, written into arrays of their shape where given."""
        given = (key,) if value is None else (key, value)
        if into is None:
            if self.store == (None, None):
                return given
            into = self._empty(key.shape[:-1])
        if self._same_recipe:
            first, parts = self.store[0], into
            first._write(layout, (key, *parts[:2]), (value, *parts[2:]))  # type: ignore[union-attr]
            return into
        rest = into
        for x, recipe in zip(given, self.store, strict=False):
            if recipe is None:
                rest[0][...], rest = x, rest[1:]
            else:
                recipe._write(layout, (x, *rest[:2]))
                rest = rest[2:]
        return into

    def _empty(self, lead: tuple[int, ...]) -> Parts:
        return tuple(self.module.empty((*lead, part.width), part.dtype) for part in self.parts)

    def meant(self, arrays: Parts) -> tuple[Any, Any]:
        """Return key and value, arrays or `Quantized`, that these arrays of slots are."""
        key, rest = self._one(self.store[0], arrays)
        return key, _narrow(key, self.Ev) if self.tied else self._one(self.store[1], rest)[0]

    def _one(self, recipe: Recipe | None, arrays: Parts) -> tuple[Any, Parts]:
        if recipe is None:
            return arrays[0], arrays[1:]
        return recipe._joined(arrays[0], arrays[1], self.layout), arrays[2:]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.heads * sum(part.width * part.dtype.itemsize for part in self.parts)

    def described(self) -> dict[str, Any]:
        """Return what must agree where tokens go from one cache or file to another, by name."""
        return {
            "heads": self.heads, "E": self.E, "Ev": self.Ev, "dtype": self.dtype.name, "tied": self.tied,
            "layout": self.layout, "store": self.store,
        }  # fmt: skip

    def __repr__(self) -> str:
        widths = f"E={self.E}" + (f", Ev={self.Ev}" if self.Ev != self.E else "")
        names = [str(self.dtype) if recipe is None else repr(recipe) for recipe in self.store[: 1 if self.tied else 2]]
        flags = (", tied" if self.tied else "") + ("" if self.layout == "HLE" else ', layout="LHE"')
        return f"heads={self.heads}, {widths}, {' and '.join(dict.fromkeys(names))}{flags}"


def _narrow(key: Any, Ev: int) -> Any:
    """Return the first numbers of each token."""
    if not isinstance(key, Quantized):
        return key[..., :Ev]
    E = key.shape[-1]

    def cut(part: Array) -> Array:
        return part if part.shape[-1] == 1 and E > 1 else part[..., : math.ceil(part.shape[-1] * Ev / E)]

    return key._map(cut)


def read_only(array: Array) -> Array:
    """Return a view that cannot be written to, where the kind of array has such views."""
    view = array.view()
    if isinstance(view, np.ndarray):
        view.setflags(write=False)
    return view
