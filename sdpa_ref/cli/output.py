"""What commands write: files whole or not at all, and lines on standard output."""

from pathlib import Path

from sdpa_ref.cli.errors import Failure
from sdpa_ref.files import replacing


def write(path: str | Path, content: str | bytes) -> None:
    """Write a file, or end the command with the reason."""
    try:
        with replacing(path) as part:
            part.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        reason = error.strerror or str(error).removeprefix(f"cannot save {path}: ")
        raise Failure(f"cannot write {path}: {reason}") from None
