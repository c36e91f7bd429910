"""Machine code for every architecture within `budget.json`: registers, no spills, matrix units and copies in use.

By default a few kernels for two architectures, all with ``pytest --hypothesis-profile nightly``. After a change that is
meant, ``python tests/gpu/test_cubins.py`` writes the budget anew.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

pytest.importorskip("ml_dtypes", reason="kernels for bfloat16 are planned for ml_dtypes.bfloat16")
pytest.importorskip("platformdirs", reason="the cache of compiled kernels lies where platformdirs says")

import ml_dtypes
from sdpa_cupy import nvrtc
from sdpa_cupy.compile import compilation, resources
from sdpa_cupy.plan import make_plan

from sdpa_ref import ALiBi
from sdpa_ref.testing import problem_of

NIGHTLY = settings.default.max_examples >= 1000
BUDGET = Path(__file__).with_name("budget.json")
GRANULE = 8  # threads get registers in whole eights
WATCHED = ("HMMA", "LDSM", "LDGSTS")  # matrix units, what loads for them, asynchronous copies
SASS = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", re.MULTILINE)
ARCHS = (75, 80, 86, 89, 90, 100, 120)
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
PROBLEMS = {f"{dtype}, E = {E}": dict(dtype=dtype, E=E) for dtype in TYPES for E in (64, 128, 256)}
PROBLEMS |= {
    f"{dtype}, E = 128, ALiBi": dict(dtype=dtype, E=128, bias=ALiBi([1.0])) for dtype in ("float16", "float32")
}
PROBLEMS |= {"float16, E = 128, few rows": dict(dtype="float16", E=128, L=4, S=4096)}
ALL = [f"{problem}, sm_{arch}" for problem in PROBLEMS for arch in ARCHS]
EVERY_DAY = ["float16, E = 64, sm_80", "bfloat16, E = 128, sm_90"]


def launches(arch, dtype, E, L=1024, S=1024, **options):
    """Return the launches for a problem on an architecture."""
    query, key = np.zeros((1, L, E), TYPES[dtype]), np.zeros((1, S, E), TYPES[dtype])
    problem = problem_of(query, key, key, query_offset="end" if options else None, **options)
    return make_plan(problem, frozenset({"output", "lse", "weights"}), arch).launches


def disassembler():
    """Return where nvdisasm is, of the wheel nvidia-cuda-nvdisasm or of a toolkit, or None."""
    places = find_spec("nvidia").submodule_search_locations if find_spec("nvidia") else ()
    return next((file for place in places for file in Path(place).glob("*/bin/nvdisasm*")), shutil.which("nvdisasm"))


def measured(name):
    """Return what each kernel of a problem takes and uses."""
    problem, arch = name.rsplit(", sm_", 1)
    found = launches(int(arch), **PROBLEMS[problem])
    return {launch.kernel: measured_kernel(launch.kernel, launch.source, launch.defines, int(arch)) for launch in found}


@cache
def measured_kernel(kernel, source, defines, arch):
    code, log = compilation(source, defines, arch)
    registers, *local = resources(log)[kernel]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(code)
        text = subprocess.run([disassembler(), "-c", file], capture_output=True, text=True, check=True).stdout
    words = set(SASS.findall(text))
    return {"registers": registers, "local bytes": sum(local), "uses": [word for word in WATCHED if word in words]}


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.skipif(disassembler() is None, reason="no nvdisasm: pip install nvidia-cuda-nvdisasm")
@pytest.mark.parametrize("name", ALL if NIGHTLY else EVERY_DAY)
def test_cubins_stay_within_the_budget(name):
    budget = json.loads(BUDGET.read_text())[name]
    found = measured(name)
    assert found.keys() == budget.keys()
    for kernel, limits in budget.items():
        assert found[kernel]["registers"] <= limits["registers"], f"{kernel}: more registers than the budget has"
        assert found[kernel]["local bytes"] == 0, f"{kernel} keeps numbers in memory for which it has no register"
        assert found[kernel]["uses"] == limits["uses"]
    if not name.startswith("float64") and not name.endswith("sm_75"):
        assert found["attend"]["uses"] == list(WATCHED)


def test_the_budget_is_for_what_is_measured():
    assert set(json.loads(BUDGET.read_text())) == set(ALL)


def write_budget():
    """Write down what the kernels take now, registers rounded up to what the hardware gives."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        budget = dict(zip(ALL, pool.map(measured, ALL), strict=True))
    for name, kernels in budget.items():
        for kernel, found in kernels.items():
            if found["local bytes"]:
                raise SystemExit(f"{kernel} for {name} spills: the budget stays as it was")
            kernels[kernel] = {"registers": -(-found["registers"] // GRANULE) * GRANULE, "uses": found["uses"]}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(kernels)}" for name, kernels in budget.items())
    BUDGET.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    write_budget()
