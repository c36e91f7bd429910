"""What a process pays once: the import, and the first call without and with kernels compiled before."""

import os
import shutil
import tempfile

import numpy as np

import sdpa_ref

from .common import load, warm

_CALL = """
import numpy, sdpa_ref
x = numpy.ones((1, 2, 8, 16), numpy.float32)
sdpa_ref.sdpa(x, x, x, backend={backend!r})
"""
_CACHE = "SDPA_REF_CACHE_DIR"


class Import:
    """A process that imports the library and does nothing else."""

    number = 1
    repeat = (5, 10, 10.0)
    warmup_time = 0

    def timeraw_import(self):
        """Import; NumPy is imported with it."""
        return "import sdpa_ref"

    def timeraw_import_after_numpy(self):
        """Import, where NumPy is there already."""
        return "import sdpa_ref", "import numpy"


class FirstCall:
    """A process that imports the library and makes one small call, with kernels to compile or in the cache."""

    params = (["reference", "numba"], ["empty", "filled"])
    param_names = ("backend", "kernel_cache")
    number = 1
    repeat = (2, 5, 20.0)
    warmup_time = 0
    timeout = 300

    def setup(self, backend, kernel_cache):
        """Make a folder for the cache; fill it with a call where it is to be full."""
        load(backend)
        self.folder = os.environ[_CACHE] = tempfile.mkdtemp()
        if kernel_cache == "filled":
            x = np.ones((1, 2, 8, 16), np.float32)
            warm(lambda: sdpa_ref.sdpa(x, x, x, backend=backend))

    def timeraw_call(self, backend, kernel_cache):
        """Import and call."""
        folder = self.folder if kernel_cache == "filled" else tempfile.mkdtemp(dir=self.folder)
        return _CALL.format(backend=backend), f"import os; os.environ[{_CACHE!r}] = {folder!r}"

    def teardown(self, backend, kernel_cache):
        """Remove the folder; there is none where the benchmark was skipped."""
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)
