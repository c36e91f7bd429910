"""Stored keys beside other projects: FlashInfer, ONNX Runtime with a past, the caches of transformers."""

import numpy as np
import pytest

import sdpa_ref as sr
from sdpa_ref import Causal, KeyLengths, KVCache, Paged, Window


def attended(query, keys, values):
    """Return attention of one query over all keys, by the formula, a group of query heads at a time."""
    heads, group = len(keys), len(query) // len(keys)
    q = query.reshape(heads, group, -1)
    s = q @ keys.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True) @ values).reshape(query.shape)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_page_tables_of_flashinfer(backend, layout):
    """The numbers of the example in its documentation: seven requests over 128 pages of 16 keys."""
    indptr = np.array([0, 17, 29, 44, 48, 66, 100, 128])
    last_page_len, P, Hq, Hkv, E = np.array([1, 7, 14, 4, 3, 1, 16]), 16, 8, 2, 32
    rng = np.random.default_rng(0)
    indices = rng.permutation(128)
    kv_cache = rng.standard_normal((128, 2, P, Hkv, E))  # NHD: pages of keys and of values side by side
    query = rng.standard_normal((7, Hq, E))
    pages = np.diff(indptr)
    table = np.full((7, pages.max()), -1)
    for b in range(7):
        table[b, : pages[b]] = indices[indptr[b] : indptr[b + 1]]
    lengths = (pages - 1) * P + last_page_len
    parts = kv_cache[:, 0], kv_cache[:, 1]
    if layout == "NHD":
        key, value = (Paged(part, table, lengths, layout="LHE") for part in parts)
        got = sr.sdpa(query[:, None], key, value, layout="LHE", backend=backend)[:, 0]
    else:
        key, value = (Paged(part.swapaxes(1, 2), table, lengths) for part in parts)
        got = sr.sdpa(query[:, :, None], key, value, backend=backend)[:, :, 0]
    for b in range(7):
        rows = [part[table[b, : pages[b]]].reshape(-1, Hkv, E)[: lengths[b]].swapaxes(0, 1) for part in parts]
        np.testing.assert_allclose(got[b], attended(query[b], *rows), atol=1e-12)


def test_group_query_attention_of_onnx_runtime_with_a_past(backend):
    onnxruntime = pytest.importorskip("onnxruntime")
    helper = pytest.importorskip("onnx").helper
    B, Hq, Hkv, E, room = 2, 4, 2, 16, 24
    rng = np.random.default_rng(0)

    def session(L, past):
        kinds = {
            "q": (B, L, Hq * E), "k": (B, L, Hkv * E), "v": (B, L, Hkv * E),
            "past_k": (B, Hkv, past, E), "past_v": (B, Hkv, past, E),
        }  # fmt: skip
        floats, integers = (helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in ("float32", "int32"))
        inputs = [helper.make_tensor_value_info(name, floats, shape) for name, shape in kinds.items()]
        inputs += [helper.make_tensor_value_info("last", integers, (B,))]
        inputs += [helper.make_tensor_value_info("total", integers, (1,))]
        results = {"y": (B, L, Hq * E), "key": (B, Hkv, None, E), "value": (B, Hkv, None, E)}
        outputs = [helper.make_tensor_value_info(name, floats, shape) for name, shape in results.items()]
        node = helper.make_node(
            "GroupQueryAttention", [*kinds, "last", "total"], list(results), domain="com.microsoft", num_heads=Hq,
            kv_num_heads=Hkv,
        )  # fmt: skip
        graph = helper.make_graph([node], "past", inputs, outputs)
        versions = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=versions, ir_version=10)
        return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    cache = KVCache(B, Hkv, E, capacity=room)
    past = [np.zeros((B, Hkv, 0, E), np.float32)] * 2
    total = 0
    for T in (9, 1, 1, 1):  # a prompt, then tokens
        q, k, v = (rng.standard_normal((B, h, T, E), np.float32) for h in (Hq, Hkv, Hkv))
        total += T
        flat = [x.swapaxes(1, 2).reshape(B, T, -1) for x in (q, k, v)]
        names = ("q", "k", "v", "past_k", "past_v", "last", "total")
        lengths = np.full(B, total - 1, np.int32), np.array([total], np.int32)
        given = dict(zip(names, (*flat, *past, *lengths), strict=True))
        y, *past = session(T, total - T).run(None, given)
        theirs = y.reshape(B, T, Hq, E).swapaxes(1, 2)
        cache.append(k, v)
        np.testing.assert_allclose(cache.attend(q, backend=backend), theirs, atol=2e-6)
        np.testing.assert_array_equal(cache.key[:, :, :total], past[0][:, :, :total])
        mask = KeyLengths(lengths[0] + 1) & Causal()  # as docs/serving.md puts it
        got = sr.sdpa(q, past[0], past[1], mask=mask, query_offset="end", backend=backend)
        np.testing.assert_allclose(got, theirs, atol=2e-6)


class TestTransformers:
    """Its cache classes return what has to be attended; here that is done by the cache."""

    B, Hq, Hkv, E = 2, 4, 2, 16

    def steps(self, lengths):
        rng = np.random.default_rng(0)
        for T in lengths:
            yield tuple(rng.standard_normal((self.B, h, T, self.E), np.float32) for h in (self.Hq, self.Hkv, self.Hkv))

    def updated(self, cache, key, value, **more):
        torch = pytest.importorskip("torch")
        keys, values = cache.update(torch.from_numpy(key.copy()), torch.from_numpy(value.copy()), 0, **more)
        return keys.numpy(), values.numpy()

    def test_dynamic_cache_with_crop_and_beams(self, backend):
        torch, library = pytest.importorskip("torch"), pytest.importorskip("transformers")
        theirs, ours = library.DynamicCache(), KVCache(self.B, self.Hkv, self.E)
        for i, (query, key, value) in enumerate(self.steps((7, 1, 4, 1, 1))):
            keys, values = self.updated(theirs, key, value)
            ours.append(key, value)
            expected = sr.sdpa(query, keys, values, mask=Causal(), query_offset="end", backend=backend)
            np.testing.assert_allclose(ours.attend(query, backend=backend), expected, atol=1e-6)
            if i == 2:  # two of four drafted tokens were wrong
                theirs.crop(-2)
                ours.crop(ours.lengths - 2)
            if i == 3:
                theirs.reorder_cache(torch.tensor([1, 1]))
                ours.select([1, 1])
            np.testing.assert_array_equal(ours.lengths, theirs.get_seq_length())

    def test_a_sliding_window(self, backend):
        library = pytest.importorskip("transformers")
        config = library.LlamaConfig(num_hidden_layers=1, sliding_window=5, num_attention_heads=self.Hq)
        config.layer_types = ["sliding_attention"]
        theirs, ours = library.DynamicCache(config=config), KVCache(self.B, self.Hkv, self.E, window=5)
        for query, key, value in self.steps((3, 1, 1, 1, 1, 1, 1)):
            keys, values = self.updated(theirs, key, value)
            ours.append(key, value)
            mask = Causal() & Window(4, 0)
            expected = sr.sdpa(query, keys, values, mask=mask, query_offset="end", backend=backend)
            np.testing.assert_allclose(ours.attend(query, backend=backend), expected, atol=1e-6)
