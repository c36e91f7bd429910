"""Learns to translate German into English from 430 short phrases, and shows which words it attends to.

Run it with ``python examples/translate.py``. Some phrases are held out, and tell how well it puts known words together.
"""

from collections import Counter
from pathlib import Path

import numpy as np
from training import Block, LayerNorm, Tape, add, cross_entropy, needed, options, train

from sdpa_ref import Causal, Embedding, KeyLengths, Linear, QueryLengths, sinusoidal_positions

with needed():
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

START, END = "<start>", "<end>"
WIDTH, HEADS, DEPTH = 64, 4, 2
HELD_OUT, LONGEST = 60, 10
SHOWN = "Wie geht es dir", "Heute kauft Max Brot", "Ich will morgen ein Buch kaufen"


def words(phrase):
    """Return the words of a phrase, in lower case."""
    return phrase.lower().split()


def split(phrases, first, rng):
    """Return the phrases to train on, and those held out: `first`, and others at random.

    A word that was never seen has no translation, so that every word of a phrase that is held out stays in four others.
    """
    left = Counter(word for pair in phrases for side in pair for word in set(words(side)))
    held_out = []
    for pair in [first, *(phrases[i] for i in rng.permutation(len(phrases)) if phrases[i] != first)]:
        own = {word for side in pair for word in words(side)}
        if len(held_out) < HELD_OUT and all(left[word] > 4 for word in own):
            held_out.append(pair)
            left.subtract(own)
    return [pair for pair in phrases if pair not in held_out], held_out


class Vocabulary:
    """The words of a language by number."""

    def __init__(self, phrases):
        self.words = [START, END, *sorted({word for phrase in phrases for word in words(phrase)})]
        self.numbers = {word: number for number, word in enumerate(self.words)}

    def rows(self, sentences):
        """Return sentences as rows of numbers, filled up at the end, and their lengths."""
        lengths = np.array([len(sentence) for sentence in sentences])
        rows = np.zeros((len(sentences), lengths.max()), int)
        for row, sentence in zip(rows, sentences, strict=True):
            row[: len(sentence)] = [self.numbers[word] for word in sentence]
        return rows, lengths


class Translator:
    """An encoder that reads the German words, and a decoder that says the next English word."""

    def __init__(self, german, english, rng):
        self.german, self.english = german, english
        self.read = Embedding(len(german.words), WIDTH, rng=rng)
        self.write = Embedding(len(english.words), WIDTH, rng=rng)
        for embedding in (self.read, self.write):  # small at first, so that what is learned outweighs what was random
            embedding.weight[...] *= 0.2
        self.places = 0.2 * sinusoidal_positions(LONGEST, WIDTH)
        self.encoder = [Block(WIDTH, HEADS, rng) for _ in range(DEPTH)]
        self.decoder = [Block(WIDTH, HEADS, rng, context=True) for _ in range(DEPTH)]
        self.norms = LayerNorm(WIDTH), LayerNorm(WIDTH)
        self.choose = Linear(WIDTH, len(english.words), rng=rng)

    def __call__(self, tape, german, n, english, m):
        """Return the logits of the next English word at each place; n and m are the lengths of the rows."""
        x = tape.drop(tape(add, tape(self.read, german), self.places[: german.shape[1]]))
        for block in self.encoder:
            x = block(tape, x, mask=KeyLengths(n) & QueryLengths(n))
        context = tape(self.norms[0], x)
        x = tape.drop(tape(add, tape(self.write, english), self.places[: english.shape[1]]))
        for block in self.decoder:
            x = block(tape, x, Causal() & QueryLengths(m), context, KeyLengths(n) & QueryLengths(m))
        return tape(self.choose, tape(self.norms[1], x))

    def translate(self, sentences):
        """Return the likeliest English words of each sentence, and their attention to its words."""
        german, n = self.german.rows(list(map(words, sentences)))
        start, end = (self.english.numbers[mark] for mark in (START, END))
        said = np.full((len(sentences), 1), start)
        while said.shape[1] < LONGEST and not (said == end).any(axis=1).all():
            tape = Tape()
            logits = self(tape, german, n, said, np.full(len(said), said.shape[1]))
            said = np.append(said, logits[:, -1:].argmax(axis=-1), axis=1)
        weights = tape.attention(self.decoder[-1].cross).mean(axis=1)
        texts = [" ".join(self.english.words[number] for number in row[1:]).split(END)[0].split() for row in said]
        return [(text, w[: len(text), :length]) for text, w, length in zip(texts, weights, n, strict=True)]


def loss_of_batches(model, phrases, rng, size=64):
    """Return the function that computes the loss of a random batch on a tape."""

    def loss_of(tape):
        batch = [phrases[i] for i in rng.choice(len(phrases), size)]
        german, n = model.german.rows([words(pair[0]) for pair in batch])
        english, m = model.english.rows([[START, *words(pair[1])] for pair in batch])
        targets, _ = model.english.rows([[*words(pair[1]), END] for pair in batch])
        logits = model(tape, german, n, english, m)
        return tape(cross_entropy, logits, targets, np.arange(targets.shape[1]) < m[:, None])

    return loss_of


def score(model, phrases):
    """Return the phrases, each with what the model says of it and how many of its words are right in their places."""
    said = [text for text, _ in model.translate([german for german, _ in phrases])]
    return [
        (german, english, " ".join(text), sum(a == b for a, b in zip(words(english), text, strict=False)))
        for (german, english), text in zip(phrases, said, strict=True)
    ]


def show(console, title, scores):
    """Print a table of phrases, the wrong ones first."""
    table = Table("German", "English", "what it says", title=title, title_justify="left")
    for german, english, said, _ in sorted(scores, key=lambda row: row[1].lower() == row[2]):
        table.add_row(german, english, said if english.lower() == said else f"[red]{said}")
    console.print(table)


def share(scores):
    """Return how many phrases are right, and how many words."""
    phrases = sum(english.lower() == said for _, english, said, _ in scores)
    places = sum(max(len(words(english)), len(words(said))) for _, english, said, _ in scores)
    hits = sum(row[3] for row in scores)
    return f"{phrases} of {len(scores)} phrases ({phrases / len(scores):.0%}), {hits / places:.0%} of the words"


def print_attention(console, german, english, weights):
    """Print the attention as shades: a row for each English word, a column for each German one."""
    width = max(map(len, english), default=0)
    console.print(" " * width, *(f"{word:^7}" for word in german))
    for word, row in zip(english, weights, strict=True):
        console.print(f"{word:>{width}}", *(" ░▒▓█"[min(int(5 * weight), 4)] * 7 for weight in row))


def draw(pairs, path):
    """Write the picture of the attention between the words of some translations."""
    figure = Figure(figsize=(3.2 * len(pairs), 3.4), layout="constrained")
    for ax, (german, english, weights) in zip(figure.subplots(1, len(pairs)), pairs, strict=True):
        ax.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        ax.set_xticks(range(len(german)), german, rotation=60)
        ax.set_yticks(range(len(english)), english)
    figure.suptitle("Attention weights: English words (rows) over German words")
    figure.savefig(path, dpi=70)


def main():
    """Train, score and draw."""
    given = options(__doc__.splitlines()[0], steps=1000, quick=30)
    rng = np.random.default_rng(given.seed)
    lines = Path(__file__).with_name("phrases.tsv").read_text(encoding="utf-8").splitlines()
    phrases = [tuple(line.split("\t")) for line in lines]
    known, held_out = split(phrases, ("Wie geht es dir", "how are you"), rng)
    model = Translator(*(Vocabulary(side) for side in zip(*phrases, strict=True)), rng)
    train(loss_of_batches(model, known, rng), given.steps, 2e-3, rng, f"{len(known)} phrases")

    console, scores = Console(highlight=False), score(model, held_out)
    show(console, f"{len(held_out)} phrases that it never saw", scores)
    console.print("right of those it learned:  ", share(score(model, known[::8])))
    console.print("right of those it never saw:", share(scores))
    shown = [(words(german), *said) for german, said in zip(SHOWN, model.translate(SHOWN), strict=True)]
    for sentence, (german, english, weights) in zip(SHOWN, shown, strict=True):
        console.print(f"\n{sentence} -> {' '.join(english)}")
        print_attention(console, german, english, weights)
    path = given.out / "translate.png"
    draw(shown, path)
    print(f"\nthe attention between the words: {path}")


if __name__ == "__main__":
    main()
