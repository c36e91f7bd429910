"""Ratios to other libraries: both sides take turns in one process, so a slow or busy machine slows both."""

from .common import CASES, THREADS, case, skip


class Peers:
    """How many times as long as ours a peer takes: above 1 this library is faster."""

    params = (
        ["numba"],
        ["torch", "onnxruntime", "openvino", "jax"],
        [name for name in CASES if name != "window-16384"],
    )
    param_names = ("backend", "peer", "case")
    timeout = 120

    def setup(self, backend, peer, name):
        """Find the peer, or skip."""
        self.case = case(name, backend)
        try:
            __import__(peer)
        except ImportError as reason:
            skip(reason)

    def track_ratio(self, backend, peer, name):
        """Return the time of the fastest right way of the peer by ours."""
        from sdpa_ref.bench.measure import measure

        found = measure(self.case, [backend, peer], THREADS, 0.5)["contenders"]
        for who in (backend, peer):
            if "median" not in found[who]:
                skip(f"{who}: {found[who]['reason']}")
        return found[peer]["median"] / found[backend]["median"]

    track_ratio.unit = "peer / ours"
