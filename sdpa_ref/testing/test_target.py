"""The laws as tests, for the targets that ``--sdpa-target`` names; `sdpa_ref.testing.plugin` has the options."""

from typing import Any

import pytest

from sdpa_ref.testing import findings, runner
from sdpa_ref.testing.counterexample import described


def test_target(sdpa_target: Any, sdpa_word: str, sdpa_law: Any, pytestconfig: pytest.Config) -> None:
    """Hold the target to one law."""
    missing = sdpa_law.needs(sdpa_target.capabilities)
    if missing:
        pytest.skip(f"{missing} is not claimed")
    seed, rounds = (pytestconfig.getoption(f"--sdpa-{name}") for name in ("seed", "cases"))
    run = runner.check(sdpa_target, seed=seed, rounds=rounds, seconds=float("inf"), laws=[sdpa_law])
    manifest, strict = (pytestconfig.getoption(f"--sdpa-{name}") for name in ("manifest", "strict"))
    for found in findings.findings(run, sdpa_word, *findings.claims_options(manifest, strict)):
        pytest.fail(f"{described(found.failure, found.diagnosis)}\nagain: {found.command}", pytrace=False)
    (outcome,) = run.outcomes
    if not outcome.cases:
        pytest.skip(f"declined: {', '.join(outcome.declined)}")
