"""What the examples share: a tape that leads gradients back, the parts of a network that sdpa_ref leaves out, and Adam.

A *step* is a layer of sdpa_ref, or a function of this file that returns its value and its vector-Jacobian product: the
function that takes the gradient of the loss by the value and returns those by the inputs.
"""

import argparse
import math
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from sdpa_ref import Linear, MultiHeadAttention
from sdpa_ref.layers import LayerGradients


@contextmanager
def needed():
    """End the program, and say what to install, where a module that is imported within is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SystemExit(f"The examples need {error.name}: pip install -e '.[examples]'") from None


with needed():
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeElapsedColumn


class Tape:
    """Records the steps of a computation, and goes back through them for the gradients.

    A model is written as one computation, ``y = tape(step, x)`` in place of ``y = step(x)``; nothing else is needed to
    train it. Arrays are told apart by identity: every step has to be on the tape, and none may write to its input.

    In training there is an `rng`, with which `drop` drops a tenth of the numbers, so that the model relies on none.
    """

    def __init__(self, rng=None):
        self.steps, self.rng = [], rng

    def __call__(self, step, *inputs, **options):
        """Return the value of the step."""
        value, vjp = getattr(step, "value_and_vjp", step)(*inputs, **options)
        self.steps.append((step, inputs, options, value, vjp))
        return value

    def drop(self, x):
        """Return x, in training without a tenth of its numbers."""
        if self.rng is None:
            return x
        kept = (self.rng.random(x.shape, np.float32) > 0.1) / np.float32(0.9)
        return self(lambda x: (x * kept, lambda gradient: (gradient * kept,)), x)

    def gradients(self, loss):
        """Return the weights of all layers that had a part in the loss, each with its gradient."""
        gradients, weights = {id(loss): np.ones_like(loss)}, {}
        for step, inputs, _, value, vjp in reversed(self.steps):
            if id(value) not in gradients:
                continue
            by_input = vjp(gradients.pop(id(value)))
            pairs = list(zip(inputs, by_input, strict=False))
            if hasattr(step, "state_dict"):
                own = step.state_dict()
                weights |= {id(weight): weight for weight in own.values()}
                pairs += [(own[name], gradient) for name, gradient in by_input.weights.items()]
            for array, gradient in pairs:
                if gradient is not None:  # what is used twice has the sum
                    gradients[id(array)] = gradients.get(id(array), 0) + gradient
        return [(weight, gradients[key]) for key, weight in weights.items()]

    def attention(self, layer):
        """Return the attention weights, ``(..., H, L, S)``, of the last use of this layer."""
        _, inputs, options, *_ = next(entry for entry in reversed(self.steps) if entry[0] is layer)
        return layer.with_weights(*inputs, **options)[1]


class Adam:
    """Steps against the gradient, each weight at its own pace (Kingma and Ba, 2015)."""

    def __init__(self):
        self.count, self.moments = 0, {}

    def update(self, gradients, rate):
        """Write a step of this rate into the weights."""
        self.count += 1
        for weight, gradient in gradients:
            if id(weight) not in self.moments:
                self.moments[id(weight)] = np.zeros_like(weight), np.zeros_like(weight)
            mean, square = self.moments[id(weight)]
            mean += 0.1 * (gradient - mean)
            square += 0.01 * (gradient * gradient - square)
            unbiased = mean / (1 - 0.9**self.count), square / (1 - 0.99**self.count)
            weight -= rate * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)


def train(loss_of, steps, rate, rng, title):
    """Return the losses of this many steps of training.

    ``loss_of(tape)`` computes the loss of a new batch on the tape. The rate rises at the start, while Adam's averages
    are of few gradients, and falls along a cosine, so that the last steps settle.
    """
    adam, losses = Adam(), []
    columns = "{task.description}", BarColumn(), "{task.completed}/{task.total}", TimeElapsedColumn()
    console = Console()
    tenth = -(-steps // 10)
    with Progress(*columns, "loss {task.fields[loss]}", console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=steps, loss="...")
        for step in range(steps):
            tape = Tape(rng)
            loss = loss_of(tape)
            schedule = min(1, (step + 1) / (0.1 * steps)) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
            adam.update(tape.gradients(loss), rate * schedule)
            losses.append(float(loss))
            mean = f"{np.mean(losses[-20:]):.3f}"
            progress.update(task, advance=1, loss=mean)
            if not console.is_terminal and (step + 1) % tenth == 0:
                print(f"{title}: step {step + 1} of {steps}, loss {mean}", flush=True)
    first, last = np.mean(losses[:tenth]), np.mean(losses[-tenth:])
    print(f"loss: {first:.3f} in the first tenth of the steps, {last:.3f} in the last")
    return losses


def add(x, y):
    """Return ``x + y``; y may lack leading axes."""
    return x + y, lambda gradient: (gradient, gradient.sum(axis=tuple(range(x.ndim - y.ndim))))


def relu(x):
    """Return what of x is positive, and 0 elsewhere."""
    return np.maximum(x, 0), lambda gradient: (np.where(x > 0, gradient, 0),)


def cross_entropy(logits, targets, counts):
    """Return the mean surprise at the targets, ``(...)`` numbers of logits, where `counts` is true."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    share = (counts / counts.sum()).astype(logits.dtype)
    chosen = np.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]

    def vjp(gradient):
        by_logits = np.exp(log_probs)
        by_logits[(*np.indices(targets.shape), targets)] -= 1
        return (by_logits * (gradient * share)[..., None],)

    return -(chosen * share).sum(), vjp


class LayerNorm:
    """Shifts and scales each token to mean 0 and variance 1, then by learned numbers."""

    def __init__(self, width):
        self.weight, self.bias = np.ones(width, np.float32), np.zeros(width, np.float32)

    def state_dict(self):
        """Return the weights by name."""
        return {"weight": self.weight, "bias": self.bias}

    def value_and_vjp(self, x):
        """Return the tokens, ``(..., width)``, and the vector-Jacobian product."""
        centred = x - x.mean(axis=-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
        unit = centred / spread

        def vjp(gradient):
            rows = tuple(range(x.ndim - 1))
            scaled = gradient * self.weight
            along = unit * (scaled * unit).mean(axis=-1, keepdims=True)
            by_x = (scaled - scaled.mean(axis=-1, keepdims=True) - along) / spread
            weights = {"weight": (gradient * unit).sum(axis=rows), "bias": gradient.sum(axis=rows)}
            return LayerGradients(by_x, None, weights)

        return unit * self.weight + self.bias, vjp


class Block:
    """A block of a transformer: attention over itself, attention over a context where there is one, two linear maps."""

    def __init__(self, width, heads, rng, context=False):
        self.attention = MultiHeadAttention(width, heads, rng=rng)
        self.cross = MultiHeadAttention(width, heads, rng=rng) if context else None
        self.wide, self.narrow = Linear(width, 4 * width, rng=rng), Linear(4 * width, width, rng=rng)
        self.norms = [LayerNorm(width) for _ in range(3)]

    def __call__(self, tape, x, mask=None, context=None, context_mask=None):
        """Return the tokens, each step's result added to what came in."""
        x = tape(add, x, tape.drop(tape(self.attention, tape(self.norms[0], x), mask=mask)))
        if self.cross:
            x = tape(add, x, tape.drop(tape(self.cross, tape(self.norms[1], x), context, mask=context_mask)))
        hidden = tape(relu, tape(self.wide, tape(self.norms[2], x)))
        return tape(add, x, tape.drop(tape(self.narrow, hidden)))


def options(about, steps, quick):
    """Return the options of the command line, with `steps` steps of training by default and `quick` with --quick."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same result")
    parser.add_argument("--steps", type=int, default=steps, help="of training (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="for the picture")
    parser.add_argument("--quick", action="store_const", dest="steps", const=quick, help=f"{quick} steps only")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    return given
