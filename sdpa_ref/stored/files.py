"""Caches as arrays by name, and their files."""

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, TypeVar

import numpy as np

from sdpa_ref.arrays import Array, as_array, kind, module_of
from sdpa_ref.stored.cache import Cache, CacheFull, differences
from sdpa_ref.stored.geometry import Geometry, Parts
from sdpa_ref.stored.recipe import Recipe
from sdpa_ref.stored.recipes import Float8, Int4, Int8
from sdpa_ref.stored.rows import Index

VERSION = 1
_RECIPES: dict[str, Callable[..., Recipe]] = {recipe.__name__: recipe for recipe in (Int8, Int4, Float8)}
_TYPES: dict[str, tuple[type, ...]] = {  # what a file describes of a cache
    "version": (int,), "kind": (str,), "batch": (list,), "heads": (int,), "E": (int,), "Ev": (int,), "dtype": (str,),
    "tied": (bool,), "layout": (str,), "capacity": (int, type(None)), "window": (int, type(None)), "first": (int,),
    "slack": (int,), "store": (list,), "page": (int, type(None)),
}  # fmt: skip
_T = TypeVar("_T")


def entries_of(cache: Cache) -> dict[str, Array]:
    """Return the tokens of a cache that were not dropped, and what it is, as arrays by name."""
    import json  # only caches that are saved need it: so are the imports below

    b, p = cache._kept()
    tokens = cache._take(b, cache._slot(b, p))
    entries: dict[str, Array] = {part.name: array for part, array in zip(cache._geometry.parts, tokens, strict=True)}
    about = cache._told() | {"version": VERSION, "store": []}
    for name, recipe in zip(("key", "value"), cache._geometry.store, strict=True):
        fields = {} if recipe is None else recipe.__getstate__()
        if fields.pop("center", None) is not None:
            entries[f"{name}.center"] = recipe.center  # type: ignore[union-attr]
        about["store"].append(None if recipe is None else {"recipe": type(recipe).__name__, **fields})
    entries["lengths"], entries["kept"] = cache.lengths, cache.lengths - cache._lost().reshape(cache.batch)
    entries["positions"] = p.astype(np.int64)
    entries["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    return entries


class Entries:
    """What `entries_of` wrote: read again, with an error for whatever does not fit together."""

    def __init__(self, entries: Mapping[str, Any], kind: str, like: Any) -> None:
        if not isinstance(entries, Mapping):
            raise TypeError(f"a cache is loaded from a mapping of names to arrays, got {type(entries).__name__}")
        self._entries, self._like = entries, like
        self.told: dict[str, Any] = self._parsed(kind)
        self.store: tuple[Recipe | None, ...] = tuple(
            self._recipe(name, told) for name, told in zip(("key", "value"), self.told["store"], strict=True)
        )

    def _parsed(self, kind: str) -> dict[str, Any]:
        """Return what the entries describe of the cache."""
        import json

        try:
            about = as_array("about", self._entries["about"])
            told = json.loads(about.tobytes() if about.dtype == np.uint8 and about.ndim == 1 else b"")
            version, got = told["version"], told["kind"]
        except (KeyError, ValueError, TypeError):
            raise ValueError("no cache was saved here: there is no entry about it that can be read") from None
        if version != VERSION:
            raise ValueError(f"the cache was saved in version {version!r} of its format, this library has {VERSION}")
        if got != kind:
            raise ValueError(f"a {got} was saved here, not a {kind}")
        wrong = [name for name in told if type(told[name]) not in _TYPES.get(name, ())]
        wrong += [name for name in _TYPES if name not in told]
        if not wrong and not all(type(n) is int and n >= 0 for n in told["batch"]):
            wrong = ["batch"]
        if wrong or len(told["store"]) != 2:
            raise ValueError(f"the entry about the cache is damaged: {', '.join(wrong) or 'store'}")
        return told  # type: ignore[no-any-return]

    def _recipe(self, name: str, told: Any) -> Recipe | None:
        if told is None:
            return None
        try:
            fields = dict(told)
            center = self._entries.get(f"{name}.center")
            if center is not None and self._like is not None:
                center = module_of(kind(self._like)).asarray(center)
            return _RECIPES[fields.pop("recipe")](**fields, center=center)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"the recipe of {name} is damaged: {told!r:.80}") from None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that make such a cache."""
        told = {name: value for name, value in self.told.items() if name not in ("kind", "version", "page")}
        try:
            dtype = np.dtype(told["dtype"])
        except TypeError:
            import ml_dtypes

            dtype = np.dtype(getattr(ml_dtypes, told["dtype"], object))
        return told | {"batch": tuple(told["batch"]), "dtype": dtype, "store": self.store}

    def geometry(self) -> Geometry:
        """Return what is stored of a token."""
        told = self.arguments()
        sizes = {name: told[name] for name in ("heads", "E", "Ev", "dtype", "store", "tied", "layout")}
        try:
            return Geometry(**sizes, like=self._like)
        except TypeError as error:
            raise ValueError(f"the entry about the cache is damaged: {error}") from None

    def check(self, got: dict[str, Any], expected: dict[str, Any]) -> None:
        """Raise a ValueError that lists in what the cache is not as expected."""
        unknown = [name for name in expected if name not in got]
        if unknown:
            raise TypeError(f"a cache has {', '.join(got)}, and no {', '.join(unknown)}")
        wanted = dict(expected)
        if "dtype" in wanted:
            wanted["dtype"] = np.dtype(wanted["dtype"])
        if "batch" in wanted:
            wanted["batch"] = wanted["batch"] if isinstance(wanted["batch"], tuple) else (wanted["batch"],)
        if "store" in wanted and not isinstance(wanted["store"], tuple):
            wanted["store"] = (wanted["store"], None if got["tied"] else wanted["store"])
        faults = differences(got, wanted)
        if faults:
            raise ValueError(f"the cache that was saved is another one: {faults}")

    def tokens(self, geometry: Geometry, first: int) -> tuple[Index, Index, Parts]:
        """Return the length of each row, how many tokens it has dropped, and those that it kept."""
        batch = tuple(self.told["batch"])
        lengths, kept = self._array("lengths", batch, np.int64), self._array("kept", batch, np.int64)
        lost = (lengths - kept).ravel()
        held = np.minimum(lengths, first) if self.told["window"] is not None else lengths
        if (lengths < 0).any() or (lost < 0).any() or (kept < held).any():
            raise ValueError("the entries lengths and kept are damaged: they do not fit together")
        total = int(kept.sum())
        place = np.concatenate([np.arange(count) for count in kept.ravel()] or [np.zeros(0, np.int64)])
        positions = np.where(place < first, place, place + np.repeat(lost, kept.ravel()))
        if not np.array_equal(self._array("positions", (total,), np.int64), positions):
            raise ValueError("the entry positions is damaged: it is not that of such lengths")
        parts = tuple(
            self._array(part.name, (total, geometry.heads, part.width), part.dtype) for part in geometry.parts
        )
        if geometry.kind != "numpy":
            module = module_of(geometry.kind)
            parts = tuple(module.asarray(part) for part in parts)
        return lengths.ravel(), lost, parts

    def _array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an entry of this shape and type; float8 is saved as its bytes."""
        if name not in self._entries:
            raise ValueError(f"the entry {name} is missing")
        array, dtype = as_array(name, self._entries[name]), np.dtype(dtype)
        if array.dtype == np.uint8 and dtype.name.startswith("float8"):
            array = array.view(dtype)
        if array.dtype.newbyteorder("=") != dtype or array.shape != shape:
            raise ValueError(f"the entry {name} must be {dtype} {shape}, got {array.dtype} {array.shape}")
        return array


def save(entries: dict[str, Array], path: str | PathLike[str]) -> None:
    """Write entries to a file, as a whole or not at all."""
    from sdpa_ref.files import replacing
    from sdpa_ref.layers import files

    written = {}
    for name, array in entries.items():
        array = array if kind(array) == "numpy" else array.get()
        array = np.ascontiguousarray(array).reshape(array.shape)
        written[name] = array.view(np.uint8) if array.dtype.name.startswith("float8") else array
    with replacing(path) as unfinished:
        files.safetensors().save_file(written, unfinished)


def loaded(path: str | PathLike[str], build: Callable[[dict[str, Array]], _T]) -> _T:
    """Return what is built of a file's entries."""
    from sdpa_ref.layers import files

    entries = files.read_weights(path)
    try:
        return build(entries)
    except CacheFull:
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
