"""How the pieces of a kernel are compiled: as parts, which are typed and lowered, and optimised only in the kernel.

Numba optimises every function with all that it calls, and so the innermost loop once for each level above it. A part
stays as it is; the kernel links all parts below it and is optimised as a whole, which takes a third of the time.
"""

from types import FunctionType
from uuid import uuid4

import numba
from llvmlite.binding import Linkage
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.typed_passes import (
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    GenericRewrites,
    IRProcessing,
    ReconstructSSA,
    RewriteSemanticConstants,
    TranslateByteCode,
)

from .cache import jit
from .notice import announced

SIGNATURE = (numba.int64,)  # of every kernel: the address of a worker
STAGES = [
    TranslateByteCode, FixupArgs, IRProcessing, RewriteSemanticConstants, DeadBranchPrune, GenericRewrites,
    ReconstructSSA, NopythonTypeInference, PreLowerStripPhis, IRLegalization, NativeLowering, NoPythonBackend,
]  # fmt: skip


class PartLibrary(JITCodeLibrary):
    """A library that is only good for linking: nothing in it is optimised or made executable."""

    def _optimize_functions(self, module):
        module.data_layout = self._codegen._data_layout

    def finalize(self):
        """Close the library."""
        self._finalized = True

    def get_pointer_to_function(self, name):
        """Return 0, as for any function without an entry from Python."""
        return 0

    @property
    def codegen(self):
        """Return what `set_env` is called on."""
        return self

    def set_env(self, name, env):
        """Do nothing: an environment serves the entry from Python."""


class KernelLibrary(JITCodeLibrary):
    """A library that links the parts of its parts, too, and shares them with no other kernel.

    Numba numbers functions anew in each process. Were their names visible, parts of a kernel from the disk cache could
    take the place of other parts in a kernel compiled here.
    """

    def add_linking_library(self, library):
        """Link `library` and, if it is a part, all that it calls."""
        super().add_linking_library(library)
        if isinstance(library, PartLibrary):
            for other in library._linking_libraries:
                self.add_linking_library(other)

    def _optimize_final_module(self):
        for function in self._final_module.functions:
            if function.linkage == Linkage.linkonce_odr:
                function.linkage = Linkage.internal
        super()._optimize_final_module()


class PartCompiler(Compiler):
    """The pipeline of a part: of Numba's passes those that plain loops over numbers need, half of all."""

    def define_pipelines(self):
        """Return the passes."""
        passes = PassManager("part")
        for stage in STAGES:
            passes.add_pass(stage, stage._name)
        passes.finalize()
        return [passes]

    def compile_extra(self, function):
        """Compile into the library that this pipeline is for."""
        self.state.library = PartLibrary(self.state.targetctx.codegen(), function.__qualname__)
        return super().compile_extra(function)


class KernelCompiler(Compiler):
    """The pipeline of a kernel."""

    def compile_extra(self, function):
        """Compile under a name that no kernel has, here or in the disk cache."""
        unique = FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
        unique.__qualname__ = f"{function.__name__}_{uuid4().hex}"
        self.state.library = KernelLibrary(self.state.targetctx.codegen(), unique.__qualname__)
        self.state.library.enable_object_caching()
        return super().compile_extra(unique)


def part(function):
    """Return `function` compiled as a part of whatever kernel calls it."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": PartCompiler}
    return numba.njit(error_model="numpy", **options)(function)


def linked(function):
    """Return `function`, of one address, compiled with all the parts that it calls, and cached on disk."""
    return jit(pipeline_class=KernelCompiler)(function)


def native(dispatcher, c=False):
    """Return where the machine code of a function of one address begins, to be called as Numba or as C does."""
    with global_compiler_lock, announced():  # a fork waits for the lock, but not for llvmlite's own
        dispatcher.compile(SIGNATURE)
        compilation = dispatcher.overloads[SIGNATURE]
        names = compilation.fndesc
        return compilation.library.get_pointer_to_function(names.llvm_cfunc_wrapper_name if c else names.llvm_func_name)
