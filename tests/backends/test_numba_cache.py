"""The disk cache of the Numba backend: what is found again, what must not be, and what may go wrong."""

import compileall
import os
import shutil
from pathlib import Path

import pytest

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

import fresh
from sdpa_numba.compile import cache
from sdpa_numba.vector import atomic, emit

KERNELS = """
from .atomic import add
from .cache import jit
from .part import FACTOR

def multiply(factor):
    @jit
    def kernel(counter, x):
        return (add(counter, 1) + x) * factor + FACTOR
    return kernel

def twice(inner):
    @jit
    def kernel(counter, x):
        return inner(counter, x) + inner(counter, x)
    return kernel
"""

SCRIPT = """
import numpy as np
from toy.kernels import multiply, twice
counters = np.zeros(9, np.int64)
counter = counters.ctypes.data
kernels = multiply(10), multiply(20), twice(multiply(10)), twice(multiply(20))
values = [kernel(counter + 8 * i, 3) for i, kernel in enumerate(kernels)]
print(*values, sum(sum(kernel.stats.cache_hits.values()) for kernel in kernels))
"""
COMPILED = "30 60 70 140 0\n"  # 3 * 10; 3 * 20; 3 * 10 + 4 * 10; 3 * 20 + 4 * 20; nothing found
FOUND = "30 60 70 140 4\n"


class Toy:
    """A small package with the real cache, beside an empty cache folder."""

    def __init__(self, root):
        self.root, self.package, self.folder = root, root / "toy", root / "cache"
        self.package.mkdir()
        (self.package / "__init__.py").touch()
        (self.package / "kernels.py").write_text(KERNELS)
        (self.package / "part.py").write_text("FACTOR = 0\n")
        for module in (atomic, cache, emit):
            shutil.copy(module.__file__, self.package)

    def start(self, script=SCRIPT, **environment):
        environment = {"SDPA_REF_CACHE_DIR": str(self.folder)} | environment
        return fresh.start(script, os.environ | environment, self.root)

    def run(self, script=SCRIPT, **environment):
        process = self.start(script, **environment)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        assert err == ""
        return out

    def files(self):
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    toy = Toy(tmp_path_factory.mktemp("compiled"))
    assert toy.run() == COMPILED
    return toy.folder


@pytest.fixture
def warm(toy, compiled):
    """The package of another process that has compiled everything."""
    shutil.copytree(compiled, toy.folder)
    return toy


def test_kernels_that_differ_in_what_they_enclose_are_stored_apart_and_found_again(warm):
    assert len(warm.files()) == 4
    assert warm.run() == FOUND


def test_any_edited_source_leads_to_another_directory(warm):
    (warm.package / "part.py").write_text("FACTOR = 1\n")
    assert warm.run() == "31 61 72 142 0\n"
    assert len(list((warm.folder / "numba").iterdir())) == 2
    (warm.package / "part.py").write_text("FACTOR = 0\n")
    assert warm.run() == FOUND


def test_only_the_youngest_directories_are_kept(warm):
    [version] = (warm.folder / "numba").iterdir()
    for age in range(1, 12):
        old = shutil.copytree(version, version.with_name(f"{age:016x}"))
        os.utime(old, (1e9 - age, 1e9 - age))
    (warm.package / "part.py").write_text("FACTOR = 1\n")
    warm.run()
    kept = {path.name for path in (warm.folder / "numba").iterdir()}
    assert {f"{age:016x}" for age in range(1, 12)} & kept == {f"{age:016x}" for age in range(1, 7)}
    assert len(kept) == 8  # with the two that were used


FOREIGN = {  # in a folder with the name that this library uses too, old and many
    "numba/sdpa_ref_{n}/index.nbi": b"of Numba",
    "numba/{n:016x}/index.nbi": b"a name like ours, other content",
    "numba/{n:016x}/kernel-{n:032x}": b"a file with a name like ours, too",
    "numba/{n:016x}/inner/kernel-{n:032x}": b"deeper",
    "numba/kernel-{n:032x}": b"beside the directories",
}


def test_what_others_have_put_there_is_never_deleted(warm):
    [version] = (warm.folder / "numba").iterdir()
    files = {warm.folder / name.format(n=n): content for n in range(12) for name, content in FOREIGN.items()}
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        os.utime(file.parent, (1e9, 1e9))
    (warm.folder / "numba" / ("e" * 16)).mkdir()  # an empty folder
    (warm.folder / "numba" / ("d" * 16)).symlink_to(version)
    mixed = [shutil.copytree(version, version.with_name(f"{n + 99:016x}")) for n in range(12)]
    for folder in mixed:
        (folder / "notes.txt").write_text("mine")
        (folder / "link-0123456789abcdef0123456789abcdef").symlink_to("/etc/passwd")
        os.utime(folder, (1e9, 1e9))
    (warm.package / "part.py").write_text("FACTOR = 1\n")
    warm.run()
    assert {file: file.read_bytes() for file in files} == files
    assert (warm.folder / "numba" / ("e" * 16)).is_dir()
    assert (warm.folder / "numba" / ("d" * 16)).is_symlink()
    assert all((folder / "notes.txt").exists() and len(list(folder.iterdir())) >= 2 for folder in mixed)
    assert sum(len(list(folder.iterdir())) == 2 for folder in mixed) > 0  # ours are gone from there


posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="the system has owners and modes")


@posix
def test_what_is_made_is_for_the_user_alone(toy):
    toy.folder = toy.root / "new" / "cache"
    old = os.umask(0)
    try:
        toy.run()
    finally:
        os.umask(old)
    made = [toy.folder.parent, *toy.folder.parent.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}


WRITABLE = {
    "the file": lambda toy: toy.files()[0],
    "its folder": lambda toy: toy.files()[0].parent,
    "the folder above": lambda toy: toy.folder / "numba",
    "the cache": lambda toy: toy.folder,
    "a folder further up": lambda toy: toy.root,
}


@posix
@pytest.mark.parametrize("who", [0o020, 0o002])
@pytest.mark.parametrize("what", WRITABLE)
def test_what_others_could_have_written_is_not_loaded(warm, what, who):
    path = WRITABLE[what](warm)
    path.chmod(path.stat().st_mode | who)
    found = int(warm.run().split()[-1])
    assert found == (3 if what == "the file" else 0)
    if what != "the file":
        assert f"PermissionError: {path.resolve()} can be written by others" in warm.run(INFO)
        assert len(warm.files()) == 4


@posix
def test_a_folder_with_the_sticky_bit_may_lie_above(warm):
    warm.root.chmod(0o1777)
    assert warm.run() == FOUND
    warm.files()[0].parent.chmod(0o1777)
    assert warm.run() == COMPILED


@posix
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="root can give files away")
@pytest.mark.parametrize("what", WRITABLE)
def test_what_belongs_to_another_user_is_not_loaded(warm, what):
    path = WRITABLE[what](warm)
    os.chown(path, 54321, -1)
    assert int(warm.run().split()[-1]) == (3 if what == "the file" else 0)


@posix
def test_links_in_place_of_files_are_not_followed(warm):
    file = warm.files()[0]
    file.rename(warm.root / "elsewhere")
    file.symlink_to(warm.root / "elsewhere")
    assert int(warm.run().split()[-1]) == 3
    assert not file.is_symlink()
    assert warm.run() == FOUND


def test_a_cache_behind_a_link_is_used(warm):
    warm.folder.rename(warm.root / "real")
    warm.folder.symlink_to(warm.root / "real", target_is_directory=True)
    assert warm.run() == FOUND


DAMAGES = {
    "empty": lambda good: b"",
    "cut": lambda good: good[:-100],
    "bit": lambda good: good[:500] + bytes([good[500] ^ 1]) + good[501:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_replaced(warm, damage):
    for path in warm.files():
        path.write_bytes(damage(path.read_bytes()))
    assert warm.run() == COMPILED
    assert warm.run() == FOUND


def test_a_file_that_another_program_wrote_is_of_no_use(warm):
    for path in warm.files():
        path.write_bytes(b"\0" * 32 + b"cos\n_exit\n(I3\ntR.")  # unpickling this ends the process
    assert warm.run() == COMPILED


def test_processes_that_compile_at_once(toy):
    processes = [toy.start() for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert (process.returncode, err) == (0, "")
        assert out.startswith("30 60 70 140 ")
    assert len(toy.files()) == 4
    assert toy.run() == FOUND


INFO = "from toy.cache import cache_info; info = cache_info(); print(info.directory); print(info.reason)"


def test_the_environment_variable_names_the_folder(toy):
    directory, reason = toy.run(INFO).splitlines()
    assert Path(directory).parent == toy.folder / "numba"
    assert reason == "None"
    elsewhere = toy.root / "elsewhere"
    assert toy.run(SDPA_REF_CACHE_DIR=str(elsewhere)) == COMPILED
    assert any(elsewhere.rglob("kernel-*"))
    assert toy.files() == []


def test_without_the_variable_it_is_the_cache_of_the_user(toy):
    home = {name: str(toy.root / "home") for name in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "USERPROFILE")}
    directory = toy.run(INFO, SDPA_REF_CACHE_DIR="", **home).splitlines()[0]
    assert "sdpa_ref" in Path(directory).parts


@pytest.mark.parametrize("place", ["check", "write"])
@pytest.mark.parametrize("error", ["TimeoutError('too slow')", "Late('too slow')"])
def test_what_a_handler_of_signals_raises_is_no_fault_of_a_file(toy, place, error):
    """It may raise at any place, here while a kernel is looked up or kept."""
    script = f"""
import numpy as np
from sdpa_ref import disk
from toy.kernels import multiply

class Late(Exception):
    pass

def late(*arguments):
    raise {error}

usual, disk.{place} = disk.{place}, late
counter = np.zeros(1, np.int64)
try:
    multiply(10)(counter.ctypes.data, 3)
except (TimeoutError, Late) as error:
    print(error)
disk.{place} = usual
counter[0] = 0
print(multiply(10)(counter.ctypes.data, 3))
"""
    assert toy.run(script) == "too slow\n30\n"


def test_a_folder_that_cannot_be_written_only_costs_time(toy):
    toy.folder.write_text("a file")
    assert toy.run() == COMPILED
    assert any(reason in toy.run(INFO) for reason in ("NotADirectoryError", "FileExistsError"))


def test_functions_of_others_are_known_by_all_they_consist_of(toy):
    script = """
import math
from numba import njit
import numpy as np
from toy.kernels import twice
SHIFT = {shift}

@njit
def lift(x):
    return x + SHIFT

@njit
def score(counter, x):
    return lift(int(math.sqrt(x))) {sign} {constant}

kernel = twice(score)
print(kernel(np.zeros(1, np.int64), 9), *kernel.stats.cache_hits.values())
"""
    variants = [(0, "+", 1), (5, "+", 1), (0, "-", 1), (0, "+", 2)]
    values = [8, 18, 4, 10]  # 2 * (3 + shift + constant)
    for (shift, sign, constant), value in zip(variants, values, strict=True):
        assert toy.run(script.format(shift=shift, sign=sign, constant=constant)) == f"{value}\n"
    assert toy.run(script.format(shift=5, sign="+", constant=1)) == "18 1\n"  # found


def test_a_kernel_that_cannot_be_described_is_compiled_anew(toy):
    script = """
import numpy as np
from numba import njit
from toy.kernels import twice
TABLE = np.arange(4)

@njit
def score(counter, x):
    return TABLE[x]

kernel = twice(score)
print(kernel(np.zeros(1, np.int64), 3), *kernel.stats.cache_hits.values())
"""
    assert toy.run(script) == "6\n"
    assert toy.files() == []


def test_loaded_and_compiled_kernels_work_together(warm):
    script = SCRIPT + "\nprint(twice(twice(kernels[0]))(counter + 32, 3), twice(kernels[1])(counter + 40, 3.5))"
    assert warm.run(script) == FOUND + "180 160.0\n"  # 30 + 40 + 50 + 60; 70 + 90


HOMES = {
    "an unknown user": {"SDPA_REF_CACHE_DIR": "~no-such-user/x"},
    "a relative folder": {"SDPA_REF_CACHE_DIR": "", "XDG_CACHE_HOME": "relative"},
    "a home that is a device": {"SDPA_REF_CACHE_DIR": "", "HOME": "/dev/null", "XDG_CACHE_HOME": ""},
    "a home too long": {"SDPA_REF_CACHE_DIR": "", "HOME": "/" + "x" * 5000, "XDG_CACHE_HOME": ""},
    "a read-only system": {"SDPA_REF_CACHE_DIR": "/proc/sdpa_ref"},
    "a name that is no UTF-8": {"SDPA_REF_CACHE_DIR": "\udcff\udcfe"},
}


@posix
@pytest.mark.parametrize("home", HOMES)
def test_odd_homes_only_cost_time(toy, home):
    environment = {"HOME": str(toy.root)} | HOMES[home]  # where a relative folder is not heard, the home's is used
    assert toy.run(**environment) == COMPILED
    if home != "a name that is no UTF-8":  # nor can it be printed
        assert ("Error" in toy.run(INFO, **environment)) == (home != "a relative folder")


def test_without_any_home_there_is_a_reason(toy):
    prefix = "import os, os.path; os.path.expanduser = lambda path: path\n"  # what it does for a user without one
    environment = {"SDPA_REF_CACHE_DIR": "", "XDG_CACHE_HOME": ""}
    assert toy.run(prefix + SCRIPT, **environment) == COMPILED
    directory, reason = toy.run(prefix + INFO, **environment).splitlines()
    assert directory == "None"
    assert "there is no home folder; set SDPA_REF_CACHE_DIR" in reason
    without = "import sys; sys.modules['platformdirs'] = None\n"
    assert toy.run(without + SCRIPT, **environment) == COMPILED
    assert "without platformdirs" in toy.run(without + INFO, **environment)
    assert toy.run(without + SCRIPT) == COMPILED
    assert toy.run(without + SCRIPT) == FOUND


def test_a_full_disk_only_costs_time(toy):
    resource = pytest.importorskip("resource")
    assert resource
    prefix = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3, 3))\n"
    assert toy.run(prefix + SCRIPT) == COMPILED
    assert toy.files() == []
    assert "OSError" in toy.run(prefix + INFO).splitlines()[-1]


class Installed(Toy):
    """The small package as a zip archive, or as compiled files without sources."""

    def install(self, how, line):
        self.package.mkdir(exist_ok=True)
        for file in ("__init__.py", "kernels.py"):
            (self.package / file).write_text({"kernels.py": KERNELS}.get(file, ""))
        (self.package / "part.py").write_text(line)
        for module in (atomic, cache, emit):
            shutil.copy(module.__file__, self.package)
        if how == "zip":
            (self.root / "toy.zip").unlink(missing_ok=True)
            shutil.make_archive(str(self.root / "toy"), "zip", self.root, "toy")
        else:
            assert compileall.compile_dir(self.package, quiet=1, legacy=True, force=True)
            for source in self.package.glob("*.py"):
                source.unlink()
            shutil.make_archive(str(self.root / "toy"), "zip", self.root, "toy")
            if how == "compiled":
                return
        shutil.rmtree(self.package)


@pytest.mark.parametrize("how", ["zip", "compiled", "zip of compiled"])
def test_installations_without_sources_never_use_kernels_of_another_release(tmp_path, how):
    toy = Installed(tmp_path)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "toy.zip"), os.environ.get("PYTHONPATH", "")])}
    toy.install(how, "FACTOR = 0\n")
    assert toy.run(**environment) == COMPILED
    assert toy.run(**environment) == FOUND
    toy.install(how, "FACTOR = 1\n")
    assert toy.run(**environment) == "31 61 72 142 0\n"
    toy.install(how, "FACTOR = 0\n")
    assert toy.run(**environment) == FOUND


def test_a_package_that_tells_nothing_of_its_modules_is_not_kept(toy):
    prefix = "import pkgutil; pkgutil.iter_modules = lambda *_: iter(())\n"  # as in some frozen applications
    assert toy.run(prefix + SCRIPT) == COMPILED
    assert toy.files() == []
    assert "cannot be listed" in toy.run(prefix + INFO)
