"""Learns to remove noise with a small U-Net, with and without spatial attention, and shows what attention adds.

Run it with ``python examples/denoise.py``. The images are walls of 64 small tiles. Each wall has three kinds of tile,
which no other wall has, in random places. Its neighbours say nothing about a tile, so that it is best restored from all
tiles of its kind, wherever they are.
"""

import numpy as np
from training import Tape, add, needed, options, relu, train

from sdpa_ref.layers import Conv1x1, SpatialAttention

with needed():
    from matplotlib.figure import Figure

SIDE, TILE, KINDS, BATCH = 32, 4, 3, 16
NOISE = 1.0  # its standard deviation; without it a pixel is -1 or 1


def walls(count, rng):
    """Return images, ``(count, 1, SIDE, SIDE)``."""
    kinds = rng.choice(np.float32([-1, 1]), (count, KINDS, TILE, TILE))
    places = rng.integers(0, KINDS, (count, SIDE // TILE, SIDE // TILE))
    tiles = kinds[np.arange(count)[:, None, None], places]
    return tiles.swapaxes(2, 3).reshape(count, 1, SIDE, SIDE)


def neighbours(x):
    """Return the 3 x 3 neighbours of each position as its channels."""
    h, w = x.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    shifts = [np.s_[:, :, i : i + h, j : j + w] for i, j in np.ndindex(3, 3)]

    def vjp(gradient):
        by_padded = np.zeros_like(padded)
        for shift, part in zip(shifts, np.split(gradient, 9, axis=1), strict=True):
            by_padded[shift] += part
        return (by_padded[:, :, 1:-1, 1:-1],)

    return np.concatenate([padded[shift] for shift in shifts], axis=1), vjp


def fold(x):
    """Return squares of 2 x 2 positions as one position with four times the channels."""
    return _fold(x), lambda gradient: (_unfold(gradient),)


def unfold(x):
    """Return each position as 2 x 2 positions with a quarter of the channels: `fold` undone."""
    return _unfold(x), lambda gradient: (_fold(gradient),)


def _fold(x):
    b, c, h, w = x.shape
    return x.reshape(b, c, h // 2, 2, w // 2, 2).transpose(0, 1, 3, 5, 2, 4).reshape(b, 4 * c, h // 2, w // 2)


def _unfold(x):
    b, c, h, w = x.shape
    return x.reshape(b, c // 4, 2, 2, h, w).transpose(0, 1, 4, 2, 5, 3).reshape(b, c // 4, 2 * h, 2 * w)


def squares(x, target):
    """Return the mean squared difference."""
    difference = x - target
    return np.mean(difference**2), lambda gradient: (gradient * 2 / difference.size * difference,)


class UNet:
    """A U-Net: down to 8 x 8 positions and up again, where what was there on the way down is added."""

    def __init__(self, attention, rng):
        self.lift, self.last = Conv1x1(1, 4, rng=rng), Conv1x1(4, 1, rng=rng)
        self.down = [Conv1x1(9 * channels, channels, rng=rng) for channels in (16, 64)]
        self.up = [Conv1x1(9 * channels, channels, rng=rng) for channels in (64, 16)]
        if attention:
            self.middle = [SpatialAttention(64, heads=4, dim_head=32, rng=rng)]  # 32 832 weights
        else:
            self.middle = [Conv1x1(64, 256, rng=rng), relu, Conv1x1(256, 64, rng=rng)]  # 33 088

    def __call__(self, tape, x):
        """Return the images without the noise."""
        x, seen = tape(self.lift, x), []
        for convolution in self.down:
            seen.append(x)
            x = convolved(tape, convolution, tape(fold, x))
        y = x
        for step in self.middle:
            y = tape(step, y)
        x = tape(add, x, y)
        for convolution in self.up:
            x = tape(add, tape(unfold, convolved(tape, convolution, x)), seen.pop())
        return tape(self.last, x)


def convolved(tape, convolution, x):
    """Return a map, and added to it what a convolution of 3 x 3 finds in it."""
    return tape(add, x, tape(relu, tape(convolution, tape(neighbours, x))))


def psnr(images, clean):
    """Return the peak signal-to-noise ratio in decibels; the images reach from -1 to 1."""
    return 10 * np.log10(4 / np.mean((images - clean) ** 2))


def trained(attention, given):
    """Return the network after training; with and without attention it sees the same images and the same noise."""
    rng = np.random.default_rng(given.seed)
    model = UNet(attention, np.random.default_rng(given.seed))

    def loss_of(tape):
        clean = walls(BATCH, rng)
        noisy = clean + NOISE * rng.standard_normal(clean.shape, np.float32)
        return tape(squares, model(tape, noisy), clean)

    train(loss_of, given.steps, 4e-3, None, "with attention" if attention else "without attention")
    return model


def draw(pictures, path):
    """Write the picture of some images, a column for each way to see them."""
    figure = Figure(figsize=(1.9 * len(pictures), 5.6), layout="constrained")
    axes = figure.subplots(3, len(pictures))
    for column, (title, images) in zip(axes.T, pictures.items(), strict=True):
        column[0].set_title(title, fontsize=10)
        for ax, image in zip(column, images, strict=False):
            ax.imshow(image[0], cmap="gray", vmin=-1.3, vmax=1.3)
            ax.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=70)


def main():
    """Train both networks, compare and draw."""
    given = options(__doc__.splitlines()[0], steps=400, quick=15)
    rng = np.random.default_rng([given.seed, 1])
    clean = walls(64, rng)
    noisy = clean + NOISE * rng.standard_normal(clean.shape, np.float32)
    pictures = {"noisy": noisy}
    for title, attention in (("without attention", False), ("with attention", True)):
        pictures[title] = trained(attention, given)(Tape(), noisy)
    for title, images in pictures.items():
        print(f"{title:<18} {psnr(images, clean):5.2f} dB on {len(clean)} walls that were not trained on")
    path = given.out / "denoise.png"
    draw({**pictures, "clean": clean}, path)
    print(f"the walls: {path}")


if __name__ == "__main__":
    main()
