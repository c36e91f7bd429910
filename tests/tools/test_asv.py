"""The benchmarks for asv: asv accepts them, their setup warms up and skips with reasons, and the dashboard is drawn."""

import http.server
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import sdpa_ref
from sdpa_ref.bench.cases import CASES
from sdpa_ref.bench.loops import LOOPS
from sdpa_ref.testing import assert_close

BENCHES = Path(__file__).parents[2] / "asv_benches"
MODULES = ("calls", "forward", "gradients", "memory", "pairs", "peers", "startup")
CHROMIUM = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=20000"
).split()
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def benchmarks(monkeypatch):
    """Return the modules of the benchmarks by name."""
    monkeypatch.syspath_prepend(str(BENCHES))
    return {name: importlib.import_module(f"benchmarks.{name}") for name in (*MODULES, "common")}


def timed(benchmarks):
    """Return the classes that time a backend in this process, and the first of each of their other parameters."""
    for name in MODULES:
        for _, made in inspect.getmembers(benchmarks[name], inspect.isclass):
            if any(method.startswith("time_") for method in vars(made)):
                yield made, [values[0] for values in made.params[1:]]


def test_asv_accepts_the_suite(tmp_path):
    pytest.importorskip("asv")
    kept_elsewhere = {'".."': BENCHES.parent, '"benchmarks"': BENCHES / "benchmarks", '"results"': tmp_path / "results"}
    text = (BENCHES / "asv.conf.json").read_text(encoding="utf-8")
    for path, absolute in kept_elsewhere.items():
        assert text.count(path) == 1
        text = text.replace(path, json.dumps(str(absolute)))
    (tmp_path / "asv.conf.json").write_text(text, encoding="utf-8")

    def asv(*arguments):
        command = [sys.executable, "-m", "asv", *arguments]
        environment = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    existing = f"existing:{sys.executable}"
    assert "No problems found" in asv("check", "-E", existing)
    asv("machine", "--yes")
    selected = ("-b", "Overhead.*reference", "-b", "Events.*tiny-single")
    out = asv("run", "--quick", "--dry-run", "--show-stderr", "-E", existing, *selected)
    assert re.search(r"reference +[\d.]+±0[μm]s", out)
    assert re.search(r"skipped: NotImplementedError.*cupy", out)


def test_commits_are_installed_with_the_modules_that_measure_them():
    """The wheel leaves `sdpa_ref.bench` out: of a commit installed from one, all but a few benchmarks are skipped."""
    text = (BENCHES / "asv.conf.json").read_text(encoding="utf-8")
    configuration = json.loads(re.sub(r"^ *//.*$", "", text, flags=re.M))
    assert configuration["build_command"] == []
    [install] = configuration["install_command"]
    assert install.endswith("-e {build_dir}")


def test_cases_exist(benchmarks):
    named = {*benchmarks["common"].CASES}
    for made in (benchmarks["gradients"].Gradients, benchmarks["memory"].Memory, benchmarks["forward"].MatrixRate):
        named |= {*made.params[1]}
    assert named <= {case.name for case in CASES}
    assert {*benchmarks["calls"].LOOPS} <= {loop.name for loop in LOOPS}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nobody", "unknown backend"),
        ("broken", "a machine that does not exist"),
        ("missing", "cannot be loaded"),
        ("picky", "its taste|no gradients"),
    ],
)
def test_a_backend_that_cannot_run_is_skipped_with_the_reason(benchmarks, name, reason):
    for made, rest in timed(benchmarks):
        with pytest.raises(NotImplementedError, match=reason):
            made().setup(name, *rest)


def test_setup_calls_once_with_what_is_timed(benchmarks, monkeypatch):
    calls = []

    def counted(function):
        def call(*arrays, **options):
            calls.append((function.__name__, [(array.shape, array.dtype) for array in arrays]))
            return function(*arrays, **options)

        return call

    for name in ("sdpa", "sdpa_vjp", "sdpa_state"):
        monkeypatch.setattr(sdpa_ref, name, counted(getattr(sdpa_ref, name)))
    for made, rest in timed(benchmarks):
        benchmark = made()
        benchmark.setup("loopback", *rest)
        before = list(calls)
        (method,) = (getattr(benchmark, method) for method in vars(made) if method.startswith("time_"))
        method("loopback", *rest)
        (call,) = calls[len(before) :]
        assert call in before


def test_errors_are_counted_in_budgets(benchmarks):
    benchmark = benchmarks["forward"].Forward()
    benchmark.setup("reference", "tiny-single")
    assert 0 < benchmark.track_error("reference", "tiny-single") < 1
    right = benchmark.run()
    benchmark.run = lambda: right + np.float32(1)
    assert benchmark.track_error("reference", "tiny-single") > 1000


def test_a_ratio_is_that_of_the_medians(benchmarks, monkeypatch):
    from sdpa_ref.bench import measure

    found = {"contenders": {"loopback": {"median": 2.0}, "json": {"median": 5.0}}}
    monkeypatch.setattr(measure, "measure", lambda case, names, threads, seconds: found)
    benchmark = benchmarks["peers"].Peers()
    benchmark.setup("loopback", "json", "tiny")  # "json" stands for a peer that is installed
    assert benchmark.track_ratio("loopback", "json", "tiny") == 2.5
    found["contenders"]["json"] = {"reason": "no masks"}
    with pytest.raises(NotImplementedError, match="json: no masks"):
        benchmark.setup("loopback", "json", "tiny")


@pytest.mark.parametrize("pair", ["padding-16 / numpy", "decode-128 / numpy"])
def test_both_sides_of_a_pair_compute_the_same(benchmarks, pair):
    calls = []

    def sdpa(*arrays, **options):
        calls.append((arrays, options))
        return sdpa_ref.sdpa(*arrays, **options, backend="loopback")

    ours, other, _ = benchmarks["pairs"].PAIRS[pair](sdpa, lambda array: array)
    shape = ours().shape
    arrays, options = calls[0]
    assert_close(other().reshape(shape), *arrays, **options)


@pytest.fixture
def ratios(monkeypatch):
    """Return the module that writes the first page of the dashboard."""
    monkeypatch.syspath_prepend(str(BENCHES))
    return importlib.import_module("ratios")


@pytest.mark.parametrize(
    ("values", "factor"),
    [
        ([1.0, 1.0, 1.0, 1.3], 1.3),
        ([1.0, 1.0, 1.0, 1.1], 0),  # less than the threshold
        ([1.0, 1.0, 1.4, 1.3], 0),  # as slow before
        ([1.4, *[1.0] * 10, 1.3], 1.3),  # so slow only long ago
        ([1.0, 1.0, 1.3], 0),  # too few
        ([1.0, 1.0, 1.0, 1.0, 0.5], 0),
        ([1.3], 0),
    ],
)
def test_what_became_worse(ratios, values, factor):
    times = ratios.Curve("forward.Forward.time_forward", (), [*enumerate(values)])
    rates = ratios.Curve(ratios.PEERS, (), [(place, 1 / value) for place, value in enumerate(values)])
    assert times.worse == pytest.approx(factor)
    assert rates.worse == pytest.approx(factor)


@pytest.mark.parametrize("parts", ["branch-main", "arch-x86_64/branch-main"])  # asv sorts them by name
def test_the_first_page_has_ratios_and_marks_what_became_worse(ratios, tmp_path, parts):
    index = {
        "benchmarks": {
            ratios.PEERS: {"params": [["'numba'"], ["'torch'", "'jax'"], ["'vit'", "'unet'"]]},
            "startup.Import.timeraw_import": {"params": []},
            "memory.Memory.peakmem_forward": {"params": [["'numba'", "'cupy'"]]},
        },
        "revision_to_hash": {str(commit): f"{commit:040x}" for commit in range(5)},
    }
    graphs = {
        ratios.PEERS: [[commit, [2.0 if commit < 4 else 1.2, None, 0.5, float("nan")]] for commit in range(5)],
        "startup.Import.timeraw_import": [[commit, 0.1] for commit in range(5)],
        "memory.Memory.peakmem_forward": [[0, None], [1, [None, None]]],
    }
    folder = tmp_path / "graphs" / parts / "machine-x"
    folder.mkdir(parents=True)
    for name, graph in graphs.items():
        (folder / f"{name}.json").write_text(json.dumps(graph), encoding="utf-8")
    found = ratios.curves(tmp_path, index)
    assert [(curve.name, curve.parameters) for curve in found] == [
        (ratios.PEERS, ("numba", "torch", "vit")),
        (ratios.PEERS, ("numba", "jax", "vit")),
        ("startup.Import.timeraw_import", ()),
    ]
    table, worse = ratios.page(found, index).split("What became worse")
    assert re.findall(r'<td( class="danger")?>([\d.]+) ', table) == [(' class="danger"', "1.20"), ("", "0.50")]
    assert re.findall(r"([\d.]+) times", worse) == ["1.67"]
    assert "None." in ratios.page(found[1:], index)
    assert "No result" in ratios.page([], index)


def test_the_threshold_is_said_once(ratios):
    assert f'".*": {ratios.THRESHOLD}\n' in (BENCHES / "asv.conf.json").read_text(encoding="utf-8")
    assert f"--factor {1 + ratios.THRESHOLD} " in (BENCHES.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_help_of_the_dashboard_renders_nothing(tmp_path):
    command = [sys.executable, str(BENCHES / "dashboard.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "folder" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the address of the dashboard of the kept results, served to this machine."""
    pytest.importorskip("asv")
    if BROWSER is None:
        pytest.skip("no Chromium here")
    if not any((BENCHES / "results").glob("*/*-*.json")) or not (BENCHES.parent / ".git").exists():
        pytest.skip("no results, or no history that they belong to")
    folder = tmp_path_factory.mktemp("dashboard")
    made = subprocess.run([sys.executable, str(BENCHES / "dashboard.py"), str(folder)], capture_output=True, text=True)
    if "npm" in made.stderr:
        pytest.skip(f"the libraries of the pages could not be had: {made.stderr.splitlines()[-1]}")
    assert made.returncode == 0, made.stdout + made.stderr
    handler = partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *_):
        """Write no line."""


def opened(address, folder, *options):
    """Return a page as the browser has it when its scripts are done, and what they reported as errors."""
    command = [BROWSER, *CHROMIUM, f"--user-data-dir={folder}", *options, "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize(
    ("page", "content"),
    [
        ("", 'id="ratios"'),
        ("#/", "time_forward"),
        ("#/summarylist", "Peers.track_ratio"),
        ("#/regressions", 'id="regressions-body"><'),
        ("#forward.Forward.time_forward", 'class="flot-base"'),
    ],
)
def test_pages_of_the_dashboard_load(site, tmp_path, page, content):
    dom, complaints = opened(site + page, tmp_path)
    assert complaints == []
    assert content in dom
    if page in ("", "#/"):
        assert "peakmem_forward" not in dom  # of which no result is kept


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_script_errors_are_seen(tmp_path):
    _, (complaint,) = opened("data:text/html,<script>absent()</script>", tmp_path)
    assert "absent is not defined" in complaint


def test_a_plot_is_drawn(site, tmp_path):
    image = pytest.importorskip("PIL.Image")
    picture = tmp_path / "plot.png"
    options = f"--screenshot={picture}", "--window-size=1200,900"
    opened(site + "#forward.Forward.time_forward", tmp_path / "user", *options)
    with image.open(picture) as drawn:
        pixels = np.asarray(drawn.convert("RGB"), dtype=int)[150:, 300:]
    assert np.count_nonzero(np.ptp(pixels, axis=2) > 80) > 100  # lines in colours, right of the menu


@pytest.mark.parametrize("threads", [2, 8, 192])
def test_the_model_of_many_threads_does_all_the_work(monkeypatch, threads):
    pytest.importorskip("numba")
    monkeypatch.syspath_prepend(str(BENCHES))
    model = importlib.import_module("spread")
    for name, case in model.CASES.items():
        tasks, used = model.tasks_of(case, threads)
        busy, rate = model.spread(tasks, used)
        assert 0 < busy <= 1 + 1e-9, name
        assert rate > 0
        if threads == 8:
            assert busy > 0.85, name
        rows = [task for task in tasks if task.packs is None]
        a_row = np.full(case.L, case.S) if case.right else np.minimum(np.arange(1, case.L + 1), case.left + 1)
        moved = 2 * case.E * case.B * (case.Hkv * case.S if case.L == 1 else case.Hq * case.L)
        a_pair, heads = 2 * case.E + model.OVERHEAD, case.B * case.Hq
        wanted = heads * a_row.sum() * a_pair + moved * model.MOVE
        # under a mask a strip, of at most 8 tiles of 3 vectors, sees whole blocks and what its other rows see
        more = 0 if case.right else 2 * (128 + 8 * 3 * 16) * heads * case.L * a_pair
        assert wanted <= sum(task.work for task in rows) <= wanted + more, name
