"""Instructions of PTX in the interpreter, against values by hand and the formulas of the PTX ISA."""

import numpy as np
import pytest

pytest.importorskip("ml_dtypes", reason="the interpreter of PTX rounds to bfloat16 with ml_dtypes")
pytest.importorskip("platformdirs", reason="the cache of compiled kernels lies where platformdirs says")

import ml_dtypes
from sdpa_cupy.launch.ptx import Fault, Global, UnknownInstruction, kernels, run
from sdpa_cupy.plan import Launch

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 memory[];\n"
REGISTERS = """
.reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<64>; .reg .f32 %f<32>; .reg .b64 %d<16>; .reg .f64 %e<8>;
ld.param.u64 %d15, [in]; ld.param.u64 %d14, [out];
mov.u32 %r63, %tid.x; mov.u32 %r62, %ctaid.x; mov.u32 %r61, %ntid.x; mad.lo.s32 %r60, %r62, %r61, %r63;
"""
F32, F64, BF16 = np.float32, np.float64, ml_dtypes.bfloat16
NAN, INF = np.nan, np.inf


def execute(body, given, result, *, threads=32, blocks=1, shared=1024):
    """Run a kernel whose lanes find their numbers at [%d15] and their place in the result at [%d14]."""
    text = f"{HEAD}.visible .entry kernel(.param .u64 in, .param .u64 out)\n{{{REGISTERS}{body}\nret;\n}}\n"
    memory = Global()
    memory.add(given)
    memory.add(result)
    parameters = np.array([given.ctypes.data, result.ctypes.data], np.uint64).tobytes()
    run(kernels(text)["kernel"], Launch("kernel", "", (), (blocks, 1, 1), threads, shared), memory, parameters)
    return result


def computed(instruction, *columns, of, to=None):
    """Return what an instruction makes of %a, %b, %c in each lane; columns are padded to a warp."""
    letters = "abc"[: len(columns)]
    size, width = np.dtype(of).itemsize, np.dtype(to or of).itemsize
    bank = {2: "h", 4: "r", 8: "d"}
    given = np.zeros((32, len(columns)), of)
    given[: len(columns[0])] = np.stack([np.array(column, of) for column in columns], 1)
    body = f"mul.wide.u32 %d0, %r60, {given.strides[0]}; add.s64 %d0, %d0, %d15;\n"
    for n in range(len(columns)):
        body += f"ld.global.b{8 * size} %{bank[size]}{n + 1}, [%d0+{n * size}];\n"
    for n, letter in enumerate(letters):
        instruction = instruction.replace(f"%{letter}", f"%{bank[size]}{n + 1}")
    body += instruction.replace("%to", f"%{bank[width]}7")
    body += f"\nmul.wide.u32 %d0, %r60, {width}; add.s64 %d0, %d0, %d14; st.global.b{8 * width} [%d0], %{bank[width]}7;"
    return execute(body, given, np.zeros(32, to or of))[: len(columns[0])]


@pytest.mark.parametrize(
    ("instruction", "columns", "of", "to", "expected"),
    [
        ("add.s32 %to, %a, %b;", ([2**31 - 1, -5], [1, 3]), "i4", None, [-(2**31), -2]),
        ("sub.u32 %to, %a, %b;", ([0, 7], [1, 3]), "u4", None, [2**32 - 1, 4]),
        ("mul.lo.s32 %to, %a, -3;", ([2**30, 5],), "i4", None, [2**30, -15]),
        ("mul.hi.u32 %to, %a, %b;", ([2**31, 2**32 - 1], [6, 2**32 - 1]), "u4", None, [3, 2**32 - 2]),
        ("mul.hi.s64 %to, %a, %b;", ([-(2**62), -1, 2**40], [8, 5, 2**30]), "i8", None, [-2, -1, 2**6]),
        ("mul.hi.u64 %to, %a, %b;", ([2**63, 2**64 - 1], [6, 2**64 - 1]), "u8", None, [3, 2**64 - 2]),
        ("mul.wide.s32 %to, %a, %b;", ([-(2**31), 7], [4, -9]), "i4", "i8", [-(2**33), -63]),
        ("mul.wide.u32 %to, %a, %b;", ([2**32 - 1], [2]), "u4", "u8", [2**33 - 2]),
        ("mad.lo.s64 %to, %a, %b, %c;", ([2**40, 3], [2**20, -4], [5, 1]), "i8", None, [2**60 + 5, -11]),
        ("div.s32 %to, %a, %b;", ([-7, 7, 9], [2, -2, 3]), "i4", None, [-3, -3, 3]),
        ("rem.s32 %to, %a, %b;", ([-7, 7, 9], [2, -2, 3]), "i4", None, [-1, 1, 0]),
        ("div.u64 %to, %a, %b;", ([2**63 + 1], [2]), "u8", None, [2**62]),
        ("min.s32 %to, %a, %b;", ([-1, 4], [2, 3]), "i4", None, [-1, 3]),
        ("min.u32 %to, %a, %b;", ([2**32 - 1, 4], [2, 3]), "u4", None, [2, 3]),
        ("shl.b32 %to, %a, %b;", ([1, 1, 3], [31, 32, 1]), "u4", None, [2**31, 0, 6]),
        ("shr.s32 %to, %a, %b;", ([-8, -8, 8], [1, 40, 2]), "i4", None, [-4, -1, 2]),
        ("shr.u64 %to, %a, 33;", ([2**63],), "u8", None, [2**30]),
        ("shf.l.wrap.b32 %to, %a, %b, %c;", ([0x80000001], [0x12345678], [4]), "u4", None, [0x23456788]),
        ("shf.r.wrap.b32 %to, %a, %b, %c;", ([0x80000001], [0x12345678], [36]), "u4", None, [0x88000000]),
        ("bfe.u32 %to, %a, 4, 8;", ([0x12345678],), "u4", None, [0x67]),
        ("bfe.s32 %to, %a, 4, 4;", ([0x000000F0, 0x70],), "i4", None, [-1, 7]),
        ("bfi.b32 %to, %a, %b, 8, 4;", ([0xFF], [0x11111111]), "u4", None, [0x11111F11]),
        ("prmt.b32 %to, %a, %b, %c;", ([0x33221100], [0x77665544], [0x7410]), "u4", None, [0x77441100]),
        ("prmt.b32 %to, %a, 0, 0xBBBB;", ([0x80000000, 0x7F000000],), "u4", None, [0xFFFFFFFF, 0]),
        ("lop3.b32 %to, %a, %b, %c, 0xE8;", ([0b1100], [0b1010], [0b0110]), "u4", None, [0b1110]),
        ("not.b32 %to, %a;", ([0, 5],), "u4", None, [2**32 - 1, 2**32 - 6]),
        ("popc.b32 %to, %a;", ([0xF0F1, 0],), "u4", None, [9, 0]),
        ("clz.b32 %to, %a;", ([1, 0, 2**31],), "u4", None, [31, 32, 0]),
        ("brev.b32 %to, %a;", ([1, 6],), "u4", None, [2**31, 0x60000000]),
        ("abs.s32 %to, %a;", ([-4, 4],), "i4", None, [4, 4]),
        ("neg.s64 %to, %a;", ([-(2**40)],), "i8", None, [2**40]),
        ("mov.b32 %to, -2;", ([0],), "i4", None, [-2]),
        ("mov.b32 {%h1, %h2}, %a; mov.b32 %to, {%h2, %h1};", ([0x12345678],), "u4", None, [0x56781234]),
        ("mov.b64 {%r1, %r2}, %a; mov.b64 %to, {%r2, %r1};", ([2**32 + 7],), "u8", None, [7 * 2**32 + 1]),
        ("{ .reg .b32 %r9; mov.b32 %r9, %a; { .reg .b64 %r9; mov.b64 %r9, 3; } add.u32 %to, %r9, 1; }",
         ([5],), "u4", None, [6]),
        ("setp.lt.s32 %p1, %a, %b; selp.b32 %to, 1, 2, %p1;", ([-1, 1], [0, 0]), "i4", None, [1, 2]),
        ("setp.hi.u32 %p1|%p2, %a, %b; selp.b32 %to, 1, 2, %p2;", ([3, 0], [0, 5]), "u4", None, [2, 1]),
        ("setp.eq.s32 %p1, %a, 1; setp.ne.and.s32 %p2, %b, 1, %p1; selp.b32 %to, 1, 0, %p2;",
         ([1, 1, 0], [1, 0, 0]), "i4", None, [0, 1, 0]),
        ("setp.eq.s32 %p1, %a, 1; not.pred %p1, %p1; @%p1 mov.b32 %to, 9; @!%p1 mov.b32 %to, 8;",
         ([1, 0], ), "i4", None, [8, 9]),
    ],
)  # fmt: skip
def test_integers(instruction, columns, of, to, expected):
    assert computed(instruction, *columns, of=of, to=to).tolist() == expected


@pytest.mark.parametrize(
    ("instruction", "columns", "expected"),
    [
        ("fma.rn.f32 %to, %a, %b, %c;", ([1 + 2**-23], [1 - 2**-23], [-1]), [-(2.0**-46)]),
        ("max.f32 %to, %a, %b;", ([NAN, 2, -INF], [1, NAN, -3]), [1, 2, -3]),
        ("max.NaN.f32 %to, %a, %b;", ([NAN, 2, 3], [1, NAN, 4]), [NAN, NAN, 4]),
        ("min.f32 %to, %a, %b;", ([NAN, 2], [1, -INF]), [1, -INF]),
        ("add.ftz.f32 %to, %a, %b;", ([2**-126, 1], [-(2**-127), 2**-130]), [2**-126, 1]),
        ("mul.ftz.f32 %to, %a, %b;", ([2**-100, -(2**-100)], [2**-40, 2**-40]), [0, -0.0]),
        ("div.rn.f32 %to, %a, %b;", ([1, -1, 0], [0, 0, 0]), [INF, -INF, NAN]),
        ("rcp.rn.f32 %to, %a;", ([4, -0.0, INF],), [0.25, -INF, 0]),
        ("sqrt.rn.f32 %to, %a;", ([9, -1],), [3, NAN]),
        ("rsqrt.approx.f32 %to, %a;", ([16, 0],), [0.25, INF]),
        ("ex2.approx.ftz.f32 %to, %a;", ([3, -INF, -126, -127, 200],), [8, 0, 2**-126, 0, INF]),
        ("lg2.approx.f32 %to, %a;", ([8, 0, -1],), [3, -INF, NAN]),
        ("neg.f32 %to, %a;", ([0, INF],), [-0.0, -INF]),
        ("abs.f32 %to, %a;", ([-2, -INF],), [2, INF]),
        ("copysign.f32 %to, %a, %b;", ([-1, 1], [3, -4]), [-3, 4]),
        ("mov.f32 %to, 0f3FC00000;", ([0],), [1.5]),
        ("cvt.rni.f32.f32 %to, %a;", ([2.5, 3.5, -0.2],), [2, 4, -0.0]),
        ("cvt.sat.f32.f32 %to, %a;", ([-1, 0.5, 7, NAN],), [0, 0.5, 1, 0]),
        ("setp.gtu.f32 %p1, %a, %b; selp.f32 %to, 1.0, 0.0, %p1;", ([2, 1, NAN], [1, 2, 1]), [1, 0, 1]),
        ("setp.ne.f32 %p1, %a, %b; selp.f32 %to, 1.0, 0.0, %p1;", ([2, 1, NAN], [1, 1, 1]), [1, 0, 0]),
        ("setp.neu.f32 %p1, %a, %b; selp.f32 %to, 1.0, 0.0, %p1;", ([2, 1, NAN], [1, 1, 1]), [1, 0, 1]),
        ("setp.nan.f32 %p1, %a, %a; selp.f32 %to, 1.0, 0.0, %p1;", ([NAN, INF],), [1, 0]),
    ],
)
def test_float32(instruction, columns, expected):
    got = computed(instruction, *columns, of=F32)
    np.testing.assert_array_equal(got, np.array(expected, F32))
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(np.array(expected, F32)[got == 0]))


def test_float64():
    tiny = 2.0**-52
    fma = computed("fma.rn.f64 %to, %a, %b, %c;", [1 + tiny, 1e300, 3], [1 - tiny, 1e300, 5], [-1, 0, INF], of=F64)
    assert fma.tolist() == [-(tiny**2), INF, INF]
    assert computed("div.rn.f64 %to, %a, %b;", [1.0], [3.0], of=F64)[0] == 1 / 3
    assert computed("mul.f64 %to, %a, 0d4008000000000000;", [0.1], of=F64)[0] == 0.1 * 3


@pytest.mark.parametrize(
    ("instruction", "given", "of", "to", "expected"),
    [
        ("cvt.rn.f16.f32 %to, %a;", [1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, 2**-25], F32, "f2",
         [1, 1 + 2**-9, 65504, INF, 0]),
        ("cvt.rn.bf16.f32 %to, %a;", [1 + 2**-8, 1 + 3 * 2**-8, -INF, NAN], F32, BF16, [1, 1 + 2**-6, -INF, NAN]),
        ("cvt.f32.f16 %to, %a;", [2**-24, -65504, INF], "f2", F32, [2**-24, -65504, INF]),
        ("cvt.f32.bf16 %to, %a;", [2**-130, -3], BF16, F32, [2**-130, -3]),
        ("cvt.rn.f32.f64 %to, %a;", [1 + 2**-24, 1e300], F64, F32, [1, INF]),
        ("cvt.f64.f32 %to, %a;", [0.5, NAN], F32, F64, [0.5, NAN]),
        ("cvt.rzi.s32.f32 %to, %a;", [-1.9, 2.9, 3e9, -3e9, NAN], F32, "i4", [-1, 2, 2**31 - 1, -(2**31), 0]),
        ("cvt.rni.s64.f64 %to, %a;", [2.5, 1e30, -1e30], F64, "i8", [2, 2**63 - 1, -(2**63)]),
        ("cvt.rmi.s32.f32 %to, %a;", [-1.1, 2.9], F32, "i4", [-2, 2]),
        ("cvt.rpi.u32.f32 %to, %a;", [-1.1, 2.1], F32, "u4", [0, 3]),
        ("cvt.rn.f32.s64 %to, %a;", [-(2**40), 2**24 + 1], "i8", F32, [-(2**40), 2**24]),
        ("cvt.rn.f64.u64 %to, %a;", [2**64 - 1], "u8", F64, [2.0**64]),
        ("cvt.s64.s32 %to, %a;", [-5], "i4", "i8", [-5]),
        ("cvt.u64.u32 %to, %a;", [2**32 - 5], "u4", "u8", [2**32 - 5]),
        ("cvt.u32.u64 %to, %a;", [2**33 + 5], "u8", "u4", [5]),
        ("cvt.s32.s8 %to, %a;", [0x180, 0x7F], "u4", "i4", [-128, 127]),
        ("cvt.sat.s8.s32 %r1, %a; cvt.s32.s8 %to, %r1;", [300, -300, 5], "i4", "i4", [127, -128, 5]),
        ("cvt.rna.tf32.f32 %to, %a;", [1 + 2**-11, 1 + 2**-12, -1 - 2**-11], F32, F32, [1 + 2**-10, 1, -1 - 2**-10]),
    ],
)  # fmt: skip
def test_conversions(instruction, given, of, to, expected):
    got = computed(instruction, given, of=of, to=to)
    np.testing.assert_array_equal(got.astype(F64 if got.dtype == BF16 else to), expected)


@pytest.mark.parametrize(("packed", "of"), [("f16x2", np.float16), ("bf16x2", BF16)])
def test_packed_numbers_have_the_first_in_the_upper_half(packed, of):
    words = computed(f"cvt.rn.{packed}.f32 %to, %a, %b;", [1.5, -2], [0.25, 3], of=F32, to=np.uint32)
    assert words.view(of).astype(float).tolist() == [0.25, 1.5, 3, -2]


@pytest.mark.parametrize(
    ("instruction", "source"),
    [
        ("shfl.sync.bfly.b32 %to, %a, 3, 31, -1;", lambda lane: lane ^ 3),
        ("shfl.sync.up.b32 %to, %a, 2, 0, -1;", lambda lane: lane - 2 if lane >= 2 else lane),
        ("shfl.sync.down.b32 %to, %a, 5, 31, -1;", lambda lane: lane + 5 if lane < 27 else lane),
        ("shfl.sync.idx.b32 %to, %a, 7, 31, -1;", lambda lane: 7),
        ("shfl.sync.idx.b32 %to, %a, 1, 0x181F, 0xffffffff;", lambda lane: lane // 8 * 8 + 1),
        ("shfl.sync.down.b32 %to, %a, 1, 0x1C1F, -1;", lambda lane: lane + 1 if lane % 4 < 3 else lane),
        ("shfl.sync.down.b32 %r1|%p1, %a, 30, 31, -1; selp.b32 %to, %r1, 99, %p1;",
         lambda lane: lane + 30 if lane < 2 else 99),
    ],
)  # fmt: skip
def test_shuffles(instruction, source):
    assert computed(instruction, np.arange(32), of="i4").tolist() == [source(lane) for lane in range(32)]


def test_votes():
    odd = "setp.gt.u32 %p1, %a, 29; vote.sync."
    assert set(computed(odd + "ballot.b32 %to, %p1, -1;", np.arange(32), of="u4")) == {0b11 << 30}
    for vote, answer in (("any", 1), ("all", 0), ("uni", 0)):
        text = odd + f"{vote}.pred %p2, %p1, -1; selp.b32 %to, 1, 0, %p2;"
        assert set(computed(text, np.arange(32), of="u4")) == {answer}


def test_lanes_that_part_meet_again():
    """Lane n runs a loop n times, with a branch in it, and all shuffle afterwards."""
    text = """mov.u32 %r9, 0; mov.u32 %r8, 0;
    $LOOP: setp.ge.u32 %p1, %r9, %a; @%p1 bra $AFTER;
    and.b32 %r10, %r9, 1; setp.eq.u32 %p2, %r10, 0; @%p2 bra $EVEN; add.u32 %r8, %r8, 100; bra.uni $NEXT;
    $EVEN: add.u32 %r8, %r8, 1;
    $NEXT: add.u32 %r9, %r9, 1; bra $LOOP;
    $AFTER: shfl.sync.bfly.b32 %to, %r8, 1, 31, -1;"""
    expected = [100 * (n // 2) + (n + 1) // 2 for n in range(32)]
    assert computed(text, np.arange(32), of="u4").tolist() == [expected[n ^ 1] for n in range(32)]


def test_a_branch_by_number():
    text = """$T: .branchtargets $A, $B, $C;
    brx.idx %a, $T;
    $A: mov.u32 %to, 10; bra $END;
    $B: mov.u32 %to, 20; bra $END;
    $C: mov.u32 %to, 30;
    $END: add.u32 %to, %to, 1;"""
    assert computed(text, [2, 0, 1], of="u4").tolist() == [31, 11, 21]


def test_blocks_know_where_they_are():
    result = np.zeros((3, 2, 40, 64), np.int32)
    text = (
        HEAD
        + """.visible .entry kernel(.param .u64 out) { .reg .b32 %r<9>; .reg .b64 %d<3>;
    mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ctaid.y; mov.u32 %r2, %ctaid.z; mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x; mov.u32 %r5, %nctaid.y;
    mad.lo.s32 %r6, %r2, %r5, %r1; mad.lo.s32 %r6, %r6, %r4, %r0; shl.b32 %r6, %r6, 6; add.s32 %r6, %r6, %r3;
    ld.param.u64 %d0, [out]; mul.wide.s32 %d1, %r6, 4; add.s64 %d0, %d0, %d1; st.global.u32 [%d0], %r6; ret; }"""
    )
    memory = Global()
    memory.add(result)
    launch = Launch("kernel", "", (), (40, 2, 3), 64, 0)
    run(kernels(text)["kernel"], launch, memory, np.uint64(result.ctypes.data).tobytes())
    assert np.array_equal(result.ravel(), np.arange(result.size))


# The (row, column) of element i of a lane's fragment, group = lane // 4 and member = lane % 4: the PTX ISA's formulas.


def a_of_16_bits(i, group, member):
    return (group if i in (0, 1, 4, 5) else group + 8), member * 2 + (i & 1) + (8 if i >= 4 else 0)


def b_of_16_bits(i, group, member):
    return member * 2 + (i & 1) + (8 if i >= 2 else 0), group


def a_of_32_bits(i, group, member):
    return (group if i in (0, 2) else group + 8), (member if i in (0, 1) else member + 4)


def b_of_32_bits(i, group, member):
    return member + 4 * i, group


@pytest.mark.parametrize(
    ("shape", "kind", "a_place", "a_count", "b_place", "b_count"),
    [
        ("m16n8k16", "f16", a_of_16_bits, 8, b_of_16_bits, 4),
        ("m16n8k16", "bf16", a_of_16_bits, 8, b_of_16_bits, 4),
        ("m16n8k8", "f16", a_of_16_bits, 4, b_of_16_bits, 2),
        ("m16n8k8", "bf16", a_of_16_bits, 4, b_of_16_bits, 2),
        ("m16n8k8", "tf32", a_of_32_bits, 4, b_of_32_bits, 2),
    ],
)
def test_every_element_of_a_fragment_of_mma(shape, kind, a_place, a_count, b_place, b_count):
    """A warp for each entry of a: where that alone is 1, the product has one row, which is a row of b."""
    k = int(shape.split("k")[1])
    dtype = {"f16": np.dtype("f2"), "bf16": np.dtype(BF16), "tf32": np.dtype("f4")}[kind]
    b = np.arange(1, 8 * k + 1).reshape(k, 8)  # exact in bfloat16 up to 256
    c = 1000 * np.arange(16 * 8).reshape(16, 8)
    given = np.zeros((16 * k, 32, a_count + b_count), dtype)
    sums = np.zeros((32, 4), F32)
    for lane in range(32):
        group, member = lane // 4, lane % 4
        for i in range(a_count):
            row, column = a_place(i, group, member)
            given[row * k + column, lane, i] = 1
        given[:, lane, a_count:] = [b[b_place(i, group, member)] for i in range(b_count)]
        sums[lane] = [c[group + 8 * (i >= 2), member * 2 + (i & 1)] for i in range(4)]
    bytes_of_lane = (a_count + b_count) * dtype.itemsize
    words = bytes_of_lane // 4
    data = np.concatenate([given.view(np.uint32), np.broadcast_to(sums, (16 * k, 32, 4)).view(np.uint32)], -1)
    stride = 4 * (words + 4)
    a_words = a_count * dtype.itemsize // 4
    body = f"mul.wide.u32 %d0, %r60, {stride}; add.s64 %d0, %d0, %d15;\n"
    body += "".join(f"ld.global.u32 %r{n}, [%d0+{4 * n}];\n" for n in range(words))
    body += "".join(f"ld.global.f32 %f{n}, [%d0+{4 * (words + n)}];\n" for n in range(4))
    a_names = ", ".join(f"%r{n}" for n in range(a_words))
    b_names = ", ".join(f"%r{n}" for n in range(a_words, words))
    body += (
        f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {{%f4, %f5, %f6, %f7}}, {{{a_names}}}, {{{b_names}}}, "
    )
    body += "{%f0, %f1, %f2, %f3};\n"
    body += "mul.wide.u32 %d0, %r60, 16; add.s64 %d0, %d0, %d14; st.global.v4.f32 [%d0], {%f4, %f5, %f6, %f7};"
    got = execute(body, np.ascontiguousarray(data), np.zeros((16 * k, 32, 4), F32), threads=64, blocks=8 * k)
    for entry in range(16 * k):
        product = np.zeros((16, 8))
        product[entry // k] = b[entry % k]
        for lane in range(32):
            group, member = lane // 4, lane % 4
            expected = [(product + c)[group + 8 * (i >= 2), member * 2 + (i & 1)] for i in range(4)]
            assert got[entry, lane].tolist() == expected


def test_tf32_ignores_what_it_does_not_hold():
    body = """mov.b32 %r1, 0x3F801FFF; mov.b32 %r2, 0x3F800000; mov.f32 %f0, 0f00000000;
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1, %f2, %f3, %f4}, {%r1, %r1, %r1, %r1}, {%r2, %r2},
    {%f0, %f0, %f0, %f0};
    mul.wide.u32 %d0, %r60, 4; add.s64 %d0, %d0, %d14; st.global.f32 [%d0], %f1;"""
    assert set(execute(body, np.zeros(1, F32), np.zeros(32, F32))) == {8.0}


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_element_of_ldmatrix(count, trans):
    """Matrix m is rows 8 m to 8 m + 7 of 8 numbers, 24 bytes of padding apart, named in reverse order of memory."""
    given = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8)
    names = ", ".join(f"%r{n}" for n in range(count))
    body = f"""mul.wide.u32 %d0, %r63, 16; add.s64 %d0, %d0, %d15; ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%d0];
    sub.u32 %r24, 31, %r63; mul.lo.u32 %r24, %r24, 32; mov.u32 %r25, memory; add.u32 %r24, %r24, %r25;
    st.shared.v4.u32 [%r24], {{%r20, %r21, %r22, %r23}}; bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%r24];
    mul.wide.u32 %d0, %r60, {4 * count}; add.s64 %d0, %d0, %d14;\n"""
    body += "".join(f"st.global.u32 [%d0+{4 * n}], %r{n};\n" for n in range(count))
    got = execute(body, given, np.zeros((32, count), np.uint32)).view(np.uint16).reshape(32, count, 2)
    for lane in range(32):
        for matrix in range(count):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                if trans:
                    row, column = column, row
                assert got[lane, matrix, half] == given[8 * matrix + row, column]


def test_unknown_instructions_are_named():
    for text in ("add.rz.f32 %f1, %f2, %f3;", "wgmma.fence.sync.aligned;", "cvt.rp.f32.f64 %f1, %e1;"):
        with pytest.raises(UnknownInstruction, match=text.split()[0].rstrip(";")):
            execute(text, np.zeros(1), np.zeros(1))


def test_what_a_kernel_takes_is_checked():
    text = HEAD + ".visible .entry kernel(.param .align 8 .b8 p[16]) { ret; }"
    with pytest.raises(ValueError, match="takes 16 bytes of parameters, got 8"):
        run(kernels(text)["kernel"], Launch("kernel", "", (), (1, 1, 1), 32, 0), Global(), b"12345678")


def test_a_trap_is_a_fault():
    with pytest.raises(Fault, match=r"thread 5: the kernel gives up in: @%p1 trap"):
        execute("setp.eq.u32 %p1, %r63, 5; @%p1 trap;", np.zeros(1), np.zeros(1))
