"""``sdpa-ref view``: a page that shows where each word, or each patch of an image, looks."""

import argparse
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from sdpa_ref.cli.errors import Failure, UsageError
from sdpa_ref.cli.output import write
from sdpa_ref.extras import install

HELP = "make a page that shows what each word, or each patch of an image, attends to"
EXAMPLES = """examples:
  sdpa-ref view weights.npz --tokens Wie geht es dir
  sdpa-ref view weights.npy --tokens Wie geht es dir --keys how are you --out translation.html
  sdpa-ref view weights.npz --image photo.png --tokens class

the file:
  weights after softmax, (heads, L, S) or (layers, heads, L, S); an NPZ file may have an array (heads, L, S) for each
  layer, by name, and arrays called tokens, keys and image in place of the options"""
_TEXTS = "tokens", "keys", "image"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("weights", metavar="FILE", help="NPZ or NPY file with the weights; see below")
    parser.add_argument(
        "--tokens",
        nargs="+",
        metavar="WORD",
        help="a word for each query; with --image, for each token before the patches",
    )
    parser.add_argument("--keys", nargs="+", metavar="WORD", help="a word for each key, where they are others")
    parser.add_argument("--image", metavar="FILE", help="an image whose patches attend to one another")
    parser.add_argument("--patch", type=int, metavar="N", help="the side of a patch in pixels (default: what fits)")
    parser.add_argument("--title", default="Attention", metavar="TEXT", help="title of the page (default: %(default)s)")
    parser.add_argument("--out", default="attention.html", metavar="FILE", help="file to write (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Write the page."""
    from sdpa_ref.viewer import html_of
    from sdpa_ref.viewer.given import sums, texts_of

    given = _read(options.weights)
    for name in ("tokens", "keys"):
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    if options.image is not None:
        given["image"] = _image(options.image)
    try:
        texts = texts_of(given["weights"], given.get("tokens"), given.get("keys"), given.get("image"), options.patch)
    except (TypeError, ValueError) as error:
        message = re.sub(r"^(tokens|keys|image|patch)\b", r"--\1", str(error))
        raise UsageError(re.sub(r"^weights", options.weights.replace("\\", r"\\"), message)) from None
    html = html_of(texts, options.title)
    write(options.out, html)
    for text in texts.values():
        heads = sum(len(layer) for layer in text.layers.values())
        shape = " by ".join(str(n) for n in next(iter(text.layers.values())).shape[1:])
        print(f"{options.out}: {len(text.layers)} layers, {heads} heads, {shape} weights, {len(html) / 1000:.0f} kB")
        if said := sums(text):
            print(said)
    return 0


def _read(path: str) -> dict[str, Any]:
    """Return the arrays of a file by the names of `page`: the layers as weights."""
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {"arr_0": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or "this is not an NPZ or NPY file of numbers or strings"
        raise UsageError(f"{path}: {reason}") from None
    given: dict[str, Any] = {name: arrays.pop(name) for name in _TEXTS if name in arrays}
    if not arrays:
        raise UsageError(f"{path}: it has no weights")
    layers = {re.sub(r"^arr_(\d+)$", r"\1", name): array for name, array in arrays.items()}
    (first, *more) = layers.values()
    return given | {"weights": layers if more else first}


def _image(path: str) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise Failure(f"--image needs Pillow: {install('plot')}") from None
    try:
        with Image.open(Path(path)) as image:
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError:
        raise UsageError(f"--image {path}: this is not an image of a known format") from None
    except Exception as error:  # what is raised depends on the format and on what is wrong with the file
        raise UsageError(f"--image {path}: {getattr(error, 'strerror', None) or error}") from None
