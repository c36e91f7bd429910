"""The command line ``sdpa-ref``: a module here for each command, imported when a command line is read.

A command's module has `HELP` (one line), `EXAMPLES`, `arguments(parser)`, and ``run(options)``, which returns the exit
code. What it needs beyond NumPy it imports in `run`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from sdpa_ref.cli.errors import Failure, UsageError

COMMANDS = ("bench", "check", "demo", "info", "mask", "museum", "warmup")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of a command line: 0, 1 where the command failed, 2 where it was called wrongly.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; by default those of the process.

    Examples
    --------
    >>> main(["mask", "Causal()", "-L", "3"])
    Causal(), L = 3 queries (down), S = 3 keys (across), # may attend
        012
      0 #..
      1 ##.
      2 ###
    kept pairs: 6 of 9 (66.7 %)
    rows that see nothing: none
    keys never read: none
    0
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a console that lacks a character still gets the line
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed its help or its error
        return int(stop.code or 0)
    if "run" not in options:
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except (UsageError, Failure) as error:
        print(f"sdpa-ref {options.command}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # the reader has seen enough: `sdpa-ref ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or else the exit flushes into the pipe again
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    from sdpa_ref import __version__

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="sdpa-ref",
        description="Scaled dot-product attention without a framework.",
        epilog="examples:\n  sdpa-ref demo\n  sdpa-ref COMMAND --help",
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"sdpa-ref {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name in COMMANDS:
        command = import_module(f"sdpa_ref.cli.{name}")
        own = commands.add_parser(
            name, help=command.HELP, description=command.HELP, epilog=command.EXAMPLES, formatter_class=raw
        )
        command.arguments(own)
        own.set_defaults(run=command.run)
    return parser
