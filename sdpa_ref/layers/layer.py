"""What all layers share: weights under PyTorch's names, drawn at random, loaded and saved."""

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from os import PathLike
from typing import Any, ClassVar, NoReturn, Self

import numpy as np

from sdpa_ref._problem.checks import checked_sizes
from sdpa_ref.arrays import Array, real_number
from sdpa_ref.layers.names import Names, of_one_layer
from sdpa_ref.layers.weights import Axes, checked_weights, float_dtype, shape_of
from sdpa_ref.stored.quantized import Quantized

_PLAIN = (int, float)  # the types of fields that are no weights


class Layer:
    """What all layers share: named weights.

    A layer is a frozen dataclass of sizes (integers), numbers, and weights (arrays, or layers) under the attribute
    names of the PyTorch module: ``layer.query.weight`` is the entry ``"query.weight"`` of what that module saves.
    """

    _weights: ClassVar[Axes] = {}
    _biases: ClassVar[Axes] = {}  # each of these is there or not
    _optional: ClassVar[Axes] = {}  # likewise, of what is no bias
    _given: ClassVar[tuple[str, ...]] = ()  # sizes that do not follow from the shapes of the weights
    _told: ClassVar[tuple[str, ...]] = ()  # sizes that follow, and that may be given to be checked
    _numbers: ClassVar[Mapping[str, float]] = {}  # what is neither a size nor a weight, at least 0, and its default
    _options: ClassVar[tuple[str, ...]] = ()  # what is none of these, None by default
    _names: ClassVar[Names] = {}  # what models call the weights

    @classmethod
    def from_state_dict(
        cls, entries: Mapping[str, Any], *, prefix: str = "", names: Names | None = None, **sizes: Any
    ) -> Self:
        """Return the layer with these weights; its sizes come from their shapes.

        Parameters
        ----------
        entries : mapping of str to array
            What `state_dict` returns, here or in PyTorch: arrays of any library that `sdpa` takes, and `Quantized` for
            the weights of `Linear` and `Embedding`. They are not copied where the memory allows, so that the layer sees
            what is written to them later.
        prefix : str
            How the names of this layer's entries begin in a whole model, such as ``"encoder.layer.0.attention."``; it
            is taken off, and all other entries are left alone.
        names : mapping of str to str or None, optional
            What the model's names are here, beside those that `MultiHeadAttention` reads: ``{"q_a": "query"}`` makes
            ``q_a.weight`` the entry ``query.weight``, and None leaves an entry out.
        **sizes : int, or float
            What the shapes do not determine: `num_heads` of `MultiHeadAttention`, `heads` of `SpatialAttention`.
            `MultiHeadAttention` checks `num_kv_heads` and `head_size`, too, where they are given. The `eps` of a norm,
            the `rotary` positions of `MultiHeadAttention`.

        Raises
        ------
        ValueError
            Where entries are missing, unexpected, misshapen or of a wrong type; the message lists all of them.

        Examples
        --------
        >>> from sdpa_ref import AttentionHead
        >>> weight = np.eye(2, 3, dtype=np.float32)
        >>> AttentionHead.from_state_dict({"query.weight": weight, "key.weight": weight, "value.weight": weight})
        AttentionHead(hidden_size=3, attention_head_size=2)
        """
        numbers = {name: sizes.pop(name, default) for name, default in cls._numbers.items()}
        options = {name: sizes.pop(name, None) for name in cls._options}
        if set(sizes) - set(cls._told) != set(cls._given):
            wanted, got = (
                ", ".join(f"{name}=" for name in names) or "no size"
                for names in ((*cls._given, *cls._numbers, *cls._options), sizes)
            )
            raise TypeError(f"{cls.__name__} takes {wanted} beside the weights, got {got}")
        if not isinstance(entries, Mapping):
            raise TypeError(f"the weights must be a mapping of names to arrays, got {type(entries).__name__}")
        if not isinstance(names, Mapping | None):
            raise TypeError(f"names must be a mapping of names to names, or to None, got {type(names).__name__}")
        table = {**cls._names, **(names or {})}
        own = cls._separate(of_one_layer(entries, prefix, table))
        layer = object.__new__(cls)
        maybe = {**cls._biases, **cls._optional}
        arrays, known = checked_weights(cls.__name__, own, cls._weights, maybe, checked_sizes(**sizes), table)
        layer._fill(arrays, {**known, **numbers, **options})
        return layer

    @classmethod
    def _separate(cls, entries: dict[str, Any]) -> dict[str, Any]:
        """Return the entries with those parted that have several weights in one."""
        return entries

    @classmethod
    def load(cls, path: str | PathLike[str], *, prefix: str = "", names: Names | None = None, **sizes: Any) -> Self:
        """Return the layer whose weights are in a file; of a whole model only this layer is read.

        Parameters
        ----------
        path : str or path
            A safetensors file, written by `save` or by PyTorch's ``safetensors.torch.save_file``; the index
            ``*.safetensors.index.json`` of a model in several files; or a GGUF file, whose codes become float32.
        prefix, names, **sizes
            As in `from_state_dict`.

        Raises
        ------
        ValueError
            Where the file has another format, or its entries are not the layer's; the message lists all that is wrong.
        """
        from sdpa_ref.layers.files import read_weights  # only files need what it imports

        entries = read_weights(path, prefix)
        try:
            return cls.from_state_dict(entries, prefix=prefix, names=names, **sizes)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def state_dict(self) -> dict[str, Array]:
        """Return the weights by PyTorch's names; they are the layer's own arrays, not copies."""
        entries: dict[str, Array] = {}
        for field in fields(self):  # type: ignore[arg-type]  # all layers are dataclasses
            value = getattr(self, field.name)
            if isinstance(value, Layer):
                entries |= {f"{field.name}.{name}": array for name, array in value.state_dict().items()}
            elif field.type not in _PLAIN and field.name not in self._options and value is not None:
                entries[field.name] = value
        return entries

    def save(self, path: str | PathLike[str]) -> None:
        """Write the weights to a safetensors file, which is replaced as a whole or not at all.

        Parameters
        ----------
        path : str or path
            The file; PyTorch reads it with ``safetensors.torch.load_file``. Through a symbolic link its target is
            written. An existing file keeps its mode.

        Raises
        ------
        TypeError
            Weights are `Quantized`.
        OSError
            There is no such folder, no space, or `path` is write-protected or no regular file.
        """
        from sdpa_ref.files import replacing
        from sdpa_ref.layers.files import safetensors

        entries = self.state_dict()
        for name, array in entries.items():
            if isinstance(array, Quantized):
                raise TypeError(f"{name} is Quantized, which the format does not have: make a layer of its dense()")
        contiguous = {  # the format's writer copies memory as it lies
            name: np.ascontiguousarray(array, array.dtype.newbyteorder("=")) for name, array in entries.items()
        }
        with replacing(path) as unfinished:
            safetensors().save_file(contiguous, unfinished)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be deleted")

    def __repr__(self) -> str:
        sizes = (f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.type in _PLAIN)  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(sizes)})"

    def _draw(
        self, rng: Any, dtype: Any, bias: bool | Collection[str], others: Mapping[str, Any] | None = None, **sizes: int
    ) -> None:
        """Fill a new layer with weights as PyTorch draws them: uniform within 1 / sqrt(fan_in), and with the others."""
        biases = self._chosen(bias)
        sizes, dtype, rng = checked_sizes(**sizes), float_dtype(dtype), np.random.default_rng(rng)
        arrays = {}
        for name, axes in {**self._weights, **biases}.items():
            _, *fan_in = shape_of(self._weights[name.replace("bias", "weight")], sizes)
            bound = 1 / math.sqrt(math.prod(fan_in))
            arrays[name] = rng.uniform(-bound, bound, shape_of(axes, sizes)).astype(dtype)
        self._fill(arrays | dict(others or {}), {**sizes, **(others or {})})

    def _chosen(self, bias: bool | Collection[str]) -> Axes:
        """Return the biases that the layer has: all, none, or those of the projections that are named."""
        if isinstance(bias, (bool, np.bool_)):
            return self._biases if bias else {}
        parts = {name.removesuffix(".bias"): name for name in self._biases if "." in name}
        hint = f"; or give the names of those that have one, of {', '.join(parts)}" if parts else ""
        if not parts or not isinstance(bias, (tuple, list, set, frozenset)):
            raise TypeError(f"bias must be True or False, got {type(bias).__name__}{hint}")
        if any(name not in parts for name in bias):
            raise ValueError(f"bias must be True or False, got {bias!r:.80}{hint}")
        return {name: self._biases[name] for part, name in parts.items() if part in bias}

    def _fill(self, arrays: Mapping[str, Array], sizes: Mapping[str, Any]) -> None:
        """Set the fields of a new layer, once."""
        sizes = {**sizes, **{name: _at_least_0(name, sizes[name]) for name in self._numbers}}
        for field in fields(self):  # type: ignore[arg-type]
            number = field.type in _PLAIN or field.name in self._options
            value: Any = sizes.get(field.name) if number else arrays.get(field.name)
            if isinstance(field.type, type) and issubclass(field.type, Layer):
                prefix = f"{field.name}."
                own = {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}
                numbers = {name: sizes[name] for name in field.type._numbers if name in sizes}
                value = field.type.from_state_dict(own, **numbers) if own else None
            object.__setattr__(self, field.name, value)


def _at_least_0(name: str, value: Any) -> float:
    number = real_number(name, value)
    if number < 0:
        raise ValueError(f"{name} must be at least 0, got {number}")
    return number
