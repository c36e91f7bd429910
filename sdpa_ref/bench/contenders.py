"""What is timed: this library's backends and other libraries, each in every way it has to compute a case."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import sdpa_ref
from sdpa_ref.bench.cases import WINDOW, Array, Case, Inputs, stacked


class CannotDo(Exception):
    """A way does not cover the case; the message says why."""


@dataclass(frozen=True)
class Call:
    """A call, with everything prepared that need not be done again, and how to see what it returned."""

    run: Callable[[], Any]
    output: Callable[[Any], Array]  # (B, Hq, L, E) of what `run` returned; of a backward case what `stacked` returns


Way = Callable[[Case, Inputs, int], Call]  # the int: how many threads


def ways(name: str) -> dict[str, Way]:
    """Return by name the ways of a peer, or the one of a backend."""
    if name not in PEERS:
        return {"sdpa": partial(_sdpa, name)}
    if name == "onnxruntime":
        from sdpa_ref.bench.onnx_models import WAYS

        return {label: forward_only(way) for label, way in WAYS.items()}
    return _WAYS[name]


def forward_only(way: Way) -> Way:
    """Return the way of a library that has no gradients."""

    def prepare(case: Case, given: Inputs, threads: int) -> Call:
        if case.backward:
            raise CannotDo("it has no gradients")
        return way(case, given, threads)

    return prepare


def rows_for_heads(way: Way) -> Way:
    """Return a way that passes the query heads of a group as rows of their key head: without a mask it is the same."""

    def grouped(case: Case, given: Inputs, threads: int) -> Call:
        if case.Hq == case.Hkv or case.mask != "full" or case.bias:
            raise CannotDo("there are no groups to fold")
        folded = replace(case, Hq=case.Hkv, L=case.L * case.Hq // case.Hkv)
        query = given.query.reshape(case.B, folded.Hq, folded.L, case.E)
        call = way(folded, replace(given, query=query), threads)
        return Call(call.run, lambda result: call.output(result).reshape(given.query.shape))

    return grouped


def heads_last(array: Array) -> Array:
    """Return ``(B, H, length, E)`` as a new array ``(B, length, H, E)``, the layout of some libraries."""
    return np.ascontiguousarray(array.swapaxes(1, 2))


def _sdpa(backend: str, case: Case, given: Inputs, threads: int) -> Call:
    sdpa_ref.load(backend)
    if case.backward:
        return Call(partial(_forward_and_backward, backend, case, given), lambda arrays: stacked(*arrays))
    mask = given.keep if case.mask == "padding" else case.rule
    run = partial(sdpa_ref.sdpa, given.query, given.key, given.value, mask=mask, bias=given.bias, backend=backend)
    return Call(run, lambda output: output)


def _forward_and_backward(backend: str, case: Case, given: Inputs) -> tuple[Array, ...]:
    """Return the output and the gradients by query, key and value."""
    arrays = given.query, given.key, given.value
    output, vjp = sdpa_ref.sdpa_with_vjp(*arrays, mask=case.rule, backend=backend)
    return output, *vjp(given.grad)[:3]


def _torch(case: Case, given: Inputs, threads: int) -> Call:
    import torch

    torch.set_num_threads(threads)

    def tensor(array: Array) -> Any:
        if case.dtype == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    with torch.inference_mode(not case.backward):
        tensors = [tensor(array).requires_grad_(case.backward) for array in (given.query, given.key, given.value)]
        mask = given.keep if given.added is None else given.added
        keep = None if mask is None else torch.from_numpy(mask)
    options: dict[str, Any] = {"attn_mask": keep, "is_causal": case.mask == "causal", "enable_gqa": case.Hq != case.Hkv}
    run = partial(torch.nn.functional.scaled_dot_product_attention, *tensors, **options)
    if not case.backward:
        return Call(run, lambda output: output.float().numpy())
    grad = torch.from_numpy(given.grad)

    def both() -> tuple[Any, ...]:
        output = run()
        return output, *torch.autograd.grad(output, tensors, grad)

    return Call(both, lambda found: stacked(*(tensor.detach().numpy() for tensor in found)))


def _openvino(case: Case, given: Inputs, threads: int) -> Call:
    import openvino
    from openvino import opset13

    kind = {"float32": openvino.Type.f32, "float16": openvino.Type.f16, "bfloat16": openvino.Type.bf16}[case.dtype]
    arrays = [given.query, given.key, given.value]
    nodes = [opset13.parameter(array.shape, kind) for array in arrays]
    mask = given.keep if given.added is None else given.added
    if mask is not None:
        arrays.append(mask)
        nodes.append(opset13.parameter(mask.shape, openvino.Type.boolean if given.added is None else kind))
    attention = opset13.scaled_dot_product_attention(*nodes, causal=case.mask == "causal")
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": "1",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": kind,  # or else it computes float32 in bfloat16 where the processor can
    }
    model = openvino.Core().compile_model(openvino.Model([attention], nodes), "CPU", options)
    request = model.create_infer_request()
    output = np.empty(given.query.shape, given.query.dtype)

    def tensor(array: Array) -> Any:
        if case.dtype == "bfloat16" and array.dtype != bool:
            return openvino.Tensor(array.view(np.uint16), array.shape, kind)
        return openvino.Tensor(array, shared_memory=True)

    for i, array in enumerate(arrays):
        request.set_input_tensor(i, tensor(array))
    request.set_output_tensor(0, tensor(output))
    return Call(request.infer, lambda _: output)


def _jax(case: Case, given: Inputs, threads: int) -> Call:
    import jax

    arrays = [jax.device_put(heads_last(array)) for array in (given.query, given.key, given.value)]
    options: dict[str, Any] = {"is_causal": case.mask in ("causal", "window")}
    if case.mask == "window":
        options["local_window_size"] = (WINDOW - 1, 0)
    keep = None if case.mask != "padding" else jax.device_put(given.keep)
    bias = None if given.bias is None else jax.device_put(given.bias)
    attention = jax.jit(partial(jax.nn.dot_product_attention, **options))
    if given.grad is not None:
        grad = jax.device_put(heads_last(given.grad))

        def both(*arrays: Any) -> tuple[Any, ...]:
            output, vjp = jax.vjp(attention, *arrays)
            return output, *vjp(grad)

        run = jax.jit(both)
        return Call(
            lambda: [array.block_until_ready() for array in run(*arrays)],
            lambda found: stacked(*(np.asarray(array).swapaxes(1, 2) for array in found)),
        )
    return Call(
        lambda: attention(*arrays, bias, keep).block_until_ready(), lambda output: np.asarray(output).swapaxes(1, 2)
    )


_WAYS: dict[str, dict[str, Way]] = {
    "torch": {
        "scaled_dot_product_attention": _torch,
        "scaled_dot_product_attention, groups as rows": rows_for_heads(_torch),
    },
    "openvino": {
        "ScaledDotProductAttention-13": forward_only(_openvino),
        "ScaledDotProductAttention-13, groups as rows": forward_only(rows_for_heads(_openvino)),
    },
    "jax": {
        "dot_product_attention": _jax,
        "dot_product_attention, groups as rows": rows_for_heads(_jax),
    },
}
PEERS = ("torch", "onnxruntime", "openvino", "jax")
