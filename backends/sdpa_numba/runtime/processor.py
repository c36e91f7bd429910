"""What LLVM has no common name for: the state of floating point, and a clock that takes no call."""

import platform

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sdpa_numba.vector.emit import I32, I64

BYTES, NOTHING = ir.IntType(8).as_pointer(), ir.VoidType()
MACHINE = platform.machine().lower()
X86, ARM = MACHINE in ("x86_64", "amd64"), MACHINE in ("arm64", "aarch64")
binding.initialize_native_asmparser()  # instructions given as text, as in `ticks` on Arm, end the process without it
IEEE = 0x1F80 if X86 else 0  # round to nearest, keep subnormal numbers, raise nothing


def ask(builder, name, result, *arguments):
    """Return what an intrinsic function of LLVM returns."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


@intrinsic
def float_state(_):
    """Return the rules that this thread computes by: rounding, subnormal numbers, traps; 0 where none are known."""

    def generate(context, builder, signature, arguments):
        if X86:
            place = cgutils.alloca_once(builder, I32)
            ask(builder, "llvm.x86.sse.stmxcsr", NOTHING, builder.bitcast(place, BYTES))
            return builder.zext(builder.load(place), I64)
        return ask(builder, "llvm.aarch64.get.fpcr", I64) if ARM else I64(0)

    return types.int64(), generate


@intrinsic
def set_float_state(_, state):
    """Let this thread compute by other rules."""

    def generate(context, builder, signature, arguments):
        if X86:
            place = cgutils.alloca_once(builder, I32)
            builder.store(builder.trunc(arguments[0], I32), place)
            ask(builder, "llvm.x86.sse.ldmxcsr", NOTHING, builder.bitcast(place, BYTES))
        elif ARM:
            ask(builder, "llvm.aarch64.set.fpcr", NOTHING, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def ticks(_):
    """Return a time in a unit of the processor's own; always 0 where it has none that programs may read."""

    def generate(context, builder, signature, arguments):
        if X86:
            return ask(builder, "llvm.readcyclecounter", I64)
        if ARM:
            return builder.asm(ir.FunctionType(I64, []), "mrs $0, cntvct_el0", "=r", [], side_effect=True)
        return I64(0)

    return types.int64(), generate


@intrinsic
def moment(_):
    """Return about 50 microseconds, in ticks; 0 where there are none."""

    def generate(context, builder, signature, arguments):
        if ARM:
            frequency = builder.asm(ir.FunctionType(I64, []), "mrs $0, cntfrq_el0", "=r", [], side_effect=True)
            return builder.lshr(frequency, I64(14))
        return I64(2**17 if X86 else 0)  # at 2 to 5 ticks a nanosecond

    return types.int64(), generate
