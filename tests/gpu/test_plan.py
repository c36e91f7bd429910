"""What the GPU backend plans, without any launcher: limits of devices, the parameter block, and what it accepts."""

import ctypes
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from compiler import needs_compiler

pytest.importorskip("ml_dtypes", reason="the plans of bfloat16 problems need ml_dtypes")

import ml_dtypes
from sdpa_cupy import launch
from sdpa_cupy.compile import KERNELS
from sdpa_cupy.parameters import GRADIENT_PARAMETERS, NUMBERS, PARAMETERS, VIEWS, bands_of, bound
from sdpa_cupy.plan import fused, make_plan

import sdpa_ref as sr
from sdpa_ref.backend import Result
from sdpa_ref.masks import Band
from sdpa_ref.testing import problem_of

SHARED_MEMORY = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
OUTPUT, ALL = frozenset({"output"}), frozenset({"output", "lse", "weights"})
WIDTHS = (0, 1, 16, 33, 64, 80, 128, 192, 255, 256)


def problem(batch=(2,), heads=(6, 2), L=5, S=7, E=64, Ev=None, dtype="float16", **options):
    """Return a problem whose arrays are views of almost no memory."""
    Hq, Hkv = heads
    shapes = ((*batch, Hq, L, E), (*batch, Hkv, S, E), (*batch, Hkv, S, E if Ev is None else Ev))
    return problem_of(*(np.zeros(shape, TYPES[dtype]) for shape in shapes), **options)


def define(plan, name):
    return dict(plan.launches[0].defines)[name]


def numbers(plan):
    """Return the parameter block of a plan without its arrays."""
    return np.frombuffer(bytes(PARAMETERS.itemsize - NUMBERS.size) + plan.numbers, PARAMETERS)[0]


def address(array):
    return array.ctypes.data


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_width_and_number_of_rows_fits_a_block(arch, dtype):
    for E, Ev, L in ((E, Ev, L) for E in WIDTHS for Ev in WIDTHS for L in (1, 9, 65)):
        for cap in (None, 20.0):
            plan = make_plan(problem(L=L, E=E, Ev=Ev, dtype=dtype, softcap=cap), ALL, arch)
            assert [each.kernel for each in plan.launches][1:] == ["weigh"]
            for each in plan.launches:
                assert each.shared <= SHARED_MEMORY[arch]
                assert each.threads in (32, 64, 128)
                assert all(0 < size < 2**31 for size in each.grid)


@pytest.mark.parametrize("arch", [80, 86, 90, 120])
def test_wide_tiles_leave_room_for_a_second_block_where_the_device_can(arch):
    shared = make_plan(problem(L=1024, S=1024, E=64), OUTPUT, arch).launches[0].shared
    assert 2 * (shared + 1024) <= SHARED_MEMORY[arch] + 1024


@pytest.mark.parametrize(
    ("dtype", "arch", "E", "kernel"),
    [
        ("float16", 75, 64, "attend"),
        ("bfloat16", 75, 64, "attend_plainly"),
        ("float32", 75, 64, "attend_plainly"),
        ("bfloat16", 80, 8, "attend"),
        ("float32", 80, 16, "attend"),
        ("float32", 80, 15, "attend_plainly"),
        ("float64", 90, 64, "attend_plainly"),
    ],
)
def test_matrix_units_serve_the_types_that_the_device_multiplies(dtype, arch, E, kernel):
    assert make_plan(problem(E=E, dtype=dtype), OUTPUT, arch).launches[0].kernel == kernel


def test_blocks_cover_all_rows_heads_and_chunks():
    many = make_plan(problem(batch=(2, 3), heads=(6, 2), L=300, S=400), OUTPUT, 80).launches[0]
    rows = 16 * dict(many.defines)["ROW_TILES"] * dict(many.defines)["WARPS"]
    assert many.grid == (2 * 3 * 6 * math.ceil(300 / rows), 1, 1)
    few = make_plan(problem(batch=(2, 3), heads=(6, 2), L=5, S=2000), OUTPUT, 80)
    assert few.launches[0].grid == (2 * 3 * 2 * int(numbers(few)["chunks"]), 1, 1)  # 15 rows of a group in a tile


def test_long_keys_of_few_rows_are_split_and_merged_by_their_number_alone():
    plans = [
        make_plan(problem(batch=batch, heads=heads, L=L, S=5000), OUTPUT, 90)
        for batch, heads, L in (((), (1, 1), 1), ((7,), (1, 1), 1), ((2,), (8, 1), 1), ((), (8, 8), 64))
    ]
    assert len({int(numbers(plan)["chunk"]) for plan in plans}) == 1
    assert len({define(plan, "KEYS") for plan in plans}) == 1
    chunk, chunks = (int(numbers(plans[0])[name]) for name in ("chunk", "chunks"))
    assert (chunks - 1) * chunk < 5000 <= chunks * chunk
    assert chunks > 1
    for plan, rows in zip(plans, (1, 7, 16, 512), strict=True):
        assert [each.kernel for each in plan.launches] == ["attend", "merge"]
        assert plan.workspace == rows * chunks * (64 + 2) * 4  # maximum, sum and output, in float32
    assert len(make_plan(problem(L=65, S=5000), OUTPUT, 90).launches) == 1
    assert make_plan(problem(L=1, S=512), OUTPUT, 90).workspace == 0


@pytest.mark.parametrize("S", [513, 16_385, 20_000, 2**20 + 1])
def test_chunks_are_whole_tiles_of_keys(S):
    p = numbers(make_plan(problem(L=1, S=S), OUTPUT, 90))
    assert p["chunk"] % 64 == 0
    assert (p["chunks"] - 1) * p["chunk"] < S <= p["chunks"] * p["chunk"]
    assert p["chunks"] <= 64


@pytest.mark.parametrize("sizes", [{"L": 0}, {"batch": (0,)}, {"heads": (0, 0)}])
def test_nothing_to_compute_launches_nothing(sizes):
    assert make_plan(problem(**sizes), ALL, 80).launches == ()


def test_no_keys_and_no_columns_are_launched():
    assert make_plan(problem(S=0), ALL, 80).launches
    assert make_plan(problem(E=0, Ev=0), ALL, 80).launches


def test_weights_alone_need_one_kernel_and_no_values():
    query, key = np.zeros((2, 3, 4)), np.zeros((2, 5, 4))
    plan = make_plan(problem_of(query, key), frozenset({"weights"}), 80)
    assert [each.kernel for each in plan.launches] == ["weigh"]


def test_rows_are_copied_16_bytes_at_a_time_where_they_lie_so():
    whole = np.zeros((2, 7, 80), np.float16)
    assert define(make_plan(problem_of(whole, whole, whole), OUTPUT, 80), "VECTOR") == 1
    turned = whole.swapaxes(0, 1)
    assert define(make_plan(problem_of(turned, turned, turned), OUTPUT, 80), "VECTOR") == 1
    for view in (whole[..., 1:65], whole[..., :63], whole[..., ::-1], whole[..., ::2], whole.swapaxes(1, 2)):
        assert define(make_plan(problem_of(view, view, view), OUTPUT, 80), "VECTOR") == 0
    mixed = make_plan(problem_of(whole, whole, whole[..., :60]), OUTPUT, 80)
    assert define(mixed, "VECTOR") == 0


def test_how_arrays_lie_is_no_part_of_a_remembered_plan():
    wide = np.zeros((2, 7, 128), np.float16)
    first, second = (problem_of(view, view, view) for view in (wide[..., :64], wide[..., 1:65]))
    assert (define(make_plan(first, OUTPUT, 80), "VECTOR"), define(make_plan(second, OUTPUT, 80), "VECTOR")) == (1, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": sr.Causal(), "query_offset": -3},
        {"mask": sr.Window(2, 3) & sr.KeyLengths([3, 7]) | sr.FirstTokens(1), "query_offset": "start"},
        {"mask": np.ones((5, 7), bool)},
        {"bias": np.zeros((5, 7), ml_dtypes.bfloat16)},
        {"bias": sr.ALiBi(np.ones(6)), "query_offset": [1, 2]},
        {"softcap": 20.0, "sink": np.zeros(6), "scale": -1.0},
        {"dropout": sr.Dropout(0.5, seed=2**63)},
    ],
)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("arch", [75, 80])
def test_every_option_is_fused(options, dtype, arch):
    assert fused(problem(dtype=dtype, **options), ALL, arch) is None


@pytest.mark.parametrize(
    ("given", "arch", "reason"),
    [
        ({"mask": sr.MaskFunction(lambda b, h, i, j: i >= j)}, 80, "mask or bias exist as rules only"),
        ({"score_mod": lambda s, b, h, i, j: s}, 80, "score_mod is a Python function"),
        ({"E": 513, "Ev": 8}, 80, "E = 513 and Ev = 8: the fused kernels go up to 512"),
        (
            {"E": 400, "Ev": 8, "dtype": "float64"},
            75,
            "E = 400 and Ev = 8: the fused kernels go up to 256 for stored keys, and for this type on this device",
        ),
        ({}, 70, "fused kernels need compute capability 7.5 or later, this device has 7.0"),
    ],
)
def test_what_is_not_fused_says_why(given, arch, reason):
    assert fused(problem(**given), ALL, arch) == reason


def test_more_blocks_than_32_bits_count_are_not_fused():
    query, key = (np.broadcast_to(np.zeros((1, 1), np.float16), (2**20, 2**6, n, 1)) for n in (64, 3))
    assert "31 bits" in fused(problem_of(query, key, key), OUTPUT, 80)
    assert fused(problem_of(query[: 2**10], key[: 2**10], key[: 2**10]), OUTPUT, 80) is None


def test_the_block_says_where_every_element_lies():
    rng = np.random.default_rng(0)
    query = rng.standard_normal((4, 5, 2, 3)).T  # (3, 2, 5, 4), all strides odd
    key = rng.standard_normal((1, 1, 7, 4))
    value = rng.standard_normal((3, 1, 7, 6))[:, :, ::-1]
    bias = rng.standard_normal((3, 1, 2, 5, 1))[0]
    given = launch.by_rows(problem_of(query, key, value, bias=bias, mask=sr.KeyLengths([1, 2, 7])))
    output, bands = rng.standard_normal((3, 2, 2, 5, 6))[:, 1], bands_of(given.visible, given.batch)
    p = bound(make_plan(given, OUTPUT, 80), address, given, Result(output), 12345, address(bands))[0]
    assert p["workspace"] == 12345
    assert (p["axes"], *p["sizes"][:1]) == (1, 3)

    def element(name, b, h=0, row=0, column=0, kind=ctypes.c_double):
        view = p[name]
        offset = b * view["batch"][0] + h * view["head"] + row * view["row"] + column * view["column"]
        return kind.from_address(int(view["data"]) + int(offset)).value

    for b, i, x in np.ndindex(3, 7, 6):
        assert element("value", b, 0, i, x) == value[b, 0, i, x]
    for b, h, i, x in np.ndindex(3, 2, 5, 4):
        assert element("query", b, h, i, x) == query[b, h, i, x]
        assert element("key", b, 0, i, x) == key[0, 0, i, x]
        assert element("out", b, h, i, x) == output[b, h, i, x]
        assert element("bias", b, h, i, x) == bias[0, h, i, 0]
    assert p["bands"] == bands.ctypes.data
    assert [tuple(band) for band in bands.tolist()] == [Band(stop=length) for length in (1, 2, 7)]
    assert p["banded"] == 0
    assert p["lse"]["data"] == p["weights"]["data"] == p["dense"]["data"] == 0


def member(name):
    """Return what the kernels call a field of the parameter block."""
    side, _, rest = name.partition("_")
    if side == "band":
        return f"band.{rest}"
    if side not in ("key", "value"):
        return name
    if name in VIEWS:
        return f"{side}.{rest or 'numbers'}"
    part, _, number = rest.partition("_")
    return f"{side}_storage.{part}.{number}" if number else f"{side}_storage.{rest}"


@needs_compiler
@pytest.mark.parametrize("block", [PARAMETERS, GRADIENT_PARAMETERS], ids=["forward", "gradients"])
def test_the_block_is_the_struct_of_the_kernels(tmp_path, block):
    fields = [(member(name), block.fields[name][1]) for name in block.names]
    fields += [(f"query.{name}", offset) for name, (_, offset) in block["query"].fields.items()]
    checks = [f'static_assert(offsetof(Parameters, {name}) == {offset}, "{name}");' for name, offset in fields]
    checks.append(f'static_assert(sizeof(Parameters) == {block.itemsize}, "size");')
    file = tmp_path / "layout.cpp"
    file.write_text("\n".join(["#include <stddef.h>", '#include "parameters.h"', *checks]))
    folders = [
        "-DGRADIENTS" if block is GRADIENT_PARAMETERS else "-DFORWARD",
        f"-I{KERNELS}",
        f"-I{Path(launch.__file__).parent}",
    ]
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-fsyntax-only", "-DEMULATED", *folders, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_views_come_first_and_every_field_has_8_bytes():
    assert PARAMETERS.names[: len(VIEWS)] == tuple(VIEWS)
    assert GRADIENT_PARAMETERS.itemsize < 4096  # what a kernel can be given
    leaves = [PARAMETERS[name] for name in PARAMETERS.names[len(VIEWS) :]] + [PARAMETERS["query"]["data"]]
    assert {leaf.base.itemsize for leaf in leaves} == {8}
