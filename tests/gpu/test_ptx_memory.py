"""What the interpreter of PTX reports: accesses outside of memory, races, copies in flight, parted barriers."""

import numpy as np
import pytest

pytest.importorskip("ml_dtypes", reason="the interpreter of PTX rounds to bfloat16 with ml_dtypes")
pytest.importorskip("platformdirs", reason="the cache of compiled kernels lies where platformdirs says")

from sdpa_cupy.launch.ptx import Fault, Global, kernels, run
from sdpa_cupy.plan import Launch

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 memory[];\n"
REGISTERS = """
.reg .pred %p<8>; .reg .b32 %me, %here, %next, %far, %x, %r<8>; .reg .b64 %in, %out, %d<8>;
.local .align 16 .b8 own[64];
ld.param.u64 %in, [in]; ld.param.u64 %out, [out];
mov.u32 %me, %tid.x; shl.b32 %here, %me, 4; xor.b32 %next, %here, 16; xor.b32 %far, %here, 512;
mul.wide.u32 %d0, %me, 16; add.s64 %in, %in, %d0; mul.wide.u32 %d0, %me, 4; add.s64 %out, %out, %d0;
"""
THREADS = 64
GIVEN = np.arange(THREADS * 4, dtype=np.uint32).reshape(THREADS, 4)


def execute(body, given=GIVEN, result=None):
    """Run two warps. A thread has 16 bytes at %in, 4 at %out, 16 shared ones at %here; others have %next and %far."""
    result = np.zeros(THREADS, np.uint32) if result is None else result
    text = f"{HEAD}.visible .entry kernel(.param .u64 in, .param .u64 out)\n{{{REGISTERS}{body}\nret;\n}}\n"
    memory = Global()
    memory.add(given)
    memory.add(result)
    parameters = np.array([given.ctypes.data, result.ctypes.data], np.uint64).tobytes()
    run(kernels(text)["kernel"], Launch("kernel", "", (), (1, 1, 1), THREADS, 32 * THREADS), memory, parameters)
    return result


WRITE = "st.shared.u32 [%here], %me;"
READ = "ld.shared.u32 %x, [{}]; st.global.u32 [%out], %x;"
COPY = "cp.async.cg.shared.global [%here], [%in], 16;"
COMMIT = "cp.async.commit_group;"
BARRIER = "bar.sync 0;"
WARP = "bar.warp.sync -1;"

GOOD = {
    "a thread reads what it wrote": (WRITE + READ.format("%here"), lambda n: n),
    "others read after a barrier": (WRITE + BARRIER + READ.format("%far"), lambda n: n ^ 32),
    "a neighbour reads after the warp met": (WRITE + WARP + READ.format("%next"), lambda n: n ^ 1),
    "all read, and write after a barrier": (
        WRITE + BARRIER + "ld.shared.u32 %x, [%far];" + BARRIER + "st.shared.u32 [%here], %x;" + BARRIER
        + READ.format("%far"), lambda n: n),
    "the warp read, met, and wrote": (
        WRITE + WARP + "ld.shared.u32 %x, [%next];" + WARP + "st.shared.u32 [%here], %x;" + READ.format("%here"),
        lambda n: n ^ 1),
    "a copy that was waited for": (COPY + COMMIT + "cp.async.wait_group 0;" + READ.format("%here"), lambda n: 4 * n),
    "copies that all were waited for": (COPY + "cp.async.wait_all;" + BARRIER + READ.format("%far"),
                                        lambda n: 4 * (n ^ 32)),
    "the older of two groups": (
        COPY + COMMIT + COPY.replace("%here", "%here+1024") + COMMIT + "cp.async.wait_group 1;"
        + READ.format("%here"), lambda n: 4 * n),
    "bytes and words beside each other": (
        "st.shared.u8 [%here], 1; st.shared.u8 [%here+1], 2; ld.shared.u16 %x, [%here]; st.global.u32 [%out], %x;",
        lambda n: 0x201),
    "through an address of any space": (
        "cvt.u64.u32 %d1, %here; cvta.shared.u64 %d1, %d1; st.u32 [%d1], %me; ld.u32 %x, [%d1]; st.u32 [%out], %x;",
        lambda n: n),
    "memory of a thread": ("mov.u64 %d1, own; st.local.v2.u32 [%d1+8], {%me, 7}; ld.local.u32 %x, [own+8];"
                           "st.global.u32 [%out], %x;", lambda n: n),
    "a loop whose end comes first": (
        "mov.u32 %x, 0; and.b32 %r1, %me, 7; bra $LOOP;"
        "$END: shfl.sync.bfly.b32 %x, %x, 1, 31, -1; st.global.u32 [%out], %x; bra $OUT;"
        "$LOOP: setp.ge.u32 %p1, %x, %r1; @%p1 bra $END; add.u32 %x, %x, 1; bra $LOOP;"
        "$OUT: mov.u32 %x, 0;", lambda n: (n ^ 1) & 7),
    "a barrier that asks whether any": (
        "setp.eq.u32 %p1, %me, 40; barrier.cta.red.or.pred.aligned.all %p2, 0, %p1; selp.b32 %x, 1, 0, %p2;"
        "st.global.u32 [%out], %x;", lambda n: 1),
    "sums in global memory": ("sub.s64 %d1, %out, %d0; red.global.add.u32 [%d1], %me;",
                              lambda n: 2016 if n == 0 else 0),
    "nothing of a row": ("mov.u32 %x, 0; cp.async.cg.shared.global [%here], [%in], 16, %x; cp.async.wait_all;"
                         + READ.format("%here"), lambda n: 0),
    "a part of a row, and zeros": ("mov.u32 %x, 4; cp.async.cg.shared.global [%here], [%in], 16, %x;"
                                   "cp.async.wait_all; ld.shared.v2.u32 {%x, %r1}, [%here]; sub.u32 %x, %x, %r1;"
                                   "st.global.u32 [%out], %x;", lambda n: 4 * n),
}  # fmt: skip

BAD = {
    "read after another warp's write": (WRITE + READ.format("%far"), "another thread's write, no barrier"),
    "read after a neighbour's write": (WRITE + READ.format("%next"), "another thread's write, no barrier"),
    "the warp is not the block": (WRITE + WARP + READ.format("%far"), "another thread's write, no barrier"),
    "written after another warp's read": (
        WRITE + BARRIER + "ld.shared.u32 %x, [%far];" + WRITE, "after another thread's read, no barrier"),
    "written after a neighbour's read": (
        WRITE + BARRIER + "ld.shared.u32 %x, [%next];" + WRITE, "after another thread's read, no barrier"),
    "one place for all": ("st.shared.u32 [memory], %me;", "written by two threads at once"),
    "overlapping sizes": ("st.shared.v4.u32 [%here], {%me, %me, %me, %me};" + READ.format("%next+12"),
                          "another thread's write"),
    "a copy in flight": (COPY + COMMIT + READ.format("%here"), "read before a copy to it is waited for"),
    "the last group in flight": (COPY + COMMIT + "cp.async.wait_group 1;" + READ.format("%here"), "waited for"),
    "an open group in flight": (COPY + "cp.async.wait_group 0;" + READ.format("%here"), "waited for"),
    "a copy over what is read": (WRITE + BARRIER + "ld.shared.u32 %x, [%far];" + COPY, "another thread's read"),
    "a copy that its thread alone waited for": (COPY + "cp.async.wait_all;" + READ.format("%far"), "another thread's"),
    "write over a copy in flight": (COPY + WRITE, "written before a copy to it is waited for"),
    "global read behind the end": ("ld.global.u32 %x, [%in+1024];", "global read of 4 bytes outside"),
    "global read before the start": ("ld.global.u32 %x, [%in+-16];", "thread 0: global read"),
    "global write to what is read-only": ("st.global.u32 [%in], %me;", "global write of 4 bytes outside"),
    "null": ("mov.u64 %d1, 0; ld.global.u32 %x, [%d1];", "outside of the arrays, at address 0x0"),
    "misaligned": ("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%in+8];", "global access of 16 bytes is misaligned"),
    "misaligned in shared memory": ("ld.shared.u32 %x, [%here+2];", "access of 4 bytes is misaligned"),
    "outside of shared memory": ("st.shared.u32 [%here+1040], %me;", "thread 63: access of 4 bytes outside"),
    "outside of a thread's memory": ("ld.local.u32 %x, [own+64];", "access of 4 bytes outside"),
    "nothing from nowhere": ("mov.u32 %x, 0; mov.u64 %d1, 0; cp.async.cg.shared.global [%here], [%d1], 16, %x;",
                             "outside of the arrays, at address 0x0"),
    "a copy from nowhere": ("cp.async.cg.shared.global [%here], [%in+4096], 16;", "global read of 16 bytes outside"),
    "a copy of more than its size": ("cp.async.cg.shared.global [%here], [%in], 16, 17;", "takes 17 from its source"),
    "half a warp at a barrier": ("setp.lt.u32 %p1, %me, 16; @%p1 bar.sync 0;", "others have ended"),
    "half a warp at a shuffle": ("setp.lt.u32 %p1, %me, 16; @%p1 shfl.sync.bfly.b32 %x, %me, 1, 31, -1;",
                                 "only a part of the warp"),
    "half a warp past a shuffle": (
        "setp.lt.u32 %p1, %me, 48; @%p1 bra $OVER; shfl.sync.bfly.b32 %x, %me, 1, 31, -1; $OVER: mov.u32 %x, 0;",
        "thread 48: a part of the warp waits for lanes that do not come"),
    "half a warp named": ("shfl.sync.bfly.b32 %x, %me, 1, 31, 0xffff;", "named as taking part"),
    "a barrier that one warp misses": ("setp.lt.u32 %p1, %me, 32; @%p1 bar.sync 0;", "others have ended"),
    "warps at two barriers": (
        "setp.lt.u32 %p1, %me, 32; @%p1 bra $A; bar.sync 0; bra $B; $A: bar.sync 0; $B: mov.u32 %x, 0;",
        "at another barrier"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_orderly(name):
    body, expected = GOOD[name]
    assert execute(body).tolist() == [expected(n) for n in range(THREADS)]


@pytest.mark.parametrize("name", BAD)
def test_faults(name):
    body, message = BAD[name]
    given = GIVEN.copy()
    given.flags.writeable = False
    with pytest.raises(Fault, match=message) as fault:
        execute(body, given)
    assert "kernel, block (0, 0, 0), thread " in str(fault.value)
    assert " in: " in str(fault.value)


def test_shared_memory_is_nan_at_first():
    assert set(execute(READ.format("%here"))) == {0xFFFFFFFF}


def test_a_variable_of_the_kernel_lies_before_what_the_launch_adds():
    body = ".shared .align 4 .b8 fixed[256]; mov.u32 %x, memory; mov.u32 %r1, fixed; sub.u32 %x, %x, %r1;"
    assert set(execute(body + "st.global.u32 [%out], %x;")) == {256}


def test_between_the_elements_of_a_view_there_is_nothing():
    numbers = np.arange(THREADS * 8, dtype=np.uint32).reshape(THREADS, 8)
    view = numbers[:, :4:2]
    there = "mul.wide.u32 %d1, %me, 16; add.s64 %in, %in, %d1;"  # a row of the view every 32 bytes
    assert execute(there + "ld.global.u32 %x, [%in+8]; st.global.u32 [%out], %x;", view).tolist() == [
        8 * n + 2 for n in range(THREADS)
    ]
    for gap in (4, 12, 16):
        with pytest.raises(Fault, match="global read of 4 bytes outside"):
            execute(there + f"ld.global.u32 %x, [%in+{gap}];", view)


def test_a_view_may_run_backwards():
    backwards = "mul.wide.u32 %d1, %me, 32; sub.s64 %in, %in, %d1; ld.global.u32 %x, [%in]; st.global.u32 [%out], %x;"
    assert execute(backwards, GIVEN[::-1]).tolist() == [4 * (63 - n) for n in range(THREADS)]
