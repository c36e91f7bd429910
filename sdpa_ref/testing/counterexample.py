"""A failure as files that need nothing of this project: a NumPy script with its numbers, and an ONNX node test."""

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

import sdpa_ref as sr
from sdpa_ref import reference
from sdpa_ref._problem import Caller, pose
from sdpa_ref.backend import Problem
from sdpa_ref.storage import Stored
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.cases import Case
from sdpa_ref.testing.diagnose import Diagnosis
from sdpa_ref.testing.judge import Failure
from sdpa_ref.testing.onnx_model import attention_model

_FEW = 8  # numbers that are printed, keys of a row or entries of an option
_LONGEST = 200  # characters of an option
_HOW_TO_READ = "  (its number is the seed of all that is drawn; sizes that it leaves out are 1, options are off)"
_SCRIPT = '''"""{title}

{message}

Found by `sdpa-ref check`, and run again by
  {command}
It needs NumPy and the numbers beside it. Arrays are (..., heads, length, width), and expected is computed anew.
"""

from pathlib import Path

import numpy as np

data = dict(np.load(Path(__file__).with_suffix(".npz")))


def numbers(name):
    """Return an array in float64; bfloat16 is stored as its bits."""
    if name + "_bfloat16" in data:
        return (data[name + "_bfloat16"].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data[name].astype(np.float64)


def attention(query, key, value):
    """Return attention in float64, a formula a line."""
    group = query.shape[-3] // key.shape[-3]
    key, value = np.repeat(key, group, -3), np.repeat(value, group, -3)
    keep = data["keep"]  # True: this query sees this key
    s = data["scale"] * (query @ np.swapaxes(key, -1, -2))
    if "softcap" in data:
        s = data["softcap"] * np.tanh(s / data["softcap"])
    s = np.where(keep, s + data.get("bias", 0), -np.inf)
    sink = data.get("sink", np.full(query.shape[-3], -np.inf))[:, None, None]
    m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
    m = np.where(m == -np.inf, 0, m)
    p = np.exp(s - m)
    z = p.sum(-1, keepdims=True) + np.exp(sink - m)
    weights = p / np.where(z == 0, 1, z) * data.get("dropout", 1)
    seen = keep & (s > -np.inf).any(-1, keepdims=True)
    with np.errstate(all="ignore"):  # what a row does not see adds nothing, not even 0 * NaN
        return np.where(seen[..., None], weights[..., None] * value[..., None, :, :], 0).sum(-2)


with np.errstate(all="ignore"):
    expected = attention(numbers("query"), numbers("key"), numbers("value"))
print("expected", expected, sep="\\n")
if "got" in data:  # to test a kernel, put its output here
    got, limit = data["got"], data["limit"]
    with np.errstate(all="ignore"):
        error = np.where((got == expected) | (np.isnan(got) & np.isnan(expected)), 0, abs(got - expected))
        wrong = ~(error <= limit)
        print("got", got, sep="\\n")
        print("wrong:", wrong.sum(), "of", wrong.size, "numbers, the first at", np.argwhere(wrong)[:1].tolist())
        print("largest error in units of what is allowed:", np.max(np.where(wrong, error / limit, 0)))
'''


def saved(directory: Path, name: str, command: str, failure: Failure, diagnosis: Diagnosis) -> tuple[list[Path], str]:
    """Write the files of a failure, and return them and why there is no ONNX test ("" where there is).

    Parameters
    ----------
    directory : Path
        Is made where it is not there.
    name : str
        Of the law.
    command : str
        That runs the case again.
    failure : Failure
    diagnosis : Diagnosis
    """
    stem = re.sub(r"\W+", "-", name).strip("-").lower()
    directory.mkdir(parents=True, exist_ok=True)
    script, archive = directory / f"{stem}.py", directory / f"{stem}.npz"
    text = {"title": f"{name}: attention that fails", "message": described(failure, diagnosis), "command": command}
    script.write_text(_SCRIPT.format(**{key: _harmless(value) for key, value in text.items()}), encoding="utf-8")
    problem, caller = pose(*failure.case.arrays, **failure.case.options)
    np.savez(archive, **_numbers(problem, caller, failure))
    reason = _not_in_onnx(problem, failure)
    if reason:
        return [script, archive], reason
    _write_node_test(directory / f"{stem}-onnx", problem)
    return [script, archive, directory / f"{stem}-onnx"], ""


def described(failure: Failure, diagnosis: Diagnosis) -> str:
    """Return in a few lines what is wrong, where it begins and what is to blame."""
    lines = [failure.message]
    if diagnosis.first:
        b, h, i = diagnosis.first
        at = f"batch {', '.join(map(str, b))}, head {h}, row {i}" if b else f"head {h}, row {i}"
        lines.append(f"first wrong row: {at}")
    if diagnosis.blame in ("weights", "values"):
        other = "wrong" if diagnosis.blame == "weights" else "right, and so the product with the values is wrong"
        lines.append(f"with one-hot values the weights are {other}")
    if diagnosis.blame == "weights" and diagnosis.weights is not None and diagnosis.right_weights is not None:
        lines.append(_wrong_weights(diagnosis.weights, diagnosis.right_weights))
    return "\n".join([*lines, _facts(failure.case), f"case: {failure.case}", _HOW_TO_READ])


def _wrong_weights(got: Array, expected: Array) -> str:
    """Return some weights of the worst row, around the key where they are farthest apart."""
    with np.errstate(all="ignore"):
        apart = np.nan_to_num(abs(got - expected), nan=np.inf)
    i, j = np.unravel_index(apart.argmax(), apart.shape)
    start = max(0, min(int(j) - _FEW // 2, got.shape[-1] - _FEW))
    keys = slice(start, min(start + _FEW, got.shape[-1]))
    told = (np.array2string(weights[i, keys], precision=4, max_line_width=1000) for weights in (expected, got))
    return "  row {}, keys {} to {}: expected {}, got {}".format(i, keys.start, keys.stop - 1, *told)


def _facts(case: Case) -> str:
    """Return the sizes and the options of a case in words."""
    last = case.options.get("layout") == "LHE"
    L, S = (array.shape[-3 if last else -2] for array in (case.query, case.key))
    arrays = zip(("query", "key", "value"), case.arrays, strict=True)
    shapes = ", ".join(f"{name} {x.shape if isinstance(x, np.ndarray) else x}" for name, x in arrays)
    options = (f"{name}={_told(option)}" for name, option in case.options.items())
    return f"{case.query.dtype.newbyteorder('=')} {shapes}: {', '.join([f'L={L}', f'S={S}', *options])}"


def _told(option: Any) -> str:
    if isinstance(option, tuple):
        return f"({', '.join(map(_told, option))})"
    if isinstance(option, np.ndarray) and option.size > _FEW:
        return f"{option.dtype} array {option.shape}"
    if callable(option) and hasattr(option, "__name__"):
        return str(option.__name__)
    text = str(option.tolist()) if isinstance(option, np.ndarray) else repr(option)
    return shorten(text, _LONGEST, placeholder=" ...")


def _harmless(text: str) -> str:
    """Return the text as it may stand in a docstring."""
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _numbers(p: Problem, caller: Caller, failure: Failure) -> dict[str, Any]:
    """Return what the script reads: arrays in canonical order, and everything added to the scores as one bias."""
    whole = _gathered(p.rows(0, p.L))
    exact = reference.stages(whole)
    found: dict[str, Any] = {"keep": exact.keep, "scale": np.float64(p.scale)}
    for name, array in (("query", whole.query), ("key", whole.key), ("value", whole.value)):
        half = array.dtype.name == "bfloat16"
        found[f"{name}_bfloat16" if half else name] = np.array(array).view(np.uint16) if half else array
    if p.softcap is not None:
        found["softcap"] = np.float64(p.softcap)
    if p.sink is not None:
        found["sink"] = p.sink
    if whole.bias is not None or p.slopes is not None or p.score_mod is not None:
        with np.errstate(all="ignore"):
            found["bias"] = np.where(exact.keep, exact.biased - exact.capped, 0)
    if p.dropout is not None:
        found["dropout"] = p.dropout.factor * p.dropout.keep(exact.keep.shape)
    if failure.got is not None and failure.what == "output":
        canonical = _to_canonical(caller)
        found |= {"got": canonical(failure.got), "limit": canonical(failure.limit)}
    return found


def _gathered(p: Problem) -> Problem:
    """Return the problem with keys and values as arrays, where they are stored otherwise."""
    return p._replace(**{x: getattr(p, x).dense() for x in ("key", "value") if isinstance(getattr(p, x), Stored)})


def _to_canonical(caller: Caller) -> Callable[[Any], Array]:
    if caller.headless:
        return lambda array: array[None]
    return lambda array: array.swapaxes(-2, -3) if caller.layout == "LHE" else array


def _not_in_onnx(p: Problem, failure: Failure) -> str:
    """Return why the failure is no ONNX node test, or ""."""
    if failure.what != "output":
        return f"the operator has no {failure.what}"
    for name, used in (
        ("sink", p.sink is not None),
        ("dropout", p.dropout is not None),
        ("score_mod", p.score_mod is not None),
    ):
        if used:
            return f"the operator has no {name}"
    if p.scale <= 0:
        return "the operator takes the root of the scale, and this one is not positive"
    if 0 in (p.B, p.Hq, p.L, p.S, p.E, p.Ev):
        return "the operator has no rule for axes of length 0"
    try:
        import onnx  # noqa: F401
    except ImportError:
        return "onnx is not installed: pip install onnx"
    return ""


def _write_node_test(directory: Path, p: Problem) -> None:
    """Write model and data in the form of ONNX's own backend tests."""
    from onnx import numpy_helper

    whole = _gathered(p.rows(0, p.L))
    exact = reference.stages(whole)
    query, key, value = (np.reshape(x, (p.B, *x.shape[-3:])) for x in (whole.query, whole.key, whole.value))
    given: Array | None = None if exact.keep.all() else exact.keep
    if whole.bias is not None or p.slopes is not None:
        with np.errstate(all="ignore"):
            given = np.where(exact.keep, exact.biased - exact.capped, -np.inf).astype(p.dtype)
    if given is not None:
        given = np.reshape(given, (p.B, *given.shape[-3:]))
    attributes: dict[str, Any] = {"scale": p.scale} | ({} if p.softcap is None else {"softcap": p.softcap})
    model, feeds = attention_model(query, key, value, mask=given, **attributes)
    options: dict[str, Any] = (
        attributes if given is None else attributes | {"mask" if given.dtype == bool else "bias": given}
    )
    expected = sr.sdpa(query, key, value, backend="reference", **options)
    data = directory / "test_data_set_0"
    data.mkdir(parents=True, exist_ok=True)
    files = {directory / "model.onnx": model.SerializeToString()}
    for n, (name, array) in enumerate(feeds.items()):
        files[data / f"input_{n}.pb"] = numpy_helper.from_array(array, name).SerializeToString()
    files[data / "output_0.pb"] = numpy_helper.from_array(expected, "Y").SerializeToString()
    for path, content in files.items():
        path.write_bytes(content)
