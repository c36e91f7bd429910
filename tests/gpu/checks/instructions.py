"""Each operation of hardware.h on the device and in the emulations, bit for bit."""

import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

MICRO = Path(__file__).parents[1] / "micro"
SOURCE = MICRO / "operations.cu"


def instructions(dry):
    """Yield for each operation, and each two machines, in how many numbers they differ."""
    machines = _machines(dry, 80 if dry else _arch())
    for kernel, given, words, threads, blocks, shared, turing in _calls():
        outs = {}
        for machine, run in machines.items():
            outs[machine] = np.zeros((threads * blocks, words), np.uint32)
            data = np.arange(512, dtype=np.uint32)
            run(kernel, (given, outs[machine], data), threads, blocks, shared, turing)
        for first, other in pairwise(outs):
            different = outs[first] != outs[other]
            if kernel == "convert":  # its last word is a power of 2, to 2 units in the last place
                different[:, 5] = abs(outs[first][:, 5].astype(np.int64) - outs[other][:, 5]) > 2
            count = int(different.sum())
            yield {
                "what": f"{kernel}: {first}, {other}",
                "numbers": different.size,
                "different": count,
                "ok": not count,
            }


def _calls():
    """Yield name, input, words of output a thread, threads, blocks, shared memory, whether it is Turing's."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    wide = (rng.standard_normal((2048, 6, 2)) * 2.0 ** rng.integers(-6, 7, (2048, 6, 2))).astype(np.float32)
    before = (rng.standard_normal((2048, 4)) * 2.0 ** rng.integers(-16, 13, (2048, 4))).astype(np.float32)
    before = before.view(np.uint32)

    def of(registers, count=6):
        return np.concatenate([registers[:, :count], before], 1)

    half = wide.astype(np.float16).view(np.uint32)[..., 0]
    numbers = (rng.standard_normal(4096) * 2.0 ** rng.integers(-30, 6, 4096)).astype(np.float32)
    matrices = (rng.permutation(64)[:32] * 16).astype(np.uint32)
    yield "multiply_half", of(half), 4, 32, 64, 0, False
    yield "multiply_half_8", of(half, 3), 4, 32, 64, 0, True
    yield "multiply_bfloat", of(wide.astype(ml_dtypes.bfloat16).view(np.uint32)[..., 0]), 4, 32, 64, 0, False
    yield "multiply_tf32", of(wide[..., 0].copy().view(np.uint32)), 4, 32, 64, 0, False
    yield "round_tf32", numbers, 1, 32, 128, 0, False
    yield "load", matrices, 4, 32, 1, 1024, False
    yield "load_transposed", matrices, 4, 32, 1, 1024, False
    yield "shuffle", np.arange(64, dtype=np.uint32), 5, 64, 1, 0, False
    yield "convert", numbers.reshape(-1, 2), 6, 32, 64, 0, False
    yield "copy", matrices, 8, 32, 1, 32 * 48, False


def _machines(dry, arch):
    """Return, by name, functions that run a kernel of operations.cu on arrays of the host."""
    from sdpa_cupy import nvrtc
    from sdpa_cupy.launch import fibers, ptx
    from sdpa_cupy.plan import Launch

    headers = {file.name: file.read_text() for file in (Path(nvrtc.__file__).parent / "kernels").glob("*.h")}

    @cache
    def code(kind, turing):
        target = f"--gpu-architecture={'sm' if kind == 'cubin' else 'compute'}_{arch}"
        return nvrtc.translate(SOURCE.read_text(), headers, [target, "--std=c++17", f"-DTURING={turing:d}"], kind).code

    def launch(kernel, threads, blocks, shared, turing):
        return Launch(kernel, SOURCE.name, (("TURING", turing),), (blocks, 1, 1), threads, shared)

    def on_gpu(kernel, arrays, threads, blocks, shared, turing):
        import cupy

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "kernels.cubin")
            file.write_bytes(code("cubin", turing))
            loaded = cupy.RawModule(path=str(file)).get_function(kernel)
        there = [cupy.asarray(array) for array in arrays]
        addresses = np.zeros(1, [(name, np.uint64) for name in ("in", "out", "data")])
        addresses[0] = tuple(array.data.ptr for array in there)
        loaded((blocks,), (threads,), (addresses,), shared_mem=shared)
        arrays[1][...] = there[1].get()

    def by_fibers(kernel, arrays, *rest):
        launcher = fibers.Fibers(arch=arch, folder=MICRO)
        launcher.run(launch(kernel, *rest), np.array([*map(launcher.address, arrays)], np.int64))

    def by_interpreter(kernel, arrays, *rest):
        memory = ptx.Global()
        for array in arrays:
            memory.add(array)
        addresses = np.array([array.ctypes.data for array in arrays], np.uint64).tobytes()
        ptx.run(ptx.kernels(code("ptx", rest[-1]).decode())[kernel], launch(kernel, *rest), memory, addresses)

    machines = {} if dry else {"GPU": on_gpu}
    if not fibers.unavailable():
        machines["fibers"] = by_fibers
    if not nvrtc.missing():
        machines["interpreter"] = by_interpreter
    return machines


def _arch():
    import cupy

    return int(cupy.cuda.Device().compute_capability)
