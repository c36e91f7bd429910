"""A line on the terminal of people who would otherwise wait without knowing for what."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

DELAY = 1.0  # seconds
TEXT = "sdpa_ref: compiling for this processor, once; the result is kept on disk (sdpa-ref warmup does it ahead)\n"
_said = threading.Event()


@contextmanager
def announced() -> Iterator[None]:
    """Write `TEXT` to stderr when the block takes longer than `DELAY`: on a terminal, and once in a process."""
    if _said.is_set() or not _is_terminal():
        yield
        return
    timer = threading.Timer(DELAY, _say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_terminal() -> bool:
    with suppress(AttributeError, ValueError):  # there is none, as in a program without a console, or it is closed
        return sys.stderr.isatty()
    return False


def _say() -> None:
    if not _said.is_set():
        _said.set()
        with suppress(AttributeError, ValueError, OSError):
            sys.stderr.write(TEXT)
            sys.stderr.flush()
