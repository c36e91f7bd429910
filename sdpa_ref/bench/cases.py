"""The problems that are timed, their inputs, and what their outputs must be."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import sdpa_ref
from sdpa_ref.masks import Mask
from sdpa_ref.testing import error_budget
from sdpa_ref.testing.budget import empirical

Array = np.ndarray[Any, np.dtype[Any]]
WINDOW = 256  # keys that a query of a window case sees, its own included
_BLOCK, _BLOCKS = 32, 4  # outputs are verified in so many blocks of so many rows


@dataclass(frozen=True)
class Case:
    """One problem: its sizes, its type, and its mask, one of "full", "causal", "window" and "padding"; or a bias.

    A `backward` case is the output and then its gradients; it is full or causal, and has no grouped heads.
    """

    name: str
    B: int
    Hq: int
    Hkv: int
    L: int
    S: int
    E: int
    dtype: str = "float32"
    mask: str = "full"
    peers: bool = True
    backward: bool = False
    bias: bool = False  # of each head, for all batch entries; the mask is then "full" or "padding"

    @property
    def pairs(self) -> int:
        """Return how many pairs of a query and a key are kept, those of one head counted."""
        if self.mask == "padding":
            return self.L * int(self.lengths.sum())
        seen = np.arange(1, self.L + 1)
        rows = {"full": np.full(self.L, self.S), "causal": seen, "window": np.minimum(seen, WINDOW)}[self.mask]
        return self.B * int(rows.sum())

    @property
    def flops(self) -> int:
        """Return the operations of the two matrix products over the kept pairs, and of the five of the gradients."""
        return (14 if self.backward else 4) * self.E * self.Hq * self.pairs

    @property
    def lengths(self) -> Array:
        """Return how many keys of each batch entry are not padding."""
        return np.linspace(self.S, self.S // self.B, self.B, dtype=np.int64)

    @property
    def rule(self) -> Mask | None:
        """Return the mask as an object."""
        return {
            "full": None,
            "causal": sdpa_ref.Causal(),
            "window": sdpa_ref.Window(WINDOW - 1, 0),
            "padding": sdpa_ref.KeyLengths(self.lengths),
        }[self.mask]


CASES = (
    Case("prefill-512", 1, 8, 8, 512, 512, 64),
    Case("prefill-512-causal", 1, 8, 8, 512, 512, 64, mask="causal"),
    Case("prefill-2048", 1, 8, 8, 2048, 2048, 64),
    Case("prefill-2048-causal", 1, 8, 8, 2048, 2048, 64, mask="causal"),
    Case("prefill-2048-wide", 1, 8, 8, 2048, 2048, 128),
    Case("prefill-2048-wide-causal", 1, 8, 8, 2048, 2048, 128, mask="causal"),
    Case("decode", 1, 32, 32, 1, 4096, 128),
    Case("decode-grouped", 1, 32, 8, 1, 4096, 128),
    Case("tiny", 4, 4, 4, 64, 64, 12),
    Case("tiny-single", 1, 1, 1, 16, 16, 16),
    Case("vit", 8, 12, 12, 197, 197, 64),
    Case("unet", 2, 4, 4, 1024, 1024, 32),
    Case("padding", 4, 8, 8, 512, 512, 64, mask="padding"),
    Case("window-4096", 1, 8, 8, 4096, 4096, 64, mask="window"),
    Case("window-8192", 1, 8, 8, 8192, 8192, 64, mask="window", peers=False),
    Case("window-16384", 1, 8, 8, 16384, 16384, 64, mask="window", peers=False),
    Case("window-32768", 1, 8, 8, 32768, 32768, 64, mask="window", peers=False),
    Case("prefill-2048-float16", 1, 8, 8, 2048, 2048, 64, "float16"),
    Case("prefill-2048-bfloat16", 1, 8, 8, 2048, 2048, 64, "bfloat16"),
    Case("decode-float16", 1, 32, 32, 1, 4096, 128, "float16"),
    Case("decode-bfloat16", 1, 32, 32, 1, 4096, 128, "bfloat16"),
    Case("backward-1024", 1, 8, 8, 1024, 1024, 64, backward=True),
    Case("backward-1024-causal", 1, 8, 8, 1024, 1024, 64, mask="causal", backward=True),
    Case("backward-2048-wide", 1, 8, 8, 2048, 2048, 128, backward=True),
    Case("backward-2048-wide-causal", 1, 8, 8, 2048, 2048, 128, mask="causal", backward=True),
    Case("backward-vit", 8, 12, 12, 197, 197, 64, backward=True),
    # attention as it is in well-known models
    Case("models-minilm", 32, 12, 12, 64, 64, 32, mask="padding"),
    Case("models-bert-base", 8, 12, 12, 128, 128, 64, mask="padding"),
    Case("models-bert-large-512", 1, 16, 16, 512, 512, 64, mask="padding"),
    Case("models-gpt2", 1, 12, 12, 1024, 1024, 64, mask="causal"),
    Case("models-gpt2-decode", 1, 12, 12, 1, 256, 64),
    Case("models-smollm2-decode", 1, 9, 3, 1, 512, 64),
    Case("models-qwen2-decode", 1, 14, 2, 1, 1024, 64),
    Case("models-llama3-8b", 1, 32, 8, 512, 512, 128, mask="causal"),
    Case("models-llama3-8b-decode", 1, 32, 8, 1, 2048, 128),
    Case("models-gemma2-decode", 1, 8, 4, 1, 1024, 256),
    Case("models-phi2", 1, 32, 32, 256, 256, 80, mask="causal"),
    Case("models-neox-20b", 1, 64, 64, 256, 256, 96, mask="causal"),
    Case("models-t5-base", 4, 12, 12, 256, 256, 64, bias=True),
    Case("models-whisper-tiny", 1, 6, 6, 1500, 1500, 64),
    Case("models-whisper-cross", 1, 6, 6, 1, 1500, 64),
    Case("models-vit-base", 8, 12, 12, 197, 197, 64),
    Case("models-swin-tiny", 64, 6, 6, 49, 49, 32, bias=True),
    Case("models-clip-text", 8, 8, 8, 77, 77, 64, mask="causal"),
    Case("models-sd15-4096", 2, 8, 8, 4096, 4096, 40),
    Case("models-sd15-cross", 2, 8, 8, 4096, 77, 40),
    Case("models-sd15-64", 2, 8, 8, 64, 64, 160),
    Case("models-sdxl-cross", 2, 10, 10, 4096, 77, 64),
    Case("models-alphafold", 64, 8, 8, 256, 256, 32, mask="padding", bias=True),
)


@dataclass(frozen=True)
class Inputs:
    """The arrays of a case, ``(B, H, length, E)``, and for peers that need one a dense mask ``(B or 1, 1, L or 1, S)``.

    A causal case has no dense mask: every peer has an option for it. A backward case has a gradient of the output. A
    bias is ``(1, Hq, L, S)``; peers take it and the mask as one array, `added`.
    """

    query: Array
    key: Array
    value: Array
    keep: Array | None
    grad: Array | None = None
    bias: Array | None = None
    added: Array | None = None


@dataclass(frozen=True)
class Truth:
    """Some rows of the exact output in float64, and how far a right answer may be from them.

    Of a backward case they are those of `stacked`, of the first head.
    """

    rows: Array
    output: Array
    budget: float


def inputs(case: Case) -> Inputs:
    """Return normally distributed inputs, the same in every run."""
    if case.dtype == "bfloat16":
        import ml_dtypes  # noqa: F401  makes bfloat16 a type of NumPy
    rng = np.random.default_rng(0)
    sizes = (case.Hq, case.L), (case.Hkv, case.S), (case.Hkv, case.S)
    query, key, value = (rng.standard_normal((case.B, *size, case.E), np.float32).astype(case.dtype) for size in sizes)
    keep = None
    if case.peers and case.mask == "window":
        dense = sdpa_ref.Window(WINDOW - 1, 0).dense(case.L, case.S)
        keep = dense[None, None].copy()  # some peers refuse what cannot be written to
    elif case.mask == "padding":
        keep = (np.arange(case.S) < case.lengths[:, None])[:, None, None]
    grad = rng.standard_normal(query.shape, np.float32) if case.backward else None
    bias = added = None
    if case.bias:
        bias = rng.standard_normal((1, case.Hq, case.L, case.S), np.float32).astype(case.dtype)
        added = bias if keep is None else np.where(keep, bias, bias.dtype.type(-np.inf))
    return Inputs(query, key, value, keep, grad, bias, added)


def truth(case: Case, given: Inputs) -> Truth:
    """Return what the reference makes of the inputs, for blocks of rows from the first to the last."""
    if case.backward:
        return _gradient_truth(case, given)
    starts = np.linspace(0, max(0, case.L - _BLOCK), _BLOCKS if case.L > _BLOCK else 1, dtype=int)
    budgets = []
    for start in starts:
        first = max(0, start - WINDOW) if case.mask == "window" else 0
        stop = start + _BLOCK if case.mask == "window" else case.S
        query = given.query[:, :, start : start + _BLOCK]
        key, value = given.key[:, :, first:stop], given.value[:, :, first:stop]
        bias = None if given.bias is None else given.bias[..., start : start + _BLOCK, :]
        budgets.append(error_budget(query, key, value, mask=case.rule, bias=bias, query_offset=int(start - first)))
    rows = np.concatenate([np.arange(start, min(start + _BLOCK, case.L)) for start in starts])
    output = np.concatenate([budget.expected for budget in budgets], axis=2)
    return Truth(rows, output, max(budget.empirical for budget in budgets))


def stacked(output: Array, query: Array, key: Array, value: Array) -> Array:
    """Return an output and gradients by query, key and value one behind the other, as if they were one output."""
    return np.concatenate([output, query, key, value], axis=2)


def _gradient_truth(case: Case, given: Inputs) -> Truth:
    """Return what the reference makes of the first head, whose budget is that of the straight formula in float32."""
    one = [array[:1, :1] for array in (given.query, given.key, given.value, given.grad) if array is not None]
    wide = [array.astype(np.float64) for array in one]
    exact = [sdpa_ref.sdpa(*wide[:3], mask=case.rule, backend="reference")]
    exact += sdpa_ref.sdpa_vjp(*wide, mask=case.rule, backend="reference")[:3]
    own = _straight(np.tri(case.L, case.S, case.S if case.mask == "full" else 0, dtype=bool), *one)
    budget = max(empirical(mine, right, right, mine.dtype) for mine, right in zip(own, exact, strict=True))
    output = stacked(*exact)
    return Truth(np.arange(output.shape[2]), output, budget)


def _straight(seen: Array, query: Array, key: Array, value: Array, grad: Array) -> tuple[Array, Array, Array, Array]:
    """Return output and gradients by the formulas in the type of the arrays."""
    scale = query.dtype.type(query.shape[-1] ** -0.5)
    s = np.where(seen, scale * (query @ key.swapaxes(-1, -2)), query.dtype.type(-np.inf))
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    d_p = grad @ value.swapaxes(-1, -2)
    d_s = scale * p * (d_p - (p * d_p).sum(-1, keepdims=True))
    return p @ value, d_s @ key, d_s.swapaxes(-1, -2) @ query, p.swapaxes(-1, -2) @ grad
