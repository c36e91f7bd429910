"""Gradients, where a backend has them: time, and accuracy."""

import numpy as np

import sdpa_ref

from .common import BACKENDS, case, inputs, load, module, on_device, on_host, skip, waiting, warm


def gradients(name, backend):
    """Return the arrays and the mask of a case, and the call of `sdpa_vjp` with them, made once."""
    if not hasattr(load(backend), "vjp"):
        skip(f"backend {backend!r} has no gradients")
    found = case(name, backend)
    given = inputs(found, backend)
    incoming = np.random.default_rng(1).standard_normal(given.query.shape).astype(given.query.dtype)
    arrays = given.query, given.key, given.value, on_device(backend, incoming)
    run = waiting(backend, lambda: sdpa_ref.sdpa_vjp(*arrays, mask=found.rule, backend=backend))
    return arrays, found.rule, warm(run)


class Gradients:
    """One call of `sdpa_vjp` with the inputs of a case and a normally distributed gradient of the output."""

    params = (BACKENDS, ["tiny-single", "tiny", "prefill-512", "prefill-512-causal", "vit", "prefill-2048-wide"])
    param_names = ("backend", "case")
    warmup_time = 0.1
    repeat = (3, 10, 2.0)

    def setup(self, backend, name):
        """Build the inputs, and call once."""
        *_, self.run = gradients(name, backend)

    def time_vjp(self, backend, name):
        """Call."""
        self.run()


class Accuracy:
    """How exact the three gradients are."""

    params = (BACKENDS, ["tiny-single", "tiny"])
    param_names = ("backend", "case")

    def setup(self, backend, name):
        """Build the inputs, and call once."""
        self.arrays, self.rule, self.run = gradients(name, backend)
        self.budget = module("sdpa_ref.testing").gradient_budget

    def track_error(self, backend, _):
        """Return the largest error by the bound that its error budget has for it."""
        budgets, found = self.budget(*map(on_host, self.arrays), mask=self.rule), self.run()
        errors = []
        for name in ("query", "key", "value"):
            budget = getattr(budgets, name)
            errors.append((abs(on_host(getattr(found, name)) - budget.expected) / budget.limit).max())
        return float(max(errors))

    track_error.unit = "error budgets"
