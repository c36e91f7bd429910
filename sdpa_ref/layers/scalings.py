"""What models do to rotary positions to read texts longer than those they were trained on first."""

import math
from typing import Any, NoReturn

import numpy as np

from sdpa_ref.arrays import Array, as_integer, real_number


class Scaling:
    """Frequencies as they are: what all scalings share.

    Scalings are values: they never change, and those of the same type and numbers are equal.
    """

    def __init__(self, **numbers: Any) -> None:
        self.__dict__.update(numbers)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} never changes: make another one")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    def frequencies(self, width: int, base: float, positions: Array) -> tuple[Array, float]:
        """Return the angle of each pair from one position to the next, and a factor of the rotated numbers.

        Parameters
        ----------
        width : int
            How many numbers of a head are turned.
        base : float
            That of `rotary`.
        positions : array, shape ``(L,)`` or ``(*batch, L)``
            Those of the call.

        Returns
        -------
        frequencies : array, shape ``(width // 2,)`` or ``(*batch, 1, width // 2)``
        factor : float
        """
        return base ** (np.arange(0, -width, -2) / width), 1.0


class LinearScaling(Scaling):
    """Positions divided by a factor.

    Parameters
    ----------
    factor : float
        At least 1: how many times longer the text may be.

    Notes
    -----
    Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation" (2023); "linear" in
    the configuration of a model.

    Examples
    --------
    >>> from sdpa_ref import rotary
    >>> x = np.ones((2, 4))
    >>> bool((rotary(x, [6, 8], scaling=LinearScaling(2)) == rotary(x, [3, 4])).all())
    True
    """

    factor: float

    def __init__(self, factor: float) -> None:
        super().__init__(factor=_at_least_1("factor", factor))

    def frequencies(self, width: int, base: float, positions: Array) -> tuple[Array, float]:
        """Return the frequencies divided by the factor: see `Scaling.frequencies`."""
        plain, one = super().frequencies(width, base, positions)
        return plain / self.factor, one


class DynamicScaling(Scaling):
    """A base that grows with the length of the text, once that is longer than the original one.

    With the length n it is ``base * (factor * n / original_length - (factor - 1)) ** (width / (width - 2))``.

    Parameters
    ----------
    factor : float
        At least 1.
    original_length : int
        Length of the texts that the model was trained on.
    length : int, optional
        Length n of the text. By default the largest position of each batch entry in the call, plus 1: keys that went
        into a cache keep the base they had.

    Notes
    -----
    "Dynamic NTK" by u/emozilla (2023), described in section 3.3 of Peng et al., "YaRN" (2023); "dynamic" in the
    configuration of a model. Hugging Face takes the largest position of the whole batch.

    Examples
    --------
    >>> from sdpa_ref import rotary
    >>> x = np.ones((2, 4))
    >>> long = rotary(x, [6, 7], scaling=DynamicScaling(3, original_length=4))
    >>> bool(np.allclose(long, rotary(x, [6, 7], base=10000 * 4.0**2)))  # 3 * 8 / 4 - 2 is 4
    True
    """

    factor: float
    original_length: int
    length: int | None

    def __init__(self, factor: float, original_length: int, length: int | None = None) -> None:
        super().__init__(
            factor=_at_least_1("factor", factor),
            original_length=_length("original_length", original_length),
            length=None if length is None else _length("length", length),
        )

    def frequencies(self, width: int, base: float, positions: Array) -> tuple[Array, float]:
        """Return the frequencies by the larger base: see `Scaling.frequencies`."""
        if width < 4:
            raise ValueError(f"width must be at least 4 for DynamicScaling, got {width}")
        n: Any = self.length
        if n is None:
            n = positions.max(-1, initial=0) + 1
            n = n[..., None, None] if positions.ndim > 1 else n
        n = np.maximum(n, self.original_length)
        larger = base * (self.factor * n / self.original_length - (self.factor - 1)) ** (width / (width - 2))
        return larger ** (np.arange(0, -width, -2) / width), 1.0


class YarnScaling(Scaling):
    """YaRN: slow pairs are interpolated, fast pairs stay, pairs between are a mixture, and scores are enlarged.

    Pair n turns ``r = original_length * base**(-2 * n / width) / (2 * pi)`` times in the original length. Where r is
    above `beta_fast` its frequency stays, where it is below `beta_slow` it is divided by the factor, and between them
    the share of the two is linear in n.

    Parameters
    ----------
    factor : float
        At least 1.
    original_length : int
        Length of the texts that the model was trained on first.
    beta_fast, beta_slow : float
        Bounds of the ramp, in turns.
    attention_factor : float, optional
        By which the turned numbers are multiplied; ``0.1 * log(factor) + 1`` by default. A model that has ``mscale``
        and ``mscale_all_dim``, such as DeepSeek, takes the ratio of ``0.1 * m * log(factor) + 1`` for these.
    truncate : bool
        Whether the ends of the ramp are rounded to whole pairs, outwards; gpt-oss does not.

    Notes
    -----
    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023), and its authors' code;
    "yarn" in the configuration of a model.

    Examples
    --------
    >>> scaling = YarnScaling(4, original_length=2048)
    >>> frequencies, factor = scaling.frequencies(64, 10000.0, np.arange(1))
    >>> plain = 10000.0 ** -(np.arange(32) / 32)
    >>> (plain / frequencies)[[0, 8, 16, 31]].round(2), round(factor, 3)
    (array([1.  , 1.  , 1.86, 4.  ]), 1.139)
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool

    def __init__(
        self,
        factor: float,
        original_length: int,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: float | None = None,
        truncate: bool = True,
    ) -> None:
        factor = _at_least_1("factor", factor)
        own = 0.1 * math.log(factor) + 1 if attention_factor is None else attention_factor
        if not isinstance(truncate, (bool, np.bool_)):
            raise TypeError(f"truncate must be True or False, got {type(truncate).__name__}")
        super().__init__(
            factor=factor,
            original_length=_length("original_length", original_length),
            **_ordered(beta_slow=beta_slow, beta_fast=beta_fast),
            attention_factor=real_number("attention_factor", own),
            truncate=bool(truncate),
        )

    def frequencies(self, width: int, base: float, positions: Array) -> tuple[Array, float]:
        """Return the frequencies, and the attention factor: see `Scaling.frequencies`."""
        if base <= 1:
            raise ValueError(f"base must be above 1 for YarnScaling, got {base}")
        plain, _ = super().frequencies(width, base, positions)
        low, high = (
            width * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        slow = np.clip((np.arange(width // 2) - low) / ((high - low) or 0.001), 0, 1)
        return plain * (1 - slow) + plain / self.factor * slow, self.attention_factor


class Llama3Scaling(Scaling):
    """Llama 3: slow pairs are divided by a factor, fast pairs stay, and pairs between are a mixture.

    Pair n turns ``r = original_length * base**(-2 * n / width) / (2 * pi)`` times in the original length. Its frequency
    is multiplied by ``s + (1 - s) / factor``, where s is
    ``(r - low_freq_factor) / (high_freq_factor - low_freq_factor)``, at least 0 and at most 1.

    Parameters
    ----------
    factor : float
        At least 1: 8 in Llama 3.1, 32 in Llama 3.2.
    original_length : int
        Length of the texts that the model was trained on first.
    low_freq_factor, high_freq_factor : float
        Bounds of the ramp, in turns.

    Notes
    -----
    The code that Meta published with Llama 3.1 (2024); "llama3" in the configuration of a model.

    Examples
    --------
    >>> frequencies, _ = Llama3Scaling(8).frequencies(128, 500000.0, np.arange(1))
    >>> plain = 500000.0 ** -(np.arange(64) / 64)
    >>> (plain / frequencies)[[0, 28, 31, 35, 63]].round(2)
    array([1.  , 1.  , 2.03, 8.  , 8.  ])
    """

    factor: float
    original_length: int
    low_freq_factor: float
    high_freq_factor: float

    def __init__(
        self,
        factor: float = 8.0,
        original_length: int = 8192,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
    ) -> None:
        super().__init__(
            factor=_at_least_1("factor", factor),
            original_length=_length("original_length", original_length),
            **_ordered(low_freq_factor=low_freq_factor, high_freq_factor=high_freq_factor),
        )

    def frequencies(self, width: int, base: float, positions: Array) -> tuple[Array, float]:
        """Return the frequencies: see `Scaling.frequencies`."""
        plain, one = super().frequencies(width, base, positions)
        turns = self.original_length * plain / (2 * math.pi)
        fast = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return plain * (fast + (1 - fast) / self.factor), one


def _at_least_1(name: str, value: Any) -> float:
    number = real_number(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def _length(name: str, value: Any) -> int:
    length = as_integer(name, value)
    if length < 1:
        raise ValueError(f"{name} must be at least 1, got {length}")
    return length


def _ordered(**bounds: Any) -> dict[str, float]:
    """Return two numbers above 0, the first below the second."""
    (low, a), (high, b) = numbers = [(name, real_number(name, value)) for name, value in bounds.items()]
    if not 0 < a < b:
        raise ValueError(f"{low} must be above 0 and below {high}, got {low} = {a} and {high} = {b}")
    return dict(numbers)
