"""Memory: of the whole process, and of one call alone."""

from .common import BACKENDS, THREADS, case, forward, inputs, load, module, skip


class Memory:
    """The peak of a process that builds the inputs of a case and calls `sdpa`."""

    params = (BACKENDS, ["tiny-single", "prefill-512", "decode", "prefill-2048", "window-16384"])
    param_names = ("backend", "case")

    def setup(self, backend, name):
        """Build the inputs."""
        self.case = case(name, backend)
        self.given = inputs(self.case, backend)

    def peakmem_forward(self, backend, name):
        """Call."""
        forward(self.case, self.given, backend)


class Extra:
    """What a call takes beside its inputs and its output: two heads of width 64, and L queries and keys."""

    params = (BACKENDS, [512, 2048, 8192])
    param_names = ("backend", "L")

    def setup(self, backend, L):
        """Skip where it cannot be measured."""
        if load(backend).ARRAYS != "numpy":
            skip("the memory of a GPU is not the process's")
        if backend == "reference" and L > 2048:
            skip("the reference holds all scores at once: it is not run for so many")
        self.peak_memory = module("sdpa_ref.bench.measure").peak_memory

    def track_extra(self, backend, L):
        """Return the peak during the call, less what there was before and less the output."""
        return self.peak_memory(backend, L, THREADS)["extra"]

    track_extra.unit = "bytes"
