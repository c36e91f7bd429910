"""Files of weights: safetensors alone or in shards, GGUF, and what to do with other formats."""

from contextlib import suppress
from os import PathLike
from typing import TYPE_CHECKING, Any

from sdpa_ref.arrays import Array
from sdpa_ref.extras import install
from sdpa_ref.layers.coded import of_blocks
from sdpa_ref.layers.names import UnknownPrefix, beginning

if TYPE_CHECKING:
    from pathlib import Path  # what only files need is imported where they are

_CONVERT = "safetensors.torch.save_file(torch.load(path, weights_only=True), 'weights.safetensors') in PyTorch"
_FORMATS = {  # how a file begins, and what it is
    b"PK\x03\x04": f"a file of torch.save (or numpy.savez, for from_state_dict): convert it with {_CONVERT}",
    b"\x80": f"a pickle, which is not read as it could run any code: convert it with {_CONVERT}",
    b"\x89HDF": "an HDF5 file: pass from_state_dict a mapping of its arrays",
    b"version https://git-lfs": "a pointer of Git LFS: the file itself comes with git lfs pull",
}
_HINTS = {  # what an error of the reader mentions, and what to do
    "bfloat16": f"; bfloat16 needs ml_dtypes: {install('half')}",
    "float8": "; float8 weights go with scales of their own: multiply them out, and save float16 or float32",
    "float4": "; float4 weights go with scales of their own: multiply them out, and save float16 or float32",
}


def read_weights(path: str | PathLike[str], prefix: str = "", *, codes: bool = False) -> dict[str, Any]:
    """Return the weights that are in a file, by name.

    For a single layer its own `load` is enough. A whole model is read once, and its layers are made of the mapping.

    Parameters
    ----------
    path : str or path
        A safetensors file; the index ``*.safetensors.index.json`` of a model in several; or a GGUF file.
    prefix : str
        Only the entries whose names begin so are read, under their full names.
    codes : bool
        Whether the codes Q4_0, Q4_1 and Q8_0 of a GGUF file stay what they are, `Quantized`, which `Linear` and
        `Embedding` take. Else, and of other kinds, they become float32.

    Returns
    -------
    dict of str to array, or Quantized
        As they are in the file.

    Raises
    ------
    ValueError
        The file has another format; no name begins with the prefix.
    """
    from pathlib import Path

    path = Path(path)
    if path.is_dir():
        inside = ", ".join(sorted(file.name for file in path.glob("*.safetensors*"))[:8]) or "none in it"
        raise IsADirectoryError(f"{path} is a folder; name a safetensors file ({inside})")
    if path.suffix == ".json":
        return _of_shards(path, prefix)
    return _of_gguf(path, prefix, codes) if _begins(path, b"GGUF") else _of_file(path, prefix)


def safetensors() -> Any:
    """Return the module that reads and writes the files."""
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"weight files need safetensors: {install('weights')}") from error
    return safetensors.numpy


def _of_file(path: "Path", prefix: str = "", names: list[str] | None = None) -> dict[str, Array]:
    """Return the entries whose names begin so, or those of these names."""
    safetensors()
    from safetensors import safe_open

    with suppress(ImportError):
        import ml_dtypes  # noqa: F401  # makes bfloat16 a type of NumPy
    try:
        with safe_open(path, "numpy") as file:
            there = list(file.keys())
            wanted = beginning(there, prefix) if names is None else [name for name in names if name in there]
            return {name: file.get_tensor(name) for name in wanted}
    except (OSError, ModuleNotFoundError, UnknownPrefix):
        raise
    except Exception as error:  # the class is SafetensorError, or an error of NumPy for an unknown type
        raise ValueError(f"NumPy cannot read {path} as a safetensors file: {_explained(path, error)}") from None


def _of_gguf(path: "Path", prefix: str, codes: bool) -> dict[str, Any]:
    """Return the entries of a GGUF file, codes multiplied out where they are not to stay."""
    try:
        from gguf import GGUFReader, dequantize
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"GGUF files need the package gguf: {install('gguf')}") from error
    try:
        tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"cannot read {path} as a GGUF file: {error}") from None
    entries: dict[str, Any] = {}
    for name in beginning(list(tensors), prefix):
        tensor, coded = tensors[name], None
        if codes:
            coded = of_blocks(tensor.data, int(tensor.tensor_type), tuple(int(n) for n in tensor.shape[::-1]))
        entries[name] = dequantize(tensor.data, tensor.tensor_type) if coded is None else coded
    return entries


def _begins(path: "Path", mark: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(mark)) == mark


def _explained(path: "Path", error: Exception) -> str:
    """Return what is wrong with a file that the reader refuses, and what to do."""
    with path.open("rb") as file:
        begin = file.read(32)
    for mark, what in _FORMATS.items():
        if begin.startswith(mark) and "float" not in str(error):
            return f"it is {what}"
    return str(error) + next((hint for word, hint in _HINTS.items() if word in str(error)), "")


def _of_shards(index: "Path", prefix: str) -> dict[str, Array]:
    """Return the entries of the files beside the index."""
    import json
    from pathlib import Path

    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = {name: Path(file).name for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is no index of safetensors files: it has no weight_map of names to files") from None
    inside: dict[str, list[str]] = {}
    for name in beginning(list(shards), prefix):
        inside.setdefault(shards[name], []).append(name)
    entries: dict[str, Array] = {}
    for file, names in inside.items():
        entries |= _of_file(index.with_name(file), names=names)
    absent = sorted(name for names in inside.values() for name in names if name not in entries)
    if absent:
        raise ValueError(f"{index} names entries that its files do not have: {', '.join(absent[:8])}")
    return {name: entries[name] for name in shards if name in entries}
