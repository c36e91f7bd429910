"""The laws of the conformance suite over Dask arrays that are cut in odd ways."""

import pytest

pytest.importorskip("dask.array", reason="Dask is not installed")

import sdpa_ref
from sdpa_ref.testing import chunks, runner
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.properties import PROPERTIES
from sdpa_ref.testing.target import Target, resolve

CLAIMS = Capabilities.everything(paged=False, quantized=False)
LAWS = {law.name: law for law in PROPERTIES if not law.needs(CLAIMS)}


@pytest.mark.parametrize("law", LAWS)
def test_laws_over_odd_chunks(law, monkeypatch):
    for seed in (0, 1):
        monkeypatch.setenv("SDPA_TEST_CHUNKS", str(seed))
        run = runner.check(resolve("dask"), seed=seed, rounds=1, seconds=float("inf"), laws=[LAWS[law]])
        (outcome,) = run.outcomes
        assert outcome.failure is None, outcome.failure
        assert outcome.cases


@pytest.mark.parametrize("law", ["everything", "lse", "weights", "gradients", "gradients with a sink", "joined masks"])
def test_laws_over_blocks_of_the_reference(law):
    names = {"forward": "sdpa", "state": "sdpa_state", "weights": "sdpa_weights", "vjp": "sdpa_vjp"}
    made = {name: chunks.over(getattr(sdpa_ref, function), "dask", "reference") for name, function in names.items()}
    target = Target("dask over the reference", capabilities=CLAIMS, **made)
    run = runner.check(target, seed=2, rounds=2, seconds=float("inf"), laws=[LAWS[law]])
    assert run.outcomes[0].failure is None, run.outcomes[0].failure
