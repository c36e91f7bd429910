"""The recipes of docs/bridges.md, as names."""

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "bridges.md"


@cache
def recipe(*libraries):
    """Return the names that the recipes for these libraries define, one after the other, after their examples."""
    names = {}
    for library in libraries:
        pytest.importorskip(library, reason=f"the recipe is for {library}")
        blocks = re.compile(rf"^```{{code-block}} python\n:class: {library}\n(.*?)^```", re.MULTILINE | re.DOTALL)
        for code in blocks.findall(PAGE.read_text(encoding="utf-8")):
            exec(compile(code, PAGE.name, "exec"), names)
    return SimpleNamespace(**names)
