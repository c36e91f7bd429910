"""What is shipped, what an import costs, and that NumPy is all it needs."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

import sdpa_ref

ROOT = Path(__file__).parents[2]
OPTIONAL = "numba cupy matplotlib PIL rich ml_dtypes safetensors platformdirs hypothesis pytest onnx torch".split()
OPTIONAL += ["dask", "distributed", "zarr"]
PROOFS = (
    "sdpa_ref/bench/",
    *(f"sdpa_ref/cli/{name}.py" for name in ("demo", "figures", "stages")),
    *(f"sdpa_ref/testing/{name}" for name in ("adapters/", "golden/", "museum/", "museum_command.py", "tightness.py")),
    *(f"sdpa_cupy/launch/{name}/" for name in ("fibers", "ptx")),
)
"""What stays in the checkout."""
# Refuses whatever is neither of the standard library nor NumPy nor of the project.
ONLY_NUMPY = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        own = "numpy", "sdpa_ref", "sdpa_numba", "sdpa_cupy", "sdpa_dask"
        if top not in sys.stdlib_module_names and top not in own:
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Refuse())
"""


def python(code, *, path=None):
    """Return what the code prints in a new interpreter, which must end well."""
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment, cwd="/"
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the project to which the folder ``backends/sdpa_x`` has been added, and nothing else."""
    pytest.importorskip("hatchling")
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("the tests do not lie in a checkout")
    copy = tmp_path_factory.mktemp("copy")
    clutter = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "build", "dist", "tests", "docs")
    shutil.copytree(ROOT, copy, ignore=clutter, dirs_exist_ok=True)
    (copy / "backends/sdpa_x").mkdir()
    (copy / "backends/sdpa_x/__init__.py").write_text('ARRAYS = "numpy"\n')
    return copy


def built(project, folder):
    """Return the wheel of a project."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    return built(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_of_cupy(checkout, tmp_path_factory):
    return built(checkout / "backends", tmp_path_factory.mktemp("wheel_of_cupy"))


def shipped(package):
    """Return the files of a package that belong into a wheel."""
    home = ROOT / ("" if package == "sdpa_ref" else "backends") / package
    files = {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert "py.typed" in files
    return {f"{package}/{file}" for file in files if not f"{package}/{file}".startswith(PROOFS)}


def contents(wheel):
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_wheel_has_the_packages_and_nothing_else(wheel):
    packages = {"sdpa_ref", *(path.name for path in (ROOT / "backends").glob("sdpa_*"))} - {"sdpa_cupy"}
    assert contents(wheel) == {"sdpa_x/__init__.py"}.union(*map(shipped, packages))


def test_wheel_has_these_at_its_top(wheel):
    tops = {name.partition("/")[0] for name in contents(wheel)} - {"sdpa_x"}
    assert tops == {"sdpa_ref", "sdpa_dask", "sdpa_numba", "sdpa_pytest"}
    inside = {name.split("/")[1] for name in contents(wheel) if name.startswith("sdpa_ref/")}
    assert {name for name in inside if "." not in name} == {
        "_problem",
        "cli",
        "layers",
        "masks",
        "stored",
        "testing",
        "viewer",
    }


def test_wheel_of_cupy_has_that_and_nothing_else(wheel_of_cupy):
    assert contents(wheel_of_cupy) == shipped("sdpa_cupy")


def test_wheel_is_small(wheel):
    """It was 1.4 MB with golden vectors, museum and emulators; what grows it shall be what users call."""
    apart = ("sdpa_ref/testing/", "sdpa_numba/")
    core = sum(entry.compress_size for entry in wheel.infolist() if not entry.filename.startswith(apart))
    assert core < 235_000
    assert Path(wheel.filename).stat().st_size < 470_000


@pytest.mark.parametrize(
    "command", [["museum", "--list"], ["bench"], ["demo"], ["check", "torch"]], ids=lambda words: words[0]
)
def test_wheel_says_where_is_what_it_has_not(wheel, tmp_path, command):
    wheel.extractall(tmp_path)
    code = f"import sdpa_ref.cli; raise SystemExit(sdpa_ref.cli.main({command}))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert run.returncode in (1, 2), run.stderr
    assert "in a checkout" in run.stderr


def test_two_wheels_have_the_cupy_backend(wheel, wheel_of_cupy, tmp_path):
    ask = "import sdpa_ref\ntry: sdpa_ref.load('cupy')\nexcept sdpa_ref.BackendUnavailable as error: print(error)"
    wheel.extractall(tmp_path)
    hidden = "import sys; sys.modules['sdpa_cupy'] = None\n"
    assert "pip install sdpa-ref-cupy" in python(hidden + ask, path=tmp_path)
    wheel_of_cupy.extractall(tmp_path)
    found = python(ask + "\nimport sdpa_cupy; print(sdpa_cupy.__file__)", path=tmp_path)
    assert "pip install sdpa-ref-cupy" not in found
    assert str(tmp_path) in found


def test_files_of_a_release():
    """They are there, and agree with the package."""
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", cited, re.MULTILINE)[1] == sdpa_ref.__version__
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r"^license: (.*)$", cited, re.MULTILINE)[1] == "Apache-2.0"
    for name in ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md"):
        assert (ROOT / name).stat().st_size > 200, name


def test_wheel_says_what_it_needs(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = wheel.read(name).decode()
    assert f"\nVersion: {sdpa_ref.__version__}\n" in metadata
    needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", metadata, re.MULTILINE)
    assert needed == ["numpy"]


def test_wheel_works_away_from_the_checkout(wheel, tmp_path):
    wheel.extractall(tmp_path)
    printed = python("import sdpa_ref, sdpa_x, numpy; x = numpy.eye(2)\n"
                     "print(sdpa_ref.__file__, sdpa_ref.names(), sdpa_ref.sdpa(x, x, x, backend='reference').shape)",
                     path=tmp_path)  # fmt: skip
    assert printed.startswith(str(tmp_path))
    assert "('reference', 'cupy', 'dask', 'numba')" in printed
    assert printed.endswith("(2, 2)")


def imported(code):
    """Return the optional modules that the code has imported."""
    return python(f"{code}\nimport sys\nprint(*sorted(set({OPTIONAL}) & set(sys.modules)))").split()


def test_import_takes_nothing_optional():
    call = "import numpy\nx = numpy.ones((2, 3))\nsdpa_ref.sdpa(x, x, x, backend='reference')\nsdpa_ref.names()"
    assert imported("import sdpa_ref") == []
    assert imported("import sdpa_ref.testing") == []
    assert imported(f"import sdpa_ref\n{call}") == []


def test_import_check_can_fail():
    assert imported("import sdpa_ref, pytest") == ["pytest"]


def test_import_costs_at_most_30_ms_on_top_of_numpy(tmp_path, monkeypatch):
    """Processor time with compiled files at hand, the least of seven; where NumPy is slow too, a third of its time."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    timed = "import time\nstart = time.process_time()\nimport numpy\nthen = time.process_time()\nimport sdpa_ref\n"
    timed += "print(then - start, time.process_time() - then)"
    python(timed)
    numpy, ours = zip(*(map(float, python(timed).split()) for _ in range(7)), strict=True)
    assert min(ours) < max(0.030, min(numpy) / 3)


def test_all_names_the_public_names():
    listed = [name for name in dir(sdpa_ref) if name[0] != "_"]
    public = {name for name in listed if not isinstance(getattr(sdpa_ref, name), types.ModuleType)}
    assert sorted(sdpa_ref.__all__) == sorted(public)
    assert len(set(sdpa_ref.__all__)) == len(sdpa_ref.__all__)


@pytest.mark.parametrize("name", sdpa_ref.__all__)
def test_public_names_are_described(name):
    thing = getattr(sdpa_ref, name)
    members = [m for n, m in vars(thing).items() if n[0] != "_" and callable(m)] if inspect.isclass(thing) else []
    for described in (thing, *members):
        words = inspect.getdoc(described)
        assert words, described
        assert words.splitlines()[0].endswith((".", ":")), words
    if inspect.isfunction(thing) and inspect.signature(thing).parameters:
        assert "Parameters\n----------" in inspect.getdoc(thing)


def test_numpy_alone_is_enough():
    printed = python(ONLY_NUMPY + """
import numpy as np
import sdpa_ref
from sdpa_ref import *
from sdpa_ref.cli import main
import sdpa_ref.testing

q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 5, 8))
mask = (Causal() & Window(2, 0) | FirstTokens(1)) & KeyLengths([5, 3])
options = dict(mask=mask, bias=ALiBi(alibi_slopes(4)), dropout=Dropout(0.1, 1))
output = sdpa(q, k, v, **options)
assert np.array_equal(output, sdpa_state(q, k, v, **options).output)
assert sdpa_vjp(q, k, v, output, **options).query.shape == q.shape
assert MultiHeadAttention(8, 2)(q).shape == q.shape
assert unpatchify(patchify(q[0, :, :4, :4, None], 2), (4, 4, 4, 1), 2).shape[-1] == 1
assert main(["mask", "Causal()", "-L", "3"]) == 0
print(names())
try:
    load("numba")
except BackendUnavailable as reason:
    print(reason)
""")  # fmt: skip
    assert "rows that see nothing: none" in printed
    assert re.search(r"backend 'numba' .*pip install", printed)


def test_numpy_alone_check_can_fail():
    with pytest.raises(AssertionError, match="pytest is not installed"):
        python(ONLY_NUMPY + "import pytest")


def test_two_backends_of_one_name(tmp_path):
    for distribution in ("one", "two"):
        home = tmp_path / f"{distribution}-1.dist-info"
        home.mkdir()
        (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        (home / "entry_points.txt").write_text(f"[sdpa_ref.backends]\nsame = {distribution}_backend\n")
    with pytest.raises(AssertionError, match=r"two backends are registered as 'same'.*: uninstall one"):
        python("import sdpa_ref\nsdpa_ref.names()", path=tmp_path)


def test_backend_comes_through_a_real_entry_point(tmp_path):
    """A folder with a module and its metadata is all that another package needs."""
    (tmp_path / "mine-1.dist-info").mkdir()
    (tmp_path / "mine-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (tmp_path / "mine-1.dist-info/entry_points.txt").write_text("[sdpa_ref.backends]\nmine = my_backend\n")
    (tmp_path / "my_backend.py").write_text(
        "from sdpa_ref.backend import Result\nARRAYS, TASKS = 'numpy', frozenset()\n"
        "def unavailable(): return None\n"
        "def unsupported(problem): return None\n"
        "def forward(problem, want):\n    out = problem.new_output(); out[...] = 42\n    return Result(output=out)\n"
    )
    code = "import numpy as np, sdpa_ref\nx = np.ones((3, 2))\n"
    code += "print(sdpa_ref.sdpa(x, x, x, backend='mine').min(), sdpa_ref.names())"
    printed = python(code, path=tmp_path)
    assert printed.startswith("42.0")
    assert "'mine'" in printed


def test_own_backends_are_known_without_metadata(tmp_path):
    """As in a frozen application, or where the folders were only copied."""
    code = "import importlib.metadata; importlib.metadata.entry_points = lambda **_: ()\n"
    code += "import sdpa_ref\nprint(sdpa_ref.names())"
    assert python(code, path=tmp_path).strip() == "('reference', 'cupy', 'dask', 'numba')"
