"""``sdpa-ref mask``: what a mask lets through."""

import argparse
import json
import math
from typing import Any

import numpy as np

from sdpa_ref.cli.errors import UsageError
from sdpa_ref.cli.mask_expression import MASKS, parse_mask
from sdpa_ref.masks.looking import picture

HELP = "draw a mask, count the pairs it keeps, and find rows that see nothing"
EXAMPLES = f"""examples:
  sdpa-ref mask "Causal() & Window(3, 0)" -L 8
  sdpa-ref mask "Window(3, 0) | FirstTokens(2) & Causal()" -L 12
  sdpa-ref mask "Causal()" -L 3 -S 8 --offset end --explain 0 6
  sdpa-ref mask "Causal() & KeyLengths([2, 6])" -L 6 --json

masks:
  {", ".join(MASKS)};
  & binds tighter than |, and ~ inverts"""
_MOST = 10**8  # pairs; each takes a few bytes while it is looked at
_RANGES = 16


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("mask", metavar="MASK", help='for example "Causal() & Window(3, 0)"')
    parser.add_argument("-L", type=_size, required=True, metavar="N", help="number of queries")
    parser.add_argument("-S", type=_size, metavar="N", help="number of keys (default: that of the queries)")
    parser.add_argument(
        "--offset",
        "--query-offset",
        type=_offset,
        metavar="start|end|N",
        help="position of the first query among the keys; N,N,... for a batch",
    )
    parser.add_argument("--batch", type=_sizes, metavar="N[,N...]", help="batch axes (default: those of the mask)")
    parser.add_argument(
        "--explain", type=int, nargs=2, metavar=("I", "J"), help="say which parts keep or drop key J for query I"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the picture and the counts."""
    report = examine(options)
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    print(f"{report['mask']}, L = {report['L']} queries (down), S = {report['S']} keys (across), # may attend")
    for entry in report["entries"]:
        if entry["batch"]:
            print(f"\nbatch entry {', '.join(map(str, entry['batch']))}")
        print(entry["picture"])
        print(f"kept pairs: {_share(entry)}")
        print(f"rows that see nothing: {_ranges(entry['rows_that_see_nothing'])}")
        print(f"keys never read: {_ranges(entry['keys_never_read'])}")
        if "explanation" in entry:
            print(f"\n{entry['explanation']}")
    if len(report["entries"]) > 1:
        print(f"\nkept pairs in all: {_share(report)}")
    return 0


def examine(options: argparse.Namespace) -> dict[str, Any]:
    """Return the picture, the counts and the explanation of every batch entry, ready for JSON."""
    mask = parse_mask(options.mask)
    L, S = options.L, options.L if options.S is None else options.S
    grid = {"batch": options.batch, "query_offset": options.offset}
    if math.prod(max(size, 1) for size in (L, S, *(options.batch or ()))) > _MOST:
        raise UsageError(f"at most {_MOST} pairs of queries and keys are examined, choose a smaller -L, -S or --batch")
    try:
        keep = mask.dense(L, S, **grid)
        batch = keep.shape[:-3]
        entries = [_entry(at, keep[(*at, 0)] if batch else keep) for at in np.ndindex(*batch)]
        if options.explain:
            i, j = options.explain
            for b, entry in enumerate(entries):
                entry["explanation"] = mask.explain(i, j, L, S, b=b, **grid)
    except (TypeError, ValueError) as error:
        message = str(error).removeprefix("mask: ")
        raise UsageError(message.replace("query_offset=", "--offset ").replace("query_offset", "--offset")) from None
    kept, pairs = (sum(entry[name] for entry in entries) for name in ("kept", "pairs"))
    return {"mask": repr(mask), "L": L, "S": S, "kept": kept, "pairs": pairs, "entries": entries}


def _entry(at: tuple[int, ...], keep: Any) -> dict[str, Any]:
    return {
        "batch": list(at),
        "kept": int(keep.sum()),
        "pairs": keep.size,
        "rows_that_see_nothing": np.flatnonzero(~keep.any(axis=1)).tolist(),
        "keys_never_read": np.flatnonzero(~keep.any(axis=0)).tolist(),
        "picture": picture(keep),
    }


def _share(counts: dict[str, Any]) -> str:
    kept, pairs = counts["kept"], counts["pairs"]
    return f"{kept} of {pairs}" + (f" ({100 * kept / pairs:.1f} %)" if pairs else "")


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as text, runs of them as "first-last"."""
    if not numbers:
        return "none"
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:_RANGES]]
    more = f", ... ({len(numbers)} in all)" if len(runs) > _RANGES else ""
    return ", ".join(texts) + more


def _size(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(part.strip()) for part in text.split(","))


def _offset(text: str) -> Any:
    if text in ("start", "end"):
        return text
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be start, end or an integer, got {text!r}") from None
    return numbers if len(numbers) > 1 else numbers[0]
