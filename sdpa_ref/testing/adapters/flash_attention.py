"""``attention_ref`` of FlashAttention 4, the plain PyTorch function that its kernels are compared with.

The file is loaded alone: the package around it cannot be imported without CUDA. Causal attention and windows end at the
last key ("end"). Not claimed: float64, which is computed in float32; boolean arrays, for which it has no argument; a
scale. Declined: biases of -inf, which alone leave a row NaN, and the lse of rows past their length, which is that of
the row before it is masked. Dropout takes the mask of ours.
"""

import importlib.util
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from sdpa_ref.masks import Causal, KeyLengths, QueryLengths, Window
from sdpa_ref.testing.adapters import _tensors
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.target import Target

PACKAGES = "--no-deps flash-attn-4==4.0.0b36 && pip install einops torch"
"""What installs it; its dependencies are for CUDA."""
_PACKAGE = "flash-attn-4"


def target() -> Target:
    """Return the reference of FlashAttention as a target."""
    import torch

    _module()
    torch.set_num_threads(1)  # cases are small
    claims = Capabilities(
        dtypes=("float16", "bfloat16", "float32"),
        layouts=("LHE",),
        grouped_heads=True,
        value_width=True,
        softcap=True,
        sink=True,
        dropout=True,
        bias="same",
        masks=("causal", "window", "key lengths", "query lengths"),
        offsets=("end",),
        mask_and_bias=True,
        lse=True,
        gradients=True,
    )
    about = f"attention_ref of {_PACKAGE} {version(_PACKAGE)} on PyTorch {torch.__version__}"
    forward, vjp = (partial(way, _output) for way in (_tensors.output, _tensors.gradients))
    return Target("flash_attention", forward, claims, state=_state, vjp=vjp, about=about)


@cache
def _module() -> Any:
    """Return the module with the reference.

    Raises
    ------
    ImportError
        Where the package is not there.
    """
    try:
        version(_PACKAGE)
    except PackageNotFoundError:
        raise ImportError(f"No module named 'flash_attn.cute.testing'; it is part of {_PACKAGE}") from None
    package = importlib.util.find_spec("flash_attn")
    (folder, *_) = (package and package.submodule_search_locations) or [""]
    spec = importlib.util.spec_from_file_location("flash_attention_reference", f"{folder}/cute/testing.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{_PACKAGE} has no cute/testing.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _state(query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Array]:
    if query.dtype.itemsize == 2:
        raise NotImplementedError("the lse has the type of the values")
    if isinstance(options.get("mask"), QueryLengths):
        raise NotImplementedError("the lse of a row past its length is that of the row before it is masked")
    import torch

    options |= {name: _tensors.tensor(options[name]) for name in ("bias",) if name in options}
    with torch.inference_mode():
        output, _, lse = _attention(*map(_tensors.tensor, (query, key, value)), return_lse=True, **options)
    return output.numpy(), lse.transpose(1, 2).contiguous().numpy()


def _output(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return _attention(query, key, value, **options)[0]


def _attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    query_offset: Any = None,
    bias: Any = None,
    softcap: float = 0.0,
    sink: Any = None,
    dropout: Any = None,
    return_lse: bool = False,
) -> Any:
    import torch

    if bias is not None and torch.isinf(bias).any():
        raise NotImplementedError("a row all of whose biases are -inf is NaN")
    (B, L, Hq, _), S = query.shape, key.shape[1]
    options: dict[str, Any] = {"attn_bias": bias, "softcap": softcap, "return_lse": return_lse}
    if isinstance(mask, Causal):
        options["causal"] = True
    elif isinstance(mask, Window):
        options["window_size"] = tuple(None if side is None else int(side) for side in (mask.left, mask.right))
    elif isinstance(mask, KeyLengths):
        options["key_padding_mask"] = torch.arange(S) < torch.from_numpy(np.array(np.broadcast_to(mask.n, B)))[:, None]
    elif isinstance(mask, QueryLengths):
        lengths = torch.from_numpy(np.array(np.broadcast_to(mask.n, B)))
        options["query_padding_mask"] = torch.arange(L) < lengths[:, None]
    if sink is not None:
        options["learnable_sink"] = sink.float().expand(Hq)
    if dropout is not None:
        options["dropout_p"] = dropout.p
        options["dropout_mask"] = torch.from_numpy(np.array(dropout.keep((B, Hq, L, S))))
    return _module().attention_ref(query, key, value, **options)
