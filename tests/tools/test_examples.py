"""The examples: each runs as a newcomer runs it, its loss falls, and in full it gets as far as its page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

EXAMPLES = Path(__file__).parents[2] / "examples"
NIGHTLY = settings.default.max_examples >= 1000
NEEDS = {"translate": ["rich", "matplotlib"], "denoise": ["rich", "matplotlib"]}
NEEDS["million"] = [*NEEDS["translate"], "zarr"]
NEEDS["vit_digits"] = [*NEEDS["translate"], "sklearn"]


def run(name, folder, *options, **environment):
    """Return what the example prints, and the losses of each training: at the start and at the end."""
    for module in NEEDS[name]:
        pytest.importorskip(module, reason=f'examples/{name}.py needs {module}: pip install ".[examples]"')
    command = [sys.executable, "-W", "error::RuntimeWarning", EXAMPLES / f"{name}.py", "--out", folder, *options]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, encoding="utf-8", timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"loss: (\S+) in the first tenth of the steps, (\S+) in the last", done.stdout)
    return done.stdout, [tuple(map(float, pair)) for pair in losses]


@pytest.mark.parametrize(("name", "trainings"), [("translate", 1), ("vit_digits", 1), ("denoise", 2)])
def test_quick_run_learns_and_draws(name, trainings, tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError('nothing is to be compiled')")
    others = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # there are other tests
    others |= {"PYTHONPATH": str(tmp_path), "PYTHONIOENCODING": "utf-8"}
    printed, losses = run(name, tmp_path / "new", "--quick", **others)
    assert len(losses) == trainings
    assert len(re.findall(r": step \d+ of \d+, loss \d", printed)) >= 5 * trainings  # there is no terminal
    assert all(last < first for first, last in losses)
    (picture,) = (tmp_path / "new").iterdir()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert printed.rstrip().endswith(str(picture))


@pytest.mark.parametrize("options", [[], ["--dask"]])
def test_million_reads_what_is_seen(options, tmp_path):
    if options:
        pytest.importorskip("dask.array", reason="Dask is not installed")
    printed, _ = run("million", tmp_path / "new", "--quick", *options)
    assert re.findall(r": (\d) of 4 chunks of keys were read", printed) == ["4", "2", "1"]
    assert (tmp_path / "new/million.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "module"), [("vit_digits", "sklearn"), ("translate", "rich"), ("denoise", "matplotlib")]
)
def test_what_is_missing_is_said_with_its_remedy(name, module, tmp_path):
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('as if absent', name={module!r})")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], env=environment, capture_output=True, text=True)
    assert done.stderr == f"The examples need {module}: pip install -e '.[examples]'\n"


def test_phrases_are_pairs_and_no_german_one_is_there_twice():
    phrases = [line.split("\t") for line in (EXAMPLES / "phrases.tsv").read_text(encoding="utf-8").splitlines()]
    assert {len(phrase) for phrase in phrases} == {2}
    assert len({german.lower() for german, _ in phrases}) == len(phrases)


@pytest.mark.skipif(not NIGHTLY, reason="a minute or two each: pytest --hypothesis-profile=nightly")
class TestInFull:
    def test_translate(self, tmp_path):
        printed, _ = run("translate", tmp_path)
        assert "Wie geht es dir -> how are you" in printed
        assert int(re.search(r"never saw: \d+ of 60 phrases \((\d+)%\)", printed)[1]) >= 75

    def test_vit_digits(self, tmp_path):
        printed, _ = run("vit_digits", tmp_path)
        assert float(re.search(r"([\d.]+)% right", printed)[1]) >= 95

    def test_denoise(self, tmp_path):
        printed, _ = run("denoise", tmp_path)
        noisy, without, attending = map(float, re.findall(r"([\d.]+) dB", printed))
        assert noisy < without < attending - 2
