"""What is of the device: streams, graphs, memory, tensors of others."""

from functools import partial
from importlib.util import find_spec

import numpy as np

import sdpa_ref as sr

from .laws import tried


def device(dry):
    """Yield whether streams, graphs, foreign tensors and far addresses are served.

    Without a GPU the stand-in for CuPy takes its place, whose launches the emulation runs: it has graphs and devices,
    and none of what is drawn, measured or imported.
    """
    if dry:
        yield tried("a captured call on the stand-in gives the same bits", _graph_on_the_stand_in)
        return
    for check in (_graph, _stream, _far, _many_heads, _tensors, _nothing_left):
        yield tried(check.__doc__.strip("."), partial(_required, check))


def _required(check):
    assert check(), "it does not hold"


def _graph_on_the_stand_in():
    """Capture a call, change its numbers, launch the graph, and compare with a call."""
    import sys

    import sdpa_cupy.compile
    import sdpa_cupy.nvrtc
    import strict_cupy
    import strict_device
    from sdpa_cupy.launch.fibers import Fibers
    from sdpa_cupy.plan import Launch

    cupy = sys.modules["cupy"] = strict_cupy.module()
    sdpa_cupy.compile.compiled, sdpa_cupy.nvrtc.missing = strict_cupy.encoded, lambda: None
    cupy.stream.ptr = 77

    def run(kernel, name, source, defines, grid, block, parameters, shared):
        emulated = Fibers(80)
        for array in list(strict_cupy.live.values()):
            emulated.address(array.host)
        emulated.run(Launch(name, source, defines, grid, *block, shared), parameters)

    strict_device.Kernel.launch = run
    rng = np.random.default_rng(0)
    q, k, v, new = (cupy.asarray(rng.standard_normal((2, 2, n, 16)).astype(np.float16)) for n in (3, 40, 40, 3))
    out = cupy.asarray(np.zeros((2, 2, 3, 16), np.float16))
    options = {"mask": sr.Causal() & sr.KeyLengths([40, 20]), "query_offset": "end", "sink": 0.5, "out": out}
    sr.sdpa(q, k, v, **options)
    cupy.stream.begin_capture()
    sr.sdpa(q, k, v, **options)
    graph = cupy.stream.end_capture()
    q[...] = new
    graph.launch()
    replayed = out.get()
    assert (sr.sdpa(q, k, v, **options).get() == replayed).all(), "the graph and the call differ"


def _normal(*shape, dtype="float16"):
    import cupy

    return cupy.random.standard_normal(shape, dtype=np.float32).astype(dtype)


def _graph():
    """A captured call gives the same bits at each launch, also for new numbers and split keys."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    same = True
    with stream:
        for L, S in ((1, 4096), (300, 300)):
            q, k, v = _normal(2, 8, L, 64), _normal(2, 2, S, 64), _normal(2, 2, S, 64)
            out = cupy.empty_like(q)
            mask = sr.Causal() & sr.KeyLengths([S, S // 2])
            options = {"mask": mask, "query_offset": "end", "sink": 0.5, "out": out}
            sr.sdpa(q, k, v, **options)
            stream.begin_capture()
            sr.sdpa(q, k, v, **options)
            graph = stream.end_capture()
            q[...] = _normal(*q.shape)
            out.fill(7)
            graph.launch()
            replayed = out.copy()
            same &= bool((sr.sdpa(q, k, v, **options) == replayed).all())
    stream.synchronize()
    return same


def _stream():
    """Twenty calls in a row give the same bits on another stream."""
    import cupy

    def chain(x):
        for _ in range(20):
            x = sr.sdpa(x, x, x)
        return x

    q = _normal(2, 8, 2048, 64)
    expected = chain(q)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        same = (chain(q) == expected).all()
        stream.synchronize()
    return bool(same)


def _far():
    """Keys beyond the byte 2**32 and the number 2**31 are read at their place."""
    import cupy

    S = 2**24 + 80  # times 128 numbers
    if cupy.cuda.Device().mem_info[0] < 20 * 2**30:
        return True
    k = cupy.zeros((1, S, 128), np.float16)
    k[:, -80:] = _normal(1, 80, 128)
    q = _normal(1, 3, 128)
    mask = sr.KeyStarts(S - 80)
    return bool((abs(sr.sdpa(q, k, k, mask=mask) - sr.sdpa(q, k[:, -80:], k[:, -80:])) < 2.0**-8).all())


def _many_heads():
    """More heads than a grid has blocks in its second axis."""
    q = _normal(70000, 1, 3, 16)
    return bool((sr.sdpa(q, q, q)[-1] == sr.sdpa(q[-1:], q[-1:], q[-1:])[0]).all())


def _tensors():
    """Tensors of PyTorch come in without a copy, bfloat16 too."""
    if not find_spec("torch"):
        return True
    import cupy
    import torch

    same = True
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q = torch.randn(2, 3, 5, 16, device="cuda", dtype=dtype)
        array = cupy.from_dlpack(q)
        same &= array.data.ptr == q.data_ptr() and bool((sr.sdpa(q, q, q) == sr.sdpa(array, array, array)).all())
    return same


def _nothing_left():
    """A hundred calls leave no memory behind."""
    import cupy

    q, pool = _normal(1, 8, 1, 64), cupy.get_default_memory_pool()
    k = _normal(1, 8, 4096, 64)
    out = cupy.empty_like(q)
    used = []
    for _ in range(100):
        sr.sdpa(q, k, k, out=out)
        used.append(pool.used_bytes())
    return used[1] == used[-1]
