"""The line on a terminal while a kernel is compiled."""

import io
import os
import sys
import threading

import pytest

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

from sdpa_numba.compile import notice
from sdpa_numba.compile.parts import linked, native


class Terminal(io.StringIO):
    def isatty(self):
        return True


def written_to(stream, monkeypatch, delay=0.0):
    """Let notices go there, in a process that has written none."""
    monkeypatch.setattr(notice, "_said", threading.Event())
    monkeypatch.setattr(notice, "DELAY", delay)
    monkeypatch.setattr(sys, "stderr", stream)  # in the test itself, as pytest puts its own there before each
    return stream


def wait():
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()


def test_a_long_compilation_is_announced_once(monkeypatch):
    terminal = written_to(Terminal(), monkeypatch)
    for _ in range(2):
        with notice.announced():
            wait()
    assert terminal.getvalue() == notice.TEXT


def test_a_short_one_is_not(monkeypatch):
    terminal = written_to(Terminal(), monkeypatch, 3600.0)
    native(linked(lambda call: None))
    wait()
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_nothing_is_written_where_there_is_no_terminal(stream, monkeypatch):
    written_to(stream, monkeypatch)
    with notice.announced():
        wait()
    assert stream is None or stream.getvalue() == ""


def test_a_terminal_that_is_closed_is_none(monkeypatch):
    written_to(Terminal(), monkeypatch).close()
    with notice.announced():
        wait()
