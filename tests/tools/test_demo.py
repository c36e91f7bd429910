"""`sdpa-ref demo`: one run on all backends, a few on the reference, and everything that it refuses."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout

import numpy as np
import pytest
from PIL import Image

from sdpa_ref.cli import main

SHAPES = {
    "photo": ([64, 48], [4, 64, 64]),
    "words": ([4, 32], [4, 4, 4]),
    "map": ([1, 12, 16, 16], [1, 4, 256, 256]),
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The directory and the report of a run as it comes, on every backend there is."""
    out = tmp_path_factory.mktemp("demo") / "made" / "by it"
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["demo", "--out", str(out), "--json"]) == 0
    return out, json.loads(printed.getvalue())


def test_every_backend_is_measured(demo, backend):
    _, report = demo
    measured = {m["stage"]: m for m in report["measurements"] if m["backend"] == backend}
    assert {name: (m["shape"], m["weights_shape"]) for name, m in measured.items()} == SHAPES
    for m in measured.values():
        assert m["seconds"] > 0
        assert np.isfinite(m["error"])
        assert m["error"] == 0 or backend not in ("reference", "loopback")
        keys = m["weights_shape"][-1]
        assert np.abs(np.subtract(m["row_sums"], 1)).max() <= keys * np.finfo(np.float32).eps


def test_backends_that_cannot_are_listed(demo):
    _, report = demo
    assert [(entry["stage"], entry["backend"]) for entry in report["unsupported"]] == [(s, "picky") for s in SHAPES]
    assert "L = 64 is not its taste" in report["unsupported"][0]["reason"]
    assert {"broken", "missing"} <= set(report["unavailable"])
    assert "a machine that does not exist" in report["unavailable"]["broken"]


def test_pictures_are_whole(demo):
    out, report = demo
    assert report["pictures"] == [os.path.join(out, name) for name in ("photo.png", "words.png", "map.png")]
    assert sorted(os.listdir(out)) == ["map.png", "photo.png", "words.png"]
    for path in report["pictures"]:
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert picture.width > 800
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 50


def test_table_for_an_image_and_words_of_ones_own(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("L", (3, 200), 77).save("flat [b].gif")
    text = "the  $x_1$ 日本 Donaudampfschifffahrtsgesellschaft is [red] the\n\\frac a b"
    arguments = ["--image", "flat [b].gif", "--text", text, "--out", "pictures", "--backend", "reference", "picky"]
    assert main(["demo", *arguments]) == 0
    out, _ = capsys.readouterr()
    assert "10 words as vectors of 32 with positions, 4 heads of 8\n" in out
    rows = [line.split() for line in out.splitlines() if " reference " in line]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        ("photo", "64x48", "4x64x64"),
        ("words", "10x32", "4x10x10"),
        ("map", "1x12x16x16", "1x4x256x256"),
    ]
    assert "words: backend 'picky' does not support this problem: L = 10 is not its taste\n" in out
    assert out.endswith(
        "pictures:\n  pictures/photo.png\n  pictures/words.png\n  pictures/map.png\n".replace("/", os.sep)
    )
    assert max(len(line) for line in out.splitlines() if " reference " in line) <= 80


def test_picture_that_cannot_be_written(capsys, demo, tmp_path):
    (tmp_path / "map.png").mkdir()
    assert main(["demo", "--out", str(tmp_path), "--backend", "reference"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"sdpa-ref demo: error: cannot write {tmp_path / 'map.png'}: ")
    assert sorted(os.listdir(tmp_path)) == ["map.png", "photo.png", "words.png"]
    for name in ("photo.png", "words.png"):
        assert (tmp_path / name).read_bytes() == (demo[0] / name).read_bytes(), "the same input, the same picture"


def refused(capsys, tmp_path, *arguments, code=2):
    """Return the message; nothing may have been made."""
    before = sorted(os.listdir(tmp_path))
    assert main(["demo", "--out", str(tmp_path / "out"), *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert sorted(os.listdir(tmp_path)) == before
    return err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (b"", "not an image of a known format"),
        (b"hello, I am a text", "not an image of a known format"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), ""),
    ],
)
def test_image_that_is_not_one(capsys, tmp_path, content, reason):
    path = tmp_path / "not an image [1].png"
    if content is not None:
        path.write_bytes(content)
    message = refused(capsys, tmp_path, "--image", str(path))
    assert message.startswith(f"sdpa-ref demo: error: --image {path}: ")
    assert reason in message


def test_image_that_is_cut_short(capsys, tmp_path):
    path = tmp_path / "cut.png"
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:-1000])
    assert f"--image {path}: image file is truncated" in refused(capsys, tmp_path, "--image", str(path))


def test_image_that_is_a_directory(capsys, tmp_path):
    assert f"--image {tmp_path}: " in refused(capsys, tmp_path, "--image", str(tmp_path))


def test_text_without_words_or_with_too_many(capsys, tmp_path):
    assert "--text has no words" in refused(capsys, tmp_path, "--text", " \n\t ")
    assert "--text has 41 words, and the picture has room for 40" in refused(capsys, tmp_path, "--text", "la " * 41)


def test_backend_that_is_unknown_or_unavailable(capsys, tmp_path):
    message = refused(capsys, tmp_path, "--backend", "reference", "nunba")
    assert message.startswith("sdpa-ref demo: error: unknown backend 'nunba'; there are reference, ")
    message = refused(capsys, tmp_path, "--backend", "reference", "broken", code=1)
    assert message.startswith("sdpa-ref demo: error: backend 'broken' cannot run here: it needs a machine")


def test_out_that_is_a_file_or_below_one(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    message = refused(capsys, tmp_path, "--out", str(file))
    assert message == f"sdpa-ref demo: error: --out {file}: this is a file, not a directory\n"
    assert f"--out {file / 'below'}: " in refused(capsys, tmp_path, "--out", str(file / "below"))
    assert file.read_text() == "mine"


def test_out_that_is_not_writable(capsys, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if os.access(locked, os.W_OK):
        pytest.skip("this user may write everywhere")
    assert f"--out {locked}: Permission denied" in refused(capsys, tmp_path, "--out", str(locked))


@pytest.mark.parametrize("module", ["rich.console", "matplotlib.figure"])
def test_without_the_extra(tmp_path, module):
    script = f"""
import sys
sys.modules[{module!r}] = None
from sdpa_ref.cli import main
assert main(["mask", "Causal()", "-L", "3"]) == 0
assert main(["info"]) == 0
assert main(["demo", "--out", "out"]) == 1
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("sdpa-ref demo: error: the demo needs rich and matplotlib")
    assert done.stderr.endswith('pip install "sdpa-ref[demo]" (in a checkout: pip install -e ".[demo]")\n')
    assert not (tmp_path / "out").exists()


RAMP = np.linspace(0, 1, 64)[None].repeat(64, 0)


@pytest.mark.parametrize("kind", ["8 bits", "16 bits", "16 bits in TIFF", "16 bits, big-endian", "float"])
def test_images_of_wide_samples_are_scaled(tmp_path, kind):
    from sdpa_ref.cli.demo import _photo

    samples = {"8": np.uint8(RAMP * 255), "1": np.uint16(RAMP * 65535), "f": np.float32(RAMP)}[kind[0]]
    samples = samples.astype(">u2") if "big" in kind else samples
    path = tmp_path / ("ramp.png" if kind in ("8 bits", "16 bits") else "ramp.tiff")
    Image.fromarray(samples).save(path)
    photo = _photo(str(path))
    assert abs(photo - np.linspace(0, 1, photo.shape[1])[None, :, None]).max() < 0.02


@pytest.mark.parametrize("samples", [np.int32(RAMP * 65535), np.float32(RAMP * 255), np.float32(RAMP * np.nan)])
def test_images_whose_white_nobody_knows_are_refused(capsys, tmp_path, samples):
    Image.fromarray(samples).save(tmp_path / "ramp.tiff")
    assert f"--image {tmp_path / 'ramp.tiff'}: samples " in refused(
        capsys, tmp_path, "--image", str(tmp_path / "ramp.tiff")
    )
