"""Rule 30 of the semantics: weights are drawn, loaded and saved under PyTorch's names."""

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
    fused["bias_k"] = np.zeros((1, 1, 6))
    with pytest.raises(ValueError, match="cannot take these weights") as error:
        MultiHeadAttention.from_state_dict(fused, num_heads=3)
    assert str(error.value).splitlines()[1:] == [
        "  unexpected: bias_k",
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
        "  query.weight must have shape (hidden_size, hidden_size) = (6, 6), got (6, 7)",
        "  value.bias must be float16, bfloat16, float32 or float64, got int64",
        "  output.bias must have shape (hidden_size) = (6,), got (1, 6)",
    ]


@pytest.mark.parametrize(
    ("layer", "entries", "message"),
    [
        (Linear, {}, "missing: weight"),
        (Linear, {"weight": np.zeros((0, 3))}, r"weight must have shape \(out_features, in_features\), got \(0, 3\)"),
        (Linear, {"weight": np.zeros(3)}, r"weight must have shape \(out_features, in_features\), got \(3,\)"),
        (Linear, {"weight": np.zeros((2, 3)), "bias": np.zeros(3)}, r"bias must have shape \(out_features\) = \(2,\)"),
        (Linear, {"weight": [["a"]]}, "weight must be float16"),
        (Linear, {"weight": [[1.0], [2.0, 3.0]]}, "weight must be an array, got list"),
        (Embedding, {"weight": np.zeros((2, 3)), "bias": np.zeros(3)}, "unexpected: bias"),
        (AttentionHead, {"query.bias": np.zeros(2)}, "missing: query.weight\n  missing: key.weight"),
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
    with pytest.raises(
        ValueError, match=r"to_qkv.weight must have shape \(3\*heads\*dim_head, dim, 1, 1\), got \(30, 6"
    ):
        SpatialAttention.from_state_dict(entries, heads=4)
    with pytest.raises(ValueError, match="hidden_size = 6 must be a multiple of num_heads = 4"):
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
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'sdpa-ref\[weights\]'"):
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
