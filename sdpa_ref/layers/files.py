"""Files of weights: safetensors alone or in shards, and what to do with other formats."""

import json
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from sdpa_ref.arrays import Array
from sdpa_ref.extras import install

_CONVERT = "safetensors.torch.save_file(torch.load(path, weights_only=True), 'weights.safetensors') in PyTorch"
_FORMATS = {  # how a file begins, and what it is
    b"PK\x03\x04": f"a file of torch.save (or numpy.savez, for from_state_dict): convert it with {_CONVERT}",
    b"\x80": f"a pickle, which is not read as it could run any code: convert it with {_CONVERT}",
    b"\x89HDF": "an HDF5 file: pass from_state_dict a mapping of its arrays",
    b"GGUF": "a GGUF file: convert it to safetensors",
    b"version https://git-lfs": "a pointer of Git LFS: the file itself comes with git lfs pull",
}
_HINTS = {  # what an error of the reader mentions, and what to do
    "bfloat16": f"; bfloat16 needs ml_dtypes: {install('half')}",
    "float8": "; float8 weights go with scales of their own: multiply them out, and save float16 or float32",
    "float4": "; float4 weights go with scales of their own: multiply them out, and save float16 or float32",
}


def read(path: str | PathLike[str]) -> dict[str, Array]:
    """Return the entries of a safetensors file, or of all the files that an index names."""
    safetensors()
    path = Path(path)
    if path.is_dir():
        inside = ", ".join(sorted(file.name for file in path.glob("*.safetensors*"))[:8]) or "none in it"
        raise IsADirectoryError(f"{path} is a folder; name a safetensors file ({inside})")
    return _of_shards(path) if path.suffix == ".json" else _of_file(path)


def safetensors() -> Any:
    """Return the module that reads and writes the files."""
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"weight files need safetensors: {install('weights')}") from error
    return safetensors.numpy


def _of_file(path: Path) -> dict[str, Array]:
    with suppress(ImportError):
        import ml_dtypes  # noqa: F401  # makes bfloat16 a type of NumPy
    try:
        entries: dict[str, Array] = safetensors().load_file(path)
    except (OSError, ModuleNotFoundError):
        raise
    except Exception as error:  # the class is SafetensorError, or an error of NumPy for an unknown type
        raise ValueError(f"NumPy cannot read {path} as a safetensors file: {_explained(path, error)}") from None
    return entries


def _explained(path: Path, error: Exception) -> str:
    """Return what is wrong with a file that the reader refuses, and what to do."""
    with path.open("rb") as file:
        begin = file.read(32)
    for mark, what in _FORMATS.items():
        if begin.startswith(mark) and "float" not in str(error):
            return f"it is {what}"
    return str(error) + next((hint for word, hint in _HINTS.items() if word in str(error)), "")


def _of_shards(index: Path) -> dict[str, Array]:
    """Return the entries of the files beside the index."""
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {name: Path(file).name for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is no index of safetensors files: it has no weight_map of names to files") from None
    shards = {file: _of_file(index.with_name(file)) for file in sorted(set(names.values()))}
    absent = sorted(name for name, file in names.items() if name not in shards[file])
    if absent:
        raise ValueError(f"{index} names entries that its files do not have: {', '.join(absent[:8])}")
    return {name: shards[file][name] for name, file in names.items()}
