"""The script for the day a GPU is at hand: what of it needs none is run here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sdpa_cupy

SCRIPT = Path(__file__).parent / "gpu_checks.py"


def test_a_dry_run_tries_what_needs_no_gpu_and_lists_the_rest(tmp_path):
    pytest.importorskip("ml_dtypes")
    pytest.importorskip("platformdirs")
    file = tmp_path / "results.json"
    run = subprocess.run([sys.executable, SCRIPT, "--dry-run", "--json", file], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    sections = json.loads(file.read_text())["sections"]
    assert list(sections) == ["machine", "instructions", "small", "laws", "device", "pytorch", "timings", "sanitizer"]
    assert all(section["ending"] == "done" and section["ok"] for section in sections.values())
    assert all(row["different"] == 0 for row in sections["instructions"]["rows"])
    assert sum(row["cases"] for row in sections["laws"]["rows"]) > 20
    assert sum(bool(section["rows"]) for section in sections.values()) >= 7
    assert "\nlaws: good, done" in run.stdout


def test_a_section_that_fails_costs_no_other(tmp_path):
    if sdpa_cupy.unavailable() is None:
        pytest.skip("here is a GPU, on which nothing of it fails")
    file = tmp_path / "results.json"
    command = [sys.executable, SCRIPT, "device", "machine", "--json", file]
    run = subprocess.run(command, capture_output=True, text=True)
    sections = json.loads(file.read_text())["sections"]
    assert run.returncode == 1
    assert [(section["ok"], section["ending"]) for section in sections.values()] == [(False, "ended with status 1")] * 2
    assert "BackendUnavailable" in run.stderr
    assert sections["machine"]["rows"][0]["what"] == "versions: sdpa_ref"
