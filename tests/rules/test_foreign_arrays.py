"""Arrays of other libraries, and those of NumPy that are not plain: taken as they are, or refused by argument."""

import copy
import dataclasses
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest

from sdpa_ref import (
    ALiBi,
    AttentionHead,
    Causal,
    Chunked,
    Dropout,
    FirstTokens,
    KeyLengths,
    KeyStarts,
    MaskFunction,
    Packed,
    Prefix,
    QueryLengths,
    Segments,
    Tree,
    Window,
    alibi_slopes,
    sdpa,
)

X = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
MASKS = {
    "KeyLengths": lambda: KeyLengths([3, 2]),
    "KeyStarts": lambda: KeyStarts([1, 0]),
    "QueryLengths": lambda: QueryLengths(np.array(3)),
    "Prefix": lambda: Prefix([1, 2]),
    "Segments": lambda: Segments([7, 7, 3, 3]),
    "Packed": lambda: Packed([1, 3]),
    "Tree": lambda: Tree([-1, 0, 0, 2]),
    "Window": lambda: Window(2, None),
    "Chunked": lambda: Chunked(2),
    "all of them": lambda: Causal() & ~KeyStarts([1, 0]) | FirstTokens(1) & Packed([1, 3]),
}
# Where an array may stand, and the argument that its error must name.
PLACES = {
    "query": ("query", lambda x: sdpa(x, X, X)),
    "key": ("key", lambda x: sdpa(X, x, X)),
    "value": ("value", lambda x: sdpa(X, X, x)),
    "mask": ("mask", lambda x: sdpa(X, X, X, mask=x)),
    "mask operand": ("mask", lambda x: Causal() & x),
    "bias": ("bias", lambda x: sdpa(X, X, X, bias=x)),
    "sink": ("sink", lambda x: sdpa(X, X, X, sink=x)),
    "scale": ("scale", lambda x: sdpa(X, X, X, scale=x)),
    "softcap": ("softcap", lambda x: sdpa(X, X, X, softcap=x)),
    "query_offset": ("query_offset", lambda x: sdpa(X, X, X, query_offset=x)),
    "KeyLengths": ("KeyLengths", KeyLengths),
    "KeyStarts": ("KeyStarts", KeyStarts),
    "QueryLengths": ("QueryLengths", QueryLengths),
    "Prefix": ("Prefix", Prefix),
    "Segments": ("Segments q_ids", Segments),
    "Segments keys": ("Segments k_ids", lambda x: Segments([1], x)),
    "Packed": ("Packed q_lengths", Packed),
    "Packed keys": ("Packed k_lengths", lambda x: Packed([1], x)),
    "Tree": ("Tree parents", Tree),
    "Window": ("Window left", lambda x: Window(x, 0)),
    "FirstTokens": ("FirstTokens n", FirstTokens),
    "Chunked": ("Chunked size", Chunked),
    "ALiBi": ("ALiBi slopes", ALiBi),
    "Dropout": ("seed", lambda x: Dropout(0.5, x)),
    "result of a function": ("MaskFunction", lambda x: sdpa(X, X, X, mask=MaskFunction(lambda b, h, i, j: x))),
}


class OnSeveralDevices:
    """As a JAX array that lies on several devices: without DLPack, but NumPy takes it where all are the host."""

    def __init__(self, array, platform="cpu"):
        self.array, self.platform, self.dtype = array, platform, array.dtype

    def devices(self):
        return {self}

    def __dlpack_device__(self):
        raise BufferError("__dlpack__ only supported for unsharded arrays.")

    def __dlpack__(self, **_):
        raise BufferError("__dlpack__ only supported for unsharded arrays.")

    def __array__(self, dtype=None, copy=None):
        assert self.platform == "cpu", "moved behind the caller's back"
        return self.array


class Tracer:
    """As an array of JAX within jit: whatever is asked raises, by a different error each."""

    dtype = np.dtype(np.float32)

    def __getattr__(self, name):
        raise AttributeError(f"Tracer has no attribute {name}")

    def __dlpack__(self, **_):
        raise ZeroDivisionError

    def __array__(self, *_, **__):
        raise RuntimeError("abstract tracer\nin many lines")


class TracerWithoutDLPack:
    """As an array of JAX within jit, where NumPy's conversion is all that it has."""

    dtype = np.dtype(np.float32)

    def __array__(self, *_, **__):
        raise TypeError("abstract tracer")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "array",
    [Tracer(), TracerWithoutDLPack(), OnSeveralDevices(np.ones(4), "gpu")],
    ids=["tracer", "tracer without DLPack", "on a device"],
)
def test_what_numpy_cannot_take_is_an_error_that_names_the_argument_and_the_page(place, array):
    name, call = PLACES[place]
    with pytest.raises(TypeError, match=name) as caught:
        call(array)
    assert place == "softcap" or "docs/bridges.md" in str(caught.value)


def test_weights_that_numpy_cannot_take_are_listed():
    with pytest.raises(ValueError, match=r"query.weight must be an array.*\n.*key.weight must be an array"):
        AttentionHead.from_state_dict({f"{name}.weight": Tracer() for name in ("query", "key", "value")})


def test_arrays_on_several_devices_of_the_host_are_taken():
    x, n, keep = (OnSeveralDevices(array) for array in (X, np.array([4, 2]), np.ones((2, 4, 4), bool)))
    expected = sdpa(X, X, X, mask=KeyLengths(3), bias=ALiBi(0.5))
    got = sdpa(
        x, x, x, mask=KeyLengths(OnSeveralDevices(np.array(3))) & keep, bias=ALiBi(OnSeveralDevices(np.array(0.5)))
    )
    np.testing.assert_array_equal(got, expected)
    assert KeyLengths(n) == KeyLengths([4, 2])


@pytest.mark.parametrize("place", PLACES)
def test_masked_arrays_are_refused_by_one_rule_with_advice_that_fits(place):
    name, call = PLACES[place]
    for masked in (np.ma.masked_equal([1, 1, 2, 9], 9), np.ma.masked, [np.ma.masked_equal([1, 9], 9), [2, 3]]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(TypeError, match=name) as caught:
                call(masked)
        if place not in ("softcap", "Window", "FirstTokens", "Chunked", "Dropout"):
            assert "masked array" in str(caught.value)
            assert ".filled(" in str(caught.value)
        assert "~" not in str(caught.value)


INTEGERS = {"python": int, "numpy": np.int8, "unsigned": np.uint64, "without axes": np.array}


def integer(kind, n):
    if kind == "torch":
        return pytest.importorskip("torch").tensor(n)
    return INTEGERS[kind](n)


@pytest.mark.parametrize("kind", [*INTEGERS, "torch"])
def test_integers_of_every_library_are_taken_without_a_warning(kind):
    two = integer(kind, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Window(two, two) == Window(2, 2)
        assert FirstTokens(two) == FirstTokens(2)
        assert Chunked(two) == Chunked(2)
        assert KeyLengths(two) == KeyLengths(2)
        assert Dropout(0.5, two) == Dropout(0.5, 2)
        assert Causal().dense(two, two).shape == (2, 2)
        assert alibi_slopes(two).shape == (2,)
        assert AttentionHead(two, two).query.weight.shape == (2, 2)


def test_tensors_of_integers_are_taken_without_a_warning():
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rule in (KeyLengths, KeyStarts, QueryLengths, Prefix, Packed, Segments):
            assert rule(torch.tensor([4, 2])) == rule([4, 2])
        assert Tree(torch.tensor([-1, 0])) == Tree([-1, 0])
        np.testing.assert_array_equal(ALiBi(torch.tensor([1, 2])).slopes, [1, 2])


@pytest.mark.parametrize("wrong", [True, np.True_, np.array(True), np.array([2]), 2.0, np.array(2.0), "2", None])
def test_other_things_are_no_integers(wrong):
    for rule in (lambda n: Window(0, n), FirstTokens, Chunked):
        if wrong is not None or rule in (FirstTokens, Chunked):
            with pytest.raises(TypeError, match="must be an integer, got"):
                rule(wrong)


def test_tensors_whose_memory_does_not_hold_their_numbers():
    torch = pytest.importorskip("torch")
    negative = torch.complex(torch.zeros(2, 4, 8), torch.tensor(X)).conj().imag
    assert negative.is_neg()
    np.testing.assert_array_equal(sdpa(X, X, negative), sdpa(X, X, -X))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2, 4, 8)
    for tensor in (
        torch._efficientzerotensor((2, 4, 8)),
        fake,
        torch.zeros(2, 4, 8, device="meta"),
        torch.zeros(2, 4, 8, requires_grad=True),
        torch.zeros(2, 4, 8, requires_grad=True, dtype=torch.bfloat16),
    ):
        with pytest.raises(TypeError, match=r"value must be .* see docs/bridges\.md"):
            sdpa(X, X, tensor)
    with pytest.raises(TypeError, match="value must be"):
        torch.func.functionalize(lambda tensor: sdpa(X, X, tensor))(torch.ones(2, 4, 8))
    with pytest.raises(TypeError, match=r"ALiBi slopes must be .* use tensor\.detach\(\)"):
        ALiBi(torch.ones(2, requires_grad=True))


class Frame:
    """As a table of pandas, whose columns NumPy sees as objects."""

    def to_numpy(self, dtype=object):
        return np.array([1.0, None], dtype)

    def __array__(self, dtype=None, copy=None):
        return self.to_numpy()


@pytest.mark.parametrize(
    "place", sorted(set(PLACES) - {"softcap", "scale", "Window", "FirstTokens", "Chunked", "Dropout"})
)
def test_nullable_tables_are_told_how_to_become_numbers(place):
    name, call = PLACES[place]
    with pytest.raises(TypeError, match=rf"{name} must be an array of numbers, got Frame of Python objects.*to_numpy"):
        call(Frame())


@pytest.mark.parametrize("kind", MASKS)
def test_masks_of_another_process_are_equal_and_hash_alike(kind):
    mask = MASKS[kind]()
    hash(mask)
    script = (
        "import pickle, sys; mask = pickle.load(sys.stdin.buffer); hash(mask); pickle.dump(mask, sys.stdout.buffer)"
    )
    done = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(mask), capture_output=True, check=True)
    other = pickle.loads(done.stdout)
    assert other == mask
    assert hash(other) == hash(mask)
    assert other in {MASKS[kind]()}


def arrays_of(thing):
    yield from (value for value in vars(thing).values() if isinstance(value, np.ndarray))
    for part in getattr(thing, "parts", ()):
        yield from arrays_of(part)


@pytest.mark.parametrize("make", [*MASKS.values(), lambda: ALiBi([1.0, 2.0])], ids=[*MASKS, "ALiBi"])
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_read_only_and_carry_no_stale_answers(make, again):
    first = make()
    hash(first)
    if not isinstance(first, ALiBi):  # what a call keeps of a mask
        first.__dict__["_seen"] = "stale"
    second = again(first)
    assert not any(array.flags.writeable for array in arrays_of(second))
    assert vars(second).keys() == {field.name for field in dataclasses.fields(first)}


def test_equal_masks_are_equal_at_any_size():
    lengths = np.ones(5000, np.int64)
    assert Packed(lengths) == Packed(lengths)
    assert hash(Packed(lengths)) == hash(Packed(lengths))
    assert Packed(lengths) != Packed([2, *lengths[2:], 0])
    x = np.ones((1, 5000, 1), np.float32)
    mask = Packed(lengths) & Causal() & Packed(lengths)
    np.testing.assert_array_equal(sdpa(x, x, x, mask=mask), x)


def test_what_may_change_is_equal_by_identity():
    keep = np.ones((4, 4), bool)
    assert Causal() & keep == Causal() & keep
    assert Causal() & keep != Causal() & keep.copy()
    assert MaskFunction(max) == MaskFunction(max)
    assert MaskFunction(max) != MaskFunction(min)


def test_pandas_on_the_left_of_an_operator():
    pandas = pytest.importorskip("pandas")
    keep = np.tri(4, dtype=bool)
    np.testing.assert_array_equal((pandas.DataFrame(keep) & KeyLengths(2)).dense(4, 4), keep & (np.arange(4) < 2))
    np.testing.assert_array_equal((pandas.Series(keep[1]) | KeyLengths(1)).dense(4, 4), [keep[1]] * 4)


def test_biases_that_are_rules_equal_their_copies():
    slopes = ALiBi([0.5, 0.25])
    assert slopes == pickle.loads(pickle.dumps(slopes)) == copy.deepcopy(slopes)
    assert {slopes: 1}[ALiBi([0.5, 0.25])] == 1
    assert slopes != ALiBi([0.5, 0.5])


def test_an_exception_of_somebody_else_in_a_conversion_is_not_replaced():
    """The handler of a signal may raise while NumPy takes an argument."""

    class Interrupted:
        def __array__(self, dtype=None, copy=None):
            raise TimeoutError("too slow")

    x = np.ones((1, 2, 4), np.float32)
    for arguments, options in (((Interrupted(), x, x), {}), ((x, x, x), {"bias": Interrupted()})):
        with pytest.raises(TimeoutError, match="too slow"):
            sdpa(*arguments, **options)
