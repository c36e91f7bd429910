"""Before the first call: where kernels are kept, and all of them compiled."""

from collections.abc import Callable
from functools import partial

from .calls import BIAS_CODES
from .compile.cache import cache_info
from .compile.products import products
from .plan import forward_sizes, host_registers, sizes_for
from .runtime.threads import get_num_threads
from .vector.dots import Code

BLOCKS = {  # the codes of GGUF files
    "Q4_0": Code("nibble", "float16", "", 8),
    "Q4_1": Code("nibble", "float16", "float16"),
    "Q8_0": Code("int8", "float16"),
}


def details() -> dict[str, str]:
    """Return what matters to the speed here, for people to read."""
    sizes = sizes_for("float32", *host_registers())
    return {
        "threads": str(get_num_threads()),
        "kernel cache": str(cache_info()),
        "bfloat16": f"pairs, by {products()}" if products() else "widened to float32",
        "vectors": f"{sizes.lanes} float32 numbers; tiles of {sizes.tile_rows} x {sizes.tile_vectors} vectors",
    }


def warmup() -> dict[str, Callable[[], object]]:
    """Return what compiles each kernel, or loads it, by the name to show meanwhile.

    Raises
    ------
    OSError
        What would be compiled cannot be kept.
    """
    from .kernels import activations, affine, backward, encode, few_rows, many_rows

    kept = cache_info()
    if kept.reason is not None:
        raise OSError(f"kernels cannot be kept in {kept}: set SDPA_REF_CACHE_DIR to another folder")
    kernels = {}
    for dtype in BIAS_CODES:
        sizes = forward_sizes(dtype)
        kernels[f"{dtype}, few rows"] = few_rows.kernel(dtype, sizes)
        kernels[f"{dtype}, plain"] = many_rows.kernel(dtype, sizes, False, None)
        kernels[f"{dtype}, general"] = many_rows.kernel(dtype, sizes, True, None)
        if sizes.acc == "float32":
            kernels[f"{dtype}, GELU"] = activations.kernel(dtype, sizes.lanes)
            kernels[f"{dtype}, weights"] = affine.kernel(Code(dtype), sizes.lanes)
        if dtype == sizes.acc:  # gradients in half precision are computed in float32
            kernels[f"{dtype}, gradients"] = backward.kernel(sizes, False)
            kernels[f"{dtype}, general gradients"] = backward.kernel(sizes, True)
    wide = sizes_for("float64", *host_registers()).lanes
    kernels |= {f"float32, {code} codes": encode.kernel("float32", code, wide) for code in encode.SPANS}
    lanes = sizes_for("float32", *host_registers()).lanes
    for name, code in BLOCKS.items():
        kernels[f"float32, weights of {name}"] = affine.kernel(code, lanes)
    return {name: partial(getattr, kernel, "address") for name, kernel in kernels.items()}
