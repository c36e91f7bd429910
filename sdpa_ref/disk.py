"""What backends keep on disk between processes: compiled code, each piece a file that is whole or not there.

A directory belongs to one version of all that its files depend on, so nothing in it is ever out of date. Whoever can
write there can run code here.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "SDPA_REF_CACHE_DIR"
VERSIONS_KEPT = 8
DIGEST_SIZE = 32


def directory(kind: str, version: bytes) -> Path:
    """Return the directory of one kind of files, for exactly what `version` holds; it need not exist.

    It lies in the folder that the environment variable ``SDPA_REF_CACHE_DIR`` names, else in the user's cache.
    """
    import platformdirs

    root = os.environ.get(VARIABLE) or platformdirs.user_cache_dir("sdpa_ref", appauthor=False)
    return Path(root).expanduser().absolute() / kind / hashlib.sha256(version).hexdigest()[:16]


def read(file: Path) -> bytes | None:
    """Return what `write` has put into a file, None where there is none or it is damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, content = content[:DIGEST_SIZE], content[DIGEST_SIZE:]
    return content if hashlib.sha256(content).digest() == digest else None


def write(file: Path, content: bytes) -> None:
    """Write a file that `read` trusts, or raise an OSError."""
    with replaced(file) as part:
        part.write_bytes(hashlib.sha256(content).digest() + content)


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Give a path to write to that becomes `file` in one step for all who read or write it; old versions go."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{uuid.uuid4().hex}{file.suffix}")
    try:
        yield part
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    file.parent.touch()  # what is in use is not the oldest
    versions = sorted(file.parent.parent.iterdir(), key=lambda version: version.stat().st_mtime)
    for old in versions[:-VERSIONS_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
