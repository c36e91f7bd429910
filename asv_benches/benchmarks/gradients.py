"""Gradients, where a backend has them: time, and accuracy beside it."""

import numpy as np

import sdpa_ref

from .common import BACKENDS, case, inputs, load, on_device, on_host, skip, waiting, warm


class Gradients:
    """One call of `sdpa_vjp` with the inputs of a case and a normally distributed gradient of the output."""

    params = (BACKENDS, ["tiny-single", "tiny", "prefill-512", "prefill-512-causal", "vit"])
    param_names = ("backend", "case")
    warmup_time = 0.1
    repeat = (3, 10, 2.0)

    def setup(self, backend, name):
        """Build the inputs, and call once."""
        if not hasattr(load(backend), "vjp"):
            skip(f"backend {backend!r} has no gradients")
        found = case(name, backend)
        given = inputs(found, backend)
        incoming = np.random.default_rng(1).standard_normal(given.query.shape).astype(given.query.dtype)
        self.arguments = given.query, given.key, given.value, on_device(backend, incoming)
        self.rule = found.rule
        self.run = warm(waiting(backend, lambda: sdpa_ref.sdpa_vjp(*self.arguments, mask=self.rule, backend=backend)))

    def time_vjp(self, backend, name):
        """Call."""
        self.run()

    def track_error(self, backend, name):
        """Return the largest error of the three gradients, each by the bound that the error budget has for it."""
        try:
            from sdpa_ref.testing import gradient_budget
        except ImportError:
            skip("this version has no gradient budget")
        if name not in ("tiny-single", "tiny"):
            skip("the budget of a larger case takes too long")
        budgets = gradient_budget(*map(on_host, self.arguments), mask=self.rule)
        found = self.run()
        return max(
            float((abs(on_host(getattr(found, one)) - budget.expected) / budget.limit).max())
            for one, budget in ((one, getattr(budgets, one)) for one in ("query", "key", "value"))
        )

    track_error.unit = "error budgets"
