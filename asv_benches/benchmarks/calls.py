"""Small calls that are not alike: whether each is as fast as if it had been made before."""

from functools import partial
from itertools import cycle

import numpy as np

import sdpa_ref

from .common import BACKENDS, load, module, skip

LOOPS = ["calls-decode", "calls-decode-window", "calls-static-cache", "calls-LHE", "calls-boolean", "calls-lengths"]


class Calls:
    """A loop of ``sdpa-ref bench``: a call of it, and a call by one that is the same every time."""

    params = (BACKENDS[:2], LOOPS)
    param_names = ("backend", "loop")

    def setup(self, backend, name):
        """Make every step once."""
        load(backend)
        known = module("sdpa_ref.bench.loops")
        loop = {one.name: one for one in known.LOOPS}.get(name) or skip(f"this version has no loop {name!r}")
        self.step = loop.ours(partial(sdpa_ref.sdpa, backend=backend), known.data())
        self.steps = loop.steps
        for i in range(self.steps):
            self.step(i)
        self.order = cycle(range(self.steps))

    def time_call(self, backend, name):
        """Make the next step."""
        self.step(next(self.order))

    def track_by_fixed(self, backend, name):
        """Return the time of a call of the loop by that of a call of its middle step."""
        middle = self.steps // 2
        runs = {
            "loop": lambda: [self.step(i) for i in range(self.steps)],
            "fixed": lambda: [self.step(middle) for _ in range(self.steps)],
        }
        loop, fixed = (np.median(times) for times in module("sdpa_ref.bench.clock").by_turns(runs, 0.2).values())
        return float(loop / fixed)

    track_by_fixed.unit = "ratio"
