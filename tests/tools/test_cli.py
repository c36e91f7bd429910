"""The command line: `mask`, `info`, errors and exit codes; test_demo.py has the demo."""

import io
import json
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from days import crossed

import sdpa_ref
from sdpa_ref.cli import COMMANDS, IN_CHECKOUTS, main


def refused(capsys, *arguments):
    """Return the message of a command that was called wrongly."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def examined(capsys, *arguments):
    assert main(["mask", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_mask_is_drawn_and_counted(capsys):
    assert main(["mask", "Causal() & Window(3, 0) & KeyStarts(2)", "-L", "8"]) == 0
    assert capsys.readouterr().out == (
        "Causal() & Window(3, 0) & KeyStarts(2), L = 8 queries (down), S = 8 keys (across), # may attend\n"
        "    01234567\n"
        "  0 ........\n"
        "  1 ........\n"
        "  2 ..#.....\n"
        "  3 ..##....\n"
        "  4 ..###...\n"
        "  5 ..####..\n"
        "  6 ...####.\n"
        "  7 ....####\n"
        "kept pairs: 18 of 64 (28.1 %)\n"
        "rows that see nothing: 0-1\n"
        "keys never read: 0-1\n"
    )


def test_mask_batch_entries_are_shown_one_by_one(capsys):
    assert main(["mask", "QueryLengths([1, 3]) & KeyLengths([4, 2])", "-L", "3", "-S", "5"]) == 0
    out = capsys.readouterr().out
    first, second = out.split("\nbatch entry ")[1:]
    assert "kept pairs: 4 of 15 (26.7 %)\nrows that see nothing: 1-2\nkeys never read: 4\n" in first
    assert "kept pairs: 6 of 15 (40.0 %)\nrows that see nothing: none\nkeys never read: 2-4\n" in second
    assert out.endswith("kept pairs in all: 10 of 30 (33.3 %)\n")


def test_mask_as_json(capsys):
    report = examined(capsys, "Chunked(2)", "-L", "2", "-S", "5", "--offset", "end", "--batch", "1,2")
    assert (report["mask"], report["L"], report["S"]) == ("Chunked(2)", 2, 5)
    assert (report["kept"], report["pairs"]) == (2 * 3, 2 * 10)
    assert report["entries"][1] == {
        "batch": [0, 1],
        "kept": 3,
        "pairs": 10,
        "rows_that_see_nothing": [],
        "keys_never_read": [0, 1],
        "picture": "    01234\n  0 ..##.\n  1 ....#",
    }


@pytest.mark.parametrize(
    ("offset", "first_row"),
    [("start", "#...."), ("end", "###.."), ("1", "##..."), ("-1", ".....")],
)
def test_mask_offset(capsys, offset, first_row):
    for option in ("--offset", "--query-offset"):
        (entry,) = examined(capsys, "Causal()", "-L", "3", "-S", "5", option, offset)["entries"]
        assert entry["picture"].splitlines()[1] == f"  0 {first_row}"


def test_mask_offset_for_each_batch_entry(capsys):
    entries = examined(capsys, "Causal()", "-L", "2", "-S", "4", "--offset", "0,2")["entries"]
    assert [entry["kept"] for entry in entries] == [1 + 2, 3 + 4]


def test_mask_explains_a_pair(capsys):
    assert main(["mask", "Causal() & ~Window(1, 0)", "-L", "4", "--explain", "3", "2"]) == 0
    assert capsys.readouterr().out.endswith(
        "\n"
        "query 3 may not attend to key 2\n"
        "  drop  Causal() & ~Window(1, 0)\n"
        "    keep  Causal()\n"
        "    drop  ~Window(1, 0)\n"
        "      keep  Window(1, 0)\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "Window(left=3, right=None)",
        "Window(1, 0) | FirstTokens(2) & Causal()",
        "(Window(1, 0) | FirstTokens(2)) & Causal()",
        "~(Prefix(2) | Chunked(3))",
        "Segments([1, 1, -4, -4, 2], [1, -4, -4, 2, 2])",
        "Packed((2, 3))",
        "Tree([-1, 0, 0, 1, 3])",
        "KeyLengths(3) & KeyStarts(1) & QueryLengths(4)",
        "  Causal()\n  & Window(2,\n 0)  # a comment",
    ],
)
def test_mask_means_what_python_means(capsys, text):
    (entry,) = examined(capsys, text, "-L", "5")["entries"]
    masks = {name: getattr(sdpa_ref, name) for name in sdpa_ref.__all__}
    expected = eval(f"({text}\n)", masks)
    assert entry["picture"] == expected.show(5, 5)
    assert entry["kept"] == np.count_nonzero(expected.dense(5, 5))


@pytest.mark.parametrize(
    ("text", "message", "piece"),
    [
        ("Causal() & Windo(3, 0)", "unknown mask 'Windo'; did you mean Window?", "Windo"),
        ("causality()", "did you mean Causal?", "causality"),
        ("Wrong()", "unknown mask 'Wrong'; there are Causal, Chunked, FirstTokens", "Wrong"),
        ("~Causal & Window(3, 0)", "Causal must be called: Causal()", "Causal"),
        ("Window(3, 0) & Window", "Window must be called: Window(left, right)", "Window"),
        ("Causal() & Window(3)", "Window(left, right); to look back only: Window(3, 0)", "Window(3)"),
        ("Causal() & Chunked()", "Chunked(size): missing a required argument: 'size'", "Chunked()"),
        ("Window(3, 0, right=1)", "multiple values for argument 'right'", "Window(3, 0, right=1)"),
        ("Causal() | Window(-1, 0)", "Window left must be at least 0, got -1", "Window(-1, 0)"),
        ("Window(3.5, 0)", "expected an integer, None or a list of integers here", "3.5"),
        ("KeyLengths([2, True])", "expected an integer, None or a list of integers here", "True"),
        ("KeyLengths([[1, 2], [3]])", "KeyLengths must have one shape", "KeyLengths([[1, 2], [3]])"),
        ("Causal(*[1])", "expected an integer, None or a list of integers here", "*[1]"),
        ("Window(**{})", "** is not allowed here", "{}"),
        ("Causal() and Causal()", "combined with & | ~, not with and, or, not", "Causal() and Causal()"),
        ("Causal() & -Causal()", "expected a mask here", "-Causal()"),
        ("MaskFunction(print)", "no code is run from text", "MaskFunction"),
        ("__import__('os').system('id')", "expected a mask here", "__import__('os').system('id')"),
        ("Causal().__class__", "expected a mask here", "Causal().__class__"),
        ("[Causal() for _ in range(9)]", "expected a mask here", "[Causal() for _ in range(9)]"),
        ("Größe(1) & Causl()", "unknown mask 'Größe'", "Größe"),
        ("Causal() & Window(3, 0", "'(' was never closed", "("),
        ("Causal() &", "the mask is not complete", ""),
        (f"KeyLengths({'[' * 40}1{']' * 40})", "more than 16 lists within one another", f"{'[' * 23}1{']' * 23}"),
        ("~" * 150 + "Causal()", "more than 100 operators within one another", None),
    ],
)
def test_mask_error_points_at_the_piece(capsys, text, message, piece):
    said, line, pointer = refused(capsys, "mask", text, "-L", "4").splitlines()
    assert said.startswith("sdpa-ref mask: error: ")
    assert message in said
    if piece is not None:
        assert line == f"    {text}"
        assert line[pointer.index("^") : pointer.rindex("^") + 1] == piece


@pytest.mark.parametrize("text", ["", " \n ", "Causal()\0", "\udcff", "(" * 300, "~" * 50_000 + "Causal()"])
def test_mask_that_cannot_be_read(capsys, text):
    assert refused(capsys, "mask", "-L", "4", "--", text).startswith("sdpa-ref mask: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Causal()"], "arguments are required: -L"),
        (["Causal()", "-L", "-1"], "argument -L: must be an integer of at least 0, got '-1'"),
        (["Causal()", "-L", "3", "--offset", "middle"], "must be start, end or an integer, got 'middle'"),
        (["Causal()", "-L", "3", "--batch", "2,x"], "argument --batch: must be an integer of at least 0, got 'x'"),
        (["Causal()", "-L", "3", "-S", "8"], 'when L = 3 and S = 8 differ: --offset "start" puts it on the first key'),
        (["KeyLengths(9)", "-L", "3"], "error: KeyLengths must be in [0, S] = [0, 3], got 9"),
        (["KeyLengths([1, 2])", "-L", "3", "--batch", "3"], "must broadcast to (3,), got (2,)"),
        (["Causal()", "-L", "3", "--explain", "3", "0"], "i must be in [0, 3), got 3"),
        (["Causal()", "-L", "100000"], "at most 100000000 pairs of queries and keys are examined"),
        (["Causal()", "-L", str(10**15), "-S", "0"], "at most 100000000 pairs"),
        (["Causal()", "-L", "3", "--batch", f"0,{10**30}"], "at most 100000000 pairs"),
    ],
)  # fmt: skip
def test_mask_arguments(capsys, arguments, message):
    assert message in refused(capsys, "mask", *arguments)


def test_mask_without_pairs(capsys):
    assert main(["mask", "Causal()", "-L", "0"]) == 0
    assert "kept pairs: 0 of 0\nrows that see nothing: none\n" in capsys.readouterr().out


def test_mask_shortens_long_lists(capsys):
    ids = [i % 2 for i in range(80)]
    assert main(["mask", f"Segments({ids}, {[1] * 80})", "-L", "80"]) == 0
    assert "rows that see nothing: 0, 2, 4, " in (out := capsys.readouterr().out)
    assert "30, ... (40 in all)\n" in out


def test_info(capsys):
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["sdpa_ref"] == sdpa_ref.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert found["backends"]["reference"] == "usable"
    assert found["backends"]["broken"].startswith("backend 'broken' cannot run here: it needs a machine")
    assert set(found["backends"]) == set(sdpa_ref.names())
    assert found["processor"]["logical processors"] >= 1
    if found["backends"].get("numba") == "usable":
        assert found["numba"]["threads"] == str(sdpa_ref.get_num_threads())
        assert found["numba"]["kernel cache"]
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"  sdpa_ref      {sdpa_ref.__version__}\n" in out
    assert "processor\n  model " in out


def test_info_tells_which_backend_cannot_tell_of_itself(capsys, monkeypatch):
    def details():
        raise ValueError("the setting X must be a number")

    reference = sdpa_ref.load("reference")
    monkeypatch.setattr(reference, "details", details, raising=False)
    monkeypatch.setattr(reference, "TASKS", reference.TASKS | {"details"})
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reference"] == {"error": "ValueError: the setting X must be a number"}


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sdpa-ref {sdpa_ref.__version__}\n"
    for command in (*COMMANDS, *IN_CHECKOUTS):
        assert main([command, "--help"]) == 0
        assert f"examples:\n  sdpa-ref {command}" in capsys.readouterr().out


def test_no_command_is_wrong(capsys):
    assert refused(capsys).startswith("usage: sdpa-ref ")
    assert "unknown command 'mesk'; did you mean mask?" in refused(capsys, "mesk")
    assert "unknown command 'xyz'; the commands are bench, check" in refused(capsys, "xyz")


def test_console_that_lacks_characters(monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stderr", console)
    assert main(["mask", "日本()", "-L", "2"]) == 2
    console.seek(0)
    assert "unknown mask '\\u65e5\\u672c'" in console.read()


def python_m(*arguments):
    command = [sys.executable, "-m", "sdpa_ref", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_python_m():
    with python_m("mask", "Causal() & Nothing()", "-L", "2") as process:
        out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("sdpa-ref mask: error: unknown mask 'Nothing'")


@pytest.mark.skipif(os.name == "nt", reason="Windows reports a closed pipe differently")
def test_reader_that_leaves_early():
    with python_m("mask", "KeyLengths(1)", "-L", "9", "--batch", "9999") as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert (process.wait(timeout=600), err) == (141, "")


LINES = ["-x", "mask 'KeyLengths(1)' -L 9 --batch 999", "info --json", "--version", "mask 'Causal()' -L 3"]
STREAMS = ["2>&-", ">/dev/full", ">&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full"]


@pytest.mark.skipif(os.name == "nt", reason="the shell's way to close a stream")
@pytest.mark.parametrize(("line", "streams"), crossed(LINES, STREAMS))
def test_streams_that_are_closed_or_full(line, streams):
    if "full" in streams and not os.path.exists("/dev/full"):
        pytest.skip("this system has no full device")
    command = f"exec {shlex.quote(sys.executable)} -m sdpa_ref {line} {streams}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=600, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    full = streams == ">/dev/full" and line != "-x"
    allowed = {1} if full else {2} if line == "-x" else {0}
    assert done.returncode in allowed | ({0} if line == "--version" else set())  # argparse itself ignores it
    assert ("No space left" in done.stderr) == (full and done.returncode == 1)


def test_warmup_needs_no_extra_for_its_progress(capsys, monkeypatch):
    """In a pipe it prints one line for each kernel, without rich."""
    compiled = []
    steps = {name: lambda name=name: compiled.append(name) for name in ("one", "two")}
    backend = SimpleNamespace(TASKS={"warmup"}, warmup=lambda: steps)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sdpa_ref, "names", lambda: ("numba",))
    monkeypatch.setattr(sdpa_ref, "load", lambda name: backend)
    assert main(["warmup"]) == 0
    out, err = capsys.readouterr()
    assert out == "2 kernels are ready\n"
    assert err == "1 of 2, numba: one\n2 of 2, numba: two\n"
    assert compiled == ["one", "two"]
    assert main(["warmup", "--only", "tw", "o"]) == 0
    assert compiled == ["one", "two", "two"]
    assert main(["warmup", "--list"]) == 0
    assert capsys.readouterr().out == "1 kernels are ready\nnumba: one\nnumba: two\n"
    assert main(["warmup", "--only", "three"]) != 0
    assert "no kernel has 'three' in its name" in capsys.readouterr().err
