"""Hints that say what to install name extras that exist, from an index and in a checkout."""

import re
import tomllib
from pathlib import Path

import pytest

from sdpa_ref.extras import install

ROOT = Path(__file__).parents[2]
SOURCES = [path for path in (ROOT / "sdpa_ref").rglob("*.py") if path.name != "extras.py"]


def named():
    """Return every extra that a hint of the package names."""
    return sorted(
        {extra for path in SOURCES for extra in re.findall(r"\binstall\(['\"]([\w-]+)['\"]\)", path.read_text("utf-8"))}
    )


@pytest.mark.parametrize("extra", named())
def test_hints_name_extras_that_exist(extra):
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("the tests do not lie in a checkout")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert extra in project["optional-dependencies"]
    assert install(extra) == f'pip install "sdpa-ref[{extra}]" (in a checkout: pip install -e ".[{extra}]")'


def test_some_hints_are_found():
    assert {"half", "weights", "test", "demo"} <= set(named())
