"""What other libraries call our arguments: a keyword of theirs gets an error that shows our spelling."""

from collections.abc import Mapping
from typing import Any

from sdpa_ref.options import Options

OURS = (*Options.__annotations__, "grad_lse")

_CAUSAL = 'mask=Causal(), with query_offset="start" or "end" where L and S differ'
_CACHE = "cache.append(key, value), then cache.attend(query), of a KVCache: docs/serving.md"
_PAST = _CACHE + "; or keys and values with the past before them, and query_offset=past_length"
_PAGES = "key=Paged(pages, table, lengths), and value= likewise"
_SCALED = "key=Quantized(codes, scale), and value= likewise"
_WINDOW = "mask=Window(left, right), both inclusive and None for open"
_THEIRS = {
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "use_causal_mask": _CAUSAL,
    "attn_mask": "mask= for a boolean array (True = may attend), bias= for numbers that are added",
    "attention_mask": "mask= for a boolean array (True = may attend), bias= for numbers that are added",
    "attn_bias": "bias=",
    "key_padding_mask": "mask=KeyLengths(n), or mask=~m[:, None, None, :] where m is True for padding",
    "block_mask": "mask=, a mask object",
    "mask_mod": "mask=MaskFunction(f)",
    "dropout_p": "dropout=Dropout(p, seed)",
    "training": "dropout=Dropout(p, seed), or no dropout",
    "enable_gqa": "nothing: grouped heads need no switch, Hq may be any multiple of Hkv",
    "window_size": _WINDOW,
    "local_window_size": _WINDOW,
    "sliding_window": "mask=Window(w - 1, 0), which counts the query itself",
    "window_left": "mask=Window(left, 0)",
    "left_window_size": _WINDOW,
    "right_window_size": _WINDOW,
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "scaling": "scale=",
    "attn_scale": "scale=",
    "logits_soft_cap": "softcap=",
    "attn_logits_soft_cap": "softcap=",
    "logit_cap": "softcap=",
    "alibi_slopes": "bias=ALiBi(slopes)",
    "sinks": "sink=",
    "s_aux": "sink=",
    "head_sink": "sink=",
    "learnable_sink": "sink=",
    "cache_seqlens": "mask=KeyLengths(n)",
    "cache_leftpad": "mask=KeyStarts(n)",
    "cache_batch_idx": "key=k_cache[cache_batch_idx], or Paged(k_cache, cache_batch_idx[:, None], lengths)",
    "cache_position": "query_offset=, or cache.attend(query) of a KVCache, which has the positions",
    **dict.fromkeys(("past_key", "past_value", "past_kv", "layer_past"), _PAST),
    **dict.fromkeys(("past_key_value", "past_key_values", "present_key", "present_value"), _PAST),
    **dict.fromkeys(("kv_cache", "k_cache", "v_cache", "key_cache", "value_cache", "use_cache", "cache"), _CACHE),
    **dict.fromkeys(("block_table", "block_tables", "page_table", "page_indices", "paged_kv_cache"), _PAGES),
    **dict.fromkeys(("k_descale", "v_descale", "k_scale", "v_scale"), _SCALED),
    **dict.fromkeys(("key_scale", "value_scale", "kv_scales"), _SCALED),
    "q_descale": "query multiplied by it, in float16 or wider",
    "cu_seqlens": "mask=Packed(lengths), where lengths are np.diff(cu_seqlens)",
    "seqlens_k": "mask=KeyLengths(n)",
    "key_value_seq_lengths": "mask=KeyLengths(n)",
    "query_seq_lengths": "mask=QueryLengths(n)",
    "nonpad_kv_seqlen": 'mask=KeyLengths(n), query_offset="end"',
    "cu_seqlens_q": "mask=Packed(q_lengths, k_lengths)",
    "cu_seqlens_k": "mask=Packed(q_lengths, k_lengths)",
    "max_seqlen_q": "nothing: lengths come from the arrays and the mask",
    "max_seqlen_k": "nothing: lengths come from the arrays and the mask",
    "segment_ids": "mask=Segments(q_ids, k_ids)",
    "need_weights": "sdpa_weights(query, key, ...), or layer.with_weights(x, ...)",
    "return_attn_probs": "sdpa_weights(query, key, ...)",
    "return_weights": "sdpa_weights(query, key, ...)",
    "return_attention_scores": "sdpa_weights(query, key, ...), or layer.with_weights(x, ...)",
    "qk_matmul_output": "sdpa_stages(query, key, value, ...)",
    "return_lse": "sdpa_state(query, key, value, ...)",
    "return_aux": "sdpa_state(query, key, value, ...)",
    "return_residual": "sdpa_state(query, key, value, ...)",
    "implementation": "backend=",
    "deterministic": "nothing: results are always deterministic",
}


def unknown_keyword(keywords: Mapping[str, Any], ours: tuple[str, ...] = OURS) -> TypeError:
    """Return the error for the first of these keywords, where `ours` are those that a function takes."""
    name = next(iter(keywords))
    if name in _THEIRS:
        return TypeError(f"unknown keyword {name!r}; here it is {_THEIRS[name]}")
    if name in OURS:
        hint = "; merge the states, then add it once: state.with_sink(sink)" if name == "sink" and ours is OURS else ""
        return TypeError(f"keyword {name!r} does not apply to this function{hint}")
    from difflib import get_close_matches  # only an error needs it

    near = get_close_matches(name, ours, 1)
    return TypeError(
        f"unknown keyword {name!r}; {f'did you mean {near[0]}=?' if near else 'there are ' + ', '.join(ours)}"
    )


def known(options: Any, allowed: Any, ours: tuple[str, ...] = OURS) -> dict[str, Any]:
    """Return the options, or raise the error of the first that is not declared in `allowed`."""
    declared = allowed.__annotations__
    if not options.keys() <= declared.keys():
        raise unknown_keyword({name: option for name, option in options.items() if name not in declared}, ours)
    kept: dict[str, Any] = options
    return kept


def known_to_layers(options: Any, allowed: Any) -> dict[str, Any]:
    """Return the same for a layer, whose errors offer only what it takes."""
    return known(options, allowed, tuple(allowed.__annotations__))


def parted(options: Any, allowed: Any, backend: str | None = None) -> tuple[str | None, dict[str, Any]]:
    """Return the backend and the other options, or raise the error of the first that is not declared in `allowed`."""
    rest = known(options, allowed)
    return rest.pop("backend", backend), rest
