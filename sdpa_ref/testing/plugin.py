"""The laws as ordinary tests: what the plugin `sdpa_pytest`, which has the options, loads once a target is named."""

from pathlib import Path
from typing import Any

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each law and target."""
    if "sdpa_law" not in metafunc.fixturenames:
        return
    from sdpa_ref.testing.properties import PROPERTIES

    expected = _expected(metafunc.config.getoption("--sdpa-xfail"))
    unknown = expected.keys() - {law.name for law in PROPERTIES}
    if unknown:
        raise pytest.UsageError(f"--sdpa-xfail: no such property: {', '.join(sorted(unknown))}")
    laws = [
        pytest.param(
            law, id=law.name, marks=[pytest.mark.xfail(reason=expected[law.name])] if law.name in expected else []
        )
        for law in PROPERTIES
    ]
    metafunc.parametrize("sdpa_word", metafunc.config.getoption("--sdpa-target") or [], scope="session")
    metafunc.parametrize("sdpa_law", laws)


@pytest.fixture(scope="session")
def sdpa_target(sdpa_word: str, pytestconfig: pytest.Config) -> Any:
    """Return the target, and skip where it cannot run here."""
    from dataclasses import replace

    from sdpa_ref.testing.capabilities import stated
    from sdpa_ref.testing.target import TargetError, resolve

    manifest = pytestconfig.getoption("--sdpa-manifest")
    try:
        target = resolve(sdpa_word, None if manifest is None else stated(manifest))
    except (OSError, ValueError, TargetError) as error:
        raise pytest.UsageError(f"--sdpa-target {sdpa_word}: {error}") from None
    strict = pytestconfig.getoption("--sdpa-strict")
    return replace(target, capabilities=target.capabilities.strict()) if strict else target


def _expected(path: Path | None) -> dict[str, str]:
    """Return the reasons of the properties that may fail, by name."""
    if path is None:
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise pytest.UsageError(f"--sdpa-xfail {path}: {error.strerror}") from None
    pairs = (line.partition("#")[::2] for line in lines)
    return {name.strip(): reason.strip() or "known" for name, reason in pairs if name.strip()}
