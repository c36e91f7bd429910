"""Tools to test an implementation of attention: error budgets, assertions and hard inputs.

`sdpa_ref.testing.strategies` needs Hypothesis (``pip install 'sdpa-ref[test]'``); the rest needs NumPy alone.
"""

from sdpa_ref.testing.budget import Budget, error_budget
from sdpa_ref.testing.compare import assert_close, assert_same_bits, assert_within
from sdpa_ref.testing.gradients import gradient_budget, slope

__all__ = ["Budget", "assert_close", "assert_same_bits", "assert_within", "error_budget", "gradient_budget", "slope"]
