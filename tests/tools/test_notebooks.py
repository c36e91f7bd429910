"""The notebooks: their cells run from top to bottom, and they are kept without results."""

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted((DOCS / "notebooks").glob("*.ipynb"))
}
EXPECTED = {  # parts of what is printed
    "attention": "a small animal",
    "masks": "same bits: True",
    "kernel": "passed: True",
}


def code(name):
    return ["".join(cell["source"]) for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs(name, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(DOCS))  # a notebook starts in its own folder, where this is ".."
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for number, source in enumerate(code(name)):
        exec(compile(source, f"{name}.ipynb, cell {number} of code", "exec"), names)
    assert EXPECTED[name] in capsys.readouterr().out


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_kept_without_results(name):
    cells = [cell for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert len({cell["id"] for cell in NOTEBOOKS[name]["cells"]}) == len(NOTEBOOKS[name]["cells"])


def test_the_kernel_with_a_mistake_fails_with_two_blocks_as_its_notebook_says():
    names = {}
    *cells, _ = code("kernel")
    for source in cells:
        exec(source, names)
    assert names["run"].failures
    assert all(16 < outcome.failure.case.key.shape[-2] <= 32 for outcome in names["run"].failures)
