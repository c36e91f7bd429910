"""Dask arrays whose chunks are CuPy arrays: the graph of other chunks, on the stand-in for CuPy; no GPU was tried."""

import numpy as np
import pytest
import strict_cupy

import sdpa_ref as sr
from sdpa_ref.masks.algebra import BooleanArray
from sdpa_ref.testing import assert_close, assert_within, device, gradient_budget

dask = pytest.importorskip("dask", reason="Dask is not installed")
da = pytest.importorskip("dask.array", reason="Dask is not installed")

RNG = np.random.default_rng(5)
KEEP, BIAS = RNG.random((2, 1, 9, 21)) < 0.6, RNG.standard_normal((4, 9, 21)).astype("float32")
OPTIONS = {
    "full": {},
    "causal": {"mask": sr.Causal() & sr.KeyLengths([14, 21]), "query_offset": "end"},
    "window": {"mask": sr.Window(4, 0) | sr.FirstTokens(2), "query_offset": 6, "sink": RNG.standard_normal(4)},
    "dropout": {"dropout": sr.Dropout(0.4, 3), "softcap": 3.0},
    "arrays": {"mask": KEEP, "bias": (BIAS, sr.ALiBi(0.25)), "query_offset": 3},
    "rules": {"mask": sr.Segments(np.arange(9) % 2, np.arange(21) % 3) | BooleanArray(KEEP), "query_offset": 0},
    "indices": {
        "mask": sr.MaskFunction(lambda b, h, i, j: (b + h + i + j) % 3 > 0),
        "score_mod": lambda s, b, h, i, j: s + 0.1 * b - 0.2 * h + 0.01 * (i - j),
        "dropout": sr.Dropout(0.4, 3),
    },
    "none": {"mask": sr.KeyLengths(0), "sink": 0.5},
}


def untraced(s, b, h, i, j):
    return s.astype(s.dtype) * 0.5 + 0.1 * h - 0.01 * (i - j)


untraced.derivative = lambda s, b, h, i, j: s * 0 + 0.5


def draw(dtype="float32"):
    shapes = (2, 4, 9, 16), (2, 2, 21, 16), (2, 2, 21, 8)
    return [RNG.standard_normal(shape).astype(dtype) for shape in shapes]


def lazy(value, *sizes):
    """Return arrays, those in masks too, as Dask arrays of CuPy chunks of these sizes."""
    if isinstance(value, tuple):
        return tuple(lazy(each, *sizes) for each in value)
    if isinstance(value, BooleanArray):
        return BooleanArray(lazy(value.array, *sizes))
    if isinstance(value, sr.masks.Mask) and hasattr(value, "parts"):
        return type(value)(tuple(lazy(each, *sizes) for each in value.parts))
    if not isinstance(value, np.ndarray):
        return value
    return da.from_array(device.moved(value), chunks=sizes[-value.ndim :])


def chunks_of(array):
    """Compute each chunk, which must lie on the device, and return the whole in the host's memory."""
    found = array.compute(scheduler="synchronous")
    assert type(found) is type(array._meta) is strict_cupy.ndarray
    assert (found.shape, found.dtype) == (array.shape, array.dtype)
    blocks = array.to_delayed()
    computed = dask.compute(*blocks.reshape(-1), scheduler="synchronous")
    for place, block in zip(np.ndindex(blocks.shape), computed, strict=True):
        assert block.shape == tuple(c[n] for c, n in zip(array.chunks, place, strict=True))
    return found.get()


@pytest.mark.parametrize(("name", "order"), [*((name, "chain") for name in OPTIONS), ("window", "tree")])
def test_chunks_on_the_device_give_what_arrays_give(machine, by_fibers, name, order):
    machine()
    options, (q, k, v) = OPTIONS[name], draw()
    given = {n: lazy(x, 1, 2, 4, 8) if n in ("mask", "bias") else x for n, x in options.items()}
    x, (y, z) = lazy(q, 1, 2, 4, 16), (lazy(a, 2, 1, 8, 16) for a in (k, v))
    with dask.config.set({"sdpa-ref.order": order}):
        state = sr.sdpa_state(x, y, z, **{n: o for n, o in given.items() if n != "sink"})
        output, weights = sr.sdpa(x, y, z, **given), sr.sdpa_weights(x, y, **given)
    sunk = {n: o for n, o in options.items() if n != "sink"}
    assert_close(chunks_of(output), q, k, v, **options)
    assert_close(chunks_of(weights), q, k, None, what="weights", **options)
    assert_close(chunks_of(state.output), q, k, v, **sunk)
    assert_close(chunks_of(state.lse), q, k, v, what="lse", **sunk)


@pytest.mark.parametrize("name", ["window", "arrays", "none", "wide", "function"])
def test_gradients_of_chunks_on_the_device(machine, by_fibers, name):
    machine()
    options, (q, k, v) = OPTIONS.get(name, {}), draw()
    if name == "wide":  # the forward pass of each block is the kernel's, and the backward pass is not
        q, k = (np.concatenate([x] * 18, -1) for x in (q, k))
    if name == "function":
        options = {"score_mod": untraced, "mask": sr.Causal(), "query_offset": 12}
    rng = np.random.default_rng(3)
    grad, grad_lse = (rng.standard_normal((2, 4, 9, *width)).astype("float32") for width in ((8,), ()))
    given = {n: lazy(x, 1, 2, 4, 8) if n in ("mask", "bias") else x for n, x in options.items()}
    x, y, z, g = lazy(q, 1, 2, 4, 64), lazy(k, 2, 1, 8, 64), lazy(v, 2, 1, 8, 16), lazy(grad, 1, 2, 4, 8)
    found = sr.sdpa_vjp(x, y, z, g, grad_lse=lazy(grad_lse, 1, 2, 4), **given)
    budgets = gradient_budget(q, k, v, grad, grad_lse=grad_lse, **options)
    pairs = [(a, b) for a, b in zip(flat(found), flat(budgets), strict=True) if b is not None]
    for (own, budget), gradient in zip(
        pairs, dask.compute(*(a for a, _ in pairs), scheduler="synchronous"), strict=True
    ):
        assert type(gradient) is type(own._meta) is strict_cupy.ndarray
        assert (gradient.shape, gradient.dtype) == (own.shape, own.dtype)
        assert_within(gradient.get(), budget)


def flat(parts):
    return [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types_layouts_and_arrays_that_are_there(machine, by_fibers, dtype):
    machine()
    q, k, v = draw(dtype)
    options = {"mask": KEEP, "dropout": sr.Dropout(0.4, 3), "layout": "LHE"}
    q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
    got = sr.sdpa(lazy(q, 1, 4, 2, 16), lazy(k, 2, 8, 2, 16), device.moved(v), **options | {"mask": device.moved(KEEP)})
    assert_close(chunks_of(got), q, k, v, **options)


def test_kinds_of_chunks_do_not_mix(machine, launches):
    machine()
    q, k, v = draw()
    x, y, z = (lazy(a, 1, 2, 8, 16) for a in (q, k, v))
    host = da.from_array(k, chunks=(1, 2, 8, 16))
    for arrays in ((x, host, z), (q, y, z), (x, k, z)):
        with pytest.raises(TypeError, match=r"all chunks must be of one kind, nothing is moved .* key of "):
            sr.sdpa(*arrays)
    for options in ({"mask": KEEP}, {"bias": BIAS}, {"mask": sr.Causal() & KEEP, "query_offset": 0}):
        with pytest.raises(TypeError, match=r"all chunks must be of one kind, .* (mask|mask 0|bias 0) of numpy"):
            sr.sdpa(x, y, z, **options)
    with pytest.raises(TypeError, match=r"pass sink\.get\(\)"):
        sr.sdpa(x, y, z, sink=device.moved(np.zeros(4)))
    with pytest.raises(TypeError, match="backend 'reference' takes numpy arrays, got cupy arrays"):
        sr.sdpa(x, y, z, backend="reference")
    assert not launches
    with pytest.raises(TypeError, match="chunk of grad_output must be a cupy array"):
        sr.sdpa_vjp(x, y, z, da.from_array(q[..., :8], chunks=-1))[0].compute(scheduler="synchronous")


def test_without_a_device_on_the_client_the_call_is_an_error(machine, launches):
    machine()
    arrays = [lazy(a, 1, 2, 8, 16) for a in draw()]
    machine(available=False)
    with pytest.raises(sr.BackendUnavailable, match=r"no backend for cupy arrays: .* no GPU"):
        sr.sdpa(*arrays)
