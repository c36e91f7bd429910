"""What a target claims to do. The suite tests what is claimed, and says what is not."""

import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypedDict

from sdpa_ref.testing.bounds import ARITHMETIC
from sdpa_ref.testing.case_options import MASKS, SHAPES

OBJECTS = tuple(word for word in MASKS if word not in SHAPES)
"""Masks that are objects; the other words of `cases.MASKS` are boolean arrays."""

_CHOICES = {
    "dtypes": ("float16", "bfloat16", "float32", "float64"),
    "layouts": ("HLE", "LHE"),
    "masks": OBJECTS,
    "offsets": ("start", "end", "number", "batch"),
    "scale": ("none", "positive", "any"),
    "bias": ("none", "same", "any"),
    "lse_base": ("e", "2"),
    "empty_row": ("zero", "mean", "nan", "any"),
    "precision": tuple(ARITHMETIC),
}


class Precision(TypedDict):
    """Keywords of `error_budget` and `gradient_budget`."""

    precision: str
    exp_error: float


@dataclass(frozen=True)
class Capabilities:
    """The claims of a target. The defaults claim plain attention of float32 arrays ``(B, H, L, E)``, and no more.

    Attributes
    ----------
    dtypes : tuple of str
        Of float16, bfloat16, float32, float64.
    layouts : tuple of str
        Of "HLE", ``(..., H, L, E)``, and "LHE", ``(..., L, H, E)``.
    ranks : tuple of int
        How many axes the arrays may have; 2 is one head without a head axis.
    broadcasting, grouped_heads, value_width, empty_axes : bool
        Leading axes that broadcast; fewer key heads than query heads; Ev != E; axes of length 0.
    strides : bool
        Arrays that are not contiguous, not aligned, not native or read-only; else all are plain.
    max_length, max_width : int, optional
        The largest L and S, and the largest E and Ev.
    scale : str
        "none", "positive", or "any", which includes 0 and negative numbers.
    softcap, sink, score_mod, alibi, dropout : bool
        The options of `sdpa` by these names.
    alibi_entries : bool
        Slopes of ALiBi for each batch entry and head, as FlashAttention has them.
    bias : str
        "none", "same" (an array in the type of the query), or "any" (any float type, and tuples of biases).
    mask : bool
        Boolean arrays. Masks whose object is not claimed are then passed as arrays.
    mask_rows : bool
        Whether such an array may leave out or broadcast axes; else it has the shape ``(..., Hq, L, S)``.
    masks : tuple of str
        Mask objects that are understood as they are, in the words of `cases.MASKS`: "causal", "window", ...
    mask_algebra : bool
        Whether they can be joined by ``&``, ``|`` and ``~``.
    mask_and_bias : bool
        Both in one call.
    offsets : tuple of str
        The alignments that causal and windowed masks take: "start", "end", "number" and "batch" (numbers).
    lse, weights, gradients : bool
        Whether there is `Target.state`, `Target.weights`, `Target.vjp`.
    lse_gradients : bool
        Whether `Target.vjp` takes ``grad_lse``, the gradient by the lse (with a sink: by the lse that includes it).
    exact_merge : bool
        That states merge exactly where scores are so large that the logarithm of a sum drowns in their lse. What the
        merge needs for that is returned behind output and lse.
    lse_base : str
        "e" or "2": the base of the logarithm.
    empty_row : str
        What a row gives that sees no key, and has no sink, with which it is 0: "zero"; "mean", that of all values;
        "nan"; or "any", which is not looked at. Gradients of "nan" and "any" are not looked at either.
    poison : bool
        That NaN and infinity in what a row does not see never reach it.
    nonfinite : bool
        That a visible NaN or infinity reaches the rows that see it, and no others.
    invariant : bool
        That a row has the same bits whatever is in the rest of the batch and in other heads, and however arrays lie.
    private : bool
        That a row has the same bits whatever finite numbers the keys hold that it does not see.
    paged : bool
        `Paged` as key and value.
    quantized : bool
        `Quantized` as key and value, and where `paged` is claimed too, pages of codes.
    key_positions : bool
        The option of `sdpa` by this name, for the masks and for ALiBi where they are claimed.
    repeatable : bool
        That the same call gives the same bits again.
    threads : bool
        That several threads may call it at once.
    precision : str
        How it computes where that is less than float32 with exact operands: "tf32" or "bfloat16" (operands of all
        products of matrices), "bfloat16 weights", "float16 weights" (before the product with V), "float16
        accumulation", or "bfloat16 products": products of bfloat16 inputs by an instruction that may round to odd, and
        takes subnormal numbers for 0. Whatever it is, 16-bit inputs are products' operands as they are, and their
        weights may be rounded to their type.
    exp_error : float
        Largest relative error of its exponential, as of a short polynomial or a table: 0 for one that is right to a few
        units in the last place.
    error_factor : float
        How many times the error budget it may err. Above 1 it is a confession.
    """

    dtypes: tuple[str, ...] = ("float32",)
    layouts: tuple[str, ...] = ("HLE",)
    ranks: tuple[int, ...] = (4,)
    broadcasting: bool = False
    grouped_heads: bool = False
    value_width: bool = False
    empty_axes: bool = False
    strides: bool = False
    max_length: int | None = None
    max_width: int | None = None
    scale: str = "none"
    softcap: bool = False
    sink: bool = False
    score_mod: bool = False
    alibi: bool = False
    alibi_entries: bool = False
    dropout: bool = False
    bias: str = "none"
    mask: bool = False
    mask_rows: bool = False
    masks: tuple[str, ...] = ()
    mask_algebra: bool = False
    mask_and_bias: bool = False
    offsets: tuple[str, ...] = ()
    lse: bool = False
    exact_merge: bool = False
    lse_base: str = "e"
    weights: bool = False
    gradients: bool = False
    lse_gradients: bool = False
    empty_row: str = "zero"
    poison: bool = False
    nonfinite: bool = False
    invariant: bool = False
    private: bool = False
    paged: bool = False
    quantized: bool = False
    key_positions: bool = False
    repeatable: bool = True
    threads: bool = True
    precision: str = "float32"
    exp_error: float = 0.0
    error_factor: float = 1.0

    @classmethod
    def everything(cls, **exceptions: Any) -> "Capabilities":
        """Return the claim to be what this project's own backends are, but for the exceptions.

        Examples
        --------
        >>> Capabilities.everything(sink=False).sink
        False
        """
        claims: dict[str, Any] = {f.name: True for f in fields(cls) if f.type is bool}
        claims |= {name: _CHOICES[name] for name in ("dtypes", "layouts", "masks", "offsets")}
        claims |= {"ranks": (2, 3, 4, 5), "scale": "any", "bias": "any"}
        return cls.of(claims | exceptions)

    @classmethod
    def of(cls, claims: Mapping[str, Any]) -> "Capabilities":
        """Return the capabilities that a mapping states; names that it leaves out keep their defaults.

        Raises
        ------
        ValueError
            For an unknown name or value; the message says what there is.

        Examples
        --------
        >>> Capabilities.of({"dtypes": ["float16"], "mask": True}).dtypes
        ('float16',)
        >>> Capabilities.of({"sofcap": True})
        Traceback (most recent call last):
        ValueError: unknown capability 'sofcap', did you mean 'softcap'?
        """
        return cls().updated(claims)

    @classmethod
    def load(cls, path: Path) -> "Capabilities":
        """Return the capabilities that a TOML file states, as `of` does.

        Raises
        ------
        ValueError
            For what is not TOML, or not a capability.
        OSError
            For a file that cannot be read.
        """
        return cls.of(stated(path))

    def updated(self, claims: Mapping[str, Any]) -> "Capabilities":
        """Return these capabilities with those that a mapping states; `of` says what it raises.

        Examples
        --------
        >>> Capabilities(mask=True).updated({"sink": True}).mask
        True
        """
        names = {f.name: f for f in fields(self)}
        checked = {}
        for name, claim in claims.items():
            if name not in names:
                near = get_close_matches(name, names, 1)
                hint = f", did you mean {near[0]!r}?" if near else f"; there are {', '.join(names)}"
                raise ValueError(f"unknown capability {name!r}{hint}")
            checked[name] = _checked(name, claim, names[name].default)
        return replace(self, **checked)

    @classmethod
    def of_signature(cls, function: Callable[..., Any]) -> "Capabilities":
        """Return the claims of a function that says nothing but which keywords it takes."""
        parameters = inspect.signature(function).parameters
        takes = {
            name for name in ("mask", "softcap", "sink", "score_mod", "dropout", "key_positions") if name in parameters
        }
        bias = "same" if "bias" in parameters else "none"
        scale = "any" if "scale" in parameters else "none"
        return cls.of({**dict.fromkeys(takes, True), "bias": bias, "scale": scale})

    def strict(self) -> "Capabilities":
        """Return the same features with the meaning that `sdpa` gives them: rule 6, 7 and 18 of the semantics."""
        return replace(
            self, empty_row="zero", poison=True, nonfinite=True, private=True, invariant=True, error_factor=1.0
        )

    @property
    def arithmetic(self) -> Precision:
        """The claims of precision as keywords of `error_budget` and `gradient_budget`."""
        return {"precision": self.precision, "exp_error": self.exp_error}

    def as_dict(self) -> dict[str, Any]:
        """Return the claims as a dictionary that `of` takes."""
        return asdict(self)


def _checked(name: str, claim: Any, default: Any) -> Any:
    """Return the claim in the type of its default, or raise what is wrong with it."""
    if name in _CHOICES:
        single = isinstance(default, str)
        given = (claim,) if single or isinstance(claim, str) else tuple(claim)
        for one in given:
            if one not in _CHOICES[name]:
                raise ValueError(f"{name}: unknown {one!r}; there are {', '.join(_CHOICES[name])}")
        return given[0] if single else given
    if name == "ranks":
        if not claim or not all(isinstance(rank, int) and rank >= 2 for rank in claim):
            raise ValueError(f"ranks: must be integers of at least 2, got {claim!r}")
        return tuple(claim)
    if isinstance(default, bool) and not isinstance(claim, bool):
        raise ValueError(f"{name}: must be true or false, got {claim!r}")
    if default is None and claim is not None and (isinstance(claim, bool) or not isinstance(claim, int) or claim < 1):
        raise ValueError(f"{name}: must be an integer of at least 1, got {claim!r}")
    if name == "exp_error":
        if isinstance(claim, bool) or not isinstance(claim, int | float) or not 0 <= claim < 1:
            raise ValueError(f"exp_error: must be a number of at least 0 and below 1, got {claim!r}")
        return float(claim)
    if isinstance(default, float) and not (isinstance(claim, (int, float)) and claim >= 1):
        raise ValueError(f"{name}: must be a number of at least 1, got {claim!r}")
    return claim


def stated(path: Path) -> dict[str, Any]:
    """Return what a TOML file states, checked; `Capabilities.load` says what it raises."""
    try:
        claims = tomllib.loads(path.read_text(encoding="utf-8"))
        Capabilities.of(claims)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return claims
