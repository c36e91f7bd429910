"""NVRTC through ctypes: CUDA C++ to PTX or machine code. It needs neither a driver nor a device, only one library."""

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["cubin", "ptx"]
MAJORS = (13, 12)  # of CUDA, in the order in which they are tried
WHEELS = {13: "nvidia-cuda-nvrtc", 12: "nvidia-cuda-nvrtc-cu12"}
PLACES = {13: ("cu13/lib", "cu13/bin/x86_64", "cu13/bin"), 12: ("cuda_nvrtc/lib", "cuda_nvrtc/bin")}  # in nvidia/
NAMES = ("libnvrtc.so.{major}", "nvrtc64_{major}0_0.dll")


class CompilerMissing(RuntimeError):
    """NVRTC is not installed; the message has the command that installs it."""


class CompilationError(RuntimeError):
    """NVRTC refused a kernel; the message has its log."""


class Compilation(NamedTuple):
    """What NVRTC made of a source, and what it said about it."""

    code: bytes
    log: str


def translate(text: str, headers: Mapping[str, str], options: Sequence[str], kind: Kind, name: str = "") -> Compilation:
    """Return the PTX or the cubin of a source.

    Parameters
    ----------
    text : str
        CUDA C++.
    headers : mapping
        The texts of what the source includes, by name.
    options : sequence of str
        Options of NVRTC; the architecture is ``sm_80`` for a cubin and ``compute_80`` for PTX.
    kind : {"cubin", "ptx"}
        What to return.
    name : str
        What the log calls the source.

    Raises
    ------
    CompilerMissing
        Without NVRTC.
    CompilationError
        For a source or options that NVRTC refuses, with its log.
    """
    nvrtc, program = library(), ctypes.c_void_p()
    names, texts = _texts(list(headers)), _texts(list(headers.values()))
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), len(headers), texts, names))
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), _texts(options))
        log = _content(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if failed:
            raise CompilationError(f"NVRTC cannot compile {name or 'the source'} with {' '.join(options)}:\n{log}")
        code = _content(program, {"cubin": "CUBIN", "ptx": "PTX"}[kind])
        return Compilation(code if kind == "cubin" else code.rstrip(b"\0"), log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def version() -> tuple[int, int]:
    """Return the version of NVRTC, as (13, 5)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def missing() -> str | None:
    """Return why there is no NVRTC here and how to install it, None if there is one."""
    try:
        library()
    except CompilerMissing as error:
        return str(error)
    return None


@cache
def library() -> ctypes.CDLL:
    """Return NVRTC: of the wheels, else of a toolkit; of CuPy's CUDA version where CuPy is in use."""
    for major in _majors():
        for file in _files(major):
            try:
                return _loaded(file)
            except OSError:
                continue
    wheels = ", or ".join(f"{WHEELS[major]} for CUDA {major}" for major in _majors())
    raise CompilerMissing(f"NVRTC, which compiles the kernels, was not found: pip install {wheels}")


def _majors() -> tuple[int, ...]:
    cupy = sys.modules.get("cupy")
    return MAJORS if cupy is None else (cupy.cuda.runtime.runtimeGetVersion() // 1000,)


def _files(major: int) -> Iterator[str]:
    """Yield where the library may be; for a bare name the system searches its own paths."""
    names = [name.format(major=major) for name in NAMES]
    wheels = find_spec("nvidia")
    folders = (
        [Path(root, place) for root in wheels.submodule_search_locations or () for place in PLACES[major]]
        if wheels
        else []
    )
    toolkits = [
        os.environ[variable] for variable in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX") if variable in os.environ
    ]
    folders += [Path(root, place) for root in toolkits for place in ("lib64", "lib", "bin/x64", "bin")]
    yield from (str(folder / name) for folder in folders for name in names if (folder / name).exists())
    yield from names


def _loaded(file: str) -> ctypes.CDLL:
    """Return the library in this file, after its other half, which it does not find by itself in every version."""
    for part in Path(file).parent.glob("*nvrtc-builtins*") if os.path.dirname(file) else ():
        if sys.platform == "win32":
            os.add_dll_directory(str(part.parent))
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(file)


def _content(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(getattr(library(), f"nvrtcGet{what}")(program, content))
    return content.raw


def _texts(texts: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def _check(status: int) -> None:
    if status:
        library().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompilationError(f"NVRTC failed: {library().nvrtcGetErrorString(status).decode()}")
