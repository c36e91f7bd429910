"""The report that is ready to send: its script shows what it says, and needs PyTorch alone."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/report-pytorch.md"


def test_script_shows_what_the_report_says(capsys):
    """Where this fails PyTorch has changed, and the report and docs/peers-report.md are to be changed."""
    torch = pytest.importorskip("torch")
    text = PAGE.read_text(encoding="utf-8")
    (script,) = re.findall(r"```\{code-block\} python\n:class: torch\n\n(.*?)```", text, re.DOTALL)
    (said,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert "sdpa_ref" not in script
    state = torch.random.get_rng_state()
    try:
        exec(compile(script, PAGE.name, "exec"), {"__name__": "__main__"})
    finally:
        torch.random.set_rng_state(state)
    lines, theirs = (x.strip().splitlines() for x in (capsys.readouterr().out, said))
    for line, one in zip(lines[1:], theirs[1:], strict=True):  # the first has the version
        numbers, right = (tuple(map(float, re.findall(r"(?:flash|math) +(\S+)", x))) for x in (line, one))
        assert numbers == pytest.approx(right, rel=0.05)
        assert numbers[1] == pytest.approx(1, abs=1e-5)
    assert max(float(re.findall(r"flash +(\S+)", line)[0]) for line in lines[1:]) > 100
