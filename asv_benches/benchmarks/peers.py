"""Ratios to other libraries: both sides take turns in one process, so a slow or busy machine slows both."""

from .common import CASES, THREADS, case, module, skip


class Peers:
    """How many times as long as ours a peer takes: above 1 this library is faster."""

    params = (["numba"], ["torch", "onnxruntime", "openvino", "jax"], [one for one in CASES if one != "window-16384"])
    param_names = ("backend", "peer", "case")
    timeout = 600  # the first of a commit compiles

    def setup(self, backend, peer, name):
        """Measure: asv lets a benchmark be skipped here and not later, and only now a peer says what it does not do."""
        found = case(name, backend)
        module(peer)
        timed = module("sdpa_ref.bench.measure").measure(found, [backend, peer], THREADS, 0.5)["contenders"]
        for who in (backend, peer):
            if "median" not in timed[who]:
                skip(f"{who}: {timed[who]['reason']}")
        self.ratio = timed[peer]["median"] / timed[backend]["median"]

    def track_ratio(self, backend, peer, name):
        """Return the time of the fastest right way of the peer by ours."""
        return self.ratio

    track_ratio.unit = "peer / ours"
