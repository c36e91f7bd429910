"""The laws of the conformance suite over Dask arrays that are cut in odd ways."""

import pytest

pytest.importorskip("dask.array", reason="Dask is not installed")

from sdpa_ref.testing import runner
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.properties import PROPERTIES
from sdpa_ref.testing.target import resolve

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
