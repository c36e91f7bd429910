"""What can be known of the CuPy backend without a GPU: its messages, and its way through a stand-in for CuPy.

The stand-in's arrays lie in the host's memory; its launches are run by the fibers, where there is a compiler.
"""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import sdpa_cupy
import strict_cupy
from sdpa_cupy.plan import PARAMETERS, Launch

import sdpa_ref as sr
from sdpa_ref.problem import Problem
from sdpa_ref.testing import assert_close, check, device, resolve

RNG = np.random.default_rng(5)


@pytest.fixture
def machine(monkeypatch):
    """Return a function that puts the stand-in for CuPy in its place, for a machine with a card of some kind."""
    pytest.importorskip("platformdirs", reason="the cache of compiled kernels lies where platformdirs says")

    def put(**kind):
        cupy = strict_cupy.module(**kind)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.delitem(sys.modules, "sdpa_cupy.launch.cuda", raising=False)
        monkeypatch.delattr("sdpa_cupy.launch.cuda", raising=False)
        monkeypatch.setattr("sdpa_cupy.compile.compiled", strict_cupy.encoded)
        monkeypatch.setattr("sdpa_cupy.nvrtc.missing", lambda: None)
        sr.registry.load.cache_clear()
        return cupy

    yield put
    sr.registry.load.cache_clear()


@pytest.fixture
def launches(monkeypatch):
    """Return the list of launches that were asked for, which do nothing."""
    found = []
    monkeypatch.setattr(strict_cupy.Kernel, "launch", lambda kernel, *launch: found.append(launch), raising=False)
    return found


def qkv(L=5, S=7, E=16, Ev=24, Hq=4, Hkv=2, batch=(2,), dtype=np.float32):
    shapes = ((*batch, Hq, L, E), (*batch, Hkv, S, E), (*batch, Hkv, S, Ev))
    return tuple(RNG.standard_normal(shape).astype(dtype) for shape in shapes)


# ---- why it cannot run here


def test_cupy_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert sdpa_cupy.unavailable() == (
        "cupy is not installed: pip install 'sdpa-ref[cupy13]' for CUDA 13, 'sdpa-ref[cupy12]' for CUDA 12"
    )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"driver": 0, "available": False}, "CuPy 14.0 is installed, but there is no NVIDIA driver"),
        ({"driver": 12080, "available": False}, r"driver is for CUDA 12 and CuPy for CUDA 13: .*sdpa-ref\[cupy12\]"),
        ({"available": False}, "shows no GPU to this process .*CUDA_VISIBLE_DEVICES is ''"),
        ({"arch": 60}, r"compute capability 6.0, and the kernels need 7.5 \(Turing\) or later"),
    ],
)
def test_importing_cupy_is_no_proof_of_a_device(machine, monkeypatch, kind, reason):
    machine(**kind)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert re.search(reason, sdpa_cupy.unavailable())
    with pytest.raises(sr.BackendUnavailable, match=f"backend 'cupy' cannot run here: .*{reason}"):
        sr.sdpa(*qkv(), backend="cupy")


def test_without_nvrtc_nothing_can_be_compiled(machine, monkeypatch):
    machine()
    monkeypatch.setattr("sdpa_cupy.nvrtc.missing", lambda: "no compiler: pip install one")
    assert sdpa_cupy.unavailable() == "no compiler: pip install one"


def test_the_real_cupy_without_a_driver():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if cupy.cuda.is_available():
        assert sdpa_cupy.unavailable() is None
    else:
        assert re.search("driver|GPU", sdpa_cupy.unavailable())


def test_what_the_stand_in_has_cupy_has():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    used = set(re.findall(r"\b(?:xp|cupy)\.(\w+)", "".join(file.read_text() for file in sources())))
    assert used - {"cuda", "__version__"} <= {*strict_cupy.FUNCTIONS, "asarray", "ndarray", "RawModule"}
    assert [name for name in (*used, *strict_cupy.FUNCTIONS) if not hasattr(cupy, name)] == []
    assert [name for name in strict_cupy.METHODS if not hasattr(cupy.ndarray, name)] == []
    assert not hasattr(cupy._core.flags.Flags, "aligned")


def sources():
    folder = Path(sdpa_cupy.__file__).parent
    return folder / "arrays.py", folder / "__init__.py", folder / "launch" / "cuda.py"


# ---- arrays of the right kind, of one device


def test_numpy_arrays_are_not_moved(machine):
    machine()
    with pytest.raises(TypeError, match="backend 'cupy' takes cupy arrays, got numpy arrays"):
        sr.sdpa(*qkv(), backend="cupy")


def test_what_the_host_reads_does_not_come_from_the_device(machine):
    machine()
    with pytest.raises(TypeError, match=r"query_offset is read by the host.*query_offset\.get\(\)"):
        sr.sdpa(*device.moved(qkv()), mask=sr.Causal(), query_offset=device.moved(np.array([2, 0])))


def test_kinds_do_not_mix(machine):
    machine()
    q, k, v = qkv()
    with pytest.raises(TypeError, match="query is a cupy array, key is a numpy array"):
        sr.sdpa(device.moved(q), k, v)
    with pytest.raises(TypeError, match="mask 0 is a numpy array"):
        sr.sdpa(*device.moved((q, k, v)), mask=np.ones((5, 7), bool))


def test_arrays_of_another_device_are_refused(machine):
    cupy = machine()
    cupy.device.id = 1
    with pytest.raises(NotImplementedError, match=r"arrays lie on device 0 and the current device is 1.*Device"):
        sr.sdpa(*device.moved(qkv()), backend="cupy")


def test_products_of_tf32_are_refused_for_float32(machine, monkeypatch):
    machine()
    monkeypatch.setenv("CUPY_TF32", "1")
    with pytest.raises(NotImplementedError, match=r"score_mod is a Python function.*CUPY_TF32"):
        sr.sdpa(*device.moved(qkv()), score_mod=lambda s, b, h, i, j: s, backend="cupy")
    sr.sdpa(*device.moved(qkv(dtype=np.float16)), score_mod=lambda s, b, h, i, j: s, backend="cupy")


def test_out_must_not_lie_in_an_input(machine, launches):
    machine()
    q, k, v = qkv(Ev=16)
    memory = strict_cupy.asarray(np.zeros((2, *q.shape), np.float32))
    with pytest.raises(ValueError, match="out must not share memory"):
        sr.sdpa(memory[0], *device.moved((k, v)), out=memory[0])
    sr.sdpa(memory[0], *device.moved((k, v)), out=memory[1])


def test_details_tell_device_and_versions(machine, monkeypatch):
    machine(arch=90, driver=13010)
    monkeypatch.setattr("sdpa_cupy.nvrtc.version", lambda: (13, 5))
    found = sdpa_cupy.details()
    assert found.pop("kernel cache")
    assert found == {
        "device": "0: A card", "compute capability": "9.0", "memory": "16 GiB", "driver": "CUDA 13.1",
        "runtime": "CUDA 13.0", "NVRTC": "13.5",
    }  # fmt: skip


def test_warmup_names_kernels_of_all_types(machine, monkeypatch, tmp_path):
    machine()
    pytest.importorskip("ml_dtypes")
    monkeypatch.setattr("sdpa_cupy.compile.cache_directory", lambda: tmp_path / "kernels")
    kernels = sdpa_cupy.warmup()
    assert {name.partition(",")[0] for name in kernels} == {"float16", "bfloat16", "float32", "float64"}
    assert all(isinstance(compile_it(), bytes) for compile_it in kernels.values())


@pytest.mark.parametrize("view", [(slice(None, None, -1), slice(1, None, 3)), (slice(None), None), (slice(0, 0),)])
def test_cases_lie_on_the_device_as_on_the_host(machine, view):
    machine()
    whole = np.arange(77, dtype=np.float32).reshape(7, 11)
    for array in (whole[view], whole[view].T, np.broadcast_to(whole[view], (2, *whole[view].shape))):
        there = device.moved(array)
        assert (there.shape, there.dtype) == (array.shape, array.dtype)
        assert array.size == 0 or there.strides == array.strides
        np.testing.assert_array_equal(there.get(), array)


def test_the_laws_hold_on_the_stand_in_where_arrays_do_the_work(machine, monkeypatch):
    machine()
    monkeypatch.setattr("sdpa_cupy.launch.fused", lambda problem, want, arch: "a test wants it so")
    run = check(resolve("cupy"), rounds=1, seconds=0)
    assert [f"{o.law.name}: {o.failure.message}" for o in run.failures] == []
    assert run.passed


# ---- whole arrays, where nothing of NumPy's may be mixed in


@pytest.mark.parametrize("layout", ["HLE", "LHE"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": sr.Causal() & sr.KeyLengths([4, 7]), "query_offset": "end"},
        {"mask": sr.Segments(np.arange(5) % 2, np.arange(7) % 3), "sink": 0.5},
        {"mask": ~sr.Segments(np.arange(5) % 2, np.arange(7) % 3) | (RNG.random((5, 7)) < 0.5)},
        {"mask": RNG.random((7,)) < 0.7, "bias": RNG.standard_normal((4, 5, 7)), "dropout": sr.Dropout(0.3, 9)},
        {"bias": (RNG.standard_normal((5, 1)), RNG.standard_normal(7), sr.ALiBi(0.5)), "query_offset": 1},
        {"softcap": 2.0, "sink": RNG.standard_normal(4)},
    ],
)
def test_whole_arrays_on_the_stand_in(machine, options, layout):
    machine()
    arrays, options = qkv(), options | {"score_mod": plain, "layout": layout}
    arrays = arrays if layout == "HLE" else tuple(array.swapaxes(1, 2) for array in arrays)
    given = options | {name: device.moved(options[name]) for name in ("mask", "bias", "sink") if name in options}
    state = sr.sdpa_state(*device.moved(arrays), **{name: x for name, x in given.items() if name != "sink"})
    sunk = {name: x for name, x in options.items() if name != "sink"}
    assert_close(state.output.get(), *arrays, **sunk)
    assert_close(state.lse.get(), *arrays, what="lse", **sunk)
    if "sink" in options:
        assert_close(state.with_sink(given["sink"]).output.get(), *arrays, **options)
        assert_close(sr.sdpa(*device.moved(arrays), **given).get(), *arrays, **options)
    weights = sr.sdpa_weights(*device.moved(arrays[:2]), **given).get()
    assert_close(weights, *arrays[:2], None, what="weights", **options)


def plain(s, b, h, i, j):
    return np.where(j > 3, s - 0.5 * h, s + 0.25 * (i + b))


def test_poison_behind_the_mask_does_not_spread_on_the_stand_in(machine):
    machine()
    q, k, v = qkv(S=9)
    k[..., 4, :], v[..., 4, :] = np.nan, np.inf
    mask = np.arange(9) != 4
    output = sr.sdpa(*device.moved((q, k, v)), mask=device.moved(mask), score_mod=plain).get()
    assert_close(output, q, k, v, mask=mask, score_mod=plain)


# ---- launches


def test_the_parameter_block_is_one_number_by_value(machine, launches):
    machine(arch=90)
    q, k, v = device.moved(qkv(L=300, S=200, dtype=np.float16))
    out = strict_cupy.asarray(np.zeros((2, 4, 300, 24), np.float16))
    sr.sdpa(q, k, v, mask=sr.Causal(), query_offset=0, out=out)
    ((name, source, defines, grid, block, parameters, shared),) = launches
    assert (name, source, block) == ("attend", "attend.cu", (128,))
    assert (parameters.shape, parameters.dtype) == ((1,), PARAMETERS)
    assert [parameters[0][array]["data"] for array in ("query", "key", "value", "out")] == [
        array.data.ptr for array in (q, k, v, out)
    ]
    assert parameters[0]["stop"]["data"] != 0  # what the mask became lies where the kernel reads
    assert len(grid) == 3
    assert shared > 0
    assert dict(defines)["ELEMENT"] == 0


def test_a_failed_launch_is_raised_with_what_was_launched(machine, monkeypatch):
    machine()

    def fail(kernel, *launch):
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")

    monkeypatch.setattr(strict_cupy.Kernel, "launch", fail, raising=False)
    with pytest.raises(RuntimeError, match="INVALID_VALUE") as raised:
        sr.sdpa(*device.moved(qkv()))
    assert re.search(r"kernel='attend.* on device 0 of compute capability 8.0", raised.value.__notes__[0])


def test_small_numbers_are_moved_once_for_a_stream(machine, launches):
    cupy = machine()
    arrays, moves = device.moved(qkv()), []
    cupy.asarray = lambda numbers: moves.append(numbers) or strict_cupy.asarray(numbers)
    for _ in range(3):
        sr.sdpa(*arrays, mask=sr.KeyLengths([3, 7]), sink=0.5)
    once = len(moves)
    assert 0 < once <= 4
    sr.sdpa(*arrays, mask=sr.KeyLengths([2, 7]), sink=0.5)
    assert len(moves) == once + 1
    cupy.stream.ptr = 99
    sr.sdpa(*arrays, mask=sr.KeyLengths([2, 7]), sink=0.5)
    assert len(moves) == 2 * once + 1


def test_a_problem_is_planned_once(machine):
    machine()
    plans = [Problem.of(*device.moved(qkv()), mask=sr.Causal(), query_offset=1).plans for _ in range(2)]
    assert plans[0] is plans[1]
    assert plans[0] is not Problem.of(*qkv(), mask=sr.Causal(), query_offset=1).plans


# ---- graphs


def test_a_captured_call_moves_loads_and_waits_for_nothing(machine, launches):
    cupy = machine()
    cupy.stream.ptr = 77
    q, k, v = device.moved(qkv(L=1, S=4096))
    out = strict_cupy.asarray(np.zeros((2, 4, 1, 24), np.float32))
    options = {"mask": sr.KeyLengths([4000, 9]), "sink": 0.25, "out": out}
    cupy.stream.capturing = True
    with pytest.raises(RuntimeError, match="make this call once on this stream before it is captured"):
        sr.sdpa(q, k, v, **options)
    cupy.stream.capturing = False
    sr.sdpa(q, k, v, **options)
    cupy.stream.capturing = True
    warm = len(launches)
    for _ in range(2):
        sr.sdpa(q, k, v, **options)
    first, second = (launches[warm + n * warm][5][0]["workspace"] for n in range(2))
    assert len(launches) == 3 * warm
    assert first == second != 0
    cupy.stream.capturing = False
    sr.sdpa(q, k, v, **options)
    assert launches[-1][5][0]["workspace"] != first  # which the graph owns


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"score_mod": plain}, "score_mod is a Python function"),
        ({"mask": sr.Segments(np.arange(5) % 2, np.arange(7) % 2)}, "rules only"),
        ({"sink": np.ones(4)}, "sink has to be made float64"),
    ],
)
def test_what_is_more_than_launches_cannot_be_captured(machine, options, reason):
    cupy = machine()
    cupy.stream.ptr, cupy.stream.capturing = 77, True
    options |= {"sink": device.moved(options["sink"])} if "sink" in options else {}
    with pytest.raises(RuntimeError, match=f"cannot be captured: .*{reason}"):
        sr.sdpa(*device.moved(qkv()), **options)


# ---- the kernels, by fibers, and on a device


def test_kernels_on_the_stand_in(machine, monkeypatch):
    fibers = pytest.importorskip("sdpa_cupy.launch.fibers")
    if fibers.unavailable():
        pytest.skip(fibers.unavailable())
    machine()

    def run(kernel, name, source, defines, grid, block, parameters, shared):
        emulated = fibers.Fibers(arch=80)
        for array in list(strict_cupy.live.values()):
            emulated.address(array.host)
        emulated.run(Launch(name, source, defines, grid, *block, shared), parameters)

    monkeypatch.setattr(strict_cupy.Kernel, "launch", run, raising=False)
    arrays, rule = qkv(L=3, S=600, batch=(), dtype=np.float16), sr.Segments(np.arange(3) % 2, np.arange(600) % 2)
    output = sr.sdpa(*device.moved(arrays), mask=rule).get()
    assert_close(output, *arrays, mask=rule)


def test_every_law_holds_on_a_device():
    reason = sdpa_cupy.unavailable()
    if reason and "cupy" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
        pytest.skip(reason)
    run = check(resolve("cupy"), rounds=10, seconds=120)
    assert [f"{o.law.name}: {o.found.case}\n{o.failure.message}" for o in run.failures] == []
    assert run.passed
