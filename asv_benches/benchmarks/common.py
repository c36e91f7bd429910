"""What the benchmarks share: backends and cases by name, ready to be timed, or else the reason to skip them."""

import os
from importlib import import_module

import sdpa_ref

# For asv a parameter is its place in the list, in every commit: so these are written out, and new ones go to the end.
BACKENDS = ["reference", "numba", "cupy"]
CASES = [
    "tiny-single",
    "tiny",
    "prefill-512",
    "prefill-512-causal",
    "vit",
    "unet",
    "padding",
    "decode",
    "decode-grouped",
    "decode-float16",
    "decode-bfloat16",
    "prefill-2048",
    "prefill-2048-causal",
    "prefill-2048-wide",
    "prefill-2048-float16",
    "prefill-2048-bfloat16",
    "window-4096",
    "window-16384",
]
THREADS = int(os.environ.get("SDPA_REF_NUM_THREADS") or os.cpu_count() or 1)
_SCORES = 2**24  # more of them take the reference seconds


def skip(reason):
    """Raise what makes asv leave a benchmark out and print the reason, when its setup raises it."""
    raise NotImplementedError(str(reason)) from None


def load(backend):
    """Return the module of a backend, or skip the benchmark where it cannot run."""
    try:
        return sdpa_ref.load(backend)
    except (ValueError, sdpa_ref.BackendUnavailable) as reason:
        skip(reason)


def module(name):
    """Return a module, or skip the benchmark where there is none."""
    try:
        return import_module(name)
    except ImportError as reason:
        skip(reason)


def case(name, backend):
    """Return a case of ``sdpa-ref bench``; skip what the version does not have and what the backend is too slow for."""
    load(backend)
    known = module("sdpa_ref.bench.cases").CASES
    found = {one.name: one for one in known}.get(name) or skip(f"this version has no case {name!r}")
    if backend == "reference" and found.B * found.Hq * found.L * found.S > _SCORES:
        skip(f"the reference holds all scores at once: it is not timed from {_SCORES} on")
    return found


def inputs(found, backend):
    """Return the inputs of a case in the kind of arrays that the backend takes."""
    cases = module("sdpa_ref.bench.cases")
    try:
        given = cases.inputs(found)
    except ModuleNotFoundError as missing:
        skip(missing)
    return cases.Inputs(*(None if array is None else on_device(backend, array) for array in vars(given).values()))


def on_device(backend, array):
    """Return a NumPy array as the kind of array that the backend takes."""
    if load(backend).ARRAYS == "numpy":
        return array
    import cupy

    return cupy.asarray(array)


def on_host(array):
    """Return an array of any backend as a NumPy array."""
    return array.get() if hasattr(array, "get") else array


def waiting(backend, run):
    """Return `run` so that it returns when its work is done: calls of a GPU backend return when it is queued."""
    if load(backend).ARRAYS == "numpy":
        return run
    import cupy

    def wait():
        result = run()
        cupy.cuda.get_current_stream().synchronize()
        return result

    return wait


def forward(found, given, backend):
    """Return the call that solves a case, called once."""
    mask = given.keep if found.mask == "padding" else found.rule

    def call():
        return sdpa_ref.sdpa(given.query, given.key, given.value, mask=mask, backend=backend)

    return warm(waiting(backend, call))


def warm(run):
    """Return `run` after a first call, which compiles, or by which a backend refuses the problem: then asv skips it."""
    run()
    return run
