"""`sdpa-ref check`, its page in a browser, and the pytest plugin."""

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from sdpa_ref import sdpa
from sdpa_ref.cli import main
from sdpa_ref.testing import findings
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.page import page
from sdpa_ref.testing.properties import BY_NAME, PROPERTIES
from sdpa_ref.testing.runner import check
from sdpa_ref.testing.target import Target

KERNELS = """
import numpy as np
from sdpa_ref import sdpa

def misses_key_16(query, key, value, *, mask=None):
    seen = np.arange(key.shape[-2]) != 16
    seen = seen | (key.shape[-2] == 1)
    mask = np.broadcast_to(seen, (query.shape[-2], key.shape[-2])) if mask is None else mask & seen
    return sdpa(query, key, value, mask=mask, backend="reference")

misses_key_16.capabilities = {"mask": True, "ranks": [3, 4]}

def right(query, key, value):
    return sdpa(query, key, value, backend="reference")

def nan_in_empty_rows(query, key, value, *, mask=True):
    output = sdpa(query, key, value, mask=mask, backend="reference")
    return np.where(np.any(mask, -1, keepdims=True), output, np.float32(np.nan))

def exits(query, key, value):
    raise SystemExit(0)
"""


@pytest.fixture
def kernels(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    return path


def test_a_right_target_passes(capsys, kernels):
    assert main(["check", f"{kernels}:right", "--property", "plain", "--property", "needles"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ plain +passed +100 +Attention without options", out, re.M)
    assert re.search(r"^2 passed, 0 failed; 200 cases in .* s of processor time, seed 0$", out, re.M)


def test_a_wrong_target_fails_with_a_command_that_repeats_it(capsys, kernels, tmp_path):
    word, directory = f"{kernels}:misses_key_16", tmp_path / "failures"
    assert main(["check", word, "--seed", "3", "--property", "needles", "--save", str(directory)]) == 1
    out = capsys.readouterr().out
    assert "first wrong row: head 0, row 0\n" in out
    assert "with one-hot values the weights are wrong\n" in out
    again = re.search(r'^again: sdpa-ref check \S+ --property needles --case "(.*)"$', out, re.M)[1]
    assert {path.name for path in directory.iterdir()} >= {"needles.py", "needles.npz"}
    assert main(["check", word, "--property", "needles", "--case", again]) == 1
    assert f"case: {again}\n" in capsys.readouterr().out
    assert main(["check", f"{kernels}:right", "--property", "needles", "--case", again]) == 0
    assert "passes" in capsys.readouterr().out


def test_a_target_that_exits_fails(capsys, kernels):
    assert main(["check", f"{kernels}:exits", "--property", "plain", "--seconds", "1"]) == 1
    out = capsys.readouterr().out
    assert "raised SystemExit: 0\n" in out
    assert re.search(r"^ plain +failed +0 passed before ", out, re.M)


def test_a_cause_that_several_laws_share_is_told_once(capsys, kernels):
    few = [word for name in ("ties", "mask arrays", "empty rows") for word in ("--property", name)]
    assert main(["check", f"{kernels}:nan_in_empty_rows", "--rounds", "20", *few]) == 1
    out = capsys.readouterr().out
    cause = "laws fail for one cause: a row that sees no key gives nan, expected 0; fix it first, or claim"
    assert re.search(rf'^[23] {cause} empty_row="nan" if that is intended$', out, re.M)
    assert out.index("one cause") < out.index("FAILED")
    assert out.count("output is wrong") == 1
    assert len(re.findall("^CAUSE ", out, re.M)) == 1


def test_json(capsys, kernels):
    few = ["--property", "plain", "--property", "needles", "--property", "softcap"]
    assert main(["check", f"{kernels}:misses_key_16", "--rounds", "20", "--json", *few]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] is False
    assert data["capabilities"]["mask"] is True
    laws = {law["name"]: law for law in data["properties"]}
    assert list(laws) == ["plain", "needles", "softcap"]
    assert laws["softcap"]["status"] == "not claimed"
    assert laws["softcap"]["missing"] == "softcap"
    failed = laws["needles"]["failure"]
    assert failed["first"] == {"b": [], "h": 0, "i": 0}
    assert failed["blame"] == "weights"
    assert failed["units"] > 1
    assert failed["again"].startswith("sdpa-ref check ")
    assert {"fault", "seen", "cases"} <= data["power"][0].keys()


def test_the_list_says_what_is_not_claimed(capsys, kernels):
    assert main(["check", f"{kernels}:right", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PROPERTIES)
    assert re.search(r"^sink +The sink .* \(not claimed: sink\)$", "\n".join(lines), re.M)
    assert main(["check", "reference", "--list", "--json"]) == 0
    assert not any(law["missing"] for law in json.loads(capsys.readouterr().out))


def test_a_manifest_replaces_the_claims(capsys, kernels, tmp_path):
    claims = tmp_path / "claims.toml"
    claims.write_text('dtypes = ["float64"]\n')
    arguments = ["check", f"{kernels}:right", "--manifest", str(claims), "--property", "plain", "--rounds", "9"]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["capabilities"]["dtypes"] == ["float64"]
    assert list(data["properties"][0]["cases"]) == ["float64"]


def test_strict_holds_a_target_to_the_rules_that_it_does_not_claim(capsys, kernels):
    arguments = ["check", f"{kernels}:misses_key_16", "--list", "--json", "--property", "poison"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)[0]["missing"] == "poison"
    assert main([*arguments, "--strict"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["missing"] == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "unknown target 'nonsense'; there are the backends reference"),
        (["no_such_module:f"], "cannot import 'no_such_module'"),
        (["reference", "--property", "speed"], "unknown property 'speed'; there are plain, needles"),
        (["reference", "--manifest", "none.toml"], "--manifest: "),
        (["reference", "--seconds", "0"], "--seconds must be above 0"),
        (["reference", "--rounds", "0"], "--rounds at least 1"),
        (["reference", "--seed", "-1"], "--seed at least 0"),
        (["reference", "--case", "case(1)"], "--case needs one --property NAME"),
        (["reference", "--property", "plain", "--case", "attention"], '--case: not a case such as "case(7, L=2, S=3)"'),
    ],
)
def test_wrong_calls_end_with_a_message(capsys, arguments, message):
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


# --- the page ---


def wrong(query, key, value):
    """Miss key 16, and double the third row."""
    output = np.array(KERNEL["misses_key_16"](query, key, value))
    output[..., 2:3, :] *= 2
    return output


KERNEL = {}
exec(KERNELS, KERNEL)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the path of the page of a run that fails, of a target whose name is hostile."""
    claims = Capabilities(ranks=(3, 4), grouped_heads=True)
    target = Target("<script>alert('&')</script>", wrong, claims, about="<b>bold</b>")
    run = check(target, rounds=4, seconds=float("inf"), laws=[BY_NAME[name] for name in ("plain", "needles", "sink")])
    found = findings.findings(run, "my kernels.py:<wrong>")
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page(run, found), encoding="utf-8")
    return path


def test_the_page_is_whole_and_escapes_what_it_is_given(written):
    text = written.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<b>" not in text
    assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;" in text
    assert "sdpa-ref check &#x27;my kernels.py:&lt;wrong&gt;&#x27; --property plain" in text
    assert not re.search(r'(src|href)="(?!data:)', text), "it needs no other file"
    body = text[text.index("<body>") : text.index("</html>")]
    ElementTree.fromstring(body)  # every tag is closed


def test_the_page_shows_one_key_of_a_thousand():
    """A pixel for each key would be less than one on a phone, and weights of 0.001 are white beside 1."""

    def loses_the_last_key(query, key, value):
        S = key.shape[-2]
        return sdpa(query, key, value, mask=np.arange(S) < S - (S == 1025), backend="reference")

    run = check(loses_the_last_key, laws=["long rows"], seconds=float("inf"))
    text = page(run, findings.findings(run, "kernels.py:loses_the_last_key"))
    (keys,) = set(re.findall(r"keys (\d+) to 1024 across", text))
    assert int(keys) > 900
    sizes = [tuple(map(int, size)) for size in re.findall(r'<img [^>]*width="(\d+)" height="(\d+)"', text)]
    assert min(min(size) for size in sizes) >= 12


def test_the_page_in_a_browser(written, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no browser is installed: apt install chromium")
    image = pytest.importorskip("PIL.Image", reason="Pillow reads the screenshot")
    shot = tmp_path / "page.png"
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1600",
        f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", written.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    with image.open(shot) as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 50, "text, frames and pictures have many colours"
    assert (pixels == (160, 0, 20)).all(1).sum() > 200, "the worst errors are drawn in dark red"


# --- the plugin ---


def pytested(directory, *arguments):
    """Return the exit code and the output of pytest with the plugin, in a directory of its own."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--pyargs",
        "sdpa_ref.testing",
        "-rA",
        *arguments,
    ]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


def test_the_plugin_runs_the_laws_as_tests(tmp_path, kernels):
    (tmp_path / "known.txt").write_text("needles  # key 16 is missing\n# a comment\n")
    few = ["--sdpa-cases", "8", "-k", "plain or needles or softcap"]
    code, out = pytested(tmp_path, "--sdpa-target", f"{kernels}:right", *few)
    assert code == 0, out
    assert re.search(r"2 passed, 1 skipped", out)
    assert "softcap is not claimed" in out
    code, out = pytested(
        tmp_path, "--sdpa-target", f"{kernels}:misses_key_16", *few, "--sdpa-xfail", str(tmp_path / "known.txt")
    )
    assert code == 1
    assert re.search(r"1 failed, 1 skipped, .*1 xfailed", out)
    assert re.search(r'again: sdpa-ref check \S+ --property plain --case "case\(', out)
    assert "key 16 is missing" in out


def test_the_plugin_does_nothing_without_a_target(tmp_path):
    code, out = pytested(tmp_path, "-q")
    assert code == 5
    assert "no tests ran" in out


def test_the_plugin_refuses_what_it_does_not_know(tmp_path):
    (tmp_path / "known.txt").write_text("neddles\n")
    code, out = pytested(tmp_path, "--sdpa-target", "reference", "--sdpa-xfail", str(tmp_path / "known.txt"))
    assert code != 0
    assert "no such property: neddles" in out
