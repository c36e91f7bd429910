"""What can be known of the CuPy backend without a GPU: its messages, and its way through a stand-in for CuPy.

The stand-in's arrays lie in the host's memory; its launches are run by the fibers, where there is a compiler.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import sdpa_cupy
import strict_cupy
from strict_cupy import plain, qkv

import sdpa_ref as sr
from sdpa_ref.testing import assert_close, check, device, resolve
from sdpa_ref.testing.strides import stored

RNG = np.random.default_rng(5)


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
    names = "arrays", "array_gradients", "flows", "gradients", "pulls", "__init__", "launch/cuda"
    return [folder / f"{name}.py" for name in names]


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
    arrays = device.moved(qkv())
    cupy.device.id = 1
    with pytest.raises(NotImplementedError, match=r"arrays lie on device 0 and the current device is 1.*Device"):
        sr.sdpa(*arrays, backend="cupy")


def test_device_and_environment_are_asked_for_in_every_call(machine, launches, monkeypatch):
    cupy = machine()
    arrays, odd = device.moved(qkv()), {"score_mod": lambda s, b, h, i, j: s.copy()}
    for _ in range(2):
        cupy.device.id = 0
        monkeypatch.setenv("CUPY_TF32", "0")
        sr.sdpa(*arrays)
        sr.sdpa(*arrays, **odd)
        monkeypatch.setenv("CUPY_TF32", "1")
        with pytest.raises(sr.BackendUnavailable, match="CUPY_TF32"):
            sr.sdpa(*arrays, **odd)
        cupy.device.id = 1
        with pytest.raises(sr.BackendUnavailable, match="device 0 and the current device is 1"):
            sr.sdpa(*arrays)


def test_products_of_tf32_are_refused_for_float32(machine, monkeypatch):
    machine()
    monkeypatch.setenv("CUPY_TF32", "1")
    with pytest.raises(NotImplementedError, match=r"score_mod is a Python function.*CUPY_TF32"):
        sr.sdpa(*device.moved(qkv()), score_mod=lambda s, b, h, i, j: s.copy(), backend="cupy")
    sr.sdpa(*device.moved(qkv(dtype=np.float16)), score_mod=lambda s, b, h, i, j: s.copy(), backend="cupy")


def test_a_traced_function_needs_no_products_of_cupy(machine, monkeypatch, launches):
    machine()
    monkeypatch.setenv("CUPY_TF32", "1")
    sr.sdpa(*device.moved(qkv()), score_mod=lambda s, b, h, i, j: s - 0.1 * abs(i - j), backend="cupy")
    assert launches


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


def test_cases_beyond_offsets_of_32_bits_lie_on_the_device_as_on_the_host(machine):
    machine()
    array = stored(np.arange(24, dtype=np.float16).reshape(2, 3, 4), "far apart")
    there = device.moved(array)
    assert there.strides == array.strides
    assert there.strides[0] > 2**31
    np.testing.assert_array_equal(there.get(), array)


def test_the_laws_hold_on_the_stand_in_where_arrays_do_the_work(machine, monkeypatch):
    machine()
    for module in ("launch", "pulls"):
        monkeypatch.setattr(f"sdpa_cupy.{module}.fused", lambda problem, want, arch: "a test wants it so")
    monkeypatch.setattr("sdpa_cupy.calls.kind_of", lambda *what: None)
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


def test_poison_behind_the_mask_does_not_spread_on_the_stand_in(machine):
    machine()
    q, k, v = qkv(S=9)
    k[..., 4, :], v[..., 4, :] = np.nan, np.inf
    mask = np.arange(9) != 4
    output = sr.sdpa(*device.moved((q, k, v)), mask=device.moved(mask), score_mod=plain).get()
    assert_close(output, q, k, v, mask=mask, score_mod=plain)


@pytest.mark.parametrize(
    "mask",
    [
        sr.Segments(np.arange(200) % 3, np.arange(300) % 3),
        ~sr.Segments(np.arange(200) % 3, np.arange(300) % 3) & sr.Causal(),
        sr.Window(3, 0) | sr.FirstTokens(4) & sr.Causal() | sr.Chunked(50) & sr.KeyStarts(20),
    ],
    ids=repr,
)
def test_rules_are_compared_on_the_device(machine, monkeypatch, mask):
    """Numbers of rows and keys go there, and no pair of them: what is moved is counted."""
    cupy = machine()
    q, k, v = qkv(L=200, S=300, batch=(), dtype=np.float32)
    moved, asarray = [], cupy.asarray

    def counted(value, dtype=None):
        moved.append(getattr(value, "size", 1) if isinstance(value, np.ndarray) else 0)
        return asarray(value, dtype)

    arrays = device.moved((q, k, v))
    monkeypatch.setattr(cupy, "asarray", counted)
    output = sr.sdpa(*arrays, mask=mask, query_offset=100, score_mod=plain).get()
    assert_close(output, q, k, v, mask=mask, query_offset=100, score_mod=plain)
    assert max(moved) <= 300
