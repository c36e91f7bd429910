"""``keras.ops.dot_product_attention``, on the backend that ``KERAS_BACKEND`` names.

Not claimed: types other than float32, since backends round their products differently; grouped heads on NumPy and on
TensorFlow, which raise for what is documented. A row that sees no key gives the mean of all values, because masked
scores become a large finite number.
"""

from typing import Any

import numpy as np

from sdpa_ref.masks import Causal
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.target import Target


def target() -> Target:
    """Return Keras as a target."""
    import keras

    claims = Capabilities(
        layouts=("LHE",),
        value_width=keras.backend.backend() != "jax",
        grouped_heads=keras.backend.backend() not in ("numpy", "tensorflow"),
        scale="any",
        bias="same",
        mask=True,
        masks=("causal",),
        offsets=("start",),
        mask_and_bias=keras.backend.backend() != "torch",
        empty_row="mean",
    )
    about = f"Keras {keras.__version__} on {keras.backend.backend()}"
    return Target("keras", _forward, claims, about=about)


def _forward(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Any = None,
    query_offset: Any = None,
    **options: Any,
) -> Array:
    import keras

    if isinstance(mask, Causal):
        options["is_causal"] = True
    elif mask is not None:
        options["mask"] = mask
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.dot_product_attention(query, key, value, **options)))
