"""``python -m sdpa_ref.testing.golden.make``: write the golden vectors again, bit for bit."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sdpa_ref.layers.files import safetensors
from sdpa_ref.testing.golden import stored
from sdpa_ref.testing.golden.collection import Array, Recipe, recipes
from sdpa_ref.testing.golden.inputs import drawn
from sdpa_ref.testing.golden.truth import attention

FORMAT = 1


def made(recipe: Recipe) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the tensors of a case, and its entry in the index."""
    tensors = drawn(recipe)
    with np.errstate(all="ignore"):
        tensors |= attention(tensors, recipe.options)
    sizes = dict(zip(("B", "Hq", "Hkv", "L", "S", "E", "Ev"), recipe.sizes, strict=True))
    entry = {
        "name": recipe.name,
        "about": recipe.about,
        "dtype": recipe.dtype,
        "sizes": sizes,
        "options": recipe.options,
    }
    return tensors, entry | {"tensors": sorted(tensors)}


def write(directory: Path) -> list[Path]:
    """Write indexes and tensors, and return their paths."""
    dense, kept = map(made, recipes()), map(stored.made, stored.recipes())
    return [*_written(directory, f"v{FORMAT}", dense), *_written(directory, f"stored-v{FORMAT}", kept)]


def _written(directory: Path, name: str, cases: Iterable[tuple[dict[str, Array], dict[str, Any]]]) -> tuple[Path, Path]:
    """Write one collection, and return the paths of its index and its tensors."""
    tensors: dict[str, Array] = {}
    entries = []
    for own, entry in cases:
        tensors |= {
            f"{entry['name']}/{part}": np.ascontiguousarray(tensor).reshape(tensor.shape)
            for part, tensor in own.items()
        }
        entries.append(entry)
    index, file = directory / f"{name}.json", directory / f"{name}.safetensors"
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    index.write_text(f'{{"format":{FORMAT},"file":"{file.name}","cases":[\n{lines}\n]}}\n', encoding="utf-8")
    file.write_bytes(safetensors().save(tensors))
    return index, file


def main(argv: list[str] | None = None) -> int:
    """Write the files and print what was written."""
    parser = argparse.ArgumentParser(prog="python -m sdpa_ref.testing.golden.make", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=Path(__file__).parent)
    for path in write(parser.parse_args(argv).directory):
        print(f"{path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
