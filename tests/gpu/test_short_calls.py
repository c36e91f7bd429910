"""Calls that only their numbers tell apart launch what the general way launches, with the same numbers."""

import numpy as np
import pytest

pytest.importorskip("platformdirs", reason="the cache of compiled kernels lies where platformdirs says")

from sdpa_cupy import calls
from sdpa_cupy.calls import kind_of
from sdpa_cupy.launch import by_any_way

import sdpa_ref as sr
from sdpa_ref._problem import pose

OUTPUT = frozenset({"output"})


class Recorder:
    """A launcher that writes down what is to run."""

    def __init__(self):
        self.found, self.small = [], {}

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def address(self, array):
        return 0 if array is None else array.ctypes.data

    def moved(self, array):
        if array is not None:
            self.small[array.ctypes.data] = array
        return array

    def run(self, launch, parameters):
        self.found.append((launch, parameters[0].copy()))


def posed(L=3, S=5, E=32, Ev=None, heads=(4, 2), batch=(2,), dtype=np.float16, layout="HLE", **options):
    Hq, Hkv = heads
    shapes = (*batch, Hq, L, E), (*batch, Hkv, S, E), (*batch, Hkv, S, E if Ev is None else Ev)
    arrays = [np.zeros(shape, dtype) for shape in shapes]
    if layout == "LHE":
        arrays = [np.zeros((*x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1]), dtype) for x in arrays]
    return pose(*arrays, layout=layout, output=True, **options)[0]


SHORT = [
    dict(),
    dict(L=1, S=400, heads=(8, 1), mask=sr.Causal(), query_offset=399),
    dict(L=70, S=90, mask=sr.Window(9, 0) & sr.KeyLengths(80), query_offset="end", scale=0.25),
    dict(L=1, S=4000, heads=(8, 2), batch=(3, 2)),
    dict(L=2, S=700, batch=(), mask=sr.Prefix(3), query_offset=5, dtype=np.float32),
    dict(L=5, S=9, layout="LHE", mask=sr.Chunked(4), query_offset=2, dtype=np.float64),
    dict(L=5, S=9, batch=(2,) * 8, Ev=256, E=384),
    dict(mask=sr.KeyLengths([3, 5])),
    dict(L=1, S=700, mask=sr.Window(9, 0) & sr.KeyLengths([300, 512]), query_offset="end"),
    dict(batch=(3, 2), mask=sr.KeyLengths([[5], [1], [4]]) & sr.Prefix([2, 3]), query_offset=[[1], [2], [0]]),
    dict(softcap=2.0),
    dict(sink=0.5),
    dict(L=1, S=600, sink=np.arange(4.0), mask=sr.Causal(), query_offset=590),
    dict(bias=sr.ALiBi(0.5), query_offset=7),
    dict(bias=sr.ALiBi(np.arange(8.0)[::2]), mask=sr.KeyLengths([3, 5]), query_offset=2, softcap=3.0),
]


@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("n", range(len(SHORT)))
def test_short_calls_launch_what_any_call_launches(n, arch):
    problem = posed(**SHORT[n])
    short, general = Recorder(), Recorder()
    own = calls.attend(problem, OUTPUT, arch, short)
    assert own is not None, "this call goes the long way"
    by_any_way(problem, OUTPUT, arch, general)
    assert own.output is problem.out
    assert [launch for launch, _ in short.found] == [launch for launch, _ in general.found]
    for (_, one), (_, other) in zip(short.found, general.found, strict=True):
        for name in one.dtype.names:
            if name == "bands" and one[name] != 0:  # in an array of each launcher's own
                assert np.array_equal(short.small[int(one[name])], general.small[int(other[name])])
                continue
            if name == "place" and problem.slopes is None:  # only ALiBi reads the place
                continue
            if name == "workspace" and one[name] != 0 != other[name]:
                continue
            if name in ("query", "key", "value", "out"):
                assert one[name]["data"] == other[name]["data"]
                array = getattr(problem, name)
                steps = [0 if n == 1 else step for n, step in zip(array.shape, array.strides, strict=True)]
                assert other[name]["batch"].tolist()[: len(steps) - 3] == steps[:-3]
                used = np.array(array.shape) > 1  # a stride that nothing is multiplied with is of no concern
                view = [*one[name]["batch"][: array.ndim - 3], *(one[name][part] for part in ("head", "row", "column"))]
                assert np.array_equal(np.array(view)[used], np.array(steps)[used])
                assert not one[name]["batch"][array.ndim - 3 :].any()
            else:
                assert one[name] == other[name] if one[name].ndim == 0 else np.array_equal(one[name], other[name]), name


def turned(array):
    return np.swapaxes(np.zeros(array.swapaxes(-1, -2).shape, array.dtype), -1, -2)


def moved(array):
    return np.zeros(array.nbytes + 2, np.uint8)[2:].view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize(
    "words",
    [
        dict(E=20),
        dict(E=256, Ev=512),
        dict(batch=(1,) * 9),
        dict(S=0),
        dict(L=0),
        dict(scale=1e-45),
        dict(bias=np.zeros(5)),
        dict(bias=sr.ALiBi(0.5), query_offset=[0, 1]),
        dict(bias=sr.ALiBi([[0.5] * 4, [0.25] * 4]), query_offset=0),
        dict(bias=sr.ALiBi(0.5), query_offset=0, key_positions=np.arange(1, 6)),
        dict(dropout=sr.Dropout(0.5, 1)),
        dict(score_mod=lambda s, b, h, i, j: s),
        dict(mask=np.ones((3, 5), bool)),
        dict(mask=sr.Segments([0, 1, 1], [0, 1, 1, 2, 2])),
    ],
    ids=lambda words: " ".join(words),
)
def test_other_calls_are_left_alone(words):
    recorder = Recorder()
    assert calls.attend(posed(**words), OUTPUT, 80, recorder) is None
    assert not recorder.found


@pytest.mark.parametrize("name", ["query", "key", "value", "out"])
@pytest.mark.parametrize("change", [turned, moved, lambda x: np.zeros((*x.shape[:-1], 33), x.dtype)[..., :32]])
def test_so_are_arrays_that_cannot_be_read_by_chunks(name, change):
    problem = posed(L=16, S=16)
    assert calls.attend(problem, OUTPUT, 80, Recorder()) is not None
    recorder = Recorder()
    assert calls.attend(problem._replace(**{name: change(getattr(problem, name))}), OUTPUT, 80, recorder) is None
    assert not recorder.found


def test_so_are_keys_that_broadcast_and_other_results():
    problem, recorder = posed(), Recorder()
    assert calls.attend(problem._replace(key=problem.key[:1]), OUTPUT, 80, recorder) is None
    assert calls.attend(problem._replace(value=problem.value[0]), OUTPUT, 80, recorder) is None
    for want in (frozenset({"output", "lse"}), frozenset({"weights"})):
        assert calls.attend(problem, want, 80, recorder) is None
    assert not recorder.found


def test_kinds_are_remembered_by_structure_and_never_by_a_length():
    calls.attend(posed(L=1, S=30), OUTPUT, 80, Recorder())
    known = kind_of.cache_info().misses
    for n in range(31, 60):
        calls.attend(posed(L=1, S=n, mask=sr.Causal(), query_offset=n, scale=1 / n), OUTPUT, 80, Recorder())
    assert kind_of.cache_info().misses == known
