"""Gradients on every backend, against the complex step, finite differences and the reference."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given
from transform import assert_near, attend, generator, kept, part

import sdpa_ref as sr
from sdpa_ref.testing import assert_same_bits, assert_within, gradient_budget, slope
from sdpa_ref.testing.strategies import DTYPES, cases

SMALL, BATCH = st.integers(1, 6), st.sampled_from([(), (2,), (2, 3)])
DIFFERENTIABLE = {
    **dict.fromkeys(("L", "S", "E", "Ev"), SMALL),
    "batch": st.sampled_from([None, (), (2,), (2, 3)]),
    "heads": st.sampled_from([(1, 1), (2, 2), (2, 1), (6, 2)]),
    "dtype": "float64",
    "numbers": "normal",
    "memory": "plain",
    "poison": False,
}


def pieces(case):
    """Return the arrays that a gradient exists for, by name."""
    arrays = {"query": case.query, "key": case.key, "value": case.value}
    bias, sink = case.options.get("bias"), case.options.get("sink")
    return arrays | ({"bias": bias} if isinstance(bias, np.ndarray) else {}) | ({} if sink is None else {"sink": sink})


def formula(case, moved):
    """Return attention for complex numbers, without a maximum, which would not be analytic."""
    keep = kept(case)
    query, key, value = (moved.get(name, getattr(case, name)) for name in ("query", "key", "value"))
    if query.ndim > 2:
        key, value = (np.repeat(array, query.shape[-3] // array.shape[-3], -3) for array in (key, value))
    scale, cap, sink = (
        case.options.get("scale"),
        case.options.get("softcap"),
        moved.get("sink", case.options.get("sink")),
    )
    score = (1 / np.sqrt(query.shape[-1]) if scale is None else scale) * (query @ key.swapaxes(-1, -2))
    score = score if cap is None else cap * np.tanh(score / cap)
    score = score + moved.get("bias", case.options.get("bias", 0))
    weights = np.where(keep, np.exp(np.where(keep, score, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink.reshape(-1, 1, 1) if query.ndim > 2 else sink)
    dropout = case.options.get("dropout")
    if dropout is not None:
        weights = weights * dropout.keep(keep.shape) * dropout.factor
    return weights @ value / np.where(total == 0, 1, total)


ANALYTIC = {"score_mod": False, "layout": "HLE", "bias": st.sampled_from([(), ("array",), ("row",)])}


@given(case=cases(**DIFFERENTIABLE | ANALYTIC))
def test_gradients_are_those_of_the_complex_step(gradient_backend, case):
    rng, step = generator(case), 1e-30
    grad_output = rng.standard_normal(attend("reference", case).shape)
    gradients = sr.sdpa_vjp(*case.arrays, grad_output, **case.options, backend=gradient_backend)
    budgets = gradient_budget(*case.arrays, grad_output, **case.options)
    for name, array in pieces(case).items():
        way = rng.standard_normal(array.shape)
        along = (grad_output * formula(case, {name: array + 1j * step * way}).imag).sum() / step
        error = abs((getattr(gradients, name) * way).sum() - along)
        assert error <= (getattr(budgets, name).bound * abs(way)).sum(), name


@given(case=cases(**DIFFERENTIABLE))
def test_gradients_are_those_of_finite_differences(gradient_backend, case):
    rng, arrays = generator(case), pieces(case)
    grad_output = rng.standard_normal(attend("reference", case).shape)
    ways = {name: rng.standard_normal(array.shape) for name, array in arrays.items()}
    gradients = sr.sdpa_vjp(*case.arrays, grad_output, **case.options, backend=gradient_backend)

    def loss(t):
        moved = {name: array + t * ways[name] for name, array in arrays.items()}
        return float((attend("reference", case, **moved) * grad_output).sum())

    budgets = gradient_budget(*case.arrays, grad_output, **case.options)
    along, error = slope(loss)
    error += sum((getattr(budgets, name).bound * abs(way)).sum() for name, way in ways.items())
    assert abs(sum((getattr(gradients, name) * way).sum() for name, way in ways.items()) - along) <= error


@given(case=cases(**DIFFERENTIABLE | {"sink": None, "dtype": st.sampled_from(DTYPES)}))
def test_gradients_agree_with_the_reference(gradient_backend, case):
    state, rng = attend("reference", case, sr.sdpa_state), generator(case)
    grads = {"grad_output": rng.standard_normal(state.output.shape), "grad_lse": rng.standard_normal(state.lse.shape)}
    gradients = sr.sdpa_vjp(*case.arrays, **grads, **case.options, backend=gradient_backend)
    budgets = gradient_budget(*case.arrays, **grads, **case.options)
    for name in ("query", "key", "value"):
        assert_within(getattr(gradients, name), getattr(budgets, name), what=f"gradient by {name}")


@given(case=cases(**DIFFERENTIABLE))
def test_gradients_are_linear_in_what_comes_in(gradient_backend, case):
    shape, rng = attend("reference", case).shape, generator(case)
    one, two = rng.integers(-4, 5, (2, *shape)).astype(np.float64)
    incoming = one, two, 2 * one - two
    a, b, c = (sr.sdpa_vjp(*case.arrays, grad, **case.options, backend=gradient_backend) for grad in incoming)
    of_a, of_b, of_c = (gradient_budget(*case.arrays, grad, **case.options) for grad in incoming)
    for name in ("query", "key", "value"):
        x, y, z = (getattr(gradients, name) for gradients in (a, b, c))
        assert_near(z, 2 * x - y, *(getattr(of, name) for of in (of_a, of_a, of_b, of_c)))


@given(case=cases(**DIFFERENTIABLE | {"dtype": st.sampled_from(DTYPES)}))
def test_output_and_gradients_in_one_are_those_of_two_calls(gradient_backend, case):
    output, vjp = sr.sdpa_with_vjp(*case.arrays, **case.options, backend=gradient_backend)
    assert_same_bits(output, attend(gradient_backend, case))
    rng = generator(case)
    one, two = rng.standard_normal((2, *output.shape)).astype(output.dtype)
    two_lse = rng.standard_normal(output.shape[:-1])
    for grads in ((one,), (two, two_lse), (one,)):
        named = dict(zip(("grad_output", "grad_lse"), grads, strict=False))
        expected = sr.sdpa_vjp(*case.arrays, **named, **case.options, backend=gradient_backend)
        for got, right in zip(vjp(*grads), expected, strict=True):
            pairs = zip(got, right, strict=True) if isinstance(right, tuple) else [(got, right)]
            for array, other in pairs:
                assert (array is None) == (other is None)
                assert array is None or assert_same_bits(array, other) is None


BY_ARRAYS = {"score_mod": False, "dropout": 0.0, "layout": "HLE", "bias": st.sampled_from([(), ("array",), ("holes",)])}


@given(case=cases(**DIFFERENTIABLE | BY_ARRAYS | {"batch": BATCH}), bad=st.sampled_from([np.nan, np.inf]))
def test_empty_rows_and_dropped_keys_have_zero_gradients_whatever_they_hold(gradient_backend, case, bad):
    (query, key, value), options = part(case)
    query, key, value = (np.array(array) for array in (query, key, value))
    empty = ~options["mask"].any(-1)
    group = options["mask"].reshape(*key.shape[:-2], -1 if options["mask"].size else 1, key.shape[-2])
    unseen = ~group.any(-2)
    grad = np.ones((*query.shape[:-1], value.shape[-1]))
    expected = sr.sdpa_vjp(query, key, value, grad, **options, backend=gradient_backend)
    grad[empty], query[empty], key[unseen], value[unseen] = bad, bad, bad, bad
    gradients = sr.sdpa_vjp(query, key, value, grad, **options, backend=gradient_backend)
    for name, nothing in (("query", empty), ("key", unseen), ("value", unseen)):
        assert_same_bits(getattr(gradients, name), getattr(expected, name))
        assert (getattr(gradients, name)[nothing] == 0).all()
