"""Attention over keys and values in stores: piece by piece, in bounded memory, with blocks that a backend computes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sdpa_ref.arrays import summed_to
from sdpa_ref.backend import Backend, Gradients, Problem, Result, Sums
from sdpa_ref.backflow import flow_of, sink_gradient, uncompiled
from sdpa_ref.blocks import add, computing, divided_by, filled, no_sums, outlined, part, seen, widened
from sdpa_ref.masks import Block
from sdpa_ref.sources import Source, pieces, settings

__all__ = ["ARRAYS", "TASKS", "Over", "forward", "over", "unavailable", "unsupported", "vjp"]

ARRAYS, TASKS = "store", frozenset({"vjp", "stages"})
Array = Any


@dataclass(frozen=True)
class Over:
    """The loop over pieces, each computed by a named backend, or by the first that can."""

    name: str | None = None
    ARRAYS = ARRAYS
    TASKS = TASKS

    def unavailable(self) -> str | None:
        """Return why it cannot run here: it can."""
        return None

    def unsupported(self, problem: Problem) -> str | None:
        """Return why the pieces cannot be computed: an error of the named backend says so."""
        self.backend(problem)
        return None

    def backend(self, problem: Problem, task: str = "forward") -> Backend:
        """Return the backend that computes the pieces."""
        arrays = {name: _stand_in(getattr(problem, name), problem.dtype) for name in ("key", "value")}
        return computing(problem._replace(form=problem.form._replace(kind="numpy"), **arrays), self.name, task)

    def forward(self, problem: Problem, want: frozenset[str]) -> Result:
        """Return what is wanted; for weights, which are larger, all keys are read at once."""
        backend = self.backend(problem)
        if "weights" in want:
            return backend.forward(in_memory(problem), want)
        done = divided_by(backend, problem, sums_of(problem, backend))
        if problem.out is None:
            return done
        problem.out[...] = done.output
        return done._replace(output=problem.out)

    def vjp(
        self, problem: Problem, grad_output: Array, grad_lse: Array | None, result: Result | None = None
    ) -> Gradients:
        """Return the gradients; those by key and value are written where `reading` says, a piece at a time."""
        backend = self.backend(problem, "vjp")
        problem = uncompiled(problem)
        d_key, d_value = (_Target.of(problem, name) for name in ("key", "value"))
        flow = flow_of(backend, problem, sums_of(problem, backend))
        acc = flow.z.dtype
        grads = grad_output.astype(acc), None if grad_lse is None else grad_lse.astype(acc)
        d_query = np.zeros(problem.query.shape, acc)
        d_biases: list[Array] = [np.zeros(bias.shape, acc) for bias in problem.biases]
        for keys, block, needed in blocks(problem):
            found = None
            if needed:
                found = backend.vjp(widened(_without_sink(block()), acc), *grads, flow)
                d_query += found.query
                whole = found.bias[0] if isinstance(found.bias, tuple) else found.bias
                for total in d_biases:
                    here = total if total.ndim < 1 or total.shape[-1] == 1 else total[..., slice(*keys)]
                    here += summed_to(whole, here.shape)
            d_key.put(keys, None if found is None else found.key)
            d_value.put(keys, None if found is None else found.value)
        bias = None if not d_biases else d_biases[0] if len(d_biases) == 1 else tuple(d_biases)
        by_sink = None if problem.sink is None else sink_gradient(problem.sink, flow, *grads)
        return Gradients(d_query, d_key.whole, d_value.whole, bias, by_sink)

    def stages(self, problem: Problem) -> Any:
        """Return every stage; all keys are read at once."""
        return self.backend(problem, "stages").stages(in_memory(problem))


_DEFAULT = Over()
forward, vjp, unsupported = _DEFAULT.forward, _DEFAULT.vjp, _DEFAULT.unsupported


def unavailable() -> str | None:
    """Return why it cannot run here: it can."""
    return None


def over(name: str) -> Over:
    """Return the same with pieces that the named backend computes."""
    return Over(name)


def blocks(problem: Problem) -> Iterator[tuple[tuple[int, int], Any, bool]]:
    """Yield of each piece the keys, a function that reads it and returns its problem, and whether a row sees it.

    Who listens is told of each piece that has been dealt with.
    """
    reading, outline = settings(), outlined(problem)
    stores = [x for x in (problem.key, problem.value) if isinstance(x, Source)]
    width = sum(x.shape[-1] * x.dtype.itemsize for x in stores) + (problem.E + problem.Ev) * problem.acc_dtype.itemsize
    cuts = pieces(problem.S, problem.B * problem.Hkv * width, reading.limit, max(source.chunk() for source in stores))
    whole = Block(tuple((0, n) for n in problem.batch), problem.batch, (0, problem.Hq), (0, problem.L), (0, problem.S))
    needed = {*seen(outline.visible, whole, problem.S, cuts)} if cuts and problem.L else set()
    for n, keys in enumerate(cuts):
        block = whole._replace(keys=keys)

        def read(block: Block = block) -> Problem:
            here = part(outline, block)
            here = here._replace(form=here.form._replace(kind="numpy"))
            key, value = (_piece(x, block, problem) for x in (problem.key, problem.value))
            keep = None if problem.keep is None else block.scores(problem.keep)
            return filled(here, problem.query, key, value, keep, tuple(map(block.scores, problem.biases)))

        yield keys, read, n in needed
        if reading.progress is not None:
            reading.progress(n + 1, len(cuts))


def sums_of(problem: Problem, backend: Backend) -> Sums:
    """Return the sums over all keys."""
    sums = None
    for _, block, needed in blocks(problem._replace(out=None)):
        if needed:
            sums = add(backend, _without_sink(block()), sums)
    return no_sums(problem, problem.L) if sums is None else sums


def in_memory(problem: Problem) -> Problem:
    """Return the problem with all that lies in stores read."""
    whole = tuple((0, n) for n in problem.batch)
    arrays = {
        name: x.read(whole, (0, problem.Hkv), (0, problem.S), problem.dtype)
        for name in ("key", "value")
        if isinstance(x := getattr(problem, name), Source)
    }
    return problem._replace(form=problem.form._replace(kind="numpy"), **arrays)


@dataclass(frozen=True)
class _Target:
    """Where the gradient by key or value goes: a store of its shape, or an array in memory."""

    whole: Any
    heads: int

    @staticmethod
    def of(problem: Problem, name: str) -> "_Target":
        target, source = getattr(settings(), f"grad_{name}"), getattr(problem, name)
        if target is None:
            width = problem.E if name == "key" else problem.Ev
            return _Target(np.zeros((*problem.batch, problem.Hkv, problem.S, width), problem.acc_dtype), problem.Hkv)
        shape = source.array.shape if isinstance(source, Source) else source.shape
        if tuple(target.shape) != tuple(shape):
            raise ValueError(f"grad_{name} must have the shape of {name}, {tuple(shape)}, got {tuple(target.shape)}")
        return _Target(_like(source, target), problem.Hkv)

    def put(self, keys: tuple[int, int], numbers: Array | None) -> None:
        """Write the gradient of some keys, zeros for None."""
        if not isinstance(self.whole, Source):
            if numbers is not None:
                self.whole[..., slice(*keys), :] = numbers
            return
        shape = self.whole.shape
        lead = tuple((0, n) for n in shape[:-3])
        own = (*shape[:-2], keys[1] - keys[0], shape[-1])
        given = np.zeros(own) if numbers is None else summed_to(numbers, own)
        self.whole.write(lead, (0, self.heads), keys, given)


def _like(source: Any, target: Any) -> Source:
    """Return the store whose axes lie as those of another one."""
    found = Source(target)
    object.__setattr__(found, "shape", source.shape)
    object.__setattr__(found, "axes", source.axes)
    return found


def _piece(x: Any, block: Block, problem: Problem) -> Array:
    if x is None:
        return None
    if isinstance(x, Source):
        return x.read(block.batch, (0, problem.Hkv), block.keys, problem.dtype)
    return x[..., slice(*block.keys), :]


def _without_sink(problem: Problem) -> Problem:
    return problem._replace(sink=None)


def _stand_in(array: Any, dtype: np.dtype[Any]) -> Any:
    """Return an array of this shape that takes no memory."""
    return None if array is None else np.broadcast_to(np.zeros((), dtype), array.shape)
