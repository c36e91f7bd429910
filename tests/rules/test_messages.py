"""Bad input: the type of each error, and that its message names the argument, what it got and what would be right."""

import numpy as np
import pytest
from naive import qkv

import sdpa_ref
from sdpa_ref import (
    ALiBi,
    AttentionState,
    Causal,
    Chunked,
    Dropout,
    FirstTokens,
    KeyLengths,
    MaskFunction,
    Packed,
    Prefix,
    QueryLengths,
    Segments,
    Tree,
    Window,
    alibi_slopes,
    sdpa,
    sdpa_stages,
    sdpa_state,
    sdpa_vjp,
    sdpa_weights,
    sdpa_with_vjp,
)

Q, K, V = qkv(np.float32)
PAIRS = np.ones((2, 6, 5, 7), bool)
SWAPPED = {"query": Q.swapaxes(1, 2), "key": K.swapaxes(1, 2), "value": V.swapaxes(1, 2)}
RAGGED = [[1.0, 2.0], [3.0]]
LOCKED = np.empty((2, 6, 5, 8), np.float32)
LOCKED.setflags(write=False)

# What is changed in a right call, the error, and what its message must say.
CALLS = {
    "integer query": ({"query": Q.astype(int)}, TypeError, ["query must be float16", "got int64", r"query\.astype"]),
    "object key": ({"key": K.astype(object)}, TypeError, ["key must be float16", "got object"]),
    "complex value": ({"value": V.astype(complex)}, TypeError, ["value must be float16", "got complex128"]),
    "boolean query": ({"query": Q > 0}, TypeError, ["query must be float16", "got bool"]),
    "text": ({"query": "abc"}, TypeError, ["query must be"]),
    "ragged lists": ({"key": RAGGED}, TypeError, ["key must be an array", "got list"]),
    "masked array": ({"key": np.ma.masked_less(K, 0)}, TypeError, ["key is a masked array", r"\.filled\(0\)", "mask="]),
    "masked query": ({"query": np.ma.masked_less(Q, 0)}, TypeError, [r"would be lost: pass query\.filled\(0\), or "]),
    "rank 1": ({"query": Q[0, 0, 0]}, ValueError, ["query must have at least 2 axes", "H, length, width", r"\(4,\)"]),
    "rank 0": ({"value": np.float32(1)}, ValueError, ["value must have at least 2 axes", r"\(\)"]),
    "heads": ({"query": Q[:, :4]}, ValueError, ["Hq = 4 must be a multiple of .* Hkv = 3", r"query \(2, 4, 5, 4\)"]),
    "no key heads": ({"key": K[:, :0], "value": V[:, :0]}, ValueError, ["Hq = 6", "Hkv = 0"]),
    "value heads": ({"value": V[:, :1]}, ValueError, ["key and value", "heads Hkv, got 3 and 1"]),
    "widths": ({"key": K[..., :3]}, ValueError, ["query and key .* width E, got 4 and 3", r"key \(2, 3, 7, 3\)"]),
    "lengths": ({"value": V[:, :, :6]}, ValueError, ["key and value must have the same length S, got 7 and 6"]),
    "batches": ({"query": Q[[0, 1, 1]]}, ValueError, ["leading axes", "must broadcast", r"query \(3, 6, 5, 4\)"]),
    "layout of the other kind": ({"layout": "LHE"}, ValueError, ["in layout LHE"]),
    "layout": ({"layout": "BLHE"}, ValueError, ["layout must be", '"HLE"', '"LHE"', "got 'BLHE'"]),
    "0/1 mask": ({"mask": PAIRS.astype(int)}, TypeError, ["mask must be", "boolean", "got int64", r"astype\(bool\)"]),
    "float mask": ({"mask": PAIRS.astype(np.float32)}, TypeError, ["mask must be", "boolean", "got float32", "bias="]),
    "object mask": ({"mask": PAIRS.astype(object)}, TypeError, ["mask must be", "object"]),
    "mask text": ({"mask": "causal"}, TypeError, [r"got str; write a mask object, such as Causal\(\)"]),
    "mask (B, S)": ({"mask": PAIRS[:, 0, 0]}, ValueError, [r"padding pass mask\[:, None, None, :\] or KeyLen"]),
    "heads after lengths": (SWAPPED, ValueError, ["Hq = 5", "Hkv = 7", '; for heads after lengths: layout="LHE"']),
    "mask class": ({"mask": Causal}, TypeError, ["mask must be a mask object", r"Causal\(\.\.\.\)"]),
    "mask shape": ({"mask": PAIRS[..., :6]}, ValueError, [r"mask must .* \(2, 6, 5, 7\), got \(2, 6, 5, 6\)"]),
    "mask of too many axes": ({"mask": PAIRS[None]}, ValueError, ["mask must broadcast", r"got \(1, 2, 6, 5, 7\)"]),
    "mask (B, L, S)": ({"mask": PAIRS[:, 0]}, ValueError, [r"got \(2, 5, 7\)", r"mask\[:, None\]", "query heads"]),
    "mask of key heads": ({"mask": PAIRS[:, :3]}, ValueError, [r"got \(2, 3, 5, 7\)", r"\(2, 6, 5, 7\)"]),
    "bias (B, L, S)": ({"bias": np.zeros((2, 5, 7))}, ValueError, [r"bias must .*got \(2, 5, 7\)", r"bias\[:, None\]"]),
    "boolean bias": ({"bias": PAIRS}, TypeError, ["bias must be float", "mask="]),
    "integer bias": ({"bias": PAIRS.astype(int)}, TypeError, ["bias must be float16", "got int64"]),
    "mask as bias": ({"bias": Causal()}, TypeError, ["bias"]),
    "slopes": ({"bias": ALiBi([1.0, 2.0])}, ValueError, ["ALiBi slopes", r"\(Hq,\) = \(6,\) or .* got \(2,\)"]),
    "infinite scale": ({"scale": np.inf}, ValueError, ["scale must be finite", "got inf"]),
    "scale of NaN": ({"scale": np.nan}, ValueError, ["scale must be finite", "got nan"]),
    "scale array": ({"scale": np.ones(6)}, TypeError, ["scale must be a real number", "got ndarray"]),
    "scale text": ({"scale": "1"}, TypeError, ["scale must be a real number", "got str"]),
    "softcap 0": ({"softcap": 0.0}, ValueError, ["softcap must be finite and above 0", "None turns it off", "got 0.0"]),
    "softcap below 0": ({"softcap": -1}, ValueError, ["softcap must be finite and above 0", "got -1"]),
    "softcap NaN": ({"softcap": np.nan}, ValueError, ["softcap must be finite", "None", "got nan"]),
    "infinite softcap": ({"softcap": np.inf}, ValueError, ["softcap must be finite", "None", "got inf"]),
    "softcap text": ({"softcap": "2"}, TypeError, ["softcap must be a real number or None", "got str"]),
    "sink shape": ({"sink": np.zeros(3)}, ValueError, ["sink must be", r"\(Hq,\) = \(6,\), got \(3,\)"]),
    "sink type": ({"sink": np.ones(6, complex)}, TypeError, ["sink must be real", "got complex128"]),
    "causal, no offset": ({"mask": Causal()}, ValueError, ["query_offset", "L = 5 and S = 7", '"start"', '"end"']),
    "offset word": ({"query_offset": "bottom"}, ValueError, ['query_offset .*"start" or "end"', "got 'bottom'"]),
    "offset float": ({"mask": Causal(), "query_offset": 2.0}, TypeError, ["query_offset must be an int", "float64"]),
    "offset shape": ({"query_offset": [0, 1, 2]}, ValueError, [r"query_offset .*\(2,\), got shape \(3,\)"]),
    "far offset": ({"mask": Causal(), "query_offset": 2**50}, ValueError, ["query_offset must be within", "1125899"]),
    "keys beyond S": ({"mask": KeyLengths([3, 8])}, ValueError, ["KeyLengths", r"\[0, S\] = \[0, 7\], got 8"]),
    "queries beyond L": ({"mask": QueryLengths(6)}, ValueError, ["QueryLengths", r"\[0, L\] = \[0, 5\], got 6"]),
    "score_mod": ({"score_mod": 2.0}, TypeError, [r"score_mod must be a function f\(s, b, h, i, j\)", "got float"]),
    "dropout": ({"dropout": 0.1}, TypeError, [r"dropout must be a Dropout\(p, seed\)", "got float"]),
    "backend": ({"backend": "cuda"}, ValueError, ["unknown backend 'cuda'", "'reference'"]),
    "unusable": ({"backend": "broken"}, sdpa_ref.BackendUnavailable, ["'broken' cannot run here", "pip install"]),
    "out shape": ({"out": LOCKED.swapaxes(2, 3)}, ValueError, [r"out must .* \(2, 6, 5, 8\).*got \(2, 6, 8, 5\)"]),
    "out type": ({"out": np.empty((2, 6, 5, 8))}, ValueError, ["out must have", "dtype float32", "got .* and float64"]),
    "out read-only": ({"out": LOCKED}, ValueError, ["out must be writeable", "read-only"]),
    "out onto itself": ({"out": np.broadcast_to(np.float32(0), LOCKED.shape)}, ValueError, ["out"]),
    "out list": ({"out": [1.0]}, TypeError, ["out must be a numpy array", "got list"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_bad_argument(backend, case):
    changed, error, words = CALLS[case]
    with pytest.raises(error) as caught:
        sdpa(**{"query": Q, "key": K, "value": V, "backend": backend} | changed)
    for word in words:
        caught.match(word)


def test_out_that_is_an_input(backend):
    with pytest.raises(ValueError, match="out must not share memory with query, key, value, mask, bias or sink"):
        sdpa(Q, K, V[..., :4], out=Q, backend=backend)


# Making the object is the error already.
OBJECTS = {
    "negative window": (lambda: Window(-1, 0), ValueError, "Window left must be at least 0, got -1; None leaves"),
    "negative right window": (lambda: Window(None, -3), ValueError, "Window right must be at least 0, got -3; None"),
    "half a window": (lambda: Window(7), TypeError, r"Window\(left, right\); to look back only: Window\(7, 0\)"),
    "float window": (lambda: Window(2.0, 0), TypeError, "Window left must be an integer, got float"),
    "boolean window": (lambda: Window(True, 0), TypeError, "Window left must be an integer, got bool"),
    "negative length": (lambda: KeyLengths([3, -1]), ValueError, "KeyLengths must not be negative, got -1"),
    "float lengths": (lambda: KeyLengths([3.0]), TypeError, "KeyLengths must be integers, got float64"),
    "boolean lengths": (lambda: KeyLengths(np.ones(3, bool)), TypeError, "KeyLengths must be integers, got bool"),
    "negative prefix": (lambda: Prefix(-1), ValueError, "Prefix must not be negative"),
    "chunks of nothing": (lambda: Chunked(0), ValueError, "Chunked size must be at least 1, got 0"),
    "negative first tokens": (lambda: FirstTokens(-1), ValueError, "FirstTokens n must be at least 0, got -1"),
    "float ids": (lambda: Segments([0.5]), TypeError, "Segments q_ids must be integers, got float64"),
    "id": (lambda: Segments(3), ValueError, "Segments q_ids must have at least 1 axis"),
    "documents": (lambda: Packed([1, 2], [3]), ValueError, "as many q_lengths as k_lengths.*got 2 and 1"),
    "negative document": (lambda: Packed([1, -2]), ValueError, "Packed q_lengths must not be negative, got -2"),
    "child before parent": (lambda: Tree([-1, 2, 0]), ValueError, "an earlier node, got 2 for node 1"),
    "own parent": (lambda: Tree([0]), ValueError, "an earlier node, got 0 for node 0"),
    "below a root": (lambda: Tree([-2]), ValueError, r"must be -1 \(a root\) or an earlier node, got -2"),
    "no function": (lambda: MaskFunction(3), TypeError, r"MaskFunction needs a function f\(b, h, i, j\), got int"),
    "mask and number": (lambda: Causal() & 1, TypeError, "mask must be a mask object or a boolean array.*got int64"),
    "mask and floats": (lambda: np.ones((5, 7)) | Causal(), TypeError, "mask must be .*got float64.*bias="),
    "slopes": (lambda: ALiBi([np.inf]), ValueError, "ALiBi slopes must be finite"),
    "slope text": (lambda: ALiBi("steep"), TypeError, "ALiBi slopes must be real numbers"),
    "heads": (lambda: alibi_slopes(-1), ValueError, "heads must be at least 0, got -1"),
    "half a head": (lambda: alibi_slopes(2.5), TypeError, "heads must be an integer, got float"),
    "certain dropout": (lambda: Dropout(1.0, 0), ValueError, r"p must be in \[0, 1\), got 1.0"),
    "negative dropout": (lambda: Dropout(-0.1, 0), ValueError, r"p must be in \[0, 1\), got -0.1"),
    "dropout text": (lambda: Dropout("0.1", 0), TypeError, "p must be a real number, got str"),
    "no seed": (lambda: Dropout(0.1), TypeError, "seed"),
    "float seed": (lambda: Dropout(0.1, 1.0), TypeError, "seed must be an integer, got float"),
    "long seed": (lambda: Dropout(0.1, 2**64), ValueError, r"seed must be in \[0, 2\*\*64\), got 18446744073709551616"),
    "negative state": (lambda: AttentionState.empty((2, -3), 4), ValueError, r"shape\[1\] must be at least 0, got -3"),
    "half a state": (lambda: AttentionState.empty((2.5,), 4), TypeError, r"shape\[0\] must be an integer, got float"),
    "state of no shape": (lambda: AttentionState.empty(3, 4), TypeError, "shape must be a tuple of integers, got int"),
    "state of negative width": (lambda: AttentionState.empty((3,), -4), ValueError, "Ev must be at least 0, got -4"),
    "state of other shapes": (lambda: AttentionState(Q, Q), ValueError, "lse must have the shape of output without"),
    "integer state": (lambda: AttentionState(Q.astype(int), Q[..., 0]), TypeError, "output must be float, got int64"),
    "state layout": (lambda: AttentionState(Q, Q[..., 0], "EHL"), ValueError, "layout must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", OBJECTS)
def test_bad_object(case):
    make, error, message = OBJECTS[case]
    with pytest.raises(error, match=message):
        make()


THEIRS = {
    "is_causal": r"mask=Causal\(\).*query_offset", "causal": r"mask=Causal\(\)", "attn_mask": "mask=.*True.*bias=",
    "key_padding_mask": r"KeyLengths\(n\)|~m", "block_mask": "mask=", "attn_bias": "bias=",
    "dropout_p": r"dropout=Dropout\(p, seed\)", "enable_gqa": "no switch", "implementation": "backend=",
    "window_size": r"mask=Window\(left, right\)", "sliding_window": r"Window\(w - 1, 0\)",
    "softmax_scale": "scale=", "sm_scale": "scale=", "logits_soft_cap": "softcap=", "sinks": "sink=",
    "alibi_slopes": r"bias=ALiBi\(slopes\)", "cu_seqlens_q": "mask=Packed", "max_seqlen_k": "lengths",
    "cache_seqlens": r"KeyLengths\(n\)", "segment_ids": "mask=Segments",
    "need_weights": r"sdpa_weights\(", "return_lse": r"sdpa_state\(",
}  # fmt: skip


@pytest.mark.parametrize("keyword", THEIRS)
def test_keyword_of_another_library_shows_our_spelling(backend, keyword):
    grad = np.ones((2, 6, 5, 8), np.float32)
    for function, arrays in (
        (sdpa, (Q, K, V)),
        (sdpa_state, (Q, K, V)),
        (sdpa_weights, (Q, K)),
        (sdpa_vjp, (Q, K, V, grad)),
        (sdpa_with_vjp, (Q, K, V)),
    ):
        with pytest.raises(TypeError, match=f"unknown keyword '{keyword}'.*{THEIRS[keyword]}"):
            function(*arrays, backend=backend, **{keyword: None})
    with pytest.raises(TypeError, match=f"unknown keyword '{keyword}'"):
        sdpa_stages(Q, K, V, **{keyword: None})


def test_keyword_that_nobody_has_shows_the_nearest_or_all():
    with pytest.raises(TypeError, match=r"unknown keyword 'soft_cap'; did you mean softcap=\?"):
        sdpa(Q, K, V, soft_cap=2.0)
    with pytest.raises(TypeError, match="unknown keyword 'colour'; there are mask, bias, scale"):
        sdpa(Q, K, V, colour="red")


def test_keyword_of_another_function_of_ours():
    with pytest.raises(TypeError, match=r"'sink' does not apply to this function.*with_sink"):
        sdpa_state(Q, K, V, sink=0.0)
    with pytest.raises(TypeError, match="'grad_lse' does not apply"):
        sdpa(Q, K, V, grad_lse=None)
    with pytest.raises(TypeError, match="'out' does not apply"):
        sdpa_stages(Q, K, V, out=None)


GRADIENTS = {
    "shape": (np.ones((2, 6, 8, 5)), {}, ValueError, r"grad_output must have shape \(2, 6, 5, 8\), got \(2, 6, 8, 5\)"),
    "type": (np.ones((2, 6, 5, 8), int), {}, TypeError, "grad_output must be float16.*got int64"),
    "layout": (np.ones((2, 6, 5, 8)), {"layout": "LHE"}, ValueError, r"grad_output must have shape \(2, 5, 6, 8\)"),
    "lse": (
        np.ones((2, 6, 5, 8)),
        {"grad_lse": np.ones((2, 6))},
        ValueError,
        r"grad_lse must have shape \(2, 6, 5\), got \(2, 6\)",
    ),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_bad_gradient(backend, case):
    grad_output, options, error, message = GRADIENTS[case]
    arrays = [x.swapaxes(1, 2) if "layout" in options else x for x in (Q, K, V)]
    with pytest.raises(error, match=message):
        sdpa_vjp(*arrays, grad_output, backend=backend, **options)


def test_bad_place_to_look_at():
    with pytest.raises(ValueError, match=r"i must be in \[0, 4\), got 4"):
        Causal().explain(4, 0, 4, 4)
    with pytest.raises(ValueError, match=r"j must be in \[0, 4\), got -1"):
        Causal().explain(0, -1, 4, 4)


@pytest.mark.parametrize(
    ("keyword", "ours"),
    [
        ("past_key_values", r"cache\.append\(key, value\), then cache\.attend\(query\), of a KVCache"),
        ("k_cache", r"cache\.append"),
        ("kv_cache", r"cache\.append"),
        ("cache_position", r"query_offset="),
        ("page_table", r"Paged\(pages, table, lengths\)"),
        ("block_tables", r"Paged\("),
        ("k_scale", r"Quantized\(codes, scale\)"),
    ],
)
def test_keywords_of_caches_are_led_to_ours(keyword, ours):
    with pytest.raises(TypeError, match=f"^unknown keyword '{keyword}'; here it is .*{ours}"):
        sdpa(Q, K, V, **{keyword: None})
