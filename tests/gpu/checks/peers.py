"""PyTorch beside it: the errors of both, and the times."""

import statistics
import time
from functools import partial
from importlib.util import find_spec

import numpy as np

import sdpa_ref as sr
from sdpa_ref.testing import problem_of

from .laws import tried

SHAPES = [(1, 32, 1024, 64), (1, 32, 4096, 64), (1, 32, 4096, 128), (1, 16, 16384, 64), (1, 16, 16384, 128)]  # B H L E
DECODE = [(1, 32, 8, 8192, 128), (8, 32, 8, 8192, 128), (32, 32, 8, 2048, 128), (1, 64, 8, 131072, 128)]  # B Hq Hkv S E
PEERS = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
ERRORS = [(2, 8, 2, 1000, 1000, 64), (1, 4, 4, 4100, 4100, 128), (2, 6, 3, 333, 777, 40), (4, 16, 2, 1, 5000, 128)]
DRY_ERRORS = [(1, 2, 1, 40, 40, 16), (1, 2, 2, 1, 70, 16)]
PEAKS = {  # dense 16-bit TFLOP/s with float32 sums and GB/s, by their makers' data sheets
    "H200": (989, 4800), "H100 PCIe": (756, 2039), "H100": (989, 3350), "A100": (312, 2039), "L40S": (362, 864),
    "RTX 4090": (165, 1008), "T4": (65, 320),
}  # fmt: skip


def pytorch(dry):
    """Yield the largest errors of both against float64, of which ours is at most twice the other, or the last place."""
    for dtype in ("float16", "bfloat16", "float32"):
        for sizes in DRY_ERRORS if dry else ERRORS:
            for causal in (False, True) if sizes[3] == sizes[4] else (False,):
                what = f"{dtype} {_named(sizes)}{' causal' if causal else ''}"
                yield tried(what, partial(_errors, dry, dtype, sizes, causal))


def _named(sizes):
    B, Hq, Hkv, L, S, E = sizes
    return f"{B}x{Hq}/{Hkv}x{L}x{S}x{E}"


def _errors(dry, dtype, sizes, causal):
    """Return the errors as text, or raise an AssertionError."""
    if not find_spec("torch"):
        return "PyTorch is not installed"
    import torch

    B, Hq, Hkv, L, S, E = sizes
    torch.manual_seed(L)
    shapes, where = ((B, Hq, L, E), (B, Hkv, S, E), (B, Hkv, S, E)), "cpu" if dry else "cuda"
    q, k, v = (torch.randn(*shape, device=where).to(getattr(torch, dtype)) for shape in shapes)
    peer = torch.nn.functional.scaled_dot_product_attention
    options = {"is_causal": causal, "enable_gqa": Hq != Hkv}
    exact = peer(q.double(), k.double(), v.double(), **options)
    ours = sr.sdpa(q, k, v, mask=sr.Causal() if causal else None, backend="fibers" if dry else None)
    errors = [
        float(abs(torch.as_tensor(_numbers(result)).to(where).double() - exact).max())
        for result in (ours, peer(q, k, v, **options))
    ]
    last = torch.finfo(getattr(torch, dtype)).eps * float(abs(exact).max())
    text = f"ours {errors[0]:.2e}, PyTorch {errors[1]:.2e}"
    assert errors[0] <= max(2 * errors[1], last), text
    return text


def _numbers(result):
    """Return a result as PyTorch takes it: NumPy has no bfloat16 of its own."""
    import torch

    if isinstance(result, np.ndarray):
        return result.astype(np.float32)
    return result if isinstance(result, torch.Tensor) else torch.from_dlpack(result)


def timings(dry, seconds=0.2):
    """Yield medians in microseconds, TFLOP/s (GB/s for one row) and the share of the device's peak.

    Beside them are those of PyTorch's kernels. Without a GPU there is the work that the numbers would be made of.
    """
    import ml_dtypes  # noqa: F401  # with it NumPy knows bfloat16 by name

    for dtype in ("float16", "bfloat16"):
        for B, H, L, E in SHAPES:
            for causal in (False, True):
                yield _row(dry, dtype, (B, H, H, L, L, E), causal, seconds)
        for B, Hq, Hkv, S, E in DECODE:
            yield _row(dry, dtype, (B, Hq, Hkv, 1, S, E), False, seconds)


def _row(dry, dtype, sizes, causal, seconds):
    columns = {}
    row = tried(f"{dtype} {_named(sizes)}{' causal' if causal else ''}",
                lambda: columns.update(_timed(dry, dtype, sizes, causal, seconds)))  # fmt: skip
    return row | columns


def work_of(sizes, causal):
    """Return the unit of speed and how many of it one microsecond is: operations, or bytes of keys for one row."""
    B, Hq, Hkv, L, S, E = sizes
    if L == 1:
        return "GB/s", 2 * 2 * B * Hkv * S * E / 1e3
    return "TFLOP/s", 4 * B * Hq * L * S * E / 1e6 / (2 if causal else 1)


def peak_of(name, unit):
    """Return what the device could do at most, None where it is not known."""
    found = next((peaks for known, peaks in PEAKS.items() if known in name), None)
    return found and found[unit == "GB/s"]


def _timed(dry, dtype, sizes, causal, seconds):
    B, Hq, Hkv, L, S, E = sizes
    mask = sr.Causal() if causal else None
    unit, work = work_of(sizes, causal)
    if dry:
        from sdpa_cupy.plan import make_plan

        q, k = np.empty((B, Hq, L, E), np.float16), np.empty((B, Hkv, S, E), np.float16)
        plan = make_plan(problem_of(q, k, k, mask=mask), frozenset({"output"}), 90)
        launches = ", ".join(f"{launch.kernel} {launch.grid[0]} x {launch.threads}" for launch in plan.launches)
        least = round(work / peak_of("H200", unit), 1)
        return {"launches": launches, f"{unit} x us": round(work, 1), "H200 at its peak, us": least}
    import cupy

    q, k, v = (
        cupy.random.standard_normal(shape, dtype=np.float32).astype(dtype)
        for shape in ((B, Hq, L, E), (B, Hkv, S, E), (B, Hkv, S, E))
    )
    out = cupy.empty_like(q)
    times = {"ours": _median(lambda: sr.sdpa(q, k, v, mask=mask, out=out), seconds)}
    times |= _times_of_pytorch((q, k, v), causal, seconds)
    peak = peak_of(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(), unit)
    rates = {f"{name} {unit}": round(work / t, 1) for name, t in times.items()}
    shares = {f"{name} share of peak": f"{work / t / peak:.0%}" for name, t in times.items()} if peak else {}
    return {f"{name} us": round(t, 1) for name, t in times.items()} | rates | shares


def _times_of_pytorch(arrays, causal, seconds):
    if not find_spec("torch"):
        return {}
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tensors = [torch.from_dlpack(array) for array in arrays]
    options = {"is_causal": causal, "enable_gqa": tensors[0].shape[1] != tensors[1].shape[1]}
    attend = torch.nn.functional.scaled_dot_product_attention
    times = {}
    for name, kernel in PEERS.items():
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            try:
                times[name] = _median(lambda: attend(*tensors, **options), seconds)
            except RuntimeError:  # this kernel of PyTorch's does not take the problem
                continue
    return times


def _median(call, seconds):
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
