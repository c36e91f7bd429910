"""The forward pass: time, accuracy beside it, and how near it comes to the machine's matrix product."""

import numpy as np

import sdpa_ref

from .common import BACKENDS, CASES, case, forward, inputs, load, module, on_device, on_host, waiting, warm


class Forward:
    """One call of `sdpa` with the inputs of a case."""

    params = (BACKENDS, CASES)
    param_names = ("backend", "case")
    warmup_time = 0.1
    repeat = (3, 10, 2.0)

    def setup(self, backend, name):
        """Build the inputs, and call once."""
        self.case = case(name, backend)
        self.given = inputs(self.case, backend)
        self.run = forward(self.case, self.given, backend)

    def time_forward(self, backend, name):
        """Call."""
        self.run()

    def track_error(self, backend, name):
        """Return the largest error, by the largest that the error budget allows."""
        cases = module("sdpa_ref.bench.cases")
        exact = cases.truth(self.case, cases.inputs(self.case))
        output = on_host(self.run())[:, :, exact.rows].astype(np.float64)
        return float(abs(output - exact.output).max()) / exact.budget

    track_error.unit = "error budgets"


class MatrixRate:
    """How near a call comes to a float32 product of NumPy, in operations a second: the two take turns."""

    params = (["reference", "numba"], ["prefill-512", "vit", "unet", "prefill-2048", "prefill-2048-wide"])
    param_names = ("backend", "case")

    def setup(self, backend, name):
        """Build the inputs, and call once."""
        self.case = case(name, backend)
        self.run = forward(self.case, inputs(self.case, backend), backend)

    def track_fraction(self, backend, name):
        """Return the operations a second over the kept pairs, by those of the product."""
        clock = module("sdpa_ref.bench.clock")
        product, flops = clock.matrix_product()
        times = clock.by_turns({"ours": self.run, "product": warm(product)}, 0.2)
        ours, yardstick = (float(np.median(times[who])) for who in ("ours", "product"))
        return self.case.flops / ours / (flops / yardstick)

    track_fraction.unit = "of a matrix product"


class Events:
    """A call on a GPU by its own clock: what it computes, without the time in which the host queues it."""

    params = (["cupy"], CASES)
    param_names = ("backend", "case")

    def setup(self, backend, name):
        """Build the inputs, and call once."""
        found = case(name, backend)
        self.run = forward(found, inputs(found, backend), backend)

    def track_events(self, backend, name):
        """Return the median time between two events around a call."""
        import cupy

        times = []
        for _ in range(20):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            self.run()
            stop.record()
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop) / 1000)
        return float(np.median(times))

    track_events.unit = "seconds"


class Overhead:
    """The least that a call takes: one query, one key, one number each."""

    params = (BACKENDS, ["plain", "mask", "state"])
    param_names = ("backend", "call")
    warmup_time = 0.1
    repeat = (5, 20, 1.0)

    def setup(self, backend, name):
        """Build the inputs, and call once."""
        load(backend)
        x = on_device(backend, np.ones((1, 1), np.float32))
        mask = sdpa_ref.Causal() if name == "mask" else None
        function = sdpa_ref.sdpa_state if name == "state" else sdpa_ref.sdpa
        self.run = warm(waiting(backend, lambda: function(x, x, x, mask=mask, backend=backend)))

    def time_call(self, backend, name):
        """Call."""
        self.run()
