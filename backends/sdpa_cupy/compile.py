"""Kernels compiled for one architecture, kept on disk under a key of all that the code depends on.

Every compilation is a file of its own; a change in any kernel source, other options or another NVRTC lead to other
files. A file that cannot be read back is as good as none, and without a folder everything works.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdpa_cupy import nvrtc
from sdpa_cupy.nvrtc import Compilation, Kind
from sdpa_ref import disk

KERNELS = Path(__file__).parent / "kernels"
TARGETS = {"cubin": "sm", "ptx": "compute"}
_RESOURCES = re.compile(
    r"Function properties for (\w+)\s.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


class Resources(NamedTuple):
    """What each thread of a kernel takes: registers, and bytes of local memory, which should be none."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def compiled(
    source: str, defines: Sequence[tuple[str, Any]], arch: int | str, kind: Kind = "cubin", folder: Path = KERNELS
) -> bytes:
    """Return the code of a kernel source, from the disk where it was compiled before.

    Parameters
    ----------
    source : str
        The name of a file in `folder`.
    defines : sequence of (name, value)
        Macros that specialise the source.
    arch : int or str
        The exact architecture: 80, or "90a".
    kind : {"cubin", "ptx"}
        Machine code, or what the interpreter runs.
    folder : Path
        Where the sources are.

    Raises
    ------
    CompilerMissing
        Without NVRTC, with the install command.
    CompilationError
        With NVRTC's log.
    """
    file = None
    with disk.harmless():
        file = _file(source, defines, arch, kind, folder)
    code = None if file is None else disk.read(file)
    if code is None:
        code = compilation(source, defines, arch, kind, folder).code
        if file is not None:
            with disk.harmless():
                disk.write(file, code)
    return code


def compilation(
    source: str, defines: Sequence[tuple[str, Any]], arch: int | str, kind: Kind = "cubin", folder: Path = KERNELS
) -> Compilation:
    """Return the code of a kernel source and the log that `resources` reads, compiled now; as `compiled` otherwise."""
    texts = _texts(folder)
    text = texts.pop(source)
    return nvrtc.translate(text, texts, _options(defines, arch, kind), kind, source)


def resources(log: str) -> dict[str, Resources]:
    """Return what each kernel takes, by its name, from the log of the compilation to a cubin."""
    return {name: Resources(int(registers), *map(int, local)) for name, *local, registers in _RESOURCES.findall(log)}


def cache_directory(folder: Path = KERNELS) -> Path:
    """Return the directory for code of exactly these sources and this NVRTC; it need not exist."""
    return disk.directory("cupy", repr((nvrtc.version(), sorted(_texts(folder).items()))).encode())


def _file(source: str, defines: Sequence[tuple[str, Any]], arch: int | str, kind: Kind, folder: Path) -> Path:
    key = hashlib.sha256(repr((source, _options(defines, arch, kind))).encode())
    return cache_directory(folder) / f"{Path(source).stem}-{arch}-{key.hexdigest()[:32]}.{kind}"


def _options(defines: Sequence[tuple[str, Any]], arch: int | str, kind: Kind) -> list[str]:
    macros = [f"-D{name}={int(value) if isinstance(value, bool) else value}" for name, value in defines]
    verbose = ["--ptxas-options=-v"] if kind == "cubin" else []
    exact = "--fmad=false"  # what is one operation in the source is one everywhere, in the emulations too
    return [f"--gpu-architecture={TARGETS[kind]}_{arch}", "--std=c++17", exact, *verbose, *macros]


def _texts(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text("utf-8") for file in folder.iterdir() if file.suffix in (".cu", ".h")}
