"""Learns to remove noise with a small U-Net, with and without spatial attention, and shows what attention adds.

    python examples/denoise.py

The images are walls of 16 tiles. Two kinds of tile, others on each wall, lie in random places. So much noise is on them
that a tile is best restored from all tiles of its kind, and those may be anywhere.
"""

import numpy as np
from matplotlib.figure import Figure
from training import Tape, add, options, relu, train

from sdpa_ref.layers import Conv1x1, SpatialAttention

ACROSS, BATCH, NOISE = 4, 16, 1.5  # tiles; images; standard deviation of the noise, where the image is -1 and 1


def walls(count, rng):
    """Return images, ``(count, 1, 32, 32)``: tiles of 4 x 4 cells of 2 x 2 pixels."""
    kinds = rng.choice(np.float32([-1, 1]), (count, 2, 4, 4)).repeat(2, axis=-1).repeat(2, axis=-2)
    places = rng.integers(0, 2, (count, ACROSS, ACROSS))
    tiles = kinds[np.arange(count)[:, None, None], places]
    return tiles.swapaxes(2, 3).reshape(count, 1, 8 * ACROSS, 8 * ACROSS)


def neighbours(x):
    """Return the 3 x 3 neighbours of each position as its channels."""
    b, c, h, w = x.shape
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
    """A U-Net: down to 8 x 8 positions and up again, where what was seen on the way down is added."""

    def __init__(self, attention, rng):
        def convolution(channels_in, channels_out):
            return Conv1x1(9 * channels_in, channels_out, rng=rng)

        self.down = [convolution(1, 8), convolution(32, 16), convolution(64, 64)]
        if attention:
            self.middle = [SpatialAttention(64, heads=4, dim_head=32, rng=rng)]  # 32 832 weights
        else:
            self.middle = [Conv1x1(64, 256, rng=rng), relu, Conv1x1(256, 64, rng=rng)]  # 33 088
        self.up = [convolution(64, 64), convolution(16, 32), convolution(8, 8)]
        self.last = Conv1x1(8, 1, rng=rng)

    def __call__(self, tape, x):
        """Return the images without the noise."""
        seen = []
        for convolution in self.down:
            x = tape(relu, tape(convolution, tape(neighbours, tape(fold, x) if seen else x)))
            seen.append(x)
        for step in self.middle:
            x = tape(step, x)
        for convolution in self.up:
            x = tape(add, x, seen.pop())
            x = tape(relu, tape(convolution, tape(neighbours, x)))
            if seen:
                x = tape(unfold, x)
        return tape(self.last, x)


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
    given = options(__doc__.splitlines()[0], steps=500, quick=15)
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
