"""Rule 30 for whole models: a prefix, the names that models have, fused and turned weights, and GGUF files."""

import numpy as np
import pytest

from sdpa_ref import AttentionHead, Linear, MultiHeadAttention
from sdpa_ref.layers import read_weights
from sdpa_ref.testing import assert_same_bits

layer = MultiHeadAttention(6, 3, rng=1)
grouped = MultiHeadAttention(6, 4, num_kv_heads=2, head_size=3, bias=False, rng=1)
PARTS = ("query", "key", "value", "output")


def called(*names, of=layer):
    """Return the weights of a layer with its projections called so."""
    table = dict(zip(PARTS, names, strict=True))
    return {f"{table[name.partition('.')[0]]}.{name.partition('.')[2]}": a for name, a in of.state_dict().items()}


def fused(weight, bias, output, turned=False):
    """Return the weights with query, key and value in one, as GPT-2 has them where `turned`."""
    own = layer.state_dict()
    whole = {n: np.concatenate([own[f"{part}.{n}"] for part in PARTS[:3]]) for n in ("weight", "bias")}
    made = {weight: whole["weight"], bias: whole["bias"], f"{output}.weight": own["output.weight"]}
    made = {name: array.T if turned and array.ndim == 2 else array for name, array in made.items()}
    return {**made, f"{output}.bias": own["output.bias"]}


MODELS = {
    "BERT": ("encoder.layer.3.attention.", called("self.query", "self.key", "self.value", "output.dense")
             | {f"output.LayerNorm.{n}": np.ones(6) for n in ("weight", "bias")}),
    "ViT": ("vit.layer.3.attention.", called("attention.query", "attention.key", "attention.value", "output.dense")),
    "DistilBERT": ("layer.3.attention.", called("q_lin", "k_lin", "v_lin", "out_lin")),
    "BART": ("decoder.layers.3.self_attn.", called("q_proj", "k_proj", "v_proj", "out_proj")),
    "T5": ("block.3.layer.0.SelfAttention.", called("q", "k", "v", "o")),
    "PyTorch": ("layers.3.self_attn.", fused("in_proj_weight", "in_proj_bias", "out_proj")),
    "timm": ("blocks.3.attn.", fused("qkv.weight", "qkv.bias", "proj")),
    "GPT-2": ("h.3.attn.", fused("c_attn.weight", "c_attn.bias", "c_proj", turned=True)
              | {"bias": np.tri(9)[None, None], "masked_bias": np.array(-1e4)}),
    "nanoGPT": ("h.3.attn.", fused("c_attn.weight", "c_attn.bias", "c_proj")),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_rule_30_names_of_models(name):
    prefix, entries = MODELS[name]
    model = {prefix + entry: array for entry, array in entries.items()} | {"elsewhere.weight": np.ones(3)}
    again = MultiHeadAttention.from_state_dict(model, prefix=prefix, num_heads=3).state_dict()
    assert again.keys() == layer.state_dict().keys()
    for entry, array in layer.state_dict().items():
        assert_same_bits(again[entry], array)


def test_rule_30_llama_from_a_file(tmp_path):
    from safetensors.numpy import save_file

    entries = called("q_proj", "k_proj", "v_proj", "o_proj", of=grouped) | {"rotary_emb.inv_freq": np.ones(2)}
    model = {f"model.layers.{n}.self_attn.{name}": (n + 1) * a for n in range(2) for name, a in entries.items()}
    save_file(model, tmp_path / "model.safetensors")
    prefix = "model.layers.1.self_attn."
    again = MultiHeadAttention.load(tmp_path / "model.safetensors", prefix=prefix, num_heads=4)
    np.testing.assert_array_equal(again.key.weight, 2 * grouped.key.weight)
    assert set(read_weights(tmp_path / "model.safetensors", prefix)) == {prefix + name for name in entries}
    with pytest.raises(ValueError, match=r"prefix must be how some names begin, got 'encoder'; there are model.layers"):
        MultiHeadAttention.load(tmp_path / "model.safetensors", prefix="encoder", num_heads=4)
    with pytest.raises(ValueError, match=r"prefix='model.layers.0.self_attn.' fits, one of 2 that do"):
        MultiHeadAttention.load(tmp_path / "model.safetensors", num_heads=4)


def test_rule_30_a_table_of_names():
    entries = {f"mine.{name}": array for name, array in called("a", "b", "c", "d").items()} | {"mine.scale": np.ones(1)}
    names = {"a": "query", "b": "key", "c": "value", "d": "output", "scale": None}
    again = MultiHeadAttention.from_state_dict(entries, prefix="mine.", names=names, num_heads=3)
    assert_same_bits(again.value.bias, layer.value.bias)
    with pytest.raises(ValueError, match="unexpected: scale"):
        MultiHeadAttention.from_state_dict(entries, prefix="mine.", names={**names, "scale": "scale"}, num_heads=3)
    with pytest.raises(ValueError, match=r"mine.a.weight and mine.b.weight are both query.weight here"):
        MultiHeadAttention.from_state_dict(entries, prefix="mine.", names={**names, "b": "query"}, num_heads=3)
    weight = np.ones((2, 3))
    assert_same_bits(Linear.from_state_dict({"fc.w": weight}, prefix="fc.", names={"w": "weight"}).weight, weight)


def test_rule_30_wrong_prefix_and_names():
    with pytest.raises(TypeError, match="prefix must be a str, got int"):
        Linear.from_state_dict({"weight": np.ones((2, 3))}, prefix=3)
    with pytest.raises(TypeError, match="names must be a mapping of names to names, or to None, got list"):
        Linear.from_state_dict({"weight": np.ones((2, 3))}, names=["weight"])
    with pytest.raises(ValueError, match="prefix must be how some names begin, got 'a'; there are no entries"):
        Linear.from_state_dict({}, prefix="a")


def test_rule_30_a_model_of_another_family_is_an_error_that_says_what_is_there():
    """GPT-NeoX has query, key and value of each head side by side, which no table of names takes apart."""
    entries = {"query_key_value.weight": np.ones((18, 6)), "dense.weight": np.ones((6, 6))}
    with pytest.raises(ValueError, match="cannot take these weights") as error:
        MultiHeadAttention.from_state_dict(
            {f"layers.0.attention.{name}": array for name, array in entries.items()},
            prefix="layers.0.attention.", num_heads=3,
        )  # fmt: skip
    assert str(error.value).splitlines()[1:] == [
        "  missing: query.weight, key.weight, value.weight, output.weight",
        "  unexpected: query_key_value.weight, dense.weight",
        "  no layer in it has these names: names= tells what is what, as in names={'its name': 'query'}",
    ]


def test_rule_30_gguf_files(tmp_path):
    gguf = pytest.importorskip("gguf", reason="GGUF files need gguf: pip install 'sdpa-ref[gguf]'")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    wide = MultiHeadAttention(64, 4, num_kv_heads=2, bias=False, rng=1)
    for name, array in called("attn_q", "attn_k", "attn_v", "attn_output", of=wide).items():
        writer.add_tensor(f"blk.0.{name}", array)
    codes = gguf.quants.quantize(wide.query.weight, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.1.attn_q.weight", codes, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(64, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    again = MultiHeadAttention.load(path, prefix="blk.0.attn_", names={"norm": None}, num_heads=4)
    for entry, array in again.state_dict().items():
        np.testing.assert_array_equal(array, wide.state_dict()[entry])
    (of_codes,) = read_weights(path, "blk.1.").values()
    assert (of_codes.shape, of_codes.dtype) == ((64, 64), np.float32)
    np.testing.assert_allclose(of_codes, wide.query.weight, atol=0.01 * abs(wide.query.weight).max())
    (as_codes,) = read_weights(path, "blk.1.", codes=True).values()
    assert as_codes.nbytes == 64 * 64 * 34 // 32
    np.testing.assert_array_equal(as_codes.dense().astype(np.float32), of_codes)
    assert read_weights(path, "blk.0.attn_q", codes=True)["blk.0.attn_q.weight"].dtype == np.float32
    with pytest.raises(ValueError, match=r"prefix must be how some names begin, got 'h\.'; there are blk"):
        AttentionHead.load(path, prefix="h.")
    (tmp_path / "broken").write_bytes(b"GGUF\x63\0\0\0" + b"x" * 99)
    with pytest.raises(ValueError, match=r"cannot read .*broken as a GGUF file"):
        read_weights(tmp_path / "broken")


def test_rule_30_without_gguf(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "x").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ModuleNotFoundError, match=r'GGUF files need the package gguf: pip install "sdpa-ref\[gguf\]"'):
        Linear.load(tmp_path / "x")
