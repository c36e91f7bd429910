"""What only a GPU can tell of the CuPy backend, in less than eight minutes.

    python tests/gpu/gpu_checks.py --json results.json --page results.html
    python tests/gpu/gpu_checks.py --dry-run            # every section, on the emulation instead of a GPU
    python tests/gpu/gpu_checks.py --compile 90         # its kernels, compiled before a GPU is at hand

Each section runs in a process of its own and within its time, so that a fault of a kernel or a hang costs nothing but
what is left of it; what merely fails is a row, and the section goes on. The tables come last; the exit status is 1 if
anything was wrong.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from html import escape
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parents[1]
SECTIONS = {  # the module of checks/ and the seconds that it may take; none: it is here
    "machine": ("", 20),
    "instructions": ("instructions", 60),
    "small": ("laws", 30),
    "fuzz": ("laws", 50),
    "laws": ("laws", 100),
    "device": ("device", 50),
    "pytorch": ("peers", 40),
    "timings": ("peers", 80),
    "sanitizer": ("", 40),
}


def machine(dry):
    """Yield versions, backends and what the device says of itself."""
    import sdpa_ref
    from sdpa_ref.cli.info import collect

    found = collect()
    for heading in ("versions", "backends", "cupy"):
        for name, value in found.get(heading, {}).items():
            yield {"what": f"{heading}: {name}", "found": str(value), "ok": None}
    if not dry:
        sdpa_ref.load("cupy")


def sanitizer(dry):
    """Yield what compute-sanitizer finds in the small problems."""
    for tool in ("the emulation",) if dry else ("memcheck", "racecheck"):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        if not dry and not shutil.which(command[0]):
            yield {"what": " ".join(command), "found": "it is not installed", "ok": None}
            continue
        # Without a GPU the emulation's own checks of accesses and races take its place.
        command = [] if dry else command
        command += [sys.executable, __file__, "small", "--here", *(["--dry-run"] if dry else [])]
        run = subprocess.run(command, capture_output=True, text=True)
        yield {"what": tool, "found": run.stdout[-1000:] if run.returncode else "", "ok": run.returncode == 0}


def run_here(name, dry, file):
    """Run a section, show its rows and keep them; return whether none is wrong."""
    module, _ = SECTIONS[name]
    if dry:  # the emulation as a backend, and a stand-in for CuPy
        sys.path[:0] = [str(TESTS / "loopback"), str(TESTS / "support")]
    section = getattr(import_module(f"checks.{module}"), name) if module else globals()[name]
    good = True
    for row in section(dry):
        good &= row["ok"] is not False
        print("  " + "  ".join(str(value) for value in row.values())[:150], flush=True)
        if file:
            with file.open("a") as rows:
                rows.write(json.dumps(row) + "\n")
    return good


def run_apart(name, dry):
    """Return what a section found in a process of its own, and how that ended."""
    with tempfile.TemporaryDirectory() as folder:
        file, begun, seconds = Path(folder, "rows"), time.monotonic(), None if dry else SECTIONS[name][1]
        command = [sys.executable, __file__, name, "--here", "--rows", str(file), *(["--dry-run"] if dry else [])]
        try:
            status = subprocess.run(command, timeout=seconds).returncode
            ending = "done" if status == 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            ending = f"stopped after {seconds} s"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    good = ending == "done" and bool(rows) and all(row["ok"] is not False for row in rows)
    return {"ending": ending, "ok": good, "seconds": round(time.monotonic() - begun, 1), "rows": rows}


def page(results):
    """Return the tables as one page of HTML."""
    parts = ["<!doctype html><meta charset=utf-8><title>GPU checks</title>", f"<style>{STYLE}</style>"]
    for name, result in results.items():
        state = "good" if result["ok"] else "not good"
        parts.append(f"<h2>{escape(name)}: {state}, {escape(result['ending'])}, {result['seconds']} s</h2><table>")
        columns = list(dict.fromkeys(column for row in result["rows"] for column in row))
        parts.append("<tr>" + "".join(f"<th>{escape(column)}" for column in columns))
        for row in result["rows"]:
            cells = "".join(f"<td>{escape(str(row.get(column, '')))}" for column in columns)
            parts.append(f"<tr class={'bad' if row['ok'] is False else 'good'}>{cells}")
        parts.append("</table>")
    return "\n".join(parts)


STYLE = "body{font:14px sans-serif} td,th{padding:2px 8px;text-align:left} .bad{color:#b00}"


def table(rows):
    """Return rows as lines of columns."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    words = {"True": "yes", "False": "NO", "None": ""}
    lines = [columns]
    for row in rows:
        cells = (str(row.get(name)).replace("\n", " ")[:70] for name in columns)
        lines.append([words.get(cell, cell) for cell in cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def main():
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="run every section on the emulation")
    parser.add_argument("--json", type=Path, help="keep everything in this file, which grows with each section")
    parser.add_argument("--page", type=Path, help="write the tables to this file, too, as HTML")
    parser.add_argument("--here", action="store_true", help="run in this process, for a debugger")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"all, or of {', '.join(SECTIONS)}")
    parser.add_argument("--compile", type=int, metavar="ARCH", help="only compile for such a device, 90 for an H200")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over the laws that are compiled for")
    options = parser.parse_args()
    if options.compile:
        import_module("checks.ahead").compile_for(options.compile, options.rounds)
        return 0
    results, good = {}, True
    for name in options.sections or SECTIONS:
        if options.here:
            good &= run_here(name, options.dry_run, options.rows) or options.rows is not None
            continue
        print(f"== {name}, at most {SECTIONS[name][1]} s", flush=True)
        results[name] = run_apart(name, options.dry_run)
        if options.json:
            options.json.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "sections": results}, indent=1))
        if options.page:
            options.page.write_text(page(results), "utf-8")
    for name, result in results.items():
        print(f"\n{name}: {'good' if result['ok'] else 'NOT GOOD'}, {result['ending']}, {result['seconds']} s")
        print("\n".join(table(result["rows"])))
    return 0 if good and all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
