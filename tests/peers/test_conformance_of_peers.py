"""Other libraries within their own semantics: the suite raises no false alarm, and finds what is known of them."""

import pytest

from sdpa_ref.testing import TargetError, check, resolve
from sdpa_ref.testing.properties import BY_NAME, PROPERTIES
from sdpa_ref.testing.runner import replay
from sdpa_ref.testing.target import ADAPTERS

KNOWN = {  # docs/peers-report.md
    "torch": ("gradient sums", "case(1, batch=(1,), S=128, numbers='ties', scale=1e9)"),
    "onnx": ("scale", "case(817413126, batch=(1,), S=2, dtype='float64', scale=0.125)"),
    "onnxruntime": ("bias", "case(2, batch=(1,), L=2, bias=('loud',))"),
    "jax": ("bias", "case(1, S=2, mask=('function',), bias=('loud',), layout='LHE')"),
    "flash_attention": (
        "gradients",
        "case(600052942, batch=(1,), L=2, mask=('causal',), bias=('row',), offset='end', layout='LHE')",
    ),
    "keras": ("bias", "case(1, batch=(1,), S=2, mask=('function',), bias=('loud',), layout='LHE')"),
}
MIXED = {"everything", "constant values", "levels", "no memory"}  # they draw what is known of the forward pass, too
FEW = ("needles", "scale", "bias", "mask arrays", "causal", "empty rows")


def peer(name):
    try:
        return resolve(name)
    except TargetError as reason:
        pytest.skip(str(reason))


@pytest.mark.filterwarnings("ignore")  # they are theirs
@pytest.mark.parametrize("name", ADAPTERS)
def test_it_passes_what_it_claims(name):
    slow = name in ("jax", "openvino", "tinygrad")  # they compile each shape
    laws = [BY_NAME[law] for law in FEW] if slow else PROPERTIES
    if name in KNOWN:
        known = KNOWN[name][0]
        backward = known.startswith("gradient")
        laws = [law for law in laws if law.name != known and (law.name not in MIXED or backward)]
        laws = [law for law in laws if name != "flash_attention" or "gradients" not in law.name]
    run = check(peer(name), rounds=1 if slow else 3, seconds=float("inf"), laws=laws)
    assert [f"{o.law.name}: {o.failure.case}\n{o.failure.message}" for o in run.failures] == []
    assert run.passed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_of_it_is_found(name):
    """Where this fails a library has changed, and so should docs/peers-report.md."""
    law, recipe = KNOWN[name]
    assert replay(peer(name), BY_NAME[law], recipe)


def test_the_documented_bug_of_jax_is_found_by_a_default_run():
    run = check(peer("jax"), rounds=1, seconds=float("inf"), laws=["bias"])
    assert run.failures
