"""Attention with learned projections: several heads."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import numpy as np

from sdpa_ref._problem.checks import checked_sizes
from sdpa_ref.api import sdpa, sdpa_with_vjp
from sdpa_ref.arrays import Array, as_array
from sdpa_ref.layers.attend import append_and_attend, attend_over, sdpa_and_weights
from sdpa_ref.layers.gradients import LayerGradients, Vjp, of_parts
from sdpa_ref.layers.layer import Layer
from sdpa_ref.layers.linear import Linear
from sdpa_ref.layers.names import ATTENTION
from sdpa_ref.layers.norms import RMSNorm
from sdpa_ref.layers.projected import (
    PROJECTIONS,
    as_heads,
    context_tokens,
    places_of,
    projected,
    projected_and_vjp,
)
from sdpa_ref.layers.rotary import Rotary
from sdpa_ref.layers.weights import Axes, checked_input, checked_weights, float_dtype
from sdpa_ref.options import LayerOptions, spelled_out
from sdpa_ref.spelling import known_to_layers
from sdpa_ref.stored.cache import Cache
from sdpa_ref.stored.kv_cache import KVCache

_FUSED_WEIGHTS = {"in_proj_weight": "3*hidden_size hidden_size", "output.weight": "hidden_size hidden_size"}
_FUSED_BIASES = {"in_proj_bias": "3*hidden_size", "output.bias": "hidden_size"}


@dataclass(init=False, eq=False, repr=False)
class MultiHeadAttention(Layer):
    """Multi-head attention: several heads, concatenated, and an `output` projection.

    Parameters
    ----------
    hidden_size : int
        Width of the tokens.
    num_heads : int
        Number of query heads H.
    bias : bool or collection of str
        Whether the projections have biases, or the names of those that do: ``("query", "value", "output")``.
    num_kv_heads : int, optional
        Number of key and value heads, of which `num_heads` is a multiple: query head h reads key head
        ``h // (num_heads // num_kv_heads)``. `num_heads` by default.
    head_size : int, optional
        Width E of a head; ``hidden_size // num_heads`` by default.
    kdim, vdim : int, optional
        Widths of the tokens that make the keys, and of those that make the values; `hidden_size` by default.
    norm : bool
        Whether each head of query and key is normalised by an `RMSNorm`, as in Qwen3 and Gemma 3.
    eps : float
        Of these norms.
    rotary : Rotary, optional
        Rotary positions, by which query and key are turned, after the norms.
    rng, dtype
        As in `Linear`.

    Attributes
    ----------
    query : Linear
        From `hidden_size` to ``num_heads * head_size``. Head h is made by the rows ``[h * E, (h + 1) * E)``.
    key, value : Linear
        From `kdim` and `vdim` to ``num_kv_heads * head_size``, likewise.
    output : Linear
        From ``num_heads * head_size`` to `hidden_size`.
    query_norm, key_norm : RMSNorm, or None
        Of width `head_size`.

    Notes
    -----
    It also loads what `torch.nn.MultiheadAttention` saves, with three projections fused in ``in_proj_weight``. In the
    masks of that module True means that a key is dropped; here True = may attend. Other names that it knows are those
    of BERT, DistilBERT, BART, Whisper, Llama, Qwen, T5, GPT-2, vision transformers and GGUF files.

    Examples
    --------
    >>> from sdpa_ref import Causal
    >>> layer = MultiHeadAttention(48, num_heads=4, rng=0)
    >>> x = np.ones((2, 5, 48), np.float32)
    >>> layer(x, mask=Causal()).shape
    (2, 5, 48)
    >>> output, weights = layer.with_weights(x, mask=Causal())
    >>> weights.shape, weights[0, 0, 1].tolist()
    ((2, 4, 5, 5), [0.5, 0.5, 0.0, 0.0, 0.0])

    Four query heads of 16 that share two key heads, as in Llama; the sizes are read from the shapes of the weights:

    >>> grouped = MultiHeadAttention(48, num_heads=4, num_kv_heads=2, head_size=16, bias=False, rng=0)
    >>> grouped.query.weight.shape, grouped.key.weight.shape, grouped.output.weight.shape
    ((64, 48), (32, 48), (48, 64))
    >>> MultiHeadAttention.from_state_dict(grouped.state_dict(), num_heads=4)
    MultiHeadAttention(hidden_size=48, num_heads=4, num_kv_heads=2, head_size=16)
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    kdim: int
    vdim: int
    eps: float
    rotary: Rotary | None
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: RMSNorm
    key_norm: RMSNorm

    _weights: ClassVar[Axes] = {
        "query.weight": "num_heads*head_size hidden_size",
        "key.weight": "num_kv_heads*head_size kdim",
        "value.weight": "num_kv_heads*head_size vdim",
        "output.weight": "hidden_size num_heads*head_size",
    }
    _biases: ClassVar[Axes] = {name.replace("weight", "bias"): axes.split()[0] for name, axes in _weights.items()}
    _given = ("num_heads",)
    _optional: ClassVar[Axes] = {"query_norm.weight": "head_size", "key_norm.weight": "head_size"}
    _told = ("num_kv_heads", "head_size", "kdim", "vdim")
    _numbers: ClassVar[Mapping[str, float]] = {"eps": 1e-6}
    _options = ("rotary",)
    _names = ATTENTION

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        bias: bool | Collection[str] = True,
        *,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        norm: bool = False,
        eps: float = 1e-6,
        rotary: Rotary | None = None,
        rng: Any = None,
        dtype: Any = np.float32,
    ) -> None:
        sizes = checked_sizes(hidden_size=hidden_size, num_heads=num_heads)
        hidden_size, num_heads = sizes.values()
        if head_size is None:
            if hidden_size % num_heads:
                raise ValueError(
                    f"hidden_size = {hidden_size} must be a multiple of num_heads = {num_heads}; or give head_size="
                )
            head_size = hidden_size // num_heads
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        widths = checked_sizes(
            num_kv_heads=num_kv_heads, head_size=head_size, kdim=hidden_size if kdim is None else kdim,
            vdim=hidden_size if vdim is None else vdim,
        )  # fmt: skip
        if not isinstance(norm, (bool, np.bool_)):
            raise TypeError(f"norm must be True or False, got {type(norm).__name__}")
        ones = {name: np.ones(widths["head_size"], float_dtype(dtype)) for name in self._optional} if norm else {}
        self._draw(rng, dtype, bias, {**ones, "eps": eps, "rotary": rotary}, **sizes, **widths)

    @spelled_out(LayerOptions)
    def __call__(
        self, x: Any, context: Any = None, *, cache: Any = None, positions: Any = None, **options: Unpack[LayerOptions]
    ) -> Array:
        """Return the attention of the tokens `x` over those of `context`.

        Parameters
        ----------
        x : array, shape (..., L, hidden_size)
            Tokens that make the queries.
        context : array, shape (..., S, hidden_size), pair of arrays, or cache, optional
            Tokens that make the keys and values, or the result of `cached`; those of `x` by default. A pair is tokens
            of width `kdim` for the keys, and as many of width `vdim` for the values.
        cache : KVCache or cache of a PagePool, optional
            Tokens before those of `x`, which are added to it: each token attends to those before it and to itself.
            The cache has their positions, so `query_offset` is not allowed. If the call raises, they are taken out
            again, as far as a window without slack allows.
        positions : array of real numbers, shape ``(L,)`` or ``(*batch, L)``, optional
            Where the tokens stand, for `rotary` positions; from what the cache holds on, or from 0, by default.
        mask, bias, query_offset, dropout, backend
            As in `sdpa_ref.sdpa`: mask and bias broadcast to ``(..., H, L, S)``, True = may attend.
            Without `dropout` nothing is dropped.
        scale, softcap, sink
            As in `sdpa_ref.sdpa`: the scale is ``1 / sqrt(head_size)`` by default, a sink is a number or ``(H,)``.

        Returns
        -------
        array, shape (..., L, hidden_size)
            In the common type of inputs and weights.

        Examples
        --------
        >>> from sdpa_ref import Causal, KVCache
        >>> layer, x = MultiHeadAttention(48, num_heads=4, rng=0), np.ones((2, 5, 48), np.float32)
        >>> cache = KVCache(2, 4, 12)
        >>> steps = [layer(x[:, t : t + 1], cache=cache) for t in range(5)]
        >>> bool(np.allclose(np.concatenate(steps, 1), layer(x, mask=Causal()), atol=1e-6))
        True
        """
        given = known_to_layers(options, LayerOptions)
        if cache is not None and context is not None:
            raise TypeError("context and cache exclude each other: a cache holds the keys of the tokens x")
        if isinstance(context, Cache):
            return self.output(self._joined(attend_over(context, self._queries(x, context, positions), given)))
        query, key, value = self._heads(x, context, cache, positions)
        if cache is not None:
            return self.output(self._joined(append_and_attend(cache, query, key, value, given)))
        return self.output(self._joined(sdpa(query, key, value, layout="LHE", **given)))

    def cached(self, context: Any, lengths: Any = None, *, store: Any = None) -> KVCache:
        """Return the keys and values of tokens that many calls will attend to, to be passed as `context`.

        Parameters
        ----------
        context : array, shape (..., S, hidden_size), or pair of arrays
            Tokens that make the keys and values, such as those of an encoder.
        lengths : int or int array over the batch, optional
            How many of them each batch entry has, the first ones.
        store : recipe, optional
            As in `KVCache`.

        Examples
        --------
        >>> layer, x = MultiHeadAttention(48, num_heads=4, rng=0), np.ones((2, 1, 48), np.float32)
        >>> words = np.ones((2, 7, 48), np.float32)
        >>> cross = layer.cached(words)
        >>> bool((layer(x, cross) == layer(x, words)).all())
        True
        """
        keys, values = context_tokens(self, "context", context)
        places_of(self, 0, context, None, None)
        key, value = as_heads(self, "key", self.key(keys))[0], as_heads(self, "value", self.value(values))[0]
        *batch, S, heads, E = key.shape
        cache = KVCache(tuple(batch), heads, E, dtype=key.dtype, capacity=S, store=store, layout="LHE", like=key)
        cache.append(key, value, lengths)
        return cache

    @spelled_out(LayerOptions)
    def value_and_vjp(
        self, x: Any, context: Any = None, *, positions: Any = None, **options: Unpack[LayerOptions]
    ) -> tuple[Array, Vjp]:
        """Return the output, the same bits as a call, and the function that gives its gradients.

        Parameters
        ----------
        x, context, positions, mask, bias, query_offset, scale, softcap, sink, dropout, backend
            As in a call of the layer; the backend is one that has gradients.

        Returns
        -------
        value : array, shape (..., L, hidden_size)
        vjp : callable
            ``vjp(grad_value)`` returns the `LayerGradients` for the gradient by the value; as often as it is called.
            Until its last call neither the arguments nor the weights may be written to: it holds them, and copies none.

        Examples
        --------
        A step of gradient descent. What `state_dict` returns are the layer's own arrays, to be changed in place:

        >>> layer = MultiHeadAttention(48, num_heads=4, rng=0)
        >>> x = np.ones((2, 5, 48), np.float32)
        >>> value, vjp = layer.value_and_vjp(x)
        >>> gradients = vjp(2 * value)  # of the sum of squares
        >>> for name, weight in layer.state_dict().items():
        ...     weight -= 0.001 * gradients.weights[name]
        >>> bool((layer(x) ** 2).sum() < (value**2).sum()), gradients.x.shape
        (True, (2, 5, 48))
        """
        given = known_to_layers(options, LayerOptions)
        if isinstance(context, Cache):
            raise TypeError("context must be the tokens themselves where gradients are wanted, got a cache")
        projections, to_tokens = projected_and_vjp(self, x, context)
        places = places_of(self, projections[0].shape[-2], context, None, positions)
        parts = [as_heads(self, name, y, places) for name, y in zip(PROJECTIONS, projections, strict=True)]
        attended, to_heads = sdpa_with_vjp(*(heads for heads, _ in parts), layout="LHE", **given)
        value, to_attended = self.output.value_and_vjp(self._joined(attended))

        def vjp(grad_value: Any) -> LayerGradients:
            output = to_attended(grad_value)
            by_heads = to_heads(output.x.reshape(attended.shape))
            ways = [back(gradient) for (_, back), gradient in zip(parts, by_heads[:3], strict=True)]
            query, key, value = (gradient for gradient, _ in ways)
            tokens = to_tokens(by_heads._replace(query=query, key=key, value=value))
            norms = {name: gradient for _, weights in ways for name, gradient in weights.items()}
            return tokens._replace(weights=tokens.weights | of_parts(output=output) | norms)

        return value, vjp

    @spelled_out(LayerOptions)
    def with_weights(
        self, x: Any, context: Any = None, *, positions: Any = None, **options: Unpack[LayerOptions]
    ) -> tuple[Array, Array]:
        """Return the output, the same bits as without, and the attention weights.

        Parameters
        ----------
        x, context, positions, mask, bias, query_offset, scale, softcap, sink, dropout, backend
            As in a call of the layer.

        Returns
        -------
        output : array, shape (..., L, hidden_size)
        weights : array, shape (..., H, L, S)
            After dropout where it is given.
        """
        given = known_to_layers(options, LayerOptions)
        if isinstance(context, Cache):
            query = self._queries(x, context, positions)
            attended, weights = attend_over(context, query, given, sdpa_and_weights)
        else:
            query, key, value = self._heads(x, context, None, positions)
            attended, weights = sdpa_and_weights(query, key, value, layout="LHE", **given)
        return self.output(self._joined(attended)), weights

    def _queries(self, x: Any, context: Cache, positions: Any) -> Array:
        """Return the queries of tokens, ``(..., L, H, E)``."""
        y = self.query(checked_input("x", x, "L hidden_size", hidden_size=self.hidden_size))
        return as_heads(self, "query", y, places_of(self, y.shape[-2], context, None, positions))[0]

    def _heads(self, x: Any, context: Any, cache: Any, positions: Any) -> tuple[Array, Array, Array]:
        """Return query, key and value of tokens, ``(..., length, H, E)``."""
        query, key, value = projected(self, x, context)
        places = places_of(self, query.shape[-2], context, cache, positions)
        query, key = as_heads(self, "query", query, places)[0], as_heads(self, "key", key, places)[0]
        return query, key, as_heads(self, "value", value)[0]

    def _joined(self, attended: Array) -> Array:
        """Return the output of the heads side by side."""
        return attended.reshape(*attended.shape[:-2], self.num_heads * self.head_size)

    @classmethod
    def _separate(cls, entries: dict[str, Any]) -> dict[str, Any]:
        if "in_proj_weight" not in entries:
            bias = as_array("in_proj_bias", entries.get("in_proj_bias", []))
            if "query.weight" not in entries or bias.ndim != 1 or bias.size % 3 or not bias.size:
                return entries
            apart = {f"{part}.bias": third for part, third in zip(PROJECTIONS, bias.reshape(3, -1), strict=True)}
            return {name: array for name, array in entries.items() if name != "in_proj_bias"} | apart
        fused = as_array("in_proj_weight", entries["in_proj_weight"])
        if fused.ndim == 2 and fused.shape[1] == 3 * fused.shape[0]:  # GPT-2 has its weights the other way round
            turned = {name: as_array(name, entries[name]).T for name in _FUSED_WEIGHTS if name in entries}
            entries = {**entries, **turned}
        arrays, _ = checked_weights(cls.__name__, entries, _FUSED_WEIGHTS, _FUSED_BIASES, {})
        separate = {name: array for name, array in arrays.items() if not name.startswith("in_proj_")}
        for name in ("weight", "bias"):
            if f"in_proj_{name}" in arrays:
                thirds = arrays[f"in_proj_{name}"]
                thirds = thirds.reshape(3, -1, *thirds.shape[1:])
                separate |= {f"{part}.{name}": third for part, third in zip(PROJECTIONS, thirds, strict=True)}
        return separate

    def _fill(self, arrays: Mapping[str, Array], sizes: Mapping[str, Any]) -> None:
        num_heads, num_kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads = {num_heads} must be a multiple of num_kv_heads = {num_kv_heads}")
        rotary = sizes.get("rotary")
        if rotary is not None and not isinstance(rotary, Rotary):
            raise TypeError(f"rotary must be a Rotary, got {type(rotary).__name__}")
        super()._fill(arrays, sizes)

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)}" for name in ("hidden_size", "num_heads", "num_kv_heads", "head_size")]
        shown += [
            f"{name}={getattr(self, name)}" for name in ("kdim", "vdim") if getattr(self, name) != self.hidden_size
        ]
        shown += [f"eps={self.eps}"] * (self.query_norm is not None or self.key_norm is not None)
        return f"MultiHeadAttention({', '.join(shown + [f'rotary={self.rotary}'] * (self.rotary is not None))})"
