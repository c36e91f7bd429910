"""What backends keep on disk between processes: compiled code, each piece a file that is whole or not there.

A directory belongs to one version of all that its files depend on, so nothing in it is ever out of date. Its files are
loaded as code, so they are read only where only the user and root can have written them. Only files that this
module can recognise as its own are ever deleted. Whatever goes wrong is an OSError, which costs time and nothing else.
"""

import hashlib
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

VARIABLE = "SDPA_REF_CACHE_DIR"
VERSIONS_KEPT = 8
MAGIC = b"sdpa_ref cache 1\n"  # what a file begins with, before the digest of the rest
DIGEST_SIZE = 32
_OURS = re.compile(r".+-[0-9a-f]{32}(\.[a-z]+)?")  # the names of files,
_PART = re.compile(r"\.sdpa-ref-[0-9a-f]{32}(\.[a-z]+)?")  # of unfinished ones,
_VERSION = re.compile(r"[0-9a-f]{16}")  # and of directories
_BUILT = b"\x7fELF"  # what a compiler has written by itself


class State(NamedTuple):
    """Where files are kept; `reason` says why none can be, and is None where they can."""

    directory: Path | None
    reason: str | None

    def __str__(self) -> str:
        where = "none" if self.directory is None else str(self.directory)
        return where if self.reason is None else f"{where} (nothing is kept: {self.reason})"


def directory(kind: str, version: bytes) -> Path:
    """Return the directory of one kind of files, for exactly what `version` holds; it need not exist.

    It lies in the folder that the environment variable ``SDPA_REF_CACHE_DIR`` names, else in the user's cache.

    Raises
    ------
    OSError
        There is no such folder, as for a user without a home.
    """
    try:
        root = Path(os.environ.get(VARIABLE) or _users_cache()).expanduser().absolute()
    except RuntimeError:  # no home, or an unknown user
        raise OSError(f"there is no home folder; set {VARIABLE} to a folder without ~") from None
    return root / kind / hashlib.sha256(version).hexdigest()[:16]


@contextmanager
def harmless(*errors: type[Exception]) -> Iterator[None]:
    """Suppress an OSError, and what else is named, but not the TimeoutError of a handler of signals.

    A handler may run, and raise, wherever Python does. The error of a file system has a number.
    """
    expected: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        yield
    except TimeoutError as error:
        if error.errno is None:
            raise
    except expected:
        pass


def read(file: Path) -> bytes | None:
    """Return what `write` has put into a file, None where there is none, it is damaged, or others could change it."""
    content = None
    with harmless():
        check(file.parent)
        with open(file, "rb", opener=_no_link) as opened:
            _check(file, os.fstat(opened.fileno()))
            content = opened.read()
    if content is None:
        return None
    digest, content = content[len(MAGIC) : len(MAGIC) + DIGEST_SIZE], content[len(MAGIC) + DIGEST_SIZE :]
    return content if hashlib.sha256(content).digest() == digest else None


def write(file: Path, content: bytes) -> None:
    """Write a file that `read` trusts, or raise an OSError."""
    with replaced(file) as part:
        part.write_bytes(MAGIC + hashlib.sha256(content).digest() + content)


def is_trusted(file: Path) -> bool:
    """Return whether there is such a file, and only the user and root can have written it."""
    with harmless():
        check(file.parent)
        _check(file, file.lstat())
        return True
    return False


def check(folder: Path) -> None:
    """Raise an OSError unless the folder is there, and only the user and root can put files into it.

    Nor may others rename it or a folder above, which they cannot in a folder with the sticky bit, such as ``/tmp``.
    """
    real = folder.resolve(strict=True)
    _check(real, real.stat())
    for above in real.parents:
        _check(above, above.stat(), sticky=True)


def prepare(folder: Path) -> None:
    """Make the folder where there is none, for the user alone, and raise an OSError unless `check` accepts it."""
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    for above in reversed(missing):
        above.mkdir(mode=0o700, exist_ok=True)
    check(folder)


def state(directory: Callable[[], Path]) -> State:
    """Return the directory that the function names, and why nothing can be kept there, after trying it."""
    found = None
    try:
        found = directory()
        prepare(found)
        with tempfile.TemporaryFile(dir=found) as file:
            file.write(b"some")
    except OSError as error:
        return State(found, f"{type(error).__name__}: {error}")
    return State(found, None)


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Give a path to write to that becomes `file` in one step; then delete the oldest versions."""
    prepare(file.parent)
    part = file.with_name(f".sdpa-ref-{uuid.uuid4().hex}{file.suffix}")
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        yield part
        part.chmod(0o600)  # a compiler may have made a new file
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    with harmless():
        file.parent.touch()  # what is in use is not the oldest
        _forget_old(file.parent.parent)


def _users_cache() -> str:
    try:
        import platformdirs
    except ImportError:
        raise OSError(f"without platformdirs there is no folder for it: set {VARIABLE}") from None
    return platformdirs.user_cache_dir("sdpa_ref", appauthor=False)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _check(path: Path, status: os.stat_result, sticky: bool = False) -> None:
    """Raise an OSError unless the owner is the user or root, and others may not write; Windows has neither."""
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(f"{path} is neither a file nor a folder")
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to another user (number {status.st_uid})")
    if status.st_mode & 0o022 and not (sticky and status.st_mode & stat.S_ISVTX):
        raise PermissionError(f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o})")


def _forget_old(kind: Path) -> None:
    """Delete the files of all but the youngest versions, as far as they are ours."""
    versions = [folder for folder in kind.iterdir() if _VERSION.fullmatch(folder.name) and _our_files(folder)]
    versions.sort(key=lambda folder: folder.stat().st_mtime)
    for old in versions[:-VERSIONS_KEPT]:
        for file in _our_files(old):
            file.unlink()
        with harmless():  # something else is in there
            old.rmdir()


def _our_files(folder: Path) -> list[Path]:
    """Return the files in a folder that this module has made: by their names, and by how they begin."""
    return [] if folder.is_symlink() or not folder.is_dir() else [file for file in folder.iterdir() if _is_ours(file)]


def _is_ours(file: Path) -> bool:
    if not stat.S_ISREG(file.lstat().st_mode):
        return False
    if _PART.fullmatch(file.name):
        return True
    if not _OURS.fullmatch(file.name):
        return False
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)).startswith((MAGIC, _BUILT))
