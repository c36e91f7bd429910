"""Rule 30 of the semantics: weights are drawn, loaded and saved under PyTorch's names."""

import json
import os
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from sdpa_ref import AttentionHead, Embedding, Linear, MultiHeadAttention, SpatialAttention
from sdpa_ref.testing import assert_same_bits

LAYERS = {
    "linear": lambda **options: Linear(6, 10, **options),
    "head": lambda **options: AttentionHead(6, 5, **options),
    "multi-head": lambda **options: MultiHeadAttention(6, 3, **options),
    "spatial": lambda **options: SpatialAttention(6, 2, 5, **options),
    "embedding": lambda **options: Embedding(6, 10, **options),
}
GIVEN = {"multi-head": {"num_heads": 3}, "spatial": {"heads": 2}}
TYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def test_rule_30_names_and_shapes():
    shapes = {name: {n: a.shape for n, a in make().state_dict().items()} for name, make in LAYERS.items()}
    parts = ("query", "key", "value")
    assert shapes == {
        "linear": {"weight": (10, 6), "bias": (10,)},
        "head": {f"{p}.{n}": shape for p in parts for n, shape in (("weight", (5, 6)), ("bias", (5,)))},
        "multi-head": {
            f"{p}.{n}": shape for p in (*parts, "output") for n, shape in (("weight", (6, 6)), ("bias", (6,)))
        },
        "spatial": {"to_qkv.weight": (30, 6, 1, 1), "to_out.weight": (6, 10, 1, 1), "to_out.bias": (6,)},
        "embedding": {"weight": (6, 10)},
    }


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_rule_30_round_trip(name, dtype, tmp_path):
    layer, given, path = LAYERS[name](rng=1, dtype=dtype), GIVEN.get(name, {}), tmp_path / "layer.safetensors"
    layer.save(path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    for again in (type(layer).load(path, **given), type(layer).from_state_dict(layer.state_dict(), **given)):
        assert repr(again) == repr(layer)
        for (name, a), (other, b) in zip(layer.state_dict().items(), again.state_dict().items(), strict=True):
            assert name == other
            assert_same_bits(a, b)


@pytest.mark.parametrize("name", ["linear", "head", "multi-head"])
def test_rule_30_without_bias(name):
    layer = LAYERS[name](bias=False)
    assert not any("bias" in entry for entry in layer.state_dict())
    type(layer).from_state_dict(layer.state_dict(), **GIVEN.get(name, {}))


def test_rule_30_odd_memory_is_saved_right(tmp_path):
    weight = np.arange(12.0).reshape(3, 4)
    for name, odd in (("transposed", weight.T.copy().T), ("swapped", weight.astype(">f8")), ("flipped", weight[::-1])):
        Linear.from_state_dict({"weight": odd}).save(tmp_path / name)
        np.testing.assert_array_equal(Linear.load(tmp_path / name).weight, odd)


def test_rule_30_fused_projections():
    entries = MultiHeadAttention(6, 3, rng=1).state_dict()
    fused = {"out_proj.weight": entries["output.weight"], "out_proj.bias": entries["output.bias"]}
    for name in ("weight", "bias"):
        fused[f"in_proj_{name}"] = np.concatenate([entries[f"{part}.{name}"] for part in ("query", "key", "value")])
    again = MultiHeadAttention.from_state_dict(fused, num_heads=3).state_dict()
    assert again.keys() == entries.keys()
    for name, array in again.items():
        assert_same_bits(array, entries[name])
    del fused["in_proj_bias"], fused["out_proj.bias"]
    assert MultiHeadAttention.from_state_dict(fused, num_heads=3).key.bias is None
    fused["in_proj_weight"] = fused["in_proj_weight"][:17]
    fused["bias_q"] = np.zeros((1, 1, 6))
    with pytest.raises(ValueError, match="cannot take these weights") as error:
        MultiHeadAttention.from_state_dict(fused, num_heads=3)
    assert str(error.value).splitlines()[1:] == [
        "  unexpected: bias_q",
        "  in_proj_weight must have shape (3*hidden_size, hidden_size) = (18, 6), got (17, 6)",
    ]


def test_rule_30_one_error_lists_all_that_is_wrong():
    entries = MultiHeadAttention(6, 3).state_dict()
    entries["key.weights"] = entries.pop("key.weight")
    entries["query.weight"] = np.zeros((6, 7), np.float32)
    entries["value.bias"] = np.zeros(6, int)
    entries["output.bias"] = np.zeros((1, 6), np.float32)
    with pytest.raises(ValueError, match="MultiHeadAttention cannot take these weights") as error:
        MultiHeadAttention.from_state_dict(entries, num_heads=3)
    assert str(error.value).splitlines()[1:] == [
        "  missing: key.weight",
        "  unexpected: key.weights",
        "  query.weight must have shape (num_heads*head_size, hidden_size) = (6, 6), got (6, 7)",
        "  value.bias must be float16, bfloat16, float32 or float64, got int64",
        "  output.bias must have shape (hidden_size) = (6,), got (1, 6)",
    ]


@pytest.mark.parametrize("name", ["encoder.layer.{}.output.weight", "layer{}.weight", "block{}_weight"])
def test_rule_30_a_whole_model_is_an_error_of_few_lines(name):
    with pytest.raises(ValueError, match="MultiHeadAttention cannot take these weights") as error:
        MultiHeadAttention.from_state_dict({name.format(i): np.zeros(6) for i in range(109)}, num_heads=3)
    lines = str(error.value).splitlines()
    assert lines[1] == "  missing: query.weight, key.weight, value.weight, output.weight"
    assert lines[2].startswith("  unexpected: ")
    parts = lines[2].removeprefix("  unexpected: ").split(", ")
    assert sum(int((re.search(r"(\d+) (?:more )?entries", part) or [0, 1])[1]) for part in parts) == 109
    assert lines[3:] == [
        "  no layer in it has these names: names= tells what is what, as in names={'its name': 'query'}"
    ]


@pytest.mark.parametrize("chosen", [("output",), ("query", "value"), ()])
def test_rule_30_any_projection_may_have_a_bias(chosen):
    entries = MultiHeadAttention(6, 3, bias=chosen).state_dict()
    assert {name.removesuffix(".bias") for name in entries if name.endswith(".bias")} == set(chosen)
    assert MultiHeadAttention.from_state_dict(entries, num_heads=3).state_dict().keys() == entries.keys()


@pytest.mark.parametrize(
    ("layer", "entries", "message"),
    [
        (Linear, {}, "missing: weight"),
        (Linear, {"weight": np.zeros((0, 3))}, r"weight must .* = \(out_features, 3\), got \(0, 3\)"),
        (Linear, {"weight": np.zeros(3)}, r"weight must .* = \(out_features, in_features\), got \(3,\)"),
        (Linear, {"weight": np.zeros((2, 3)), "bias": np.zeros(3)}, r"bias must have shape \(out_features\) = \(2,\)"),
        (Linear, {"weight": [["a"]]}, "weight must be float16"),
        (Linear, {"weight": [[1.0], [2.0, 3.0]]}, "weight must be an array, got list"),
        (Embedding, {"weight": np.zeros((2, 3)), "bias": np.zeros(3)}, "unexpected: bias"),
        (AttentionHead, {"query.bias": np.zeros(2)}, "missing: query.weight, key.weight, value.weight$"),
    ],
)
def test_rule_30_wrong_entries(layer, entries, message):
    with pytest.raises(ValueError, match=message):
        layer.from_state_dict(entries)


def test_rule_30_heads_cannot_be_read_from_the_shapes():
    entries = SpatialAttention(6, 2, 5).state_dict()
    with pytest.raises(TypeError, match="SpatialAttention takes heads= beside the weights, got no size"):
        SpatialAttention.from_state_dict(entries)
    with pytest.raises(TypeError, match="Linear takes no size beside the weights, got heads="):
        Linear.from_state_dict(entries, heads=2)
    with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
        SpatialAttention.from_state_dict(entries, heads=0)
    with pytest.raises(ValueError, match=r"to_qkv.weight must have shape .* = \(12\*dim_head, 6, 1, 1\), got \(30, 6"):
        SpatialAttention.from_state_dict(entries, heads=4)
    with pytest.raises(ValueError, match=r"query.weight must have shape .* = \(4\*head_size, 6\), got \(6, 6\)"):
        MultiHeadAttention.from_state_dict(MultiHeadAttention(6, 3).state_dict(), num_heads=4)


def test_rule_30_files_that_are_wrong(tmp_path):
    path = tmp_path / "weights.safetensors"
    with pytest.raises(FileNotFoundError):
        Linear.load(path)
    path.write_text("these are not the weights you are looking for")
    with pytest.raises(ValueError, match=r"cannot read .*weights\.safetensors as a safetensors file"):
        Linear.load(path)
    Embedding(3, 2).save(path)
    with pytest.raises(ValueError, match=r"weights\.safetensors: AttentionHead cannot take(.|\n)*unexpected: weight"):
        AttentionHead.load(path)


def test_rule_30_saving_into_no_folder(tmp_path):
    path = tmp_path / "none" / "weights.safetensors"
    with pytest.raises(FileNotFoundError, match=re.escape(f"cannot save {path}: there is no folder {path.parent}")):
        Linear(3, 2).save(path)
    assert not path.parent.exists()


def test_rule_30_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    Linear(3, 2, rng=1).save(path)
    before = path.read_bytes()

    def full(entries, unfinished):
        unfinished.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(OSError, match="no space left"):
        Linear(3, 2, rng=2).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_rule_30_without_safetensors(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for call in (Linear(3, 2).save, Linear.load):
        with pytest.raises(
            ModuleNotFoundError,
            match=r'pip install "sdpa-ref\[weights\]" \(in a checkout: pip install -e "\.\[weights\]"\)',
        ):
            call(tmp_path / "x")


def test_layers_import_nothing_optional():
    code = "import sys, sdpa_ref; sdpa_ref.Linear(3, 2)([1.0, 2, 3]); sys.exit('safetensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", LAYERS)
def test_random_weights(name):
    one, two, other = (LAYERS[name](rng=seed).state_dict() for seed in (1, np.random.default_rng(1), 2))
    for entry, array in one.items():
        assert array.dtype == np.float32
        assert_same_bits(array, two[entry])
        assert not np.array_equal(array, other[entry])
    if name != "embedding":
        for entry, array in one.items():
            fan_in = one[entry.replace("bias", "weight")].shape[1]
            assert abs(array).max() <= fan_in**-0.5


def test_random_weights_fill_their_range():
    """Mean and mean square are those of the distribution, within four standard errors."""
    uniform, gauss = Linear(100, 300, rng=1).weight * 10, Embedding(300, 100, rng=1).weight
    for drawn, variance, of_squares in ((uniform, 1 / 3, 4 / 45), (gauss, 1, 2)):
        assert abs(drawn.mean()) < 4 * (variance / drawn.size) ** 0.5
        assert abs((drawn**2).mean() - variance) < 4 * (of_squares / drawn.size) ** 0.5


PROJECTIONS = ("query", "key", "value", "output")


@pytest.mark.parametrize("have", [(), ("query",), ("query", "key", "value"), ("query", "value", "output"), PROJECTIONS])
def test_rule_26_a_bias_for_each_projection_apart(have, tmp_path):
    layer = MultiHeadAttention(6, 3, bias=have, rng=1)
    assert [getattr(layer, name).bias is not None for name in PROJECTIONS] == [name in have for name in PROJECTIONS]
    entries = layer.state_dict()
    assert {name.partition(".")[0] for name in entries if name.endswith("bias")} == set(have)
    layer.save(tmp_path / "x")
    again = MultiHeadAttention.load(tmp_path / "x", num_heads=3)
    zeros = {f"{name}.bias": np.zeros(6, np.float32) for name in PROJECTIONS}
    filled = MultiHeadAttention.from_state_dict(zeros | entries, num_heads=3)
    x = np.random.default_rng(2).standard_normal((5, 6)).astype(np.float32)
    assert_same_bits(again(x), layer(x))
    np.testing.assert_allclose(filled(x), layer(x), rtol=1e-6, atol=1e-6)
    value, vjp = again.value_and_vjp(x)
    assert vjp(value).weights.keys() == entries.keys()


def test_rule_26_names_of_biases_are_checked():
    for wrong in ("query", b"query", 1, None, np.True_ * np.ones(2)):
        with pytest.raises(TypeError, match=r"got .*; or give the names .* query, key, value"):
            AttentionHead(6, 3, bias=wrong)
    with pytest.raises(ValueError, match=r"bias must be True or False, got \['output'\]; or give the names"):
        AttentionHead(6, 3, bias=["output"])
    with pytest.raises(TypeError, match=r"bias must be True or False, got list$"):
        Linear(6, 3, bias=["bias"])


def test_rule_30_a_whole_model_is_told_by_its_parts():
    layer = {f"attention.self.{name}": array for name, array in MultiHeadAttention(6, 3).state_dict().items()}
    model = {f"encoder.layer.{n}.{name}": array for n in range(12) for name, array in layer.items()}
    model |= {
        "embeddings.word.weight": np.zeros((3, 6)),
        "embeddings.place.weight": np.zeros((3, 6)),
        "head": np.ones(1),
    }
    with pytest.raises(ValueError, match="cannot take these weights") as error:
        MultiHeadAttention.from_state_dict(model, num_heads=3)
    assert str(error.value).splitlines()[1:] == [
        "  missing: query.weight, key.weight, value.weight, output.weight",
        "  unexpected: encoder.layer.* (96 entries), embeddings.* (2 entries), head",
        "  name one layer of the model: prefix='encoder.layer.0.attention.self.' fits, one of 12 that do",
    ]


def test_rule_30_shards_are_loaded_through_their_index(tmp_path):
    layer = AttentionHead(6, 3, rng=1)
    entries, files = layer.state_dict(), {}
    from safetensors.numpy import save_file

    for n in range(2):
        part = dict(list(entries.items())[n::2])
        save_file(part, tmp_path / f"model-{n}.safetensors")
        files |= dict.fromkeys(part, f"model-{n}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    x = np.ones((2, 6), np.float32)
    assert_same_bits(AttentionHead.load(index)(x)[0], layer(x)[0])
    with pytest.raises(IsADirectoryError, match=r"is a folder; name a safetensors file \(model-0.safetensors, model-1"):
        AttentionHead.load(tmp_path)
    index.write_text(json.dumps({"weight_map": files | {"more": "model-1.safetensors"}}))
    with pytest.raises(ValueError, match="names entries that its files do not have: more"):
        AttentionHead.load(index)
    for content in ("[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'):
        index.write_text(content)
        with pytest.raises(ValueError, match="is no index of safetensors files"):
            AttentionHead.load(index)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"PK\x03\x04" + b"x" * 99, "file of torch.save .*safetensors.torch.save_file"),
        (b"\x80\x02}q\x00" + b"x" * 99, "a pickle, which is not read"),
        (b"\x89HDF\r\n\x1a\n" + b"x" * 99, "an HDF5 file"),
        (b"version https://git-lfs.github.com/spec/v1\n" + b"x" * 99, "a pointer of Git LFS"),
        (b"", "header"),
    ],
)
def test_rule_30_other_formats_are_named(tmp_path, content, what):
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"cannot read .*model\.pt as a safetensors file: .*{what}"):
        Linear.load(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2"])
def test_rule_30_float8_is_refused_with_what_to_do(tmp_path, name):
    header = json.dumps({"weight": {"dtype": name, "shape": [2, 2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=r"(?i)float8"):
        Linear.load(tmp_path / "x")


posix = pytest.mark.skipif(os.name == "nt", reason="links and modes of POSIX")


@posix
def test_saving_writes_through_links_and_keeps_the_mode(tmp_path):
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "real", tmp_path / "link"
    link.symlink_to("there/real")
    Linear(3, 2, rng=1).save(link)  # a target that is not there yet
    real.chmod(0o640)
    layer = Linear(3, 2, rng=2)
    layer.save(link)
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert_same_bits(Linear.load(link).weight, layer.weight)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "real", "there"]


@posix
def test_saving_never_replaces_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/null")
    before = {path: path.lstat().st_mode for path in tmp_path.iterdir()}
    for name, what in {"pipe": "a pipe", "folder": "a folder", "device": "a device"}.items():
        with pytest.raises(OSError, match=f"cannot save .*{name}: it is {what}"):
            Linear(3, 2).save(tmp_path / name)
    assert {path: path.lstat().st_mode for path in tmp_path.iterdir()} == before
