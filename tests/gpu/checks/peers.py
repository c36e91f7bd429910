"""PyTorch beside it: the errors of both, and the times."""

import statistics
import time
from importlib.util import find_spec

import numpy as np

import sdpa_ref as sr
from sdpa_ref.testing import problem_of

SHAPES = [(1, 32, 1024, 64), (1, 32, 4096, 64), (1, 32, 4096, 128), (1, 16, 16384, 64), (1, 16, 16384, 128)]  # B H L E
DECODE = [(1, 32, 8, 8192, 128), (8, 32, 8, 8192, 128), (32, 32, 8, 2048, 128), (1, 64, 8, 131072, 128)]  # B Hq Hkv S E
PEERS = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}
ERRORS = [(2, 8, 2, 1000, 1000, 64), (1, 4, 4, 4100, 4100, 128), (2, 6, 3, 333, 777, 40), (4, 16, 2, 1, 5000, 128)]


def pytorch(dry):
    """Yield the largest errors of both against float64, of which ours is at most twice the other."""
    for dtype in ("float16", "bfloat16", "float32"):
        for B, Hq, Hkv, L, S, E in ERRORS:
            for causal in (False, True) if L == S else (False,):
                row = {"what": f"{dtype} {B}x{Hq}/{Hkv}x{L}x{S}x{E}{' causal' if causal else ''}", "ok": None}
                yield row if dry or not find_spec("torch") else row | _errors(dtype, B, Hq, Hkv, L, S, E, causal)


def _errors(dtype, B, Hq, Hkv, L, S, E, causal):
    import torch

    torch.manual_seed(L)
    shapes = (B, Hq, L, E), (B, Hkv, S, E), (B, Hkv, S, E)
    q, k, v = (torch.randn(*shape, device="cuda").to(getattr(torch, dtype)) for shape in shapes)
    peer = torch.nn.functional.scaled_dot_product_attention
    options = {"is_causal": causal, "enable_gqa": Hq != Hkv}
    exact = peer(q.double(), k.double(), v.double(), **options)
    ours = torch.from_dlpack(sr.sdpa(q, k, v, mask=sr.Causal() if causal else None))
    both = {"ours": ours, "PyTorch": peer(q, k, v, **options)}
    errors = {name: float(abs(result.double() - exact).max()) for name, result in both.items()}
    return errors | {"ok": errors["ours"] <= 2 * errors["PyTorch"]}


def timings(dry):
    """Yield medians in microseconds and TFLOP/s (GB/s for one row), beside PyTorch's cuDNN and flash kernels."""
    import ml_dtypes  # noqa: F401  # with it NumPy knows bfloat16 by name

    for dtype in ("float16", "bfloat16"):
        for B, H, L, E in SHAPES:
            for causal in (False, True):
                what = f"{dtype} {B}x{H}x{L}x{E}{' causal' if causal else ''}"
                yield _timed(dry, what, dtype, (B, H, H, L, L, E), causal)
        for B, Hq, Hkv, S, E in DECODE:
            yield _timed(dry, f"{dtype} decode {B}x{Hq}/{Hkv}x{S}x{E}", dtype, (B, Hq, Hkv, 1, S, E), False)


def _timed(dry, what, dtype, sizes, causal):
    B, Hq, Hkv, L, S, E = sizes
    mask = sr.Causal() if causal else None
    if dry:
        from sdpa_cupy.plan import make_plan

        q, k = np.empty((B, Hq, L, E), np.float16), np.empty((B, Hkv, S, E), np.float16)
        plan = make_plan(problem_of(q, k, k, mask=mask), frozenset({"output"}), 90)
        launches = ", ".join(f"{launch.kernel} {launch.grid[0]} x {launch.threads}" for launch in plan.launches)
        return {"what": what, "launches": launches, "ok": None}
    import cupy

    q, k, v = (
        cupy.random.standard_normal(shape, dtype=np.float32).astype(dtype)
        for shape in ((B, Hq, L, E), (B, Hkv, S, E), (B, Hkv, S, E))
    )
    out = cupy.empty_like(q)
    times = {"ours": _median(lambda: sr.sdpa(q, k, v, mask=mask, out=out))} | _times_of_pytorch((q, k, v), causal)
    unit, work = ("GB/s", 4 * B * Hkv * S * E / 1e3) if L == 1 else ("TFLOP/s", 4 * B * Hq * L * S * E / 1e6)
    work /= 2 if causal else 1
    rates = {f"{name} {unit}": round(work / t, 1) for name, t in times.items()}
    return {"what": what, **{f"{name} us": round(t, 1) for name, t in times.items()}, **rates, "ok": True}


def _times_of_pytorch(arrays, causal):
    if not find_spec("torch"):
        return {}
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tensors = [torch.from_dlpack(array) for array in arrays]
    options = {"is_causal": causal, "enable_gqa": tensors[0].shape[1] != tensors[1].shape[1]}
    times = {}
    for name, kernel in PEERS.items():
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            try:
                times[name] = _median(lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, **options))
            except RuntimeError:  # this kernel of PyTorch's does not take the problem
                continue
    return times


def _median(call, seconds=0.3):
    """Return the median time in microseconds on the default stream, which PyTorch shares."""
    import cupy

    for _ in range(3):
        call()
    cupy.cuda.Device().synchronize()
    times, end = [], time.monotonic() + seconds
    while len(times) < 5 or (len(times) < 100 and time.monotonic() < end):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(1000 * cupy.cuda.get_elapsed_time(start, stop))
    return statistics.median(times)
