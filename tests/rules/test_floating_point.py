"""Law 18 where another library has changed this thread's arithmetic: subnormal numbers are zeros there."""

import os
from contextlib import contextmanager

import numpy as np
import pytest

import sdpa_ref
from sdpa_ref import ALiBi, KeyLengths, sdpa, sdpa_state, sdpa_vjp, sdpa_weights
from sdpa_ref.floating_point import default_rules, keeps_subnormals
from sdpa_ref.layers import Conv1x1, Embedding, LayerNorm, Linear, MultiHeadAttention, RMSNorm, SpatialAttention

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

import numba
from sdpa_numba.runtime.processor import ARM, X86, float_state, set_float_state
from thread_work import python

FLUSH = 0x8040 if X86 else 1 << 24
ROUND = [0x2000, 0x4000, 0x6000] if X86 else [1 << 22, 2 << 22, 3 << 22]  # down and up in turns, and towards zero
STATUS = 0x3F if X86 else 0  # what has happened, no rule
pytestmark = pytest.mark.skipif(not X86 and not ARM, reason="how to flush subnormal numbers is not known here")

rules = numba.njit(lambda: float_state())
set_rules = numba.njit(lambda state: set_float_state(state))


@contextmanager
def flushing(flush=FLUSH):
    """Let this thread flush subnormal numbers, and see that nobody has changed that."""
    before = rules()
    set_rules(before | flush)
    try:
        yield
        after = rules()
    finally:
        set_rules(before)
    assert after & ~STATUS == (before | flush) & ~STATUS


def small(*shape):
    """Return numbers most of which are subnormal, and so are most sums of some of them."""
    return np.random.default_rng(0).standard_normal(shape, np.float32) * np.float32(1e-39)


q, k, bias = np.random.default_rng(1).standard_normal((3, 2, 4, 130, 8), np.float32)
v, b = small(2, 4, 130, 8), small(130, 130)
q1, wide = np.ones((4, 1, 8), np.float64), np.asarray(small(4, 9, 8), np.float64) * 1e-280
wide_keys = wide * 1e290
half_query, half_key, half_value = q.astype(np.float16), k.astype(np.float16), (v * np.float32(1e32)).astype(np.float16)
narrow = b[:, :8].copy()
CALLS = {
    "output": lambda on: sdpa(q, k, v, **on),
    "few rows": lambda on: sdpa(q[..., :1, :], k, v, **on),
    "mask": lambda on: sdpa(q, k, v, mask=KeyLengths([3, 120]), **on),
    "rule": lambda on: sdpa(q, k, v, score_mod=lambda s, *_: s + np.float32(1e-39), **on),
    "biases": lambda on: sdpa(narrow, q[0, 0], v[0, 0], scale=1e30, bias=(b, b, ALiBi(0.5)), **on),
    "float64": lambda on: sdpa(q1, wide_keys, wide, **on),
    "mixed types": lambda on: sdpa(q.astype(np.float64), k, v, **on),
    "half": lambda on: sdpa(half_query, half_key, half_value, **on),
    "weights": lambda on: sdpa_weights(q * 20, k * 20, **on),
    "states": lambda on: (
        (
            sdpa_state(q[..., :3, :], k[..., :50, :], v[..., :50, :], **on)
            + sdpa_state(q[..., :3, :], k[..., 50:, :], v[..., 50:, :], **on)
        ).output
    ),
}
GRADIENTS = {
    "plain": lambda on: sdpa_vjp(q, k, v, v, **on),
    "broadcast": lambda on: sdpa_vjp(q, k[:1], v[:1], v, bias=b, **on),
}


@pytest.mark.parametrize("flush", [0x8000, 0x40, 0x8040] if X86 else [FLUSH], ids=hex)
@pytest.mark.parametrize("call", CALLS)
def test_flushing_subnormal_numbers_changes_no_bit(call, flush, backend):
    right = np.array(CALLS[call]({"backend": backend}))
    for _ in range(3):
        with flushing(flush):
            result = CALLS[call]({"backend": backend})
        assert result.tobytes() == right.tobytes()


@pytest.mark.parametrize("direction", ROUND, ids=hex)
@pytest.mark.parametrize(
    "call", sorted(CALLS.keys() - {"weights"})
)  # whose arguments are computed under the other rules
def test_rounding_in_a_direction_changes_no_bit(call, direction, backend):
    right = np.array(CALLS[call]({"backend": backend}))
    with flushing(direction):
        result = CALLS[call]({"backend": backend})
    assert result.tobytes() == right.tobytes()


TINY = np.float32(2.0**-70)
LAYERS = {
    "linear": (Linear(8, 8, rng=0), q[0, 0] * TINY),
    "embedding": (Embedding(9, 8, rng=0), np.arange(130) % 9),
    "feature map": (Conv1x1(8, 8, rng=0), q[0, 0, :64].T.reshape(8, 8, 8) * TINY),
    "attention": (MultiHeadAttention(8, 2, rng=0), q[0, 0] * TINY),
    "layer norm": (LayerNorm(8, eps=1e-38), q[0, 0] * TINY),
    "rms norm": (RMSNorm(8, eps=1e-38), q[0, 0] * TINY),
    "spatial attention": (SpatialAttention(8, 2, 4, rng=0), q[0, 0, :64].T.reshape(8, 8, 8) * TINY),
}


@pytest.mark.parametrize("rules", [FLUSH, *ROUND], ids=hex)
@pytest.mark.parametrize("name", LAYERS)
def test_other_rules_change_no_bit_of_a_layer_and_of_its_gradients(name, rules):
    layer, x = LAYERS[name]
    right, right_vjp = layer.value_and_vjp(x)
    flow = q.reshape(-1)[: right.size].reshape(right.shape) * TINY
    wanted = right_vjp(flow)
    with flushing(rules):
        value, vjp = layer.value_and_vjp(x)
        got = vjp(flow), right_vjp(flow)
    assert value.tobytes() == right.tobytes()
    for gradients in got:
        assert wanted.x is None or gradients.x.tobytes() == wanted.x.tobytes()
        for part, array in wanted.weights.items():
            assert gradients.weights[part].tobytes() == array.tobytes(), part


ELEMENTWISE = {
    "rotary": lambda x: sdpa_ref.rotary(x, range(x.shape[-2])),
    "rotary_vjp": lambda x: sdpa_ref.rotary_vjp(x, range(x.shape[-2])),
    **{name: getattr(sdpa_ref, name) for name in ("gelu", "gelu_derivative", "silu", "silu_derivative")},
}


@pytest.mark.parametrize("rules", [FLUSH, *ROUND], ids=hex)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_other_rules_change_no_bit_of_what_is_between_layers(name, rules):
    x = np.concatenate([q[0, 0], q[0, 0] * TINY**2 * 0.25, q[0, 0] * 8])
    right = ELEMENTWISE[name](x)
    with flushing(rules):
        result = ELEMENTWISE[name](x)
    assert result.tobytes() == right.tobytes()


@pytest.mark.parametrize("call", GRADIENTS)
def test_flushing_subnormal_numbers_changes_no_gradient(call, gradient_backend):
    right = GRADIENTS[call]({"backend": gradient_backend})
    with flushing():
        result = GRADIENTS[call]({"backend": gradient_backend})
    for name in ("query", "key", "value", "bias"):
        mine, theirs = getattr(result, name), getattr(right, name)
        assert (mine is None) == (theirs is None)
        assert mine is None or mine.tobytes() == theirs.tobytes(), name


@pytest.mark.parametrize("made_flushing", [False, True])
def test_helpers_compute_like_the_caller_whenever_they_were_made(made_flushing):
    script = f"""
import numba
from sdpa_numba.runtime.processor import float_state, set_float_state
from sdpa_ref import sdpa
rules, set_rules = numba.njit(lambda: float_state()), numba.njit(lambda state: set_float_state(state))
set_num_threads(2)
own = rules()
q, k = np.random.default_rng(0).standard_normal((2, 64, 40, 16), np.float32)
v = k * np.float32(1e-39)

def equal_bits():
    for _ in range(50):
        assert sdpa(q, k, v, backend="numba").tobytes() == right

set_num_threads(1)
right = sdpa(q, k, v, backend="numba").tobytes()
set_num_threads(2)
if {made_flushing}:
    set_rules(own | {FLUSH})
helper_joins()  # is made
equal_bits()
set_rules(own | {FLUSH} if not {made_flushing} else own)
equal_bits()
"""
    python(script)


def test_the_default_rules_are_set_and_taken_back():
    for flush in (0, FLUSH):
        with flushing(flush):
            assert keeps_subnormals() == (flush == 0)
            with default_rules():
                assert keeps_subnormals()
            with pytest.raises(ZeroDivisionError), default_rules():
                raise ZeroDivisionError
            assert keeps_subnormals() == (flush == 0)


def test_a_call_with_helpers_leaves_the_rules_as_they_were():
    before = sdpa_ref.get_num_threads()
    sdpa_ref.set_num_threads(2)
    try:
        with flushing():
            sdpa(q, k, v, backend="numba")
            assert not keeps_subnormals()
    finally:
        sdpa_ref.set_num_threads(before)
