"""What the first page of the dashboard says: the ratios to other libraries, and what became worse."""

import html
import json
import math
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

PEERS = "peers.Peers.track_ratio"
MORE_IS_BETTER = {PEERS, "forward.MatrixRate.track_fraction"}
THRESHOLD = 0.15  # that of asv.conf.json and of CONTRIBUTING: smaller differences are within the noise
BEFORE = 10  # commits that the newest one is compared with
FEWEST = 3  # of fewer, nothing is said


class Curve(NamedTuple):
    """The values of a benchmark with its parameters on one machine: a pair of a commit's number and a value each."""

    name: str
    parameters: tuple[str, ...]
    points: list[tuple[int, float]]

    @property
    def worse(self):
        """By which factor the newest value is worse than the median of those before; 0 if the noise explains it."""
        *before, newest = (value for _, value in self.points[-BEFORE - 1 :])
        if len(before) < FEWEST:
            return 0
        if self.name in MORE_IS_BETTER:
            before, newest = [1 / value for value in before if value], 1 / newest if newest else math.inf
        usual = median(before)
        return newest / usual if newest > max(before) and newest > (1 + THRESHOLD) * usual > 0 else 0


def curves(site, index):
    """Return the curves of all benchmarks of the main branch that have a result, as `asv publish` wrote them."""
    found = []
    for name, benchmark in index["benchmarks"].items():
        combinations = [*product(*benchmark["params"])]
        for file in sorted(Path(site, "graphs").glob(f"**/branch-*/**/{name}.json")):
            graph = json.loads(file.read_text(encoding="utf-8"))
            for place, parameters in enumerate(combinations):
                values = [(commit, row[place] if benchmark["params"] and row else row) for commit, row in graph]
                points = [(commit, value) for commit, value in values if value is not None and math.isfinite(value)]
                if points:
                    found.append(Curve(name, tuple(text.strip("'") for text in parameters), points))
    return found


def page(found, index):
    """Return the HTML of what stands above the grid: a table of the ratios, and a list of what became worse."""
    return f'<div class="container-fluid">\n{_ratios(found, index)}\n{_regressions(found, index)}\n</div>'


def _ratios(found, index):
    ratios = {curve.parameters[1:]: curve for curve in found if curve.name == PEERS}
    if not ratios:
        return "<h1>Ratios to other libraries</h1><p>No result is kept yet.</p>"
    peers, cases = (list(dict.fromkeys(names)) for names in zip(*ratios, strict=True))
    rows = []
    for case in cases:
        cells = [_cell(ratios.get((peer, case)), index) for peer in peers]
        rows.append(f"<tr><th>{html.escape(case)}</th>{''.join(cells)}</tr>")
    head = "".join(f"<th>{html.escape(peer)}</th>" for peer in peers)
    return (
        "<h1>Ratios to other libraries</h1><p>The time of a library by ours, measured by turns: above 1 this library is"
        f' faster. <a href="#{PEERS}">Curves</a></p>\n<table class="table" id="ratios"><thead><tr><th>case</th>{head}'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _cell(curve, index):
    if curve is None:
        return "<td></td>"
    commit, value = curve.points[-1]
    mark = ' class="danger"' if curve.worse else ""
    return f"<td{mark}>{value:.2f} <small>at {_hash(commit, index)}</small></td>"


def _regressions(found, index):
    rule = (
        f"<p>The newest result is worse than each of the {FEWEST} to {BEFORE} before it, and by more than"
        f" {THRESHOLD:.0%} than their median.</p>"
    )
    worse = sorted((curve for curve in found if curve.worse), key=lambda curve: -curve.worse)
    rows = "".join(
        f'<tr class="danger"><td><a href="#{curve.name}">{html.escape(", ".join((curve.name, *curve.parameters)))}</a>'
        f"</td><td>{curve.worse:.2f} times</td><td>{_hash(curve.points[-1][0], index)}</td></tr>"
        for curve in worse
    )
    table = f'<table class="table" id="worse">{rows}</table>' if rows else '<p id="worse">None.</p>'
    return f"<h1>What became worse</h1>\n{rule}\n{table}"


def _hash(commit, index):
    return index["revision_to_hash"][str(commit)][:8]
