"""Render the results as a site that loads nothing from other servers: ``python asv_benches/dashboard.py [FOLDER]``.

The pages of ``asv publish`` load their libraries from content delivery networks. Here npm fetches the same ones, once.
The first page begins with the ratios to other libraries and with what became worse. Benchmarks without a result have no
tile.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ratios

HERE = Path(__file__).parent
NPM = HERE / ".asv" / "npm"
PACKAGES = (
    "jquery@3.3.1",
    "flot@0.8.3",
    "flot-orderbars@1.0.0",
    "stupid-table-plugin@1.1.3",
    "blueimp-md5@2.19.0",
    "bootstrap@3.1.1",
)
FILES = {  # the last part of an address in asv's page: the file in a package
    "jquery-3.3.1.min.js": "jquery/dist/jquery.min.js",
    "jquery.flot.min.js": "flot/jquery.flot.js",
    "jquery.flot.time.min.js": "flot/jquery.flot.time.js",
    "jquery.flot.selection.min.js": "flot/jquery.flot.selection.js",
    "jquery.flot.categories.min.js": "flot/jquery.flot.categories.js",
    "jquery.flot.orderBars.js": "flot-orderbars/js/jquery.flot.orderBars.js",
    "stupidtable.min.js": "stupid-table-plugin/stupidtable.min.js",
    "md5.min.js": "blueimp-md5/js/md5.min.js",
    "bootstrap.min.js": "bootstrap/dist/js/bootstrap.min.js",
    "bootstrap.min.css": "bootstrap/dist/css/bootstrap.min.css",
}
_REMOTE = re.compile(r'(src|href)="https://[^"]*/([^/"]+)" integrity="[^"]*" crossorigin="anonymous"')
_SERIES = "series: {"  # of a tile: a curve of one result is a point
_GRID = '<div id="summarygrid-display" style="position: absolute; left: 0; top: 55px; width: 100%; height: 100%">\n'


def render(folder):
    """Write the site into the folder."""
    subprocess.run([sys.executable, "-m", "asv", "publish", "--html-dir", str(folder)], cwd=HERE, check=True)
    if not (NPM / "node_modules").exists():
        subprocess.run(["npm", "install", "--silent", "--no-package-lock", "--prefix", str(NPM), *PACKAGES], check=True)
    for file in FILES.values():
        target = folder / "lib" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(NPM / "node_modules" / file, target)
    first = first_page(folder)
    put(folder / "summarygrid.js", _SERIES, f"{_SERIES}points: {{show: data.length == 1}}, ")
    put(folder / "index.html", _GRID, _GRID + first)
    put(folder / "index.html", ">Benchmark grid<", ">Ratios and grid<")
    index = folder / "index.html"
    page = index.read_text(encoding="utf-8")
    index.write_text(_REMOTE.sub(lambda found: f'{found[1]}="lib/{FILES[found[2]]}"', page), encoding="utf-8")


def put(file, old, new):
    """Replace the one place with this text in a file of asv."""
    text = file.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise RuntimeError(f"{file.name} of this version of asv does not have {old!r} once")
    file.write_text(text.replace(old, new), encoding="utf-8")


def first_page(folder):
    """Take what has no result out of the site's index and lists, and return what stands above the grid."""
    file = folder / "index.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    found = ratios.curves(folder, index)
    with_results = {curve.name for curve in found}
    index["benchmarks"] = {name: one for name, one in index["benchmarks"].items() if name in with_results}
    file.write_text(json.dumps(index), encoding="utf-8")
    for file in folder.glob("graphs/**/branch-*/**/summary.json"):
        rows = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps([row for row in rows if row["last_value"] is not None]), encoding="utf-8")
    return ratios.page(found, index)


def main():
    """Render where the command line says, and say how to look at it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0].partition(":")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=HERE / ".asv" / "html", help="default: %(default)s")
    folder = parser.parse_args().folder.absolute()
    render(folder)
    print(f"To look at it: {Path(sys.executable).name} -m http.server -d {folder}")


if __name__ == "__main__":
    main()
