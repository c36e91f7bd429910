"""The way from arguments to a problem, and from results back to the caller.

`pose` checks everything and states the problem, `checks` has the errors, `form` what arrays are apart from their
lengths, `caller` what turns results back.
"""

from sdpa_ref._problem.caller import Caller, differentiable
from sdpa_ref._problem.form import arrays_of
from sdpa_ref._problem.pose import NO_VALUE, pose, problem_of

__all__ = ["NO_VALUE", "Caller", "arrays_of", "differentiable", "pose", "problem_of"]
