"""``sdpa-ref demo``: three layers on real input, on every backend."""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

import sdpa_ref
from sdpa_ref.cli.errors import Failure, UsageError
from sdpa_ref.cli.info import unusable
from sdpa_ref.cli.output import write
from sdpa_ref.cli.stages import PATCH, SIDE, Measurement, measure, stages
from sdpa_ref.extras import install

HELP = "run attention on a photo, a sentence and a feature map, and draw the attention weights"
EXAMPLES = """examples:
  sdpa-ref demo
  sdpa-ref demo --text "the cat sat on the mat" --out pictures
  sdpa-ref demo --image holiday.jpg --backend reference
  sdpa-ref demo --json"""
_SAMPLE = "grace_hopper.jpg"
_MOST_WORDS = 40  # more would be unreadable in the picture
_PATCHES = (3, 4), (2, 7), (6, 2)  # rows and columns of those whose attention is drawn
_POSITIONS = (6, 8), (4, 14), (12, 4)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--image", metavar="FILE", help="a photo (default: a public-domain portrait)")
    parser.add_argument("--text", default="Wie geht es dir", help="words, separated by spaces (default: %(default)s)")
    parser.add_argument("--out", default="sdpa-ref-demo", metavar="DIR", help="folder to write (default: %(default)s)")
    parser.add_argument("--backend", nargs="+", metavar="NAME", help="only these backends (default: all that can run)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Compute, write the pictures and print what came out."""
    try:
        from rich.console import Console

        from sdpa_ref.cli import figures
    except ImportError as error:
        raise Failure(f"the demo needs rich and matplotlib ({error}): {install('demo')}") from None
    words = _words(options.text)
    backends, unavailable = _backends(options.backend)
    photo = _photo(options.image)
    _make_directory(options.out)

    plain = stages(photo, words)
    with Console(stderr=True).status("the reference", spinner="line") as status:
        exact = {stage.name: stage.run("reference") for stage in plain}
        measurements, unsupported = _measure(backends, photo, words, exact, status.update)
        status.update("the pictures")
        drawn = {
            "photo.png": figures.photo_picture(photo, exact["photo"][1], PATCH, _PATCHES),
            "words.png": figures.words_picture(words, exact["words"][1]),
            "map.png": figures.map_picture(photo, exact["map"][1][0], _POSITIONS),
        }
        pictures = [_write(options.out, name, picture) for name, picture in drawn.items()]

    if options.json:
        report = {
            "image": _SAMPLE if options.image is None else options.image,
            "words": words,
            "measurements": [asdict(measurement) for measurement in measurements],
            "unsupported": unsupported,
            "unavailable": unavailable,
            "pictures": pictures,
        }
        print(json.dumps(report, indent=2))
        return 0
    for stage in plain:
        print(f"{stage.name:<6} {stage.about}")
    Console(width=100, markup=False, emoji=False, highlight=False).print(_table(measurements))
    print("error: largest difference from the reference's output; row sums: of weights, the smallest and largest")
    for reason in [f"{entry['stage']}: {entry['reason']}" for entry in unsupported] + list(unavailable.values()):
        print(reason)
    print("pictures:", *pictures, sep="\n  ")
    return 0


def _measure(
    backends: Sequence[str], photo: Any, words: Sequence[str], exact: dict[str, Any], say: Callable[[str], None]
) -> tuple[list[Measurement], list[dict[str, str]]]:
    """Return what the backends make of the stages, stage by stage, and what is unsupported."""
    measurements, unsupported = [], []
    for backend in backends:
        for stage in stages(photo, words, import_module(sdpa_ref.load(backend).ARRAYS).asarray):
            say(f"{stage.name} on {backend}, which may have to compile first")
            try:
                measurements.append(measure(stage, backend, exact[stage.name][0]))
            except NotImplementedError as error:
                unsupported.append({"stage": stage.name, "backend": backend, "reason": str(error)})
    return sorted(measurements, key=lambda m: list(exact).index(m.stage)), unsupported


def _words(text: str) -> list[str]:
    words = text.split()
    if not words:
        raise UsageError('--text has no words; write for example --text "the cat sat on the mat"')
    if len(words) > _MOST_WORDS:
        raise UsageError(f"--text has {len(words)} words, and the picture has room for {_MOST_WORDS}")
    return words


def _backends(named: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """Return the backends to run, and the reasons why others cannot; one that was named must."""
    known = sdpa_ref.names()
    for name in named or ():
        if name not in known:
            raise UsageError(f"unknown backend {name!r}; there are {', '.join(known)}")
    names = list(dict.fromkeys(named or known))
    reasons = {name: reason for name in names if (reason := unusable(name) or _not_measured(name)) is not None}
    if named and reasons:
        raise Failure("; ".join(reasons.values()))
    return [name for name in names if name not in reasons], reasons


def _not_measured(name: str) -> str | None:
    """Return why the demo does not measure a backend that can be used, None where it does."""
    lazy = sdpa_ref.load(name).ARRAYS == "dask"
    return f"backend {name!r} computes lazy arrays by another backend: see docs/dask.md" if lazy else None


def _photo(path: str | None) -> Any:
    """Return the middle of the image in ``(SIDE, SIDE, 3)``, float32 in [0, 1]."""
    from matplotlib.cbook import get_sample_data
    from PIL import Image, ImageOps, UnidentifiedImageError

    file = get_sample_data(_SAMPLE, asfileobj=False) if path is None else path
    try:
        with Image.open(file) as image:
            upright = _eight_bits(ImageOps.exif_transpose(image), image.format).convert("RGB")
            square = ImageOps.fit(upright, (SIDE, SIDE), Image.Resampling.BOX)
    except UsageError as error:
        raise UsageError(f"--image {file}: {error}") from None
    except UnidentifiedImageError:
        raise UsageError(f"--image {file}: this is not an image of a known format") from None
    except Exception as error:  # what is raised depends on the format and on what is wrong with the file
        raise UsageError(f"--image {file}: {getattr(error, 'strerror', None) or error}") from None
    return np.asarray(square, np.float32) / 255


def _eight_bits(image: Any, file_format: str | None) -> Any:
    """Return an image whose samples have 8 bits: Pillow would cut off what is wider instead of scaling it."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and file_format == "PNG"):
        white = 65535.0
    elif image.mode == "F":
        white = 1.0
    elif image.mode == "I":
        raise UsageError("samples of 32 bits have no agreed white; convert the image to 8 or 16 bits")
    else:
        return image
    scaled = np.asarray(image).astype(np.float64) / white
    if not ((scaled >= 0) & (scaled <= 1)).all():
        raise UsageError(f"samples must be in [0, {white:g}], got {scaled.min() * white:g} to {scaled.max() * white:g}")
    return Image.fromarray(np.round(scaled * 255).astype(np.uint8))


def _make_directory(path: str) -> None:
    """Raise the error of a directory that cannot be made or written to, before any work is done."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except FileExistsError:
        raise UsageError(f"--out {path}: this is a file, not a directory") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {path}: {getattr(error, 'strerror', None) or error}") from None


def _write(directory: str, name: str, content: bytes) -> str:
    """Return the path of the file, which has appeared as a whole."""
    path = os.path.join(directory, name)
    write(path, content)
    return path


def _table(measurements: Sequence[Measurement]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("stage", "backend", "in and out", "weights"):
        table.add_column(heading)
    for heading in ("time", "error", "row sums - 1"):
        table.add_column(heading, justify="right")
    for _, group in groupby(measurements, key=lambda m: m.stage):
        for m in group:
            sizes = ("x".join(map(str, shape)) for shape in (m.shape, m.weights_shape))
            error = f"{m.error:.1e}" if m.error else "0"
            low, high = (f"{end - 1:+.0e}" for end in m.row_sums)
            table.add_row(m.stage, m.backend, *sizes, f"{1000 * m.seconds:.2f} ms", error, f"{low} {high}")
        table.add_section()
    return table
