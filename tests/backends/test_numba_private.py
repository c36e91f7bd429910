"""The private interfaces of Numba that the backend uses: a version of Numba that lacks one fails here, by its name.

That they do what the backend needs is tested where it uses them, as in test_numba_cache.py.
"""

import ast
import importlib
import inspect
import os
from pathlib import Path

import pytest

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

import numba
import sdpa_numba
from numba.core.codegen import JITCodeLibrary

PACKAGE = Path(sdpa_numba.__file__).parent
METHODS = {  # of classes that are subclassed or called: their parameters
    "numba.core.caching.NullCache.load_overload": ["self", "sig", "target_context"],
    "numba.core.caching.NullCache.save_overload": ["self", "sig", "cres"],
    "numba.core.codegen.JITCodeLibrary._optimize_functions": ["self", "ll_module"],
    "numba.core.codegen.JITCodeLibrary._optimize_final_module": ["self"],
    "numba.core.codegen.JITCodeLibrary.add_linking_library": ["self", "library"],
    "numba.core.codegen.JITCodeLibrary.enable_object_caching": ["self"],
    "numba.core.codegen.JITCodeLibrary.finalize": ["self"],
    "numba.core.codegen.JITCodeLibrary.get_pointer_to_function": ["self", "name"],
    "numba.core.compiler.CompileResult._reduce": ["self"],
    "numba.core.compiler.Compiler.compile_extra": ["self", "func"],
    "numba.core.compiler.Compiler.define_pipelines": ["self"],
    "numba.core.compiler_machinery.PassManager.add_pass": ["self", "pss", "description"],
    "numba.core.compiler_machinery.PassManager.finalize": ["self"],
    "numba.core.runtime.nrt.rtsys.initialize": ["ctx"],
}


def imported():
    """Return what modules of the backend import from below `numba.core`, and which of them."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("numba.core"):
                for alias in node.names:
                    found.setdefault(f"{node.module}.{alias.name}", []).append(file.relative_to(PACKAGE).as_posix())
    return found


def resolve(path):
    """Return what lies under a dotted name, importing modules on the way."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(resolve(module), name)


@pytest.mark.parametrize("path", imported())
def test_what_is_imported_from_below_numba_core_exists(path):
    assert resolve(path) is not None, f"used by {imported()[path]}"


@pytest.mark.parametrize("path", METHODS)
def test_methods_take_what_the_backend_gives_them(path):
    assert list(inspect.signature(resolve(path)).parameters) == METHODS[path]


def test_attributes_of_a_compiled_function():
    @numba.njit("int64(int64)")
    def double(x):
        return 2 * x

    assert hasattr(double, "_cache")  # compile/cache.py puts its own there
    assert {"targetoptions", "locals", "overloads", "__wrapped__"} <= set(dir(double))
    (compilation,) = double.overloads.values()
    library = compilation.library
    assert isinstance(library, JITCodeLibrary)
    assert library.has_dynamic_globals is False
    assert {"_codegen", "_finalized", "_final_module", "_linking_libraries"} <= set(dir(library))  # compile/parts.py
    assert library._codegen._data_layout
    assert library._codegen.magic_tuple()
    for name in (compilation.fndesc.llvm_func_name, compilation.fndesc.llvm_cfunc_wrapper_name):
        assert library.get_pointer_to_function(name) > 0
