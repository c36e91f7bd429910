"""The pictures of these pages: SVG that takes its ink from the page, and so reads on light and on dark ground."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from matplotlib.cbook import get_sample_data
from PIL import Image

from sdpa_ref import Mask

BLUE, ORANGE = "#2a78c8", "#c2570c"  # for above and below 0; black and white ink both read on them
_INK = 'fill="var(--picture-ink, currentColor)"'
_LETTER = 7.2  # width of a letter in the labels


@dataclass(frozen=True)
class Picture:
    """What a notebook shows as HTML, and as `text` where it shows none."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def portrait() -> Any:
    """Return a photo in the public domain, of Grace Hopper, float32 in [0, 1] of shape (32, 32, 3)."""
    with Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)) as file:
        small = file.crop((0, 20, 512, 532)).resize((32, 32), Image.Resampling.BOX)
    return np.asarray(small, np.float32) / 255


def matrix(
    values: Any, title: str = "", rows: Sequence[str] = (), columns: Sequence[str] = (), *, digits: int | None = 2
) -> Picture:
    """Return the picture of a matrix: blue above 0, orange below, the stronger the further from it.

    Parameters
    ----------
    values : array, shape (rows, columns)
    title : str
    rows, columns : sequence of str
        Labels.
    digits : int or None
        Of the number in each cell; None for small cells without numbers.
    """
    values = np.asarray(values, np.float64)
    largest = np.max(abs(values), where=np.isfinite(values), initial=1e-300)
    if digits is None:
        side = 7 if len(values) > 32 else 10
        width, height = (side * n for n in values.shape[::-1])
        parts = [_pixels(_shade(values / largest), width, height), _cell(0, 0, width, height, BLUE, 0)]
        return _figure(parts, width, height, title, f"{values.shape} matrix")
    w, h = 11 + 9 * (digits + 1), 26
    if columns:
        w = max(w, 8 + _LETTER * max(map(len, columns)))
    left, top = 6 + _LETTER * max(map(len, rows), default=-0.8), 20 if columns else 2
    parts = [_text(left - 6, top + h * (i + 0.5), name, "end") for i, name in enumerate(rows)]
    parts += [_text(left + w * (j + 0.5), 10, name) for j, name in enumerate(columns)]
    for (i, j), value in np.ndenumerate(values):
        x, y = left + w * j, top + h * i
        strength = min(abs(value) / largest, 1) if np.isfinite(value) else 0
        parts.append(_cell(x, y, w, h, BLUE if value >= 0 else ORANGE, strength))
        number = f"{value:z.{digits}f}".replace("-", "\N{MINUS SIGN}").replace("inf", "\N{INFINITY}")
        parts.append(_text(x + w / 2, y + h / 2, number))
    return _figure(parts, left + w * values.shape[1] + 2, top + h * len(values) + 2, title, f"{values.shape} matrix")


def mask(rule: Any, L: int = 0, S: int = 0, title: str = "", **options: Any) -> Picture:
    """Return the picture of a mask: a query in each row, a filled square where it may attend.

    Parameters
    ----------
    rule : Mask, or boolean array of shape (L, S)
    L, S, **options
        As in `Mask.dense`, for a mask object.
    title : str
        By default the mask as it is written.
    """
    keep = rule.dense(L, S, **options) if isinstance(rule, Mask) else np.asarray(rule)
    title = title or ", ".join([repr(rule), *(f"{name}={value!r}" for name, value in options.items())])
    (L, S), side, left, top = keep.shape, 17, 24, 20
    parts = [_text(left - 6, top + side * (i + 0.5), str(i), "end") for i in range(L)]
    parts += [_text(left + side * (j + 0.5), 10, str(j)) for j in range(S)]
    parts += [_cell(left + side * j, top + side * i, side, side, BLUE, kept) for (i, j), kept in np.ndenumerate(keep)]
    return _figure(parts, left + side * S + 2, top + side * L + 2, title, f"{L} x {S} mask")


def photo(image: Any, title: str = "", *, weights: Any = None, frame: tuple[int, int, int] | None = None) -> Picture:
    """Return an image, with weights laid over it in blue.

    Parameters
    ----------
    image : array, shape (h, w, 3)
        In [0, 1]. Under weights it is shown in grey.
    title : str
    weights : array, shape (rows, columns), optional
        A grid of weights that covers the image, the largest in full colour.
    frame : (row, column, side), optional
        The square to be framed, in pixels.
    """
    image, size = np.asarray(image, np.float64), 160
    if weights is not None:
        image = np.repeat(image.mean(-1, keepdims=True), 3, -1)
    height = size * image.shape[0] / image.shape[1]
    parts = [_pixels(image, size, height)]
    if weights is not None:
        parts.append(_pixels(_shade(np.sqrt(weights / np.max(weights))), size, height))
    if frame is not None:
        scale = size / image.shape[1]
        row, column, side = (scale * n for n in frame)
        parts.append(
            f'<rect x="{column:.1f}" y="{row:.1f}" width="{side:.1f}" height="{side:.1f}" fill="none" '
            f'stroke="#ffd400" stroke-width="2.5"/>'
        )
    return _figure(parts, size, height, title, "image")


def beside(*pictures: Picture) -> Picture:
    """Return pictures beside one another, or below where the page is narrow."""
    return Picture("".join(p.html for p in pictures), "\n".join(p.text for p in pictures))


def _figure(parts: list[str], width: float, height: float, title: str, kind: str) -> Picture:
    """Return the drawing with its title below it; on a page that is narrower it shrinks."""
    caption = f"<figcaption>{escape(title)}</figcaption>" if title else ""
    return Picture(
        f'<figure class="picture"><svg viewBox="0 0 {width:.1f} {height:.1f}" width="{width:.0f}" role="img" '
        f'aria-label="{escape(title or kind)}" font-size="12">{"".join(parts)}</svg>{caption}</figure>',
        f"[{kind}: {title}]" if title else f"[{kind}]",
    )


def _cell(x: float, y: float, w: float, h: float, colour: str, strength: float) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{colour}" fill-opacity="{strength:.2f}" '
        'stroke="currentColor" stroke-opacity="0.2"/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" dominant-baseline="central" {_INK}>{escape(text)}</text>'
    )


def _shade(values: Any) -> Any:
    """Return the colours of values in [-1, 1]: an image whose transparency leaves the ground visible near 0."""
    blue, orange = ([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)] for colour in (BLUE, ORANGE))
    return np.concatenate([np.where(values[..., None] >= 0, blue, orange), abs(values)[..., None]], -1)


def _pixels(image: Any, width: float, height: float) -> str:
    """Return an image in [0, 1] whose pixels stay sharp when it is enlarged."""
    memory = io.BytesIO()
    Image.fromarray((255 * image).round().astype(np.uint8)).save(memory, "PNG")
    data = base64.b64encode(memory.getvalue()).decode()
    return (
        f'<image href="data:image/png;base64,{data}" width="{width:.1f}" height="{height:.1f}" '
        'preserveAspectRatio="none" style="image-rendering: pixelated"/>'
    )
