"""Whether bfloat16 numbers are multiplied as they are, by an instruction of the processor, or widened to float32."""

import os
import re
from functools import cache

import llvmlite.binding as llvm
from numba.core.registry import cpu_target

from sdpa_numba.vector.pairs import MODEL, PRODUCTS

VARIABLE = "SDPA_REF_BFLOAT16"
MEASURED = re.compile(r"x86_64\S* znver(?!1$|2$|3$)\d+")  # where the instruction was twice as fast as float32
PROBE = """
define void @probe(<16 x float>* %wide, <16 x bfloat>* %narrow) {
  %x = load <16 x float>, <16 x float>* %wide
  %y = fptrunc <16 x float> %x to <16 x bfloat>
  store <16 x bfloat> %y, <16 x bfloat>* %narrow
  ret void
}
"""
COMES_WITH = {  # conversions that are there where a product is; {vex} marks one that comes without
    "vdpbf16ps": re.compile(r"^\s*vcvtneps2bf16\s", re.MULTILINE),
    "bfdot": re.compile(r"^\s*bfcvtn\b", re.MULTILINE),
}


@cache
def products() -> str:
    """Return the instruction by which pairs of bfloat16 numbers are multiplied, or its model; "" where none is used.

    It depends on the processor that Numba compiles for and on the environment variable ``SDPA_REF_BFLOAT16``: "widen"
    for none, "hardware" for the one that there is, also where nobody has measured that it is faster; and for tests
    "vdpbf16ps model" and "bfdot model".
    """
    machine = cpu_target.target_context.codegen().magic_tuple()
    return chosen(os.environ.get(VARIABLE, "").strip(), *machine)


def chosen(setting: str, triple: str, name: str, features: str) -> str:
    """Return what `products` does for this setting and this processor."""
    if setting in PRODUCTS and setting.endswith(MODEL):
        return setting
    if setting not in ("", "widen", "hardware"):
        models = ", ".join(repr(each) for each in PRODUCTS if each.endswith(MODEL))
        raise ValueError(
            f"the environment variable {VARIABLE} must be 'widen', 'hardware' or for tests {models}; got {setting!r}"
        )
    if setting == "widen" or (setting == "" and not MEASURED.fullmatch(f"{triple} {name}")):
        return ""
    found = instruction(triple, name, features)
    if setting == "hardware" and not found:
        raise ValueError(f"the environment variable {VARIABLE} is 'hardware', but {name} has no products of bfloat16")
    return found


@cache
def instruction(triple: str, name: str, features: str) -> str:
    """Return the instruction for products of bfloat16 numbers that a processor has, "" for none."""
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=name, features=features, opt=0, jit=True)
    assembly = machine.emit_assembly(llvm.parse_assembly(PROBE))
    return next((product for product, mark in COMES_WITH.items() if mark.search(assembly)), "")
