"""The kernels that the checks will launch, compiled on a machine without a GPU, as its minutes are few."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

import sdpa_ref as sr
from sdpa_ref._problem import pose
from sdpa_ref.testing import check, problem_of, resolve
from sdpa_ref.testing.cases import case

WANTED = {sr.sdpa: {"output"}, sr.sdpa_state: {"output", "lse", "m", "z"}, sr.sdpa_weights: {"weights"}}


@dataclass(frozen=True)
class Compiler:
    """A launcher that compiles what it is to launch."""

    arch: int
    empty = staticmethod(np.empty)
    moved = staticmethod(lambda array: array)

    def address(self, array):
        return 0 if array is None else array.ctypes.data

    def run(self, launch, parameters):
        from sdpa_cupy.compile import compiled

        compiled(launch.source, launch.defines, self.arch)


def compile_for(arch, rounds):
    """Compile what the laws, the small problems and the timings need; show progress."""
    import ml_dtypes  # noqa: F401  # with it NumPy knows bfloat16 by name

    from .laws import SMALL
    from .peers import DECODE, ERRORS, SHAPES

    print("timings and errors", flush=True)
    sizes = [(B, H, H, L, L, E) for B, H, L, E in SHAPES] + [(B, Hq, Hkv, 1, S, E) for B, Hq, Hkv, S, E in DECODE]
    for dtype in ("float16", "bfloat16", "float32"):
        for B, Hq, Hkv, L, S, E in (sizes if dtype != "float32" else []) + ERRORS:
            q, k = (np.empty((B, H, n, E), np.dtype(dtype)) for H, n in ((Hq, L), (Hkv, S)))
            _compile(arch, {"output"}, q, k, k)
    print("small problems", flush=True)
    for words in SMALL:
        it = case(0, **words)
        _compile(arch, {"output"}, *it.arrays, **it.options)
        _compile(arch, {"weights"}, it.query, it.key, **it.options)
        _compile_gradients(arch, *it.arrays, np.zeros((*it.query.shape[:-1], it.value.shape[-1]), it.query.dtype),
                           **it.options)  # fmt: skip

    def progress(law, n, failures):
        print(f"round {n}: {law.name}", flush=True)

    by_reference = resolve("reference")
    functions = {"forward": sr.sdpa, "state": sr.sdpa_state, "weights": sr.sdpa_weights}
    watched = {name: partial(_watched, arch, f, getattr(by_reference, name)) for name, f in functions.items()}
    watched["vjp"] = partial(_watched, arch, None, by_reference.vjp)
    check(replace(by_reference, **watched), rounds=rounds, seconds=float("inf"), progress=progress)


def _watched(arch, function, answer, *arrays, **options):
    """Return the answer, after what a device needs for it was compiled."""
    if function is None:
        _compile_gradients(arch, *arrays, **options)
    else:
        _compile(arch, WANTED[function], *arrays, **options)
    return answer(*arrays, **options)


def _compile_gradients(arch, query, key, value, grad_output, grad_lse=None, **options):
    from sdpa_cupy.gradients import differentiate

    problem, caller = pose(query, key, value, **options)
    with np.errstate(all="ignore"):  # of numbers that nothing has computed
        differentiate(problem, *caller.incoming(problem, grad_output, grad_lse), None, arch, Compiler(arch), np)


def _compile(arch, want, *arrays, **options):
    from sdpa_cupy.launch import forward

    forward(problem_of(*arrays, **options), frozenset(want), arch, Compiler(arch))
