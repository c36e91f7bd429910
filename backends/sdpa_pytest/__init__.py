"""The pytest plugin: ``pytest --pyargs sdpa_ref.testing --sdpa-target TARGET`` runs the laws as ordinary tests.

It is loaded with pytest wherever sdpa_ref is installed, so it stands beside it: neither sdpa_ref nor NumPy is imported
until a target is named.
"""

from pathlib import Path

import pytest

__all__ = ["pytest_addoption", "pytest_configure", "pytest_ignore_collect"]

_TESTS = ("sdpa_ref", "testing", "test_target.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("sdpa-ref", "conformance of attention")
    group.addoption("--sdpa-target", action="append", metavar="TARGET", help="what to check, as in sdpa-ref check")
    group.addoption("--sdpa-manifest", type=Path, metavar="FILE", help="TOML file with what the target claims")
    group.addoption("--sdpa-strict", action="store_true", help="hold the claimed features to all rules of sdpa_ref")
    group.addoption("--sdpa-seed", type=int, default=0, metavar="N", help="of everything that is drawn (default: 0)")
    group.addoption("--sdpa-cases", type=int, default=20, metavar="N", help="cases of each property (default: 20)")
    group.addoption(
        "--sdpa-xfail", type=Path, metavar="FILE", help="properties that may fail, a line each: NAME  # reason"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load the laws where a target is named."""
    if config.getoption("--sdpa-target"):
        from sdpa_ref.testing import plugin

        if not config.pluginmanager.is_registered(plugin):
            config.pluginmanager.register(plugin)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Return True for the tests of the laws where no target is named."""
    return True if collection_path.parts[-3:] == _TESTS and not config.getoption("--sdpa-target") else None
