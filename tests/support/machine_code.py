"""What LLVM makes of kernels, for any processor."""

import re

import llvmlite.binding as llvm
import numba
from sdpa_numba.compile.parts import KernelCompiler, KernelLibrary


class Text(KernelLibrary):
    """A library that is optimised and never made executable, which this processor might not be able to do."""

    def _finalize_final_module(self):
        self._finalized = True

    def get_pointer_to_function(self, name):
        self._ensure_finalized()
        return 0

    @property
    def codegen(self):
        return self

    def set_env(self, name, env):
        pass


class TextCompiler(KernelCompiler):
    """The pipeline of a kernel that is only read."""

    def compile_extra(self, function):
        self.state.library = Text(self.state.targetctx.codegen(), function.__qualname__)
        return super(KernelCompiler, self).compile_extra(function)


def assembly_of(function, arguments, triple, cpu):
    """Return the instructions of a function of these types for a processor."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": TextCompiler}
    compiled = numba.njit(error_model="numpy", **options)(function)
    compiled.compile(arguments)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    module = llvm.parse_assembly(compiled.inspect_llvm(compiled.signatures[0]))
    module.triple, module.data_layout = triple, str(machine.target_data)
    return machine.emit_assembly(module)


def loops(assembly):
    """Return the instructions of every innermost loop."""
    lines, labels, found = assembly.splitlines(), {}, []
    for number, line in enumerate(lines):
        if label := re.match(r"([.\w$]+):", line):
            labels[label[1]] = number
        jump = re.match(r"\s+(?:j\w+|b\.\w+|cbn?z\s+\w+,|tbn?z[^,]+,[^,]+,)\s*([.\w$]+)", line)
        if jump and jump[1] in labels:
            body = lines[labels[jump[1]] + 1 : number + 1]
            if not any(re.match(r"[.\w$]+:", other) for other in body):
                found.append([other.strip() for other in body if re.match(r"\s+[a-z]", other)])
    return found
