"""Codes and scales: what they mean, and bad input."""

import copy
import itertools
import pickle

import ml_dtypes
import numpy as np
import pytest

from sdpa_ref import Quantized

RNG = np.random.default_rng(0)
TYPES = [np.int8, np.uint8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def plain(codes, scale, offset=0.0, zero=0):
    """Return what is meant by the definition, number by number: an axis of length s serves n in runs of n / s."""

    def at(part, index):
        part = np.asarray(part, np.float64)
        own = index[len(index) - part.ndim :]
        return part[
            tuple(i * s // n for i, s, n in zip(own, part.shape, codes.shape[len(index) - part.ndim :], strict=True))
        ]

    dense = np.zeros(codes.shape)
    for index in np.ndindex(codes.shape):
        dense[index] = (float(codes[index]) - zero) * at(scale, index) + at(offset, index)
    return dense


def codes_of(dtype, shape):
    return np.arange(np.prod(shape)).astype(np.uint8).reshape(shape).view(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_code_means_scale_times_code(dtype):
    codes = codes_of(dtype, (16, 16))
    np.testing.assert_array_equal(Quantized(codes, 0.5).dense(), codes.astype(np.float64) * 0.5)
    assert Quantized(codes, 0.5).shape == (16, 16)


@pytest.mark.parametrize("offset", [None, (), (1, 6), (2, 1), (4, 3)])
@pytest.mark.parametrize("scale", [(), (6,), (4, 1), (4, 2), (2, 6), (1, 6), (3, 4, 1), (1, 2, 3)])
def test_parts_broadcast_in_blocks(scale, offset):
    codes = RNG.integers(-128, 128, (3, 4, 6), np.int8)
    scale = RNG.standard_normal(scale).astype(np.float16)
    offset = None if offset is None else RNG.standard_normal(offset)
    quantized = Quantized(codes, scale, offset, zero=-3)
    np.testing.assert_array_equal(quantized.dense(), plain(codes, scale, 0.0 if offset is None else offset, -3))
    assert quantized.codes is codes
    assert np.shares_memory(quantized.scale, scale)
    assert offset is None or np.shares_memory(quantized.offset, offset)
    assert quantized.nbytes == codes.nbytes + scale.nbytes + (0 if offset is None else offset.nbytes)


def test_four_bits_lie_two_a_byte_the_first_in_the_low_half():
    codes = np.array([[0x10, 0x32], [0x98, 0xFF]], np.uint8)
    quantized = Quantized(codes, np.ones((2, 1), np.float32), zero=8, bits=4)
    assert quantized.shape == (2, 4)
    assert quantized.ndim == 2
    assert quantized.dense().tolist() == [[-8, -7, -6, -5], [0, 1, 7, 7]]
    groups = Quantized(codes, [[1.0, 10.0]], bits=4)  # a scale for each half of a token
    assert groups.dense()[0].tolist() == [0, 1, 20, 30]
    per_channel = Quantized(codes, np.arange(4.0), bits=4)
    assert per_channel.dense()[0].tolist() == [0, 1, 4, 9]


def test_a_constant_group_has_scale_0_and_is_exact():
    quantized = Quantized(np.full((2, 4), 77, np.uint8), np.zeros((2, 1)), [[0.1], [-3.0]])
    assert (quantized.dense() == [[0.1] * 4, [-3.0] * 4]).all()


def test_hard_scales_spread_and_warn_nobody():
    codes = np.array([[1, 0, -1]] * 3, np.int8)
    dense = Quantized(codes, [[np.nan], [np.inf], [1e308]], [[0.0], [0.0], [1e308]]).dense()
    assert np.isnan(dense[0]).all()
    assert np.isposinf(dense[1, 0])
    assert np.isnan(dense[1, 1])
    assert np.isposinf(dense[2, 0])
    assert dense[2, 2] == 0


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_empty_codes(shape):
    codes = np.zeros(shape, np.int8)
    for part in itertools.chain([()], (shape[i:] for i in range(len(shape))), [(1,) * len(shape)]):
        assert Quantized(codes, np.ones(part)).dense().shape == shape


CODES = np.zeros((2, 6), np.int8)
WRONG = {
    "float codes": ({"codes": np.zeros((2, 6))}, TypeError, ["codes must be int8, uint8, float8_e4m3fn.* float64"]),
    "wide codes": ({"codes": CODES.astype(int)}, TypeError, ["codes must be", "got int64"]),
    "another float8": ({"codes": CODES.astype(ml_dtypes.float8_e4m3fnuz)}, TypeError, ["got float8_e4m3fnuz"]),
    "integer scale": ({"scale": np.ones(6, int)}, TypeError, ["scale must be float16", "got int64"]),
    "text": ({"scale": "abc"}, TypeError, ["scale must be"]),
    "scale that divides nothing": ({"scale": np.ones((2, 4))}, ValueError, [r"scale .*\(2, 6\).*got shape \(2, 4\)"]),
    "more scales than numbers": ({"scale": np.ones((2, 12))}, ValueError, ["scale must have axes that divide"]),
    "more axes": ({"scale": np.ones((1, 2, 6))}, ValueError, [r"got shape \(1, 2, 6\)"]),
    "no scale": ({"scale": np.ones((2, 0))}, ValueError, [r"got shape \(2, 0\)"]),
    "offset": ({"offset": np.ones((2, 5))}, ValueError, [r"offset .* got shape \(2, 5\)"]),
    "integer offset": ({"offset": np.ones(6, np.int8)}, TypeError, ["offset must be float16", "got int8"]),
    "bits": ({"bits": 2}, ValueError, ["bits must be 8 or 4, got 2"]),
    "signed nibbles": ({"bits": 4}, TypeError, ["bits=4 must be uint8", "got int8"]),
    "zero": ({"zero": 128}, ValueError, ["zero must be a code, -128 to 127", "got 128"]),
    "zero of a float8": ({"codes": CODES.astype(TYPES[2]), "zero": 1}, ValueError, ["zero must be a code, 0 to 0"]),
    "zero of a nibble": ({"codes": CODES.view(np.uint8), "bits": 4, "zero": 16}, ValueError, ["0 to 15", "got 16"]),
    "float zero": ({"zero": 8.0}, TypeError, ["zero must be an integer, got float"]),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_errors(what):
    changed, error, words = WRONG[what]
    arguments = {"codes": CODES, "scale": np.ones((2, 1))} | changed
    with pytest.raises(error) as raised:
        Quantized(arguments.pop("codes"), arguments.pop("scale"), **arguments)
    for word in words:
        raised.match(word)


def test_it_is_frozen():
    quantized = Quantized(codes_of(np.uint8, (2, 4)), np.ones((2, 1)), np.ones(1), zero=8, bits=4)
    with pytest.raises(AttributeError):
        quantized.zero = 0
    for twin in (copy.copy(quantized), copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized))):
        assert (twin.dense() == quantized.dense()).all()
        assert (twin.zero, twin.bits) == (8, 4)


def test_what_it_shows():
    quantized = Quantized(codes_of(np.uint8, (2, 4)), np.ones((2, 1)), np.ones(1), zero=8, bits=4)
    shown = "Quantized((2, 8), codes uint8 (2, 4), bits=4, scale float64 (2, 1), offset float64 (1,), zero=8)"
    assert repr(quantized) == shown
