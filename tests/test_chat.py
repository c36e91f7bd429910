"""The chat's model with small random weights: steps, rows of other lengths, and tokens that are taken back."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

spec = importlib.util.spec_from_file_location("chat", Path(__file__).parents[1] / "examples/chat.py")
chat = importlib.util.module_from_spec(spec)
spec.loader.exec_module(chat)


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(0)
    sizes, width, hidden = chat.Sizes(2, 4, 2, 8, base=100.0), 32, 48

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    layers = [
        chat.Layer(
            1 + normal(width), normal(width, 64), normal(width, width), 1 + normal(width), normal(width, 2 * hidden),
            normal(hidden, width),
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
