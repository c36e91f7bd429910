"""Arrays as small pictures in a page, without a library for pictures."""

import numpy as np

from sdpa_ref.testing.case_options import Array
from sdpa_ref.viewer.png import png_address

_LOW, _HIGH = np.array([255, 255, 255]), np.array([38, 84, 124])
_WRONG, _WORST = np.array([255, 196, 120]), np.array([160, 0, 20])


def errors(units: Array) -> str:
    """Return a data address of a picture of errors in units of what is allowed.

    Up to 1 it goes from white to blue, beyond, on a logarithmic scale to 1000, from orange to dark red.

    Examples
    --------
    >>> errors(np.array([[0.1, 30.0]]))[:32]
    'data:image/png;base64,iVBORw0KGg'
    """
    within = _LOW + np.clip(units, 0, 1)[..., None] * (_HIGH - _LOW)
    far = np.clip(np.log10(np.maximum(units, 1)) / 3, 0, 1)[..., None]
    return png_address(np.where(units[..., None] > 1, _WRONG + far * (_WORST - _WRONG), within))


def shares(weights: Array, most: float = 1.0) -> str:
    """Return a data address of a picture of weights: white for 0, blue for `most`, red for what cannot be a weight."""
    legal = (weights >= 0) & (weights <= 1.001)
    shade = np.sqrt(np.clip(np.nan_to_num(weights / most), 0, 1))[..., None]
    return png_address(np.where(legal[..., None], _LOW + shade * (_HIGH - _LOW), _WORST))
