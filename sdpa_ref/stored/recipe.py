"""What recipes share: how numbers become codes and scales, each token by itself."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from sdpa_ref.arrays import FLOATS, Array, as_integer, is_float, kind, memory_array, module_of
from sdpa_ref.floating_point import ieee
from sdpa_ref.frozen import Frozen
from sdpa_ref.registry import BackendUnavailable, load
from sdpa_ref.stored.quantized import Quantized

_BLOCK = 1 << 15
_BITS = {2: np.uint16, 4: np.uint32}  # unsigned integers of the size of a scale


class Recipe(Frozen):
    """What the recipes share: groups of numbers along the last axis, each with a scale of its own."""

    group: int | None
    center: Array | None

    code: ClassVar[str]  # what backends call the codes
    codes_dtype: ClassVar[Any]
    scale_dtype: ClassVar[Any] = np.dtype(np.float16)
    span: ClassVar[float]  # the code that the largest magnitude of a group becomes
    zero: ClassVar[int] = 0
    bits: ClassVar[int] = 8

    def __post_init__(self) -> None:
        if self.group is not None:
            group = as_integer("group", self.group)
            if group < 1:
                raise ValueError(f"group must be at least 1, or None for all of a token, got {group}")
            object.__setattr__(self, "group", group)
        if self.center is not None:
            center = memory_array("center", self.center)
            if not is_float(center.dtype):
                raise TypeError(f"center must be {FLOATS}, got {center.dtype}")
            if center.ndim != 2:
                raise ValueError(f"center must have shape (heads, E), got {center.shape}")
            center = center.copy()
            if not bool(module_of(kind(center)).isfinite(center.astype(np.float64)).all()):
                raise ValueError("center must be finite, got NaN or infinity in it")
            if isinstance(center, np.ndarray):
                center.setflags(write=False)
            object.__setattr__(self, "center", center)

    def encode(self, x: Any, layout: str = "HLE") -> Quantized:
        """Return the codes and scales of these numbers.

        Parameters
        ----------
        x : float array, shape (..., heads, T, E), or (..., T, heads, E) in layout "LHE"
            Keys or values. Where there is no center, any axes before the last.
        layout : {"HLE", "LHE"}
            Where the axis of heads is, for the center.

        Raises
        ------
        ValueError
            A number is not finite, a scale is beyond its type, or the group does not divide E.
        """
        x = memory_array("x", x)
        self._check_type("x", x)
        if layout not in ("HLE", "LHE"):
            raise ValueError(f'layout must be "HLE" or "LHE", got {layout!r}')
        self._check(x.shape, layout, kind(x))
        module, lead, E = module_of(kind(x)), x.shape[:-1], x.shape[-1]
        codes = module.empty((*lead, E * self.bits // 8), self.codes_dtype)
        scale = module.empty((*lead, max(E // (self.group or max(E, 1)), 1)), self.scale_dtype)
        self._write(layout, (x, codes, scale))
        return self._joined(codes, scale, layout)

    @property
    def key(self) -> Any:
        """What makes two of these equal, wherever the center is."""
        center = None if self.center is None else (self.center.shape, self.center.tobytes())
        return type(self), tuple(value for name, value in self.__getstate__().items() if name != "center"), center

    def _check_type(self, name: str, x: Array) -> None:
        """Raise the error of numbers of another type."""
        if not is_float(x.dtype):
            raise TypeError(f"{name} must be {FLOATS}, got {x.dtype}")

    def _check(self, shape: tuple[int, ...], layout: str, whose: str) -> None:
        """Raise the error of numbers of this shape and kind."""
        if not shape:
            raise ValueError("x must have at least one axis, got a number")
        E, group = shape[-1], self.group
        if self.bits == 4 and E % 2:
            raise ValueError(f"the width E must be even for codes of 4 bits, two a byte, got E = {E}")
        if group is not None and E % group:
            divisors = ", ".join(str(n) for n in range(1, E + 1) if E % n == 0)
            raise ValueError(f"group must divide the width E = {E}, got {group}; its divisors are {divisors}")
        if self.center is not None:
            heads = shape[-3 if layout == "HLE" else -2] if len(shape) > 2 else None
            if self.center.shape != (heads, E):
                raise ValueError(
                    f"center must have shape (heads, E) = ({heads}, {E}) for numbers of shape {shape} in layout "
                    f"{layout}, got {self.center.shape}"
                )
            if kind(self.center) != whose:
                raise TypeError(f"x and center must be of one kind, got {whose} and {kind(self.center)}")

    def _offset(self, layout: str) -> Array | None:
        """Return the center as it is added to numbers in this layout."""
        return self.center if self.center is None or layout == "LHE" else self.center[:, None, :]

    def _joined(self, codes: Array, scale: Array, layout: str) -> Quantized:
        """Return what these parts mean."""
        return Quantized(codes, scale, self._offset(layout), zero=self.zero, bits=self.bits)

    def _write(self, layout: str, *parts: tuple[Array, Array, Array]) -> None:
        """Write codes and scales of arrays of one shape into those that follow each; they are checked but for NaN.

        A backend that can do it has the same bits as `_block`.
        """
        x = parts[0][0]
        encode, group = _encoder() if type(x) is np.ndarray else None, self.group or x.shape[-1]
        if encode is not None and x.size and (self.bits == 8 or group % 2 == 0):
            moved = parts
            if self.center is not None:
                moved = tuple((self._centered(x, layout), codes, scale) for x, codes, scale in parts)
            if encode(self.code, group, *moved):
                return
        self._write_blocks(layout, parts)  # which raises the error

    @ieee
    def _centered(self, x: Array, layout: str) -> Array:
        """Return the numbers in float64, less the center."""
        y: Array = x.astype(np.float64, copy=False)
        return y if self.center is None else y - self._offset(layout).astype(np.float64)  # type: ignore[union-attr]

    @ieee
    def _write_blocks(self, layout: str, parts: tuple[tuple[Array, Array, Array], ...]) -> None:
        """Do what `_write` does, with as many tokens at once as stay in the processor's cache."""
        axis, module = -3 if layout == "LHE" else -2, module_of(kind(parts[0][0]))
        if len(parts) > 1 and parts[0][0].size <= _BLOCK:  # all in one, in fewer steps
            both = self._block(module.stack([x.astype(np.float64, copy=False) for x, _, _ in parts]), layout)
            for (_, codes, scale), some_codes, some_scale in zip(parts, *both, strict=True):
                codes[...], scale[...] = some_codes, some_scale
            return
        for x, codes, scale in parts:
            T = x.shape[axis] if x.ndim >= -axis else 1
            few = max(1, _BLOCK * T // max(x.size, 1)) if kind(x) == "numpy" and x.size > 2 * _BLOCK else max(T, 1)
            for t in range(0, T, few):
                some: Any = (..., slice(t, t + few), *(slice(None),) * (-axis - 1)) if few < T else ...
                codes[some], scale[some] = self._block(x[some], layout)

    def _block(self, x: Array, layout: str) -> tuple[Array, Array]:
        """Return codes and scales of one array."""
        module, shape, span, E = module_of(kind(x)), x.shape, self.span, x.shape[-1]
        y = self._centered(x, layout)
        size = self.group or max(E, 1)
        y = y.reshape(*shape[:-1], max(E // size, 1), size if E else 0)
        peak = self._peak(y, module)
        exact = peak / span
        largest, most = float(abs(exact).max()) if exact.size else 0.0, float(np.finfo(self.scale_dtype).max)
        if not largest <= most:
            if bool(module.isfinite(y).all()):
                raise self._too_large(largest)
            raise ValueError("numbers to be coded must be finite, got NaN or infinity")
        scale = exact.astype(self.scale_dtype)
        bits = scale.view(_BITS[scale.dtype.itemsize])
        bits += abs(scale.astype(np.float64) * span) < abs(peak)  # the next number away from 0
        if not bool(module.isfinite(scale).all()):
            raise self._too_large(largest)
        step = scale.astype(np.float64)
        y = y / (step + (step == 0))[..., None]
        return self._codes(y, module).reshape(*shape[:-1], E * self.bits // 8), scale

    def _too_large(self, scale: float) -> ValueError:
        limits = np.finfo(self.scale_dtype)
        return ValueError(f"a scale must be a {limits.dtype}, at most {float(limits.max):.5g}, got {scale:.8g}")

    def _peak(self, y: Array, module: Any) -> Array:
        """Return what becomes code `span` in each group ``y[..., :]``; NaN or infinite where a number is."""
        return abs(y).max(-1, initial=0)

    def _codes(self, y: Array, module: Any) -> Array:
        """Return the codes of numbers in units of their scale, with the last two axes joined or still apart."""
        raise AssertionError("a recipe has codes")

    def __repr__(self) -> str:
        fields = {name: repr(value) for name, value in self.__getstate__().items() if value is not None}
        if self.center is not None:
            fields["center"] = f"array{self.center.shape}"
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in fields.items())})"


def _encoder() -> Callable[..., bool] | None:
    """Return the compiled encoder, None where there is none now: what is missing may be installed meanwhile."""
    try:
        backend = load("numba")
    except (BackendUnavailable, ValueError):
        return None
    return backend.encode if "encode" in backend.TASKS else None
