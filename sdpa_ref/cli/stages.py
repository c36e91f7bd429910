"""The demo's three layers with their input, and what is measured of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from sdpa_ref.layers import Embedding, MultiHeadAttention, SpatialAttention, patchify, sinusoidal_positions

SIDE, PATCH, CELL = 32, 4, 2  # pixels: of the photo, of a patch (a token), of a position of the feature map
_HEADS, _DIM_HEAD, _WORD_WIDTH = 4, 32, 32
_RUNS = 5


@dataclass(frozen=True)
class Stage:
    """A layer and its input."""

    name: str
    about: str
    layer: MultiHeadAttention | SpatialAttention
    x: Any

    def run(self, backend: str) -> tuple[Any, Any]:
        """Return the layer's output and its attention weights."""
        output, weights = self.layer.with_weights(self.x, backend=backend)
        return _numpy(output), _numpy(weights)


@dataclass(frozen=True)
class Measurement:
    """What a backend made of a stage.

    `seconds` is the median time of a call of the layer, `error` the largest absolute difference from the reference's
    output, and `row_sums` the smallest and largest sum of a row of weights.
    """

    stage: str
    backend: str
    shape: tuple[int, ...]
    weights_shape: tuple[int, ...]
    seconds: float
    error: float
    row_sums: tuple[float, float]


def measure(stage: Stage, backend: str, exact: Any) -> Measurement:
    """Return what a backend makes of a stage, of which `exact` is the output."""
    output, weights = stage.run(backend)
    times = []
    for _ in range(_RUNS):
        start = perf_counter()
        _numpy(stage.layer(stage.x, backend=backend))
        times.append(perf_counter() - start)
    sums = weights.sum(axis=-1, dtype=np.float64)
    return Measurement(
        stage=stage.name,
        backend=backend,
        shape=output.shape,
        weights_shape=weights.shape,
        seconds=median(times),
        error=float(np.abs(output - exact).max()),
        row_sums=(float(sums.min()), float(sums.max())),
    )


def stages(photo: Any, words: Sequence[str], asarray: Callable[[Any], Any] = np.asarray) -> tuple[Stage, Stage, Stage]:
    """Return the layers over the photo's patches, the words and the photo's feature map, the same at each call.

    Parameters
    ----------
    photo : array, shape (SIDE, SIDE, 3)
    words : sequence of str
    asarray : callable
        Makes an array of a backend's kind from one of NumPy.
    """
    rng = np.random.default_rng(0)
    return _photo(photo, rng, asarray), _words(words, rng, asarray), _map(photo, rng, asarray)


def _photo(photo: Any, rng: np.random.Generator, asarray: Callable[[Any], Any]) -> Stage:
    """Return the stage in which a head sees each patch in its own random directions, and query and key are the same."""
    x = _tokens(photo, PATCH)
    directions = np.linalg.qr(rng.normal(size=(x.shape[-1], x.shape[-1])))[0]
    about = f"{len(x)} patches of {x.shape[-1]} values, {_HEADS} heads of {x.shape[-1] // _HEADS}"
    return Stage("photo", about, _multi_head([directions] * 4, asarray), asarray(x))


def _words(words: Sequence[str], rng: np.random.Generator, asarray: Callable[[Any], Any]) -> Stage:
    """Return the stage in which everything is random."""
    vocabulary = sorted(set(words))
    embedding = Embedding(len(vocabulary), _WORD_WIDTH, rng=rng)
    x = embedding([vocabulary.index(word) for word in words]) + sinusoidal_positions(len(words), _WORD_WIDTH)
    projections = rng.normal(scale=_WORD_WIDTH**-0.5, size=(4, _WORD_WIDTH, _WORD_WIDTH))
    about = f"{len(x)} words as vectors of {_WORD_WIDTH} with positions, {_HEADS} heads of {_WORD_WIDTH // _HEADS}"
    return Stage("words", about, _multi_head(projections, asarray), asarray(x))


def _map(photo: Any, rng: np.random.Generator, asarray: Callable[[Any], Any]) -> Stage:
    """Return the stage of the photo as a map of small patches, in which query and key are the same."""
    side, width = SIDE // CELL, _HEADS * _DIM_HEAD
    x = _tokens(photo, CELL).T.reshape(1, -1, side, side)
    channels = x.shape[1]
    query, value = rng.normal(scale=0.25, size=(2, width, channels))
    weights = {
        "to_qkv.weight": np.concatenate([query, query, value])[..., None, None],
        "to_out.weight": rng.normal(scale=width**-0.5, size=(channels, width, 1, 1)),
        "to_out.bias": np.zeros(channels),
    }
    layer = SpatialAttention.from_state_dict(_moved(weights, asarray), heads=_HEADS)
    about = f"{side} x {side} positions of {channels} channels, {_HEADS} heads of {_DIM_HEAD}"
    return Stage("map", about, layer, asarray(x))


def _tokens(photo: Any, patch: int) -> Any:
    """Return the patches as tokens of one length, whose direction is their difference from the mean."""
    tokens = patchify(photo, patch)
    tokens = tokens - tokens.mean(axis=0)
    return 1.5 * tokens / np.sqrt((tokens * tokens).mean(axis=-1, keepdims=True) + 1e-6)  # 1.5: sharp, yet not one-hot


def _multi_head(projections: Any, asarray: Callable[[Any], Any]) -> MultiHeadAttention:
    names = (f"{name}.weight" for name in ("query", "key", "value", "output"))
    weights = _moved(dict(zip(names, projections, strict=True)), asarray)
    return MultiHeadAttention.from_state_dict(weights, num_heads=_HEADS)


def _moved(weights: dict[str, Any], asarray: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: asarray(weight.astype(np.float32)) for name, weight in weights.items()}


def _numpy(array: Any) -> Any:
    """Return the array on the host, after what computes it has ended."""
    return array.get() if hasattr(array, "get") else array
