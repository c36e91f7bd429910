"""Learns to read handwritten digits with a small vision transformer, and shows which parts of a digit it attends to.

Run it with ``python examples/vit_digits.py``. The images are real, 8 x 8 pixels each, and come with scikit-learn.
"""

import numpy as np
from training import Block, LayerNorm, Tape, add, cross_entropy, needed, options, train

from sdpa_ref import Embedding, Linear, patchify

with needed():
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits

PATCH, WIDTH, HEADS, DEPTH, BATCH = 2, 48, 4, 2, 64
TEST = 360


class Reader:
    """A transformer over the patches of an image, and one token more that gathers what they say."""

    def __init__(self, rng):
        self.project = Linear(PATCH * PATCH, WIDTH, rng=rng)
        self.places = Embedding((8 // PATCH) ** 2 + 1, WIDTH, rng=rng)
        self.blocks = [Block(WIDTH, HEADS, rng) for _ in range(DEPTH)]
        self.norm, self.choose = LayerNorm(WIDTH), Linear(WIDTH, 10, rng=rng)

    def __call__(self, tape, images):
        """Return the logits of the ten digits for images, ``(B, 8, 8)``."""
        patches = tape(self.project, patchify(images[..., None], PATCH))
        x = tape(add, tape(with_gatherer, patches), tape(self.places, np.arange(self.places.num_embeddings)))
        for block in self.blocks:
            x = block(tape, x)
        return tape(self.choose, tape(self.norm, tape(gatherer, x)))


def with_gatherer(tokens):
    """Return the tokens with one of zeros in front."""
    return np.pad(tokens, ((0, 0), (1, 0), (0, 0))), lambda gradient: (gradient[:, 1:],)


def gatherer(tokens):
    """Return the first of the tokens."""

    def vjp(gradient):
        everywhere = np.zeros_like(tokens)
        everywhere[:, 0] = gradient
        return (everywhere,)

    return tokens[:, 0], vjp


def shifted(images, rng):
    """Return the images moved by up to one pixel each way: 1400 digits are few, and where one stands says nothing."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), axis=(1, 2))
    return windows[(np.arange(len(images)), *rng.integers(0, 3, (2, len(images))))]


def draw(images, weights, said, path):
    """Write the picture of the attention of the gathering token: a digit in each column, a head in each row."""
    rows = 1 + weights.shape[1]
    figure = Figure(figsize=(1.1 * len(images), 1.15 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, len(images))
    for column, (image, heads, digit) in enumerate(zip(images, weights, said, strict=True)):
        axes[0, column].imshow(image, cmap="gray_r")
        axes[0, column].set_title(f"{digit}")
        for ax, head in zip(axes[1:, column], heads, strict=True):
            ax.imshow(image, cmap="gray_r", alpha=0.4)
            ax.imshow(head.reshape(8 // PATCH, -1), cmap="Blues", alpha=0.7, extent=(-0.5, 7.5, 7.5, -0.5))
    for row, axis in enumerate(axes[:, 0]):
        axis.set_ylabel(f"head {row - 1}" if row else "image")
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.suptitle("What it reads, and the attention weights of the patches")
    figure.savefig(path, dpi=70)


def main():
    """Train, test and draw."""
    given = options(__doc__.splitlines()[0], steps=2000, quick=20)
    rng = np.random.default_rng(given.seed)
    images, digits = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 8 - 1).astype(np.float32)
    order = rng.permutation(len(images))
    test, rest = order[:TEST], order[TEST:]
    model = Reader(rng)

    def loss_of(tape):
        batch = rng.choice(rest, BATCH)
        return tape(cross_entropy, model(tape, shifted(images[batch], rng)), digits[batch], np.ones(BATCH))

    train(loss_of, given.steps, 3e-3, None, f"{len(rest)} digits")
    tape = Tape()
    said = model(tape, images[test]).argmax(axis=-1)
    wrong = int((said != digits[test]).sum())
    print(f"{len(test)} digits that it never saw: {1 - wrong / len(test):.1%} right, {wrong} wrong")
    for digit, truth in [(s, t) for s, t in zip(said, digits[test], strict=True) if s != t][:10]:
        print(f"  read {digit}, and it is {truth}")
    shown = [list(digits[test]).index(digit) for digit in range(10)]
    attended = tape.attention(model.blocks[-1].attention)[shown, :, 0, 1:]
    path = given.out / "vit_digits.png"
    draw(images[test][shown], attended, said[shown], path)
    print(f"the attention weights: {path}")


if __name__ == "__main__":
    main()
