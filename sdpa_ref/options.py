"""The keywords of the public functions, once: what they are, and what help() shows of them."""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, TypedDict, TypeVar

from sdpa_ref.backend import ScoreMod
from sdpa_ref.dropout import Dropout

_F = TypeVar("_F", bound=Callable[..., Any])


DEFAULTS = {"layout": "HLE"}  # of those whose default is not None


class StageOptions(TypedDict, total=False):
    """What every function takes, apart from the sink."""

    mask: Any
    bias: Any
    scale: float | None
    softcap: float | None
    query_offset: Any
    key_positions: Any
    score_mod: ScoreMod | None
    dropout: Dropout | None
    layout: str
    backend: str | None


class StateOptions(StageOptions, total=False):
    """The keywords of `sdpa_state`, which has no sink."""

    out: Any


class GradientOptions(StageOptions, total=False):
    """The keywords of what returns several arrays."""

    sink: Any


class Options(GradientOptions, StateOptions, total=False):
    """The keywords of `sdpa`."""


class MapOptions(TypedDict, total=False):
    """The keywords of a layer whose tokens are the positions of a map."""

    mask: Any
    bias: Any
    dropout: Dropout | None
    backend: str | None


class LayerOptions(MapOptions, total=False):
    """The keywords of a layer whose tokens stand in a row."""

    query_offset: Any
    scale: float | None
    softcap: float | None
    sink: Any


def spelled_out(options: Any, **defaults: Any) -> Callable[[_F], _F]:
    """Return a decorator that makes help() and `inspect.signature` list options that are taken by ``**options``."""

    def spell(function: _F) -> _F:
        shown = signature(function)
        own = [each for each in shown.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        listed = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=(DEFAULTS | defaults).get(name), annotation=annotation)
            for name, annotation in options.__annotations__.items()
        ]
        function.__signature__ = shown.replace(parameters=[*own, *listed])  # type: ignore[attr-defined]
        return function

    return spell
