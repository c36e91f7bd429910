"""Files that the user names: written whole or not at all, and nothing else is put in their place."""

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to that becomes the file `path` in one step when the block ends without an error.

    A symbolic link stays, and its target is replaced. The mode of a file that was there is kept.

    Raises
    ------
    OSError
        There is no such folder, or `path` is write-protected or no regular file: a folder, a device, a pipe.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot save {path}: there is no folder {Path(path).parent}")
    mode = None
    if os.path.lexists(target):
        mode = target.stat().st_mode
        if not stat.S_ISREG(mode):
            raise OSError(f"cannot save {path}: it is {_KINDS.get(stat.S_IFMT(mode), 'no regular file')}")
        if not os.access(target, os.W_OK):
            raise PermissionError(f"cannot save {path}: it is write-protected")
    part = target.with_name(f".{uuid.uuid4().hex}.part")
    try:
        yield part
        if mode is not None:
            part.chmod(stat.S_IMODE(mode))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link that leads nowhere",
}
