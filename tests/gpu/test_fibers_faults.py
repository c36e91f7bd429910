"""Faults planted in copies of the kernels' source: the fibers see each, by results, schedules, accesses or banks."""

import mmap
import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from compiler import needs_compiler
from hypothesis import settings
from sdpa_cupy import launch
from sdpa_cupy.launch.fibers import SCHEDULES, Fault, Fibers

from sdpa_ref.testing import assert_close, assert_same_bits, problem_of
from sdpa_ref.testing.cases import case

pytestmark = needs_compiler

EVERY = 1 if settings.default.max_examples >= 1000 else 2  # all in the nightly profile
WRONG = "is wrong"
RACE = "race: |under way|nobody wrote"


class Planted(NamedTuple):
    """A fault: `old` text of a file becomes `new`, which shows `by` this message in a case of these words."""

    file: str
    old: str
    new: str
    by: str
    words: dict[str, Any] = {}  # noqa: RUF012

    @property
    def want(self):
        """What the kernels of the file compute."""
        return frozenset({"weights"} if self.file == "weigh.cu" else {"output", "lse"})


MANY = {"L": 40, "S": 140}
CAUSAL = MANY | {"mask": ("causal",), "offset": "end"}
HIDDEN = MANY | {"mask": ("causal",), "offset": "start", "poison": True}
DECODE = {"L": 2, "S": 1100, "heads": (4, 2)}
PLAIN = {"dtype": "float64", "L": 20, "S": 70}
FAULTS = {
    "fragments of other keys": Planted("products.h", "lane % 8 + lane / 16 * 8", "lane % 16", WRONG),
    "swapped registers of a fragment": Planted("products.h", "(s[rt][n], a[rt], b[0], b[1]",
                                               "(s[rt][n], a[rt], b[0], b[2]", WRONG),
    "values not transposed": Planted("products.h", "ldmatrix_x4_trans(b, values", "ldmatrix_x4(b, values", WRONG),
    "another order of keys in P than in V": Planted("products.h", "lane % 4 * 2 * PITCH", "lane % 4 * PITCH", WRONG,
                                                    {"dtype": "float32"}),
    "TF32 without its small part": Planted("products.h", "rest & finite", "rest & 0", WRONG, {"dtype": "float32"}),
    "sums that stay in the matrix unit": Planted("products.h", "ELEMENT != 2 || !apart", "true", WRONG,
                                                {"dtype": "float32", "L": 70, "S": 2500}),
    "no barrier before the keys": Planted("attend.cu", "barrier();  // the keys are there", "//", RACE),
    "no barrier before the values": Planted("attend.cu", "barrier();  // the values are there", "//", RACE, MANY),
    "no barrier before the output": Planted("attend.cu", "barrier();  // no thread reads a tile", "//", RACE,
                                           MANY | {"Ev": 64}),
    "no barrier before the table": Planted("rows.h", "table.spans[warp] = span;\n    barrier();",
                                           "table.spans[warp] = span;", RACE),
    "a barrier for some": Planted("attend.cu", "if (barrier_any(harmful))",
                                  "if (thread_x() != 5 && barrier_any(harmful))", "deadlock", HIDDEN),
    "copies not waited for": Planted("attend.cu", "wait_copies<0>();\n        barrier();",
                                     "wait_copies<1>();\n        barrier();", RACE, MANY),
    "values loaded too early": Planted("attend.cu", "commit_copies();\n    while (j < end) {",
                                       "commit_copies();\n    while (j < end) {\n        load_values(j);", RACE, MANY),
    "one key too many": Planted("attend.cu", "j + r < task.last ? row_at(p.key", "j + r <= task.last ? row_at(p.key",
                                "outside every array", {"S": 33}),
    "one key too few": Planted("rows.h", "task.first + p.chunk : p.S)", "task.first + p.chunk : p.S - 1)", WRONG),
    "the key after an interval": Planted("attend.cu", "< (u32)(row.stop", "<= (u32)(row.stop", WRONG, CAUSAL),
    "no rescaling": Planted("attend.cu", "o[rt][n][2 * half] *= shrink;", "", WRONG,
                            {"S": 140, "numbers": "needles"}),
    "lanes of other rows": Planted("attend.cu", "shuffle_xor(top, 2)", "shuffle_xor(top, 4)", WRONG,
                                   {"numbers": "huge"}),
    "a warp apart": Planted("attend.cu", "top = fmaxf(top, shuffle_xor(top, 1));",
                            "if (thread_x() % 32 < 16) top = fmaxf(top, shuffle_xor(top, 1));", "deadlock|comes to"),
    "another word of Philox": Planted("attend.cu", "odd ? words.third : words.first, odd", "words.first, odd", WRONG,
                                      {"dropout": 0.5}),
    "a head of another group": Planted("rows.h", "task.head / (int)p.group", "task.head % (int)p.Hkv", WRONG,
                                       {"heads": (6, 2), "L": 70}),
    "no zeroes beside narrow rows": Planted("tiles.h", "first && skipped < width", "first", f"{WRONG}|outside",
                                            {"E": 8, "Ev": 8}),
    "no padding of rows": Planted("tiles.h", "sizeof(Element) + 16; }", "sizeof(Element); }", "bank conflicts",
                                  {"E": 64, "Ev": 64}),
    "misaligned rows": Planted("tiles.h", "sizeof(Element) + 16; }", "sizeof(Element) + 8; }", "no multiple"),
    "NaN of dropped keys": Planted("attend.cu", "if (!kept_whole(p, block, j)) harmful", "if (false) harmful", WRONG,
                                   HIDDEN),
    "columns beyond the last": Planted("attend.cu", "least(PER_CHUNK, (int)p.Ev - first)", "PER_CHUNK",
                                       f"{WRONG}|outside", {"Ev": 13}),
    "32-bit strides of keys": Planted("stored.h", ": 0) + at.slot * source", ": 0) + (int)at.slot * (int)source",
                                      f"{WRONG}|outside", {"huge": True}),
    "a chunk left out": Planted("merge.cu", "c < (int)p.chunks; c++) sum", "c + 1 < (int)p.chunks; c++) sum", WRONG,
                                DECODE),
    "states of other rows": Planted("states.h", "* p.L + i;", "* p.L;", f"{WRONG}|outside|schedules", DECODE),
    "plain: no barrier before the tile": Planted("plain.cu", "barrier();  // no warp reads the", "//", RACE, PLAIN),
    "plain: weights of another row": Planted("plain.cu", "own_weights[r * KEYS + x]", "own_weights[x]", WRONG, PLAIN),
    "weights: no maximum over lanes": Planted("weigh.cu", "mask < 32; mask *= 2) top", "mask < 16; mask *= 2) top",
                                              WRONG, {"numbers": "huge", "S": 70}),
}  # fmt: skip


def drawn(words):
    """Return a case; where it is `huge`, more than 4 GiB lie between its keys."""
    words = {"L": 20, "S": 40, "E": 16, "Ev": 16, "dtype": "float16", "heads": (2, 1)} | words
    huge = words.pop("huge", False)
    given = case(7, **words)
    if not huge:
        return given
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, given.key.shape[-2] << 33, flags=flags)
    key = np.ndarray(given.key.shape, given.key.dtype, memory, 0, (*given.key.strides[:-2], (1 << 32) + 64, 2))
    key[...] = given.key
    return replace(given, key=key)


def finding(folder, words, want):
    """Return what the fibers find wrong with the kernels of a folder, "" for nothing."""
    given = drawn(words)
    problem = problem_of(*given.arrays, **given.options)
    results, reports = [], []
    for order, late in SCHEDULES:
        fibers = Fibers(80, order, late, folder, reports=reports)
        try:
            results.append(launch.forward(problem, want, 80, fibers))
        except Fault as fault:
            return str(fault)
    try:
        for result in results:
            for name in want:
                arrays = (*given.arrays[:2], None) if name == "weights" else given.arrays
                assert_close(getattr(result, name), *arrays, what=name, **given.options)
    except AssertionError as error:
        return str(error)
    try:
        for result in results[1:]:
            for name in want:
                assert_same_bits(getattr(result, name), getattr(results[0], name))
    except AssertionError as error:
        return f"schedules differ: {error}"
    lines = {line for report in reports for line in report.conflicts if "products.h" in line}
    return f"bank conflicts: {lines}" if lines else ""


@pytest.mark.parametrize("name", list(FAULTS)[::EVERY])
def test_a_planted_fault_is_found(name, copy):
    fault = FAULTS[name]
    file = copy / fault.file
    text = file.read_text()
    assert fault.old in text, f"{fault.file} has no {fault.old!r} any more: plant this fault elsewhere"
    file.write_text(text.replace(fault.old, fault.new))
    assert re.search(fault.by, finding(copy, fault.words, fault.want))


@pytest.mark.parametrize("name", list(FAULTS)[:: 10 if EVERY > 1 else 1])
def test_there_is_none_in_the_source_as_it_is(name, copy):
    assert finding(copy, FAULTS[name].words, FAULTS[name].want) == ""
