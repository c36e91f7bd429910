"""The public types: a user's file runs, and type checkers find nothing in it."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "support" / "user_code.py"
MYPY = ["-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", "--explicit-package-bases"]


def test_the_users_file_runs():
    subprocess.run([sys.executable, "-W", "error", str(FILE)], cwd=ROOT, check=True)


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="no mypy here")
def test_mypy_finds_nothing_in_a_users_file():
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *MYPY, str(FILE)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("pyright") is None, reason="no pyright here")
def test_pyright_finds_nothing_in_a_users_file():
    command = ["pyright", "--pythonpath", sys.executable, str(FILE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
