"""Tools to test an implementation of attention: the conformance suite, error budgets, assertions and hard inputs.

`sdpa_ref.testing.strategies` needs Hypothesis (``pip install 'sdpa-ref[test]'``); the rest needs NumPy alone.
"""

from sdpa_ref._problem import problem_of
from sdpa_ref.testing.budget import Budget, error_budget
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.compare import assert_close, assert_same_bits, assert_within
from sdpa_ref.testing.gradients import gradient_budget, slope
from sdpa_ref.testing.runner import Outcome, Run, check
from sdpa_ref.testing.target import Target, TargetError, resolve

__all__ = [
    "Budget",
    "Capabilities",
    "Outcome",
    "Run",
    "Target",
    "TargetError",
    "assert_close",
    "assert_same_bits",
    "assert_within",
    "check",
    "error_budget",
    "gradient_budget",
    "problem_of",
    "resolve",
    "slope",
]
