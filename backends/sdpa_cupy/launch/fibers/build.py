"""Kernel sources built by g++ into libraries that run them on fibers, kept on disk under a key of all they depend on.

The compiler inserts the calls of its race detector before each access to memory, and this package defines the
functions that are called; or it inserts its address and undefined-behaviour sanitizers, which then need to be loaded
before Python.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sdpa_cupy.compile import KERNELS
from sdpa_ref import disk

RUNTIME = Path(__file__).parent
CHECKED = ("-fsanitize=thread",)  # for the kernel alone, and not for the linker: only the calls are wanted
SANITIZED = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer")
WITHOUT_LIBRARIES = ("-nostdlib", "-lgcc")  # what C++ comes with takes longer to read than the rest to link
OPTIONS = ("-std=c++17", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-ffp-contract=off", "-Wall")
KERNEL_OPTIONS = (
    *("-Og", "-fno-strict-aliasing", "-DEMULATED", f"-I{RUNTIME.parent}"),
    "-nostdinc++",  # C's <math.h>, which is read in half the time
)


class BuildError(RuntimeError):
    """The compiler refused a kernel; the message is the compiler's."""


def unavailable() -> str | None:
    """Return why kernels cannot be built here, None where they can."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    name = _compiler()
    if shutil.which(name) is None:
        return f"it needs a C++ compiler and there is no {name!r}; try: apt install g++ (or set CXX)"
    return None


@cache
def library(
    source: str, defines: Sequence[tuple[str, Any]], arch: int, folder: Path = KERNELS, sanitize: bool = False
) -> Path:
    """Return the shared library of a kernel source, which is built where it is not on disk.

    Parameters
    ----------
    source : str
        The name of a file in `folder`.
    defines : sequence of (name, value)
        Macros that specialise the source.
    arch : int
        What the source takes for the architecture, as in 80.
    folder : Path
        Where the sources are.
    sanitize : bool
        Whether to build with the address and undefined-behaviour sanitizers, instead of with this package's checks.

    Raises
    ------
    BuildError
        With what the compiler says.
    """
    macros = [f"-D{name}={int(value) if isinstance(value, bool) else value}" for name, value in defines]
    flavour = SANITIZED if sanitize else CHECKED
    options = [*OPTIONS, *KERNEL_OPTIONS, *flavour, *macros, f"-D__CUDA_ARCH__={arch}0", f"-I{KERNELS}", "-x", "c++"]
    directory = cache_directory(RUNTIME, KERNELS, folder)
    name = f"{Path(source).stem}-{_digest(options, source)}"
    kernel = _made(directory, f"{name}.o", [*options, "-c", str(folder / source)])
    linked = SANITIZED if sanitize else WITHOUT_LIBRARIES
    return _made(directory, f"{name}.so", ["-shared", str(kernel), str(runtime()), *linked])


def cache_directory(*folders: Path) -> Path:
    """Return the directory for what this compiler makes of exactly these folders' sources; it need not exist."""
    files = [file for folder in folders for file in sorted(folder.iterdir()) if file.suffix in (".cu", ".h", ".cpp")]
    texts = [(file.name, file.read_bytes()) for file in files]
    return disk.directory("fibers", repr((_version(_compiler()), texts)).encode())


def runtime() -> Path:
    """Return the object file of the machine, which all kernels share."""
    options = [*OPTIONS, "-O3", "-r", "-nostdlib"]
    sources = map(str, sorted(RUNTIME.glob("*.cpp")))
    return _made(cache_directory(RUNTIME), f"runtime-{_digest(options)}.o", [*options, *sources])


def _made(directory: Path, name: str, arguments: list[str]) -> Path:
    """Return a file that the compiler made, in one step, also where several processes make it at the same time."""
    file = directory / name
    if not disk.is_trusted(file):
        with disk.replaced(file) as part:
            command = [_compiler(), *arguments, "-o", str(part)]
            plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
            if done.returncode:
                raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    return file


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
