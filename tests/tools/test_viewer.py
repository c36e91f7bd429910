"""The page of attention weights: what it holds, what it refuses, and that it works in a real browser."""

import re

import numpy as np
import pytest
from browser import browser
from pages import parts, unpacked, weights_of

from sdpa_ref import Causal, sdpa_weights
from sdpa_ref.cli import main
from sdpa_ref.viewer import page

WORDS = "Wie geht es dir".split()


def weights(*shape, seed=0, **options):
    """Return weights of shape (..., L, S) that are far from even."""
    rng = np.random.default_rng(seed)
    query, key = rng.normal(size=(*shape[:-1], 8)), rng.normal(size=(*shape[:-2], shape[-1], 8))
    return sdpa_weights(3 * query, key, **options, backend="reference")  # a page needs no kernels


def held(html):
    """Return the data of a page."""
    return parts(html)[1]


# --- what it holds ---


@pytest.mark.parametrize("options", [{}, {"mask": Causal()}])
def test_weights_are_right_to_what_the_page_says(options):
    given = weights(5, 3, 40, 40, **options)
    (text,) = held(page(given, list(map(str, range(40)))))
    shown = weights_of(text)
    assert abs(shown - given).max() < 0.0003
    small = abs(given - 0.001) < 0.0001
    assert small.any()
    assert (abs(shown - given)[small] < 0.01 * given[small]).all()
    assert (shown[given == 0] == 0).all()


def test_two_letters_a_weight_and_none_for_a_masked_future():
    empty = len(page(weights(1, 1, 1), ["a"]))
    words = [""] * 64
    assert len(page(weights(2, 3, 64, 64), words)) - empty < 2.1 * 6 * 64 * 64
    assert len(page(weights(2, 3, 64, 64, mask=Causal()), words)) - empty < 1.2 * 6 * 64 * 64


def test_forms_of_weights():
    whole = weights(3, 2, 4, 4)
    layers = held(page(whole, WORDS))[0]["layers"]
    assert [layer["name"] for layer in layers] == ["0", "1", "2"]
    assert held(page(list(whole), WORDS))[0]["layers"] == layers
    named = held(page({"first": whole[0], "other": whole[1, :1]}, WORDS))[0]["layers"]
    assert [(layer["name"], len(layer["heads"])) for layer in named] == [("first", 2), ("other", 1)]
    assert held(page(whole[0], WORDS))[0]["layers"] == layers[:1]
    assert held(page(whole[0, 0].tolist(), WORDS))[0]["layers"][0]["heads"] == layers[0]["heads"][:1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", ">f4"])
def test_types_of_weights(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    given = weights(2, 4, 4).astype(dtype)
    heads = held(page(given, WORDS))[0]["layers"][0]["heads"]
    assert abs(unpacked(heads[1], 4) - given[1].astype(np.float64)).max() < 0.0003


def test_several_texts():
    texts = held(page({"one": weights(2, 4, 4), "two": weights(3, 2, 2, 2)}, {"one": WORDS, "two": ["a", "b"]}))
    assert [(text["name"], text["rows"], len(text["layers"])) for text in texts] == [
        ("one", WORDS, 1),
        ("two", ["a", "b"], 3),
    ]


def test_words_cannot_end_the_script_or_the_title():
    html = page(weights(2, 2), ["</script><script>alert(1)", "<!--"], title="<b> & </title>")
    assert html.count("<script") == 2
    assert "<title>&lt;b&gt; &amp; &lt;/title&gt;</title>" in html
    assert held(html)[0]["rows"] == ["</script><script>alert(1)", "<!--"]


def test_words_that_are_part_of_the_template():
    assert held(page(weights(2, 2), ["DATA", "TITLE"], title="DATA"))[0]["rows"] == ["DATA", "TITLE"]


def test_sums_are_told_not_refused():
    assert held(page(weights(2, 4, 4), WORDS))[0]["sums"] == ""
    said = held(page(weights(2, 4, 4, sink=np.array([0.0, 9.0])), WORDS))[0]["sums"]
    assert re.match(r"\d of 8 rows do not sum to 1; the sums are 0\.\d{3} to ", said)


def test_dropout_may_make_weights_larger_than_one():
    given = np.array([[1.5, 0.0], [0.75, 0.75]])
    (text,) = held(page(given, ["a", "b"]))
    assert text["top"] == 1.5
    np.testing.assert_allclose(unpacked(text["layers"][0]["heads"][0], 2, text["top"]), given, atol=0.0005)


@pytest.mark.parametrize(
    ("shape", "before", "patch", "grid"),
    [
        ((32, 32, 3), 0, None, (8, 8)),
        ((32, 32), 1, 4, (8, 8)),
        ((16, 64, 3), 2, None, (4, 16)),
        ((16, 64, 3), 0, 4, (4, 16)),
        ((500, 520, 3), 0, None, (8, 8)),
    ],
)
def test_grid_of_patches(shape, before, patch, grid):
    N = grid[0] * grid[1] + before
    image = np.random.default_rng(0).random(shape)
    (text,) = held(page(weights(1, N, N), ["extra"] * before, image=image, patch=patch))
    assert (text["image"]["rows"], text["image"]["columns"], text["image"]["before"]) == (*grid, before)
    assert text["image"]["source"].startswith("data:image/png;base64,")
    assert text["rows"][before:][:2] == ["row 0, column 0", "row 0, column 1"]


# --- what it refuses ---

FINE = np.full((2, 4, 4), 0.25)
WRONG = {
    "too few tokens": ((FINE, WORDS[:3]), {}, ValueError, "tokens must be 4 strings, as weights has 4 queries; got 3"),
    "no tokens": ((FINE,), {}, TypeError, "tokens is missing"),
    "one string": ((FINE, "abcd"), {}, TypeError, "tokens must be a sequence of strings, got a str"),
    "a number": ((FINE, ["a", "b", "c", 4]), {}, TypeError, "tokens must be a sequence of strings, got a int"),
    "no keys": ((FINE[..., :3], WORDS), {}, ValueError, "keys is missing: weights has 4 queries and 3 keys"),
    "too many keys": ((FINE, WORDS), {"keys": list("abcde")}, ValueError, "keys must be 4 strings"),
    "axes": ((FINE[0, 0], WORDS), {}, ValueError, r"weights must have the shape .*; got \(4,\)"),
    "a batch": ((FINE[None, None], WORDS), {}, ValueError, r"weights must have the shape .*; got \(1, 1, 2, 4, 4\)"),
    "nothing": ((FINE[:, :0], []), {}, ValueError, r"weights of layer 0 must be \(heads, L, S\)"),
    "integers": ((FINE.astype(int), WORDS), {}, TypeError, "weights must be weights in a float type, got int64"),
    "NaN": ((np.where(np.eye(4), np.nan, FINE), WORDS), {}, ValueError, "weights has NaN .* head 0, query 0, key 0"),
    "scores": ((FINE - 0.3, WORDS), {}, ValueError, "weights has a negative number .* sdpa_weights"),
    "layers": (([FINE, FINE[:, :2, :2]], WORDS), {}, ValueError, "weights must have the same L and S in all layers"),
    "no grid": ((FINE,), {"image": np.zeros((8, 20))}, ValueError, "the other 4 make no grid of square patches over"),
    "patch": ((FINE,), {"image": np.zeros((8, 8)), "patch": 2}, ValueError, "no grid of square patches of 2 pixels"),
    "patch alone": ((FINE, WORDS), {"patch": 2}, ValueError, "image was not given"),
    "image": ((FINE,), {"image": np.zeros((8, 8, 4))}, ValueError, r"image must be .*got \(8, 8, 4\)"),
    "bright": ((FINE,), {"image": np.full((8, 8), 255.0)}, ValueError, "image must be uint8, or floats from 0 to 1"),
    "keys of patches": ((FINE,), {"image": np.zeros((8, 8)), "keys": WORDS}, ValueError, "keys: the patches"),
    "names": (({"a": FINE}, {"b": WORDS}), {}, ValueError, "weights must be a dict with the names of tokens"),
    "title": ((FINE, WORDS), {"title": 3}, TypeError, "title must be a string, got int"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    given, options, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        page(*given, **options)


# --- the command ---


def told(capsys, *arguments, code=0):
    assert main(["view", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_command(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = weights(2, 3, 4, 4)
    np.savez("w.npz", given)
    assert told(capsys, "w.npz", "--tokens", *WORDS).startswith("attention.html: 2 layers, 6 heads, 4 by 4 weights, ")
    assert (tmp_path / "attention.html").read_text(encoding="utf-8") == page(given, WORDS)
    np.save("w.npy", given[0, 0])
    told(capsys, "w.npy", "--tokens", *WORDS, "--keys", *"abcd", "--out", "x.html", "--title", "Mine")
    written = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert written == page(given[0, 0], WORDS, keys=list("abcd"), title="Mine")
    np.savez("l.npz", tokens=WORDS, late=0.5 * given[0], early=given[1])
    assert "12 of 24 rows do not sum to 1; the sums are 0.500 to 1.000" in told(capsys, "l.npz")
    (text,) = held((tmp_path / "attention.html").read_text(encoding="utf-8"))
    assert [layer["name"] for layer in text["layers"]] == ["late", "early"]


def test_command_with_an_image(capsys, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow reads the image")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    image.fromarray(pixels).save(tmp_path / "photo.png")
    given = weights(2, 5, 5)
    np.savez(tmp_path / "w.npz", given)
    out = tmp_path / "page.html"
    told(capsys, tmp_path / "w.npz", "--image", tmp_path / "photo.png", "--tokens", "class", "--out", out)
    assert out.read_text(encoding="utf-8") == page(given, ["class"], image=pixels)


def test_command_called_wrongly(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("w.npz", FINE)
    np.savez("empty.npz", tokens=WORDS)
    np.savez("scores.npz", FINE - 1)
    np.save("objects.npy", np.array([None], object))
    (tmp_path / "text.npz").write_text("no")
    assert "--tokens must be 4 strings" in told(capsys, "w.npz", "--tokens", "a", code=2)
    assert "empty.npz: it has no weights" in told(capsys, "empty.npz", code=2)
    assert "scores.npz has a negative" in told(capsys, "scores.npz", "--tokens", *WORDS, code=2)
    for name in ("objects.npy", "text.npz"):
        assert f"{name}: this is not an NPZ or NPY file" in told(capsys, name, code=2)
    assert "none.npz: No such file" in told(capsys, "none.npz", code=2)
    assert "--patch is the size" in told(capsys, "w.npz", "--tokens", *WORDS, "--patch", "2", code=2)
    assert "there is no folder" in told(capsys, "w.npz", "--tokens", *WORDS, "--out", "no/x.html", code=1)
    assert not (tmp_path / "attention.html").exists()


# --- in a browser ---


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


GIVEN = weights(3, 2, 4, 4)
TOKENS = ["Wie", " geht", "es", "<b>dir"]
PAGES = {
    "words": lambda: page(GIVEN, TOKENS),
    "keys": lambda: page(weights(2, 2, 4, 6), TOKENS, keys=list("abcdef")),
    "patches": lambda: page(weights(1, 2, 17, 17), ["class"], image=np.random.default_rng(0).random((16, 16, 3))),
    "many words": lambda: page(weights(1, 1, 90, 90), [f"word{i}" for i in range(90)]),
    "long words": lambda: page(weights(1, 1, 2, 2), ["x" * 300, "y"], title="z" * 300),
    "texts": lambda: page({"one": GIVEN, "two": GIVEN[0]}, {"one": TOKENS, "two": TOKENS}),
}


@pytest.fixture
def opened(tab, tmp_path):
    def open_page(name="words", **options):
        file = tmp_path / "page.html"
        file.write_text(PAGES[name](), encoding="utf-8")
        tab.open(file, **options)
        return tab

    yield open_page
    assert not tab.errors
    assert all(url.startswith(("data:image/png", "file://")) for url in tab.requests)


def values(tab):
    """Return the weights that stand below the words."""
    return tab.run("[...document.querySelectorAll('.word small')].map(x => +x.textContent)")


def said(tab):
    return tab.run("document.querySelector('output').textContent")


def middle(tab, selector, number=0):
    """Return the middle of an element on the screen."""
    where = f"document.querySelectorAll({selector!r})[{number}].getBoundingClientRect()"
    return tab.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({where})")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_window(opened, name, width):
    tab = opened(name, width=width, touch=width < 500)
    assert tab.run("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('body *')].filter(x => x.getBoundingClientRect().right > innerWidth + 1)"
    assert tab.run(f"{wide}.map(x => x.outerHTML.slice(0, 80))") == []
    beside = tab.run("document.querySelector('figure').getBoundingClientRect().left > innerWidth / 2 - 20")
    assert beside == (width > 1000)


def test_pointer_over_a_word_shows_where_it_looks(opened):
    tab = opened()
    for i in (0, 3, 1):
        tab.point(*middle(tab, ".word", i))
        np.testing.assert_allclose(values(tab), GIVEN[0, 0, i], atol=0.00081)
        assert said(tab).startswith(f"{TOKENS[i]} looks at {TOKENS[GIVEN[0, 0, i].argmax()]} ")
    shades = tab.run("[...document.querySelectorAll('.word')].map(x => +x.style.getPropertyValue('--part'))")
    np.testing.assert_allclose(shades, GIVEN[0, 0, 1] / GIVEN[0, 0, 1].max(), atol=0.002)


def test_keyboard(opened):
    tab = opened()
    focused = "document.activeElement.id || document.activeElement.getAttribute('aria-label')"
    order = []
    for _ in range(4):
        tab.press("Tab")
        order.append(tab.run(focused))
    assert order == ["layer", "head", "turned", "es"]  # the middle word is chosen
    for key, i in (("ArrowRight", 3), ("ArrowRight", 3), ("Home", 0), ("ArrowDown", 1), ("ArrowLeft", 0), ("End", 3)):
        tab.press(key)
        assert tab.run(focused) == TOKENS[i]
        assert tab.run("[...document.querySelectorAll('[aria-checked=true]')].length") == 1
        np.testing.assert_allclose(values(tab), GIVEN[0, 0, i], atol=0.00081)


def test_layer_head_and_direction(opened):
    tab = opened("texts")

    def choose(name, number):
        tab.run(f"(x => {{ x.selectedIndex = {number}; x.dispatchEvent(new Event('change')) }})(find('{name}'))")

    choose("layer", 2)
    choose("head", 1)
    np.testing.assert_allclose(values(tab), GIVEN[2, 1, 2], atol=0.00081)
    choose("turned", 1)
    np.testing.assert_allclose(values(tab), GIVEN[2, 1, :, 2], atol=0.00081)
    assert said(tab).startswith("es is looked at by ")
    choose("head", 2)
    np.testing.assert_allclose(values(tab), GIVEN[2, :, :, 2].mean(0), atol=0.00081)
    choose("text", 1)
    assert tab.run("document.querySelector('#layer').parentNode.hidden")
    np.testing.assert_allclose(values(tab), GIVEN[0, :, :, 2].mean(0), atol=0.00081)


def test_an_address_may_choose(opened, tmp_path):
    tab = opened("texts")
    tab.run("location.hash = '#text=0&layer=2&head=1&word=3'")
    tab.run("new Promise(done => setTimeout(done))")
    np.testing.assert_allclose(values(tab), GIVEN[2, 1, 3], atol=0.00081)
    tab.open(tmp_path / "page.html", hash="#layer=1&word=99&head=-x")
    np.testing.assert_allclose(values(tab), GIVEN[1, 0, 3], atol=0.00081)


def test_matrix_under_the_pointer_and_the_finger(opened):
    tab = opened()
    x, y, cell = tab.run("(r => [r.x + edge[0], r.y + edge[1], cell])(canvas.getBoundingClientRect())")
    tab.point(x + 1.5 * cell, y + 3.5 * cell)
    assert said(tab).endswith(f"here:  geht {GIVEN[0, 0, 3, 1]:.3f}")
    np.testing.assert_allclose(values(tab), GIVEN[0, 0, 3], atol=0.00081)
    tab = opened(width=390, touch=True)
    tab.run("document.querySelector('canvas').scrollIntoView()")
    x, y, cell = tab.run("(r => [r.x + edge[0], r.y + edge[1], cell])(canvas.getBoundingClientRect())")
    tab.touch(x + 2.5 * cell, y + 0.5 * cell)
    np.testing.assert_allclose(values(tab), GIVEN[0, 0, 0], atol=0.00081)
    tab.run("scrollTo(0, 0)")
    tab.touch(*middle(tab, ".word", 1))
    np.testing.assert_allclose(values(tab), GIVEN[0, 0, 1], atol=0.00081)


def test_matrix_that_is_narrower_than_it_was_drawn(opened):
    tab = opened("many words")
    tab.run("document.querySelector('figure').style.width = '300px'")  # as a scroll bar does, by less
    x, y, width = tab.run("(r => [r.x, r.y, r.width])(canvas.getBoundingClientRect())")
    assert width == 300
    tab.point(x + 10.5 * width / 90, y + 70.5 * width / 90)
    assert tab.run("[chosen, other]") == [70, 10]


def test_other_keys_have_a_list_of_their_own(opened):
    tab = opened("keys")
    assert tab.run("[...document.querySelectorAll('[role=radio]')].map(x => x.ariaLabel)") == TOKENS
    assert tab.run("[...document.querySelectorAll('[role=group] .word')].map(x => x.firstChild.data)") == list("abcdef")
    tab.point(*middle(tab, "[role=radio]", 3))
    np.testing.assert_allclose(values(tab)[4:], weights(2, 2, 4, 6)[0, 0, 3], atol=0.00081)


def test_patches_by_keyboard(opened):
    tab = opened("patches")
    for _ in range(3):
        tab.press("Tab")
    tab.press("Home", "ArrowRight", "ArrowDown", "ArrowRight")
    assert tab.run("document.activeElement.ariaLabel") == "row 1, column 1"
    given = weights(1, 2, 17, 17)[0, 0, 1 + 5]
    shades = tab.run("[...document.querySelectorAll('.patch')].map(x => +x.style.getPropertyValue('--part'))")
    np.testing.assert_allclose(shades, given[1:] / given.max(), atol=0.005)
    patch = tab.run("(r => [r.width, r.height])(document.querySelector('.patch').getBoundingClientRect())")
    assert abs(patch[0] - patch[1]) < 0.5


def luminance(color):
    parts = [int(x) / 255 for x in re.findall(r"\d+", color)[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return np.dot(linear, [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(opened, scheme):
    tab = opened(scheme=scheme)
    ink, ground, quiet, shade = tab.run(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('figcaption')).color,"
        " getComputedStyle(document.documentElement).getPropertyValue('--shade')]"
    )
    assert (luminance(ground) < 0.1) == (scheme == "dark")
    for front, back, least in ((ink, ground, 7), (quiet, ground, 4.5), (ink, shade, 4.5)):
        low, high = sorted([luminance(front), luminance(back)])
        assert (high + 0.05) / (low + 0.05) > least


def test_names_for_those_who_listen(opened):
    tab = opened("keys")
    tree = tab.send("Accessibility.getFullAXTree")["nodes"]
    named = [(node["role"]["value"], node.get("name", {}).get("value")) for node in tree if not node["ignored"]]
    for role in ("combobox", "radio", "radiogroup", "image", "form", "region"):
        of_role = [name for kind, name in named if kind in (role, {"image": "img"}.get(role))]
        assert of_role, role
        assert all(of_role), role
    assert ("radio", "Wie") in named
    assert any(name.startswith("Matrix of layer 0, head 0: 4 rows") for kind, name in named if "im" in kind and name)


def test_page_is_drawn(opened, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow reads the screenshot")
    tab = opened()
    tab.screenshot(tmp_path / "shot.png")
    with image.open(tmp_path / "shot.png") as shot:
        pixels = np.asarray(shot.convert("RGB")).reshape(-1, 3)
    assert (pixels == (91, 159, 227)).all(1).sum() > 500, "the largest weights have the full shade"
