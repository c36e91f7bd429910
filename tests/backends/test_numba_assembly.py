"""Instructions that are given as text: LLVM ends the process where it has no parser for them."""

import os
import subprocess
import sys

import pytest

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

SCRIPT = """
import numba
import sdpa_numba.runtime.processor
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

@intrinsic
def nothing(_):
    def generate(context, builder, signature, arguments):
        builder.asm(ir.FunctionType(ir.VoidType(), []), "nop", "", [], side_effect=True)
        return context.get_dummy_value()
    return types.void(), generate

@numba.njit
def three():
    nothing()
    return 3

print(three())
"""


def test_instructions_given_as_text_are_compiled():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "3\n", done.stderr
