"""What an exhibit is: a step of the kernel that is wrong in the way of a real bug, and what the suite is told of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import getdoc
from typing import Any

from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.museum.kernel import Kernel
from sdpa_ref.testing.target import Target

CLAIMS = Capabilities.everything(exact_merge=False)
"""What the kernel without a fault does, and what each fault claims unless it says otherwise."""


@dataclass(frozen=True)
class Fault:
    """A faulty kernel.

    Attributes
    ----------
    name : str
    wrong : str
        What is wrong, in one sentence.
    address : str
        The public bug that it stands for, or "" for one that was made up.
    kernel : Kernel
        With the faulty step.
    capabilities : Capabilities
        What it claims.
    """

    name: str
    wrong: str
    address: str
    kernel: Kernel
    capabilities: Capabilities = CLAIMS

    @property
    def target(self) -> Target:
        """What the suite is pointed at."""
        return target_of(replace(self.kernel), self.name, self.capabilities)  # one that remembers nothing


def fault(step: str, **exceptions: Any) -> Callable[[Callable[..., Any]], Fault]:
    """Return the decorator that makes an exhibit of a function.

    The function's docstring says what is wrong in its first line, and has the address of the bug in its last.

    Parameters
    ----------
    step : str
        The step of `Kernel` that the function replaces.
    **exceptions
        Capabilities that the exhibit does not claim.

    Examples
    --------
    >>> @fault("scale")
    ... def no_scale(call):
    ...     '''Scores are not scaled.
    ...
    ...     https://example.org/issues/1
    ...     '''
    ...     return 1.0
    >>> no_scale.name, no_scale.wrong, no_scale.address
    ('no scale', 'Scores are not scaled.', 'https://example.org/issues/1')
    """

    def exhibit(function: Callable[..., Any]) -> Fault:
        lines = (getdoc(function) or "").split("\n")
        claims = replace(CLAIMS, **exceptions)
        return Fault(function.__name__.replace("_", " "), lines[0], lines[-1], Kernel(**{step: function}), claims)

    return exhibit


def target_of(kernel: Kernel, name: str = "museum", capabilities: Capabilities = CLAIMS) -> Target:
    """Return the target that a kernel is."""
    return Target(
        name,
        kernel.forward,
        capabilities,
        kernel.state,
        kernel.weights,
        kernel.vjp,
        kernel.merge,
        "a kernel of the museum",
    )
