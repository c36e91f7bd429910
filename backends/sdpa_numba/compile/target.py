"""The processor that Numba compiles for, which its settings can change: what LLVM makes of a small function there."""

import re
from functools import cache
from typing import NamedTuple

import llvmlite.binding as llvm
from numba import config
from numba.core.registry import cpu_target

PROBE = """
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
define void @probe(<16 x float>* %wide, <16 x half>* %narrow) {
  %h = load <16 x half>, <16 x half>* %narrow
  %x = fpext <16 x half> %h to <16 x float>
  %y = call <16 x float> @llvm.fma.v16f32(<16 x float> %x, <16 x float> %x, <16 x float> %x)
  store <16 x float> %y, <16 x float>* %wide
  %z = fptrunc <16 x float> %y to <16 x half>
  store <16 x half> %z, <16 x half>* %narrow
  ret void
}
"""
CALLS = {
    "fused multiply-add (fma)": re.compile(r"\b_?fmaf?\b"),
    "conversion of half precision (f16c)": re.compile(r"\b_*(?:extendhfsf2|truncsfhf2|gnu_h2f_ieee|gnu_f2h_ieee)\b"),
}


class Target(NamedTuple):
    """A processor: its vector registers, and the instructions that LLVM replaces by calls of missing functions."""

    register_bytes: int
    registers: int
    missing: tuple[str, ...]


def target() -> Target:
    """Return the processor that Numba compiles for."""
    return _probed(*cpu_target.target_context.codegen().magic_tuple())


def unusable() -> str | None:
    """Return why kernels compiled by Numba, as it is set here, cannot run, None where they can."""
    if config.DISABLE_JIT:
        return "Numba's compiler is turned off (NUMBA_DISABLE_JIT)"
    settings = {"NUMBA_CPU_NAME": config.CPU_NAME, "NUMBA_CPU_FEATURES": config.CPU_FEATURES}
    named = " and ".join(f"{name}={value}" for name, value in settings.items() if value is not None)
    machine = f"the processor that {named} names" if named else "this processor"
    if target().missing:
        return f"{machine} lacks the instructions {', '.join(target().missing)}"
    if named:
        triple, *_ = cpu_target.target_context.codegen().magic_tuple()
        features = ",".join(f"{'+' if has else '-'}{name}" for name, has in llvm.get_host_cpu_features().items())
        host = _probed(triple, llvm.get_host_cpu_name(), features)
        if host.missing or host.register_bytes < target().register_bytes:
            return f"{machine} has instructions that this one lacks"
    return None


@cache
def _probed(triple: str, name: str, features: str) -> Target:
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=name, features=features, opt=0, jit=True)
    assembly = machine.emit_assembly(llvm.parse_assembly(PROBE))
    missing = tuple(what for what, call in CALLS.items() if call.search(assembly))
    if "%zmm" in assembly:
        return Target(64, 32, missing)
    if "%ymm" in assembly:
        return Target(32, 16, missing)
    return Target(16, 16 if "%xmm" in assembly else 32, missing)
