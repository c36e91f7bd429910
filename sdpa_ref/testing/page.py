"""A run as one HTML page that needs no other file: laws by type, claims, failures with pictures, seeds."""

from html import escape
from typing import Any

import numpy as np

from sdpa_ref.testing import pictures
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.counterexample import described
from sdpa_ref.testing.diagnose import Diagnosis
from sdpa_ref.testing.findings import Finding, groups
from sdpa_ref.testing.report import common_cause, summary, unseen, warnings
from sdpa_ref.testing.runner import Outcome, Run

_LEAST = 320  # pixels that the longer side of a picture gets at least
_MOST_ZOOM = 16
_THIN = 12  # pixels that a single row gets
_WINDOW = 64  # rows and keys around the weight that is most wrong; a pixel for each of thousands tells nothing
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem;
  color: #1c2733; background: #fff }
h1 { font-size: 1.5rem; margin-bottom: 0 }
h2 { font-size: 1.1rem; margin-top: 2rem }
p.about { color: #5b6875; margin-top: .2rem }
p.verdict { font-size: 1.1rem; padding: .5rem .8rem; border-radius: .4rem }
.passed { background: #e3f4e6; color: #14532d }
.failed { background: #fde3e3; color: #8b1018 }
.declined, .not-run { background: #fdf3d7; color: #6b4e00 }
.not-claimed { color: #76828e }
table { border-collapse: collapse; width: 100% }
@media (max-width: 40rem) { body { margin: .5rem auto; padding: 0 .5rem } section.failure { padding: 0 .5rem .5rem }
  figure { margin: .5rem 0; display: block } th, td { padding: .25rem .3rem } td { overflow-wrap: anywhere } }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #e3e8ed }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
td.status { white-space: nowrap }
div { overflow-x: auto }
section.failure { border: 1px solid #f1b5b5; border-radius: .4rem; padding: 0 1rem 1rem; margin: 1rem 0 }
pre { background: #f5f7f9; padding: .6rem .8rem; border-radius: .3rem; white-space: pre-wrap; overflow-wrap: anywhere }
figure { display: inline-block; margin: .5rem 1.5rem .5rem 0; vertical-align: top }
figcaption { color: #5b6875; font-size: .85rem }
img { image-rendering: pixelated; max-width: 100%; border: 1px solid #c8d0d8 }
@media (prefers-color-scheme: dark) {
  body { color: #dbe3ea; background: #14191f }
  pre { background: #1f262e }
  th, td { border-color: #2b343d }
  p.about, figcaption { color: #93a0ad }
  .passed { background: #173a22; color: #b9ebc6 }
  .failed { background: #451a1e; color: #ffc9c9 }
  .declined, .not-run { background: #42360f; color: #f4deb0 }
}
"""
_LEGEND = """<p class="about">Errors are in units of what is allowed: from white to blue up to 1, from orange to
dark red beyond, to 1000. Weights go from white, 0, to blue, the largest that is right there; red is below 0 or
above 1.</p>"""


def page(run: Run, found: tuple[Finding, ...]) -> str:
    """Return the page."""
    verdict = "passed" if run.passed else "failed"
    cause, _ = common_cause(found, run.target.capabilities)
    parts = [
        f"<h1>{escape(run.target.name)}</h1>",
        f'<p class="about">{escape(run.target.about)}</p>',
        f'<p class="verdict {verdict}">{escape(summary(run))}</p>',
        *(["<h2>Failures</h2>", f"<p>{escape(cause)}</p>", _LEGEND, *_causes(found)] if found else []),
        "<h2>Properties</h2>",
        _properties(run),
        "<h2>What was drawn</h2>",
        _drawn(run),
        "<h2>What the tolerance could see</h2>",
        _power(run),
        "<h2>Claims</h2>",
        _claims(run),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(run.target.name)}: {verdict}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _properties(run: Run) -> str:
    """Return the table of laws by type."""
    dtypes = run.target.capabilities.dtypes
    head = "".join(f'<th class="number">{escape(dtype)}</th>' for dtype in dtypes)
    rows = []
    for outcome in run.outcomes:
        status = outcome.status
        counts = "".join(f'<td class="number">{outcome.cases[dtype] or ""}</td>' for dtype in dtypes)
        rows.append(
            f'<tr><td>{escape(outcome.law.name)}</td><td class="status {status.replace(" ", "-")}">{status}</td>'
            f"{counts}<td>{escape(_note(outcome))}</td></tr>"
        )
    top = f"<thead><tr><th>property</th><th>result</th>{head}<th></th></tr></thead>"
    return f"<div><table>{top}<tbody>{''.join(rows)}</tbody></table></div>"


def _note(outcome: Outcome) -> str:
    if outcome.missing:
        return f"needs {outcome.missing}"
    declined = "; ".join(f"declined {n}: {reason}" for reason, n in outcome.declined.items())
    return f"{outcome.law.about} {declined}".strip()


def _causes(found: tuple[Finding, ...]) -> list[str]:
    """Return the failures, each cause under its pattern, with pictures for the first law of it."""
    parts = []
    for number, (pattern, some) in enumerate(groups(found), 1):
        laws = ", ".join(one.law.name for one in some)
        parts.append(f"<h3>Cause {number}: {escape(pattern or 'see below')}</h3><p>in {escape(laws)}</p>")
        parts.append(_failure(some[0]))
        if some[1:]:
            others = "".join(map(_failure, some[1:]))
            parts.append(f"<details><summary>{len(some) - 1} more of this cause</summary>{others}</details>")
    return parts


def _drawn(run: Run) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in run.drawn.table())
    lines = "".join(f'<p class="declined">{escape(line)}</p>' for line in warnings(run))
    return f"{lines}<div><table><tbody>{rows}</tbody></table></div>"


def _failure(finding: Finding) -> str:
    first = ""
    if finding.found and finding.at_first and finding.found.case.recipe != finding.failure.case.recipe:
        first = f"<p>Found in <code>{escape(finding.found.case.recipe)}</code></p>{_figures(finding.at_first)}"
    return (
        f'<section class="failure" id="{escape(finding.law.name.replace(" ", "-"))}">'
        f"<h4>{escape(finding.law.name)}</h4><p>{escape(finding.law.about)}</p>"
        f"<pre>{escape(described(finding.failure, finding.diagnosis))}</pre>{_figures(finding.diagnosis)}"
        f"<p>{escape(finding.stability) or 'It fails'}. Run it again:</p><pre>{escape(finding.command)}</pre>"
        f"{first}</section>"
    )


def _figures(diagnosis: Diagnosis) -> str:
    """Return the pictures of the first wrong head."""
    if diagnosis.first is None or diagnosis.units is None:
        return ""
    b, h, _ = diagnosis.first
    where = f"batch {', '.join(map(str, b))}, head {h}" if b else f"head {h}"
    drawn = [
        _figure(pictures.errors(diagnosis.units), diagnosis.units, f"error, {where}: rows down, columns of V across")
    ]
    if diagnosis.weights is not None and diagnosis.right_weights is not None:
        rows, keys = _around_the_worst(diagnosis.weights, diagnosis.right_weights)
        got, right = (x[rows, keys] for x in (diagnosis.weights, diagnosis.right_weights))
        most = float(right.max(initial=0)) or 1.0
        seen = f"rows {rows.start} to {rows.stop - 1} down, keys {keys.start} to {keys.stop - 1} across"
        drawn.append(_figure(pictures.shares(got, most), got, f"weights: {seen}"))
        drawn.append(_figure(pictures.shares(right, most), right, "weights as they should be"))
    return "".join(drawn)


def _around_the_worst(got: Array, right: Array) -> tuple[slice, slice]:
    """Return the rows and the keys of the picture: all, or some around the weight that is most wrong."""
    with np.errstate(all="ignore"):
        apart = np.nan_to_num(abs(got - right), nan=np.inf)
    worst = divmod(int(apart.argmax()), apart.shape[1]) if apart.size else (0, 0)
    starts = [max(0, min(at - _WINDOW // 2, n - _WINDOW)) for at, n in zip(worst, got.shape, strict=True)]
    rows, keys = (slice(start, min(start + _WINDOW, n)) for start, n in zip(starts, got.shape, strict=True))
    return rows, keys


def _figure(address: str, array: Array, caption: str) -> str:
    height, width = array.shape
    zoom = min(_MOST_ZOOM, max(1, _LEAST // max(height, width, 1)))
    size = f'width="{width * zoom}" height="{max(height * zoom, _THIN)}"'
    text = escape(caption)
    return f'<figure><img src="{address}" {size} alt="{text}"/><figcaption>{text}</figcaption></figure>'


def _power(run: Run) -> str:
    rows = "".join(
        f'<tr><td>{escape(s.fault)}</td><td class="number">{s.seen} of {s.cases}</td>'
        f'<td class="number">{s.longest_seen}</td><td class="number">{s.longest}</td></tr>'
        for s in run.sights
    )
    blind = "".join(f"<li>{escape(line)}</li>" for line in unseen(run))
    return (
        "<p>Faults put into the exact result of some of the run's own cases, and held against their budget.</p>"
        f'<table><thead><tr><th>fault</th><th class="number">seen in</th><th class="number">keys, at most</th>'
        f'<th class="number">of</th></tr></thead><tbody>{rows}</tbody></table>'
        + (f"<p>Not seen at these shapes:</p><ul>{blind}</ul>" if blind else "")
    )


def _claims(run: Run) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(_told(claim))}</td></tr>"
        for name, claim in run.target.capabilities.as_dict().items()
    )
    return f"<table><tbody>{rows}</tbody></table>"


def _told(claim: Any) -> str:
    if isinstance(claim, bool):
        return "yes" if claim else "no"
    if isinstance(claim, list | tuple):
        return ", ".join(map(str, claim)) or "none"
    return "none" if claim is None else str(claim)
