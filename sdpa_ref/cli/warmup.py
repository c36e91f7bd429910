"""``sdpa-ref warmup``: compile ahead what the first calls would wait for."""

import argparse
import sys
from collections.abc import Callable

import sdpa_ref
from sdpa_ref.cli.errors import Failure
from sdpa_ref.cli.info import unusable

HELP = "compile the kernels of the backends ahead, for example when an image is built"
EXAMPLES = """examples:
  sdpa-ref warmup
  sdpa-ref warmup --only float32
  sdpa-ref warmup --only float16 "few rows"
  SDPA_REF_CACHE_DIR=/opt/kernels sdpa-ref warmup

A kernel that is on disk already takes a moment. A function passed as score_mod is compiled at its first use."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="compile those whose names have all these words, such as float32 plain",
    )
    parser.add_argument("--list", action="store_true", help="print the names and compile nothing")


def run(options: argparse.Namespace) -> int:
    """Compile what every usable backend offers, and print how much that was."""
    steps: dict[str, Callable[[], object]] = {}
    for name in sdpa_ref.names():
        if unusable(name):
            continue
        try:
            backend = sdpa_ref.load(name)
            found = backend.warmup() if "warmup" in backend.TASKS else {}
        except OSError as error:
            raise Failure(f"{name}: {error}") from None
        steps.update({f"{name}: {step}": compile_it for step, compile_it in found.items()})
    wanted = {step: made for step, made in steps.items() if all(word in step for word in options.only or ())}
    if steps and not wanted:
        raise Failure(
            f"no kernel has {' and '.join(map(repr, options.only))} in its name; there are: {', '.join(steps)}"
        )
    steps = wanted
    if options.list:
        print("\n".join(steps))
        return 0
    in_place = sys.stderr.isatty()
    for done, (step, compile_it) in enumerate(steps.items(), start=1):
        line = f"{done} of {len(steps)}, {step}"
        print(f"\r{line:<79}" if in_place else line, end="" if in_place else "\n", file=sys.stderr, flush=True)
        compile_it()
    if in_place:
        print(f"\r{'':<79}\r", end="", file=sys.stderr, flush=True)
    print(f"{len(steps)} kernels are ready" if steps else "no usable backend has anything to compile")
    return 0
