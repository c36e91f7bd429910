"""Attention with learned projections: several heads."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import numpy as np

from sdpa_ref._problem.checks import checked_sizes
from sdpa_ref.arrays import Array
from sdpa_ref.layers.attention import attended, attended_and_weights, cached, check_parts, value_and_vjp
from sdpa_ref.layers.fused import separate
from sdpa_ref.layers.gradients import Vjp
from sdpa_ref.layers.layer import Layer
from sdpa_ref.layers.linear import Linear
from sdpa_ref.layers.names import ATTENTION
from sdpa_ref.layers.norms import RMSNorm
from sdpa_ref.layers.own_keys import drawn_keys
from sdpa_ref.layers.rotary import Rotary
from sdpa_ref.layers.weights import Axes, float_dtype
from sdpa_ref.options import LayerOptions, spelled_out
from sdpa_ref.spelling import known_to_layers
from sdpa_ref.stored.kv_cache import KVCache


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
        The `eps` of these norms.
    rotary : Rotary, optional
        Rotary positions, by which query and key are turned, after the norms.
    add_bias_kv : bool
        Whether a learned key and value, PyTorch's `bias_k` and `bias_v`, follow those of the tokens, for every query.
    add_zero_attn : bool
        Whether a key and value of zeros do so. It is not saved with the weights: `from_state_dict` and `load` take it,
        too.
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
    query_norm, key_norm : RMSNorm of width `head_size`, or None
    bias_k, bias_v : array, shape (1, 1, num_kv_heads * head_size), or None

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
    add_zero_attn: bool | None
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: RMSNorm
    key_norm: RMSNorm
    bias_k: Array
    bias_v: Array

    _weights: ClassVar[Axes] = {
        "query.weight": "num_heads*head_size hidden_size",
        "key.weight": "num_kv_heads*head_size kdim",
        "value.weight": "num_kv_heads*head_size vdim",
        "output.weight": "hidden_size num_heads*head_size",
    }
    _biases: ClassVar[Axes] = {name.replace("weight", "bias"): axes.split()[0] for name, axes in _weights.items()}
    _given = ("num_heads",)
    _optional: ClassVar[Axes] = {
        **dict.fromkeys(("query_norm.weight", "key_norm.weight"), "head_size"),
        **dict.fromkeys(("bias_k", "bias_v"), "1 1 num_kv_heads*head_size"),
    }
    _told = ("num_kv_heads", "head_size", "kdim", "vdim")
    _numbers: ClassVar[Mapping[str, float]] = {"eps": 1e-6}
    _options = ("rotary", "add_zero_attn")
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
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        rng: Any = None,
        dtype: Any = np.float32,
    ) -> None:
        sizes = checked_sizes(hidden_size=hidden_size, num_heads=num_heads)
        hidden_size, num_heads = sizes.values()
        if head_size is None and hidden_size % num_heads:
            raise ValueError(
                f"hidden_size = {hidden_size} must be a multiple of num_heads = {num_heads}; or give head_size="
            )
        widths = checked_sizes(
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_size=hidden_size // num_heads if head_size is None else head_size,
            kdim=hidden_size if kdim is None else kdim, vdim=hidden_size if vdim is None else vdim,
        )  # fmt: skip
        for name, flag in (("norm", norm), ("add_bias_kv", add_bias_kv)):
            if not isinstance(flag, (bool, np.bool_)):
                raise TypeError(f"{name} must be True or False, got {type(flag).__name__}")
        others: dict[str, Any] = {"eps": eps, "rotary": rotary, "add_zero_attn": add_zero_attn}
        rng, dtype = np.random.default_rng(rng), float_dtype(dtype)
        if norm:
            others |= {f"{name}_norm.weight": np.ones(widths["head_size"], dtype) for name in ("query", "key")}
        if add_bias_kv:
            others |= drawn_keys(rng, widths["num_kv_heads"] * widths["head_size"], dtype)
        self._draw(rng, dtype, bias, others, **sizes, **widths)

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
        positions : array of real numbers, shape (L,) or (..., L), optional
            Where the tokens stand, for `rotary` positions; from what the cache holds on, or from 0, by default.
        mask, bias, query_offset, dropout, backend
            As in `sdpa_ref.sdpa`: mask and bias broadcast to ``(..., H, L, S)``, True = may attend.
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
        return self.output(attended(self, x, context, cache, positions, known_to_layers(options, LayerOptions)))

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
        >>> bool((layer(x, layer.cached(words)) == layer(x, words)).all())
        True
        """
        return cached(self, context, lengths, store)

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
        A step of gradient descent, which changes the layer's own arrays in place:

        >>> layer = MultiHeadAttention(48, num_heads=4, rng=0)
        >>> x = np.ones((2, 5, 48), np.float32)
        >>> value, vjp = layer.value_and_vjp(x)
        >>> gradients = vjp(2 * value)  # of the sum of squares
        >>> for name, weight in layer.state_dict().items():
        ...     weight -= 0.001 * gradients.weights[name]
        >>> bool((layer(x) ** 2).sum() < (value**2).sum()), gradients.x.shape
        (True, (2, 5, 48))
        """
        return value_and_vjp(self, x, context, positions, known_to_layers(options, LayerOptions))

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
            After dropout where it is given. Those of `bias_k`, and of the zeros, stand behind the S.
        """
        output, weights = attended_and_weights(self, x, context, positions, known_to_layers(options, LayerOptions))
        return self.output(output), weights

    @classmethod
    def _separate(cls, entries: dict[str, Any]) -> dict[str, Any]:
        return separate(cls.__name__, entries)

    def _fill(self, arrays: Mapping[str, Array], sizes: Mapping[str, Any]) -> None:
        check_parts(arrays, sizes)
        super()._fill(arrays, {**sizes, "add_zero_attn": bool(sizes.get("add_zero_attn"))})

    def __repr__(self) -> str:
        names = ["hidden_size", "num_heads", "num_kv_heads", "head_size"]
        names += [name for name in ("kdim", "vdim") if getattr(self, name) != self.hidden_size]
        shown = [f"{name}={getattr(self, name)}" for name in names]
        shown += [f"eps={self.eps}"] * (self.query_norm is not None or self.key_norm is not None)
        shown += [f"rotary={self.rotary}"] * (self.rotary is not None)
        shown += ["add_bias_kv=True"] * (self.bias_k is not None) + ["add_zero_attn=True"] * bool(self.add_zero_attn)
        return f"MultiHeadAttention({', '.join(shown)})"
