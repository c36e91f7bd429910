"""The documentation: its code runs, its links lead somewhere, every public name is in it and every law has its test."""

import ast
import inspect
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import sdpa_ref
import sdpa_ref.layers
import sdpa_ref.testing
from sdpa_ref.cli import main
from sdpa_ref.masks import RULES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in (*ROOT.glob("*.md"), *PAGES)}
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def fenced(text, *languages):
    """Return the blocks of code of these languages."""
    return [code for language, code in FENCE.findall(text) if language in languages]


def slug(heading):
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(text):
    prose = FENCE.sub("", text)
    return {*map(slug, re.findall(r"^#+ (.*)", prose, re.MULTILINE)), *re.findall(r"^\((\S+)\)=", prose, re.MULTILINE)}


def reader():
    """Return the names that examples leave to the reader, for a page or, in the README, for each example."""
    rng = np.random.default_rng(0)
    q, k, v, grad_output = rng.normal(size=(4, 2, 600, 8))
    return {
        "__name__": "__main__",
        "np": np,
        **{name: getattr(sdpa_ref, name) for name in sdpa_ref.__all__},
        **{"q": q, "k": k, "v": v, "query": q, "key": k, "value": v, "grad_output": grad_output},
        **{"k_cache": k, "v_cache": v, "used": 550, "bias": np.zeros((600, 600))},
        **dict.fromkeys(
            ("my_attention", "my_paged_attention", "attention_with_lse", "attention_backward"), sdpa_ref.sdpa
        ),
    }


@pytest.mark.parametrize("name", [name for name in TEXTS if fenced(TEXTS[name], "{code-cell}", "python")])
def test_code_of_a_page_runs(name, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.chdir(tmp_path)
    names = reader()
    for code in fenced(TEXTS[name], "{code-cell}", "python"):
        exec(compile(code, name, "exec"), reader() if name == "README.md" else names)


@pytest.mark.parametrize("name", TEXTS)
def test_commands_that_draw_masks_run(name, capsys):
    for line in re.findall(r"^\$ sdpa-ref (mask .*)", TEXTS[name], re.MULTILINE):
        assert main(shlex.split(line)) == 0


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", TEXTS[name]))
    for link in (link for link in links if not link.startswith(("http://", "https://"))):
        path, _, anchor = link.partition("#")
        target = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        assert target.exists(), f"{name}: {link}"
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), f"{name}: {link}"


MARKDOWN = {
    file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
    for file in ROOT.rglob("*.md")
    if not any(part.startswith((".", "_build")) or part == "node_modules" for part in file.relative_to(ROOT).parts)
}


@pytest.mark.parametrize("name", MARKDOWN)
def test_markdown_is_wrapped_at_120(name):
    """Tables, code, and words that are longer than that, such as addresses, aside."""
    prose = re.sub(r"^( *```).*?^\1", "", MARKDOWN[name], flags=re.DOTALL | re.MULTILINE)
    long = [line for line in prose.splitlines() if len(line) > 120 and not line.lstrip().startswith("|")]
    breakable = [line for line in long if " " in line.strip()[:120].removeprefix("- ")]
    assert not breakable


@pytest.mark.parametrize("name", MARKDOWN)
def test_no_merge_was_left_unfinished(name):
    assert not re.search(r"^(<{7}|>{7}) ", MARKDOWN[name], re.MULTILINE)


def test_every_task_of_a_backend_is_in_its_guide():
    pytest.importorskip("numba")
    [row] = re.findall(r"^\| `TASKS` \| (.*)$", TEXTS["docs/backends.md"], re.MULTILINE)
    tasks = set().union(*(sdpa_ref.load(name).TASKS for name in ("reference", "numba")))
    assert tasks <= set(re.findall(r'`"(\w+)"`', row))


@pytest.mark.parametrize("module", [sdpa_ref, sdpa_ref.layers, sdpa_ref.testing], ids=lambda module: module.__name__)
def test_public_names_are_documented(module):
    text = TEXTS["docs/api.md"]
    listed = {line.rsplit(".", 1)[-1] for line in re.findall(r"^   ([\w.]+)$", text, re.MULTILINE)}
    listed |= set(RULES) if "\napi/masks\n" in text else set()  # which docs/conf.py writes
    missing = set(module.__all__) - listed - {"scaled_dot_product_attention"}
    assert not missing
    assert "`scaled_dot_product_attention` is `sdpa`" in text
    assert all(getattr(module, name).__doc__ for name in module.__all__)


def test_laws_name_tests_that_exist():
    laws = re.findall(r"^\| (\d+)\. .*\| `(\w+)` \|$", TEXTS["docs/semantics.md"], re.MULTILINE)
    assert [int(number) for number, _ in laws] == list(range(1, 31))
    tests = {
        node.name
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    for number, test in laws:
        assert test == f"test_rule_{number:0>2}"
        assert any(name.startswith(test) for name in tests), f"no test is called {test}..."


def test_every_page_is_in_the_contents():
    listed = re.findall(r"^([\w/-]+)$", "\n".join(fenced(TEXTS["docs/index.md"], "{toctree}")), re.MULTILINE)
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES} - {"index"}
    assert {page for page in pages if not page.startswith("decisions/0")} == set(listed)


def keywords_of_other_libraries():
    """Return the keywords in the first column of the tables of arguments, less those that are the same here."""
    tables = re.findall(r"^\| there \| here \|\n(.*?)\n\n", TEXTS["docs/migrating.md"], re.DOTALL | re.MULTILINE)
    theirs = [row.split("|")[1] for table in tables for row in table.splitlines()[1:]]
    found = set(re.findall(r"`(\w+)(?:=[^`]*)?`", " ".join(theirs)))
    return sorted(found - set(inspect.signature(sdpa_ref.sdpa).parameters))


@pytest.mark.parametrize("keyword", keywords_of_other_libraries())
def test_keywords_of_other_libraries_are_told_ours(keyword):
    x = np.ones((2, 3))
    with pytest.raises(TypeError, match=f"^unknown keyword '{keyword}'; here it is "):
        sdpa_ref.sdpa(x, x, x, **{keyword: None})
