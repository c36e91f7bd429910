"""The contract of a backend on one page: it is given a `Problem`, returns one of these results, and offers the rest."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from sdpa_ref.arrays import Array
from sdpa_ref.problem import Form, Problem, ScoreMod, sum_of_biases

__all__ = ["OUTPUT", "Backend", "Form", "Gradients", "Problem", "Result", "ScoreMod", "Sums", "sum_of_biases"]

OUTPUT = frozenset({"output"})  # what most calls want


class Result(NamedTuple):
    """What a backend computed, in canonical order; None for what was not wanted.

    Attributes
    ----------
    output : array, shape (..., Hq, L, Ev)
    lse : array, shape (..., Hq, L)
    weights : array, shape (..., Hq, L, S)
    m, z : array, shape (..., Hq, L)
        The largest score of each row, the sink's included, and the sum of the exponentials beside it; -inf and 0 for a
        row without any. Weights are made again from these two: in the lse the logarithm of z drowns beside a large m.
    """

    output: Array = None
    lse: Array = None
    weights: Array = None
    m: Array = None
    z: Array = None


class Sums(NamedTuple):
    """Attention over some of the keys as it is before the division: what more keys are added to.

    Attributes
    ----------
    m, z : array, shape (..., Hq, L)
        The largest score of each row, and the sum of the exponentials beside it; -inf and 0 where there is none yet.
    total : array, shape (..., Hq, L, Ev)
        The values, weighted by these exponentials.
    """

    m: Array
    z: Array
    total: Array


class Gradients(NamedTuple):
    """Gradients of attention, each in the type and shape of what was passed; None for what was not given.

    Attributes
    ----------
    query, key, value : array
    bias : array, None (also for ALiBi), or a tuple of them for a tuple of biases
    sink : array or None
    """

    query: Array
    key: Array
    value: Array
    bias: Any = None
    sink: Array = None


class Backend(Protocol):
    """What a backend is: a module, or any object, with these names.

    Attributes
    ----------
    ARRAYS : str
        The kind of array that it takes: "numpy", "cupy", or "dask" for what is computed later.
    TASKS : frozenset of str
        What it can do beside `forward`: the names of the other functions below that it has.
    """

    ARRAYS: str
    TASKS: frozenset[str]

    def unavailable(self) -> str | None:
        """Return why it cannot run here, with the install command; None where it can."""

    def unsupported(self, problem: Problem) -> str | None:
        """Return why it cannot solve this problem; None where it can."""

    def forward(self, problem: Problem, want: frozenset[str]) -> Result:
        """Return what is wanted of "output", "lse" and "weights", or with "m" and "z" beside the lse."""
        ...

    def vjp(
        self, problem: Problem, grad_output: Array, grad_lse: Array | None, result: Result | None = None
    ) -> Gradients:
        """Return the gradients in canonical order; `result` is what `forward` made of the same problem, where known.

        It may be that of more keys, of which the problem has some: then its m and z make the weights. Gradients of
        broadcast axes may be summed or not. Of several biases there may be one, of their sum, or a tuple.
        """
        ...

    def stages(self, problem: Problem) -> Any:
        """Return every stage of the formula."""
        ...

    def gelu(self, x: Array) -> Array:
        """Return the exact GELU of an array whose numbers are computed in float32, in its type, as a new array."""
        ...

    def encode(
        self, code: str, group: int, first: tuple[Array, Array, Array], second: tuple[Array, Array, Array] = ...
    ) -> bool:
        """Write the codes and scales that a recipe makes of an array, or of two of one shape, into arrays that follow.

        The bits are those of `sdpa_ref.stored.recipe`; `code` is the type of codes, "nibble" that of four bits, and so
        many numbers share a scale. False says that a number is not finite or a scale beyond its type.
        """
        ...

    def affine(self, weight: Any) -> Callable[[Array, Array | None], Array]:
        """Return the function of rows x and a bias that returns ``x @ weight.T + bias``, for many calls.

        The weights ``(out, in)`` are float16, bfloat16 or float32, or `Quantized`, each row with scales of its own, of
        which one serves a multiple of 32 numbers. They are read in each call, each rounded to float32 once. Rows are
        contiguous; they, the bias and the result are float32.
        """
        ...

    def precision(self) -> str:
        """Return how it computes, as `sdpa_ref.testing.Capabilities.precision`; "float32" where it does not say."""
        ...

    def details(self) -> dict[str, str]:
        """Return what `sdpa-ref info` shows: what it found in the machine, where it keeps things."""
        ...

    def warmup(self) -> dict[str, Callable[[], object]]:
        """Return functions that each compile a kernel ahead of the first call, by the names to show.

        An OSError says that the result could not be kept.
        """
        ...

    def set_num_threads(self, n: int) -> None:
        """Set how many threads a call may use."""

    def over(self, name: str) -> "Backend":
        """Return the same backend, of which the named one computes the blocks; of one that cuts problems up."""
        ...

    def add(self, problem: Problem, sums: Sums | None) -> Sums:
        """Return the sums with the keys of a problem without sink added, in new arrays; None stands for no keys.

        Where the bits of a call are to be those of its blocks, these are its steps.
        """
        ...

    def finish(self, problem: Problem, sums: Sums, want: frozenset[str]) -> Result:
        """Return what is wanted of output, lse, m and z of these sums; the problem has the sink, and no keys left."""
        ...

    def get_num_threads(self) -> int:
        """Return how many threads a call may use."""
        ...
