"""The script for the day a GPU is at hand: what of it needs none is run here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sdpa_cupy

sys.path.append(str(Path(__file__).parent))  # where the script finds its checks

from checks.laws import tried
from checks.peers import peak_of, work_of
from gpu_checks import SECTIONS, main

SCRIPT = Path(__file__).parent / "gpu_checks.py"


def test_every_section_runs_dry(tmp_path):
    pytest.importorskip("ml_dtypes")
    pytest.importorskip("platformdirs")
    fibers = pytest.importorskip("sdpa_cupy.launch.fibers")
    if fibers.unavailable():
        pytest.skip(fibers.unavailable())
    file, page = tmp_path / "results.json", tmp_path / "results.html"
    command = [sys.executable, SCRIPT, "--dry-run", "--json", file, "--page", page]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    sections = json.loads(file.read_text())["sections"]
    assert list(sections) == list(SECTIONS)
    assert all(section["ending"] == "done" and section["ok"] and section["rows"] for section in sections.values())
    assert all(row["different"] == 0 for row in sections["instructions"]["rows"])
    for name in ("small", "fuzz", "device", "pytorch", "sanitizer"):
        assert all(row["ok"] for row in sections[name]["rows"]), name
    assert sum(row["cases"] for row in sections["laws"]["rows"]) >= 5
    assert "\nlaws: good, done" in run.stdout
    assert page.read_text().count("<h2>") == len(SECTIONS)


def test_all_sections_together_take_less_than_eight_minutes():
    assert sum(seconds for _, seconds in SECTIONS.values()) < 480


def test_a_check_that_fails_is_a_row_and_others_go_on():
    def fail():
        raise ValueError("as it should")

    assert tried("this", fail) == {"what": "this", "found": "ValueError: as it should", "ok": False}
    assert tried("that", lambda: None) == {"what": "that", "found": "", "ok": True}


def test_speeds_are_shares_of_the_peak():
    assert work_of((1, 32, 32, 4096, 4096, 128), causal=True) == ("TFLOP/s", 4 * 32 * 4096**2 * 128 / 1e6 / 2)
    assert work_of((1, 32, 8, 1, 8192, 128), causal=False) == ("GB/s", 4 * 8 * 8192 * 128 / 1e3)
    assert (peak_of("NVIDIA H200", "TFLOP/s"), peak_of("NVIDIA H200", "GB/s")) == (989, 4800)
    assert peak_of("another", "GB/s") is None


def test_a_section_that_fails_costs_no_other(tmp_path, monkeypatch, capfd):
    if sdpa_cupy.unavailable() is None:
        pytest.skip("here is a GPU, on which nothing of it fails")
    file = tmp_path / "results.json"
    for name in ("device", "machine"):
        monkeypatch.setitem(SECTIONS, name, (SECTIONS[name][0], None))  # without a limit, as this machine may be loaded
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "device", "machine", "--json", str(file)])
    assert main() == 1
    sections = json.loads(file.read_text())["sections"]
    endings = [(section["ok"], section["ending"]) for section in sections.values()]
    assert endings == [(False, "done"), (False, "ended with status 1")]
    assert [row["ok"] for row in sections["device"]["rows"]] == [False] * 6  # one after the other
    assert "BackendUnavailable" in capfd.readouterr().err
    assert sections["machine"]["rows"][0]["what"] == "versions: sdpa_ref"
