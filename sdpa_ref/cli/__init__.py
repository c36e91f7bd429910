"""The command line ``sdpa-ref``: a module for each command, imported when a command line is read.

A command's module has `HELP` (one line), `EXAMPLES`, `arguments(parser)`, and ``run(options)``, which returns the exit
code. What it needs beyond NumPy it imports in `run`.
"""

import argparse
import errno
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec

from sdpa_ref.cli.errors import Failure, UsageError

_CODES = """exit codes:
  0 done, 1 failed or could not write, 2 called wrongly, 130 interrupted, 141 the output was closed, as by head"""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
COMMANDS = {name: f"sdpa_ref.cli.{name}" for name in ("check", "info", "mask", "view", "warmup")}
IN_CHECKOUTS = {
    "bench": "sdpa_ref.bench.command",
    "demo": "sdpa_ref.cli.demo",
    "museum": "sdpa_ref.testing.museum_command",
}
"""Commands that are no part of the wheel: docs/decisions/0012."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of a command line: 0, 1 where the command failed, 2 where it was called wrongly.

    It is 1 as well where standard output cannot be written, as on a full disk; 141 where its reader has gone, as
    `head` does; 130 after Ctrl-C. A closed standard output discards what is written.

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
    _open_streams()
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough: `sdpa-ref ... | head`
        _discard_output()
        return 128 + 13  # what a shell says of a program that SIGPIPE has ended
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        _discard_output()
        with suppress(OSError):
            print(f"sdpa-ref: error: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _run(argv: Sequence[str] | None) -> int:
    there = COMMANDS | {name: module for name, module in IN_CHECKOUTS.items() if _is_here(module)}
    first = next(iter(sys.argv[1:] if argv is None else argv), "")
    if first in IN_CHECKOUTS and first not in there:
        print(f"sdpa-ref {first}: error: it is no part of the wheel: run this in a checkout, after pip install -e .",
              file=sys.stderr)  # fmt: skip
        return 1
    if first and not first.startswith("-") and first not in there:
        near = get_close_matches(first, there, 1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(sorted(there))}"
        print(f"sdpa-ref: error: unknown command {first!r}; {hint}", file=sys.stderr)
        return 2
    parser = _parser(there)
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed its help or its error
        return int(stop.code or 0)
    if "run" not in options:
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = options.run(options)
    except (UsageError, Failure) as error:
        print(f"sdpa-ref {options.command}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return code


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _open_streams() -> None:
    """Replace closed streams by the null device, and let open ones write any character."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # for the whole process
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Let what is left in the buffer go nowhere, or else the exit would write it and fail again."""
    with suppress(OSError, ValueError):  # a stream without a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(there: Mapping[str, str]) -> argparse.ArgumentParser:
    from sdpa_ref import __version__

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="sdpa-ref",
        description="Scaled dot-product attention without a framework.",
        epilog="examples:\n  sdpa-ref demo\n  sdpa-ref COMMAND --help\n\n" + _CODES,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"sdpa-ref {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name in sorted(there):
        command = import_module(there[name])
        own = commands.add_parser(
            name, help=command.HELP, description=command.HELP, epilog=command.EXAMPLES, formatter_class=raw
        )
        command.arguments(own)
        own.set_defaults(run=command.run)
    return parser
