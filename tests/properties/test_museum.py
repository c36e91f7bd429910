"""The conformance suite sees bugs: every exhibit of the museum fails it, and the kernel that they share passes."""

import json
from pathlib import Path

import pytest
from days import NIGHTLY

from sdpa_ref import cli
from sdpa_ref.testing import museum
from sdpa_ref.testing.runner import check

FAULTS = list(museum.FAULTS.values()) if NIGHTLY else [faults[0] for faults in museum.ROOMS.values()]


@pytest.mark.parametrize("seed", range(2 if NIGHTLY else 1))
def test_the_kernel_without_a_fault_passes(seed):
    run = check(museum.target_of(museum.Kernel()), seed=seed, rounds=6, seconds=float("inf"))
    assert run.passed, [(failed.law.name, failed.failure.message) for failed in run.failures]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_seen(fault):
    assert museum.see(fault).property


STORED = "pages", "codes", "key positions", "decode loop"


@pytest.mark.parametrize("fault", museum.ROOMS["storage"][:: 1 if NIGHTLY else 3], ids=lambda fault: fault.name)
def test_fault_of_stored_keys_is_seen_by_their_laws(fault):
    assert check(fault.target, rounds=100, seconds=float("inf"), laws=STORED, stop_at_first=True).failures


def test_faults_say_what_is_wrong_and_where_it_was():
    assert len(museum.FAULTS) >= 45
    for fault in museum.FAULTS.values():
        assert fault.wrong.endswith("."), fault.name
        made_up = fault in museum.ROOMS["sizes"] + museum.ROOMS["calls"]
        assert fault.address == "" if made_up else fault.address.startswith("https://github.com/"), fault.name
    assert len({fault.wrong for fault in museum.FAULTS.values()}) == len(museum.FAULTS)


def test_a_fault_of_ones_own():
    @museum.fault("scale")
    def ten_percent(call):
        """Scores are a tenth too large.

        https://github.com/example/kernels/issues/1
        """
        return 1.1 * museum.Kernel().scale(call)

    assert museum.see(ten_percent).property == "plain"


def test_command(capsys):
    assert cli.main(["museum", "--fault", "scale twice", "--fault", "heads tiled"]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 faults seen" in out
    assert "case(" in out


def test_command_json(capsys):
    assert cli.main(["museum", "--fault", "scale twice", "--json"]) == 0
    (seen,) = json.loads(capsys.readouterr().out)
    assert seen["fault"] == "scale twice"
    assert seen["property"] == "needles"
    assert seen["seconds"] > 0


def test_command_that_sees_nothing(capsys, monkeypatch):
    right = museum.Fault("no fault", "Nothing is wrong.", "https://github.com/example/kernels", museum.Kernel())
    monkeypatch.setitem(museum.FAULTS, right.name, right)
    assert cli.main(["museum", "--fault", "no fault", "--seconds", "1"]) == 1
    assert "0 of 1 faults seen; not seen: no fault" in capsys.readouterr().out


def test_command_list(capsys):
    assert cli.main(["museum", "--list", "--fault", "scale twice"]) == 0
    assert capsys.readouterr().out.splitlines()[2].strip().startswith("https://")


def test_command_page(tmp_path, capsys):
    page = tmp_path / "museum.md"
    assert cli.main(["museum", "--fault", "scale twice", "--markdown", str(page)]) == 0
    assert "| [scale twice](https://" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault", "scale twce"], "unknown fault 'scale twce', did you mean 'scale twice'?"),
        (["--seconds", "0"], "--seconds must be above 0"),
    ],
)
def test_wrong_use(arguments, message, capsys):
    assert cli.main(["museum", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_page_of_the_documentation_has_them_all():
    page = (Path(__file__).parents[2] / "docs" / "museum.md").read_text(encoding="utf-8")
    assert [name for name in museum.FAULTS if f"| [{name}](" not in page and f"| {name}: " not in page] == []
