"""The ways of ONNX Runtime: models of one operator, bound to memory that is not copied."""

from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_ref.bench.cases import WINDOW, Array, Case, Inputs
from sdpa_ref.bench.contenders import Call, CannotDo, Way, heads_last, rows_for_heads


def _attention(case: Case, given: Inputs, threads: int) -> Call:
    """Return the standard operator, heads before lengths."""
    feeds = {"q": given.query, "k": given.key, "v": given.value, "mask": _full_rows(case, given)}
    output = np.empty_like(given.query)
    run = _session("Attention", feeds, {"y": output}, threads, is_causal=int(case.mask == "causal"))
    return Call(run, lambda _: output)


def _attention_flat(case: Case, given: Inputs, threads: int) -> Call:
    """Return the standard operator, heads after lengths and in one axis with the width."""
    feeds = {**_flat(given), "mask": _full_rows(case, given)}
    output = np.empty_like(feeds["q"])
    heads = {"q_num_heads": case.Hq, "kv_num_heads": case.Hkv}
    run = _session("Attention", feeds, {"y": output}, threads, is_causal=int(case.mask == "causal"), **heads)
    return Call(run, lambda _: _heads_first(output, case))


def _multi_head(case: Case, given: Inputs, threads: int) -> Call:
    """Return the runtime's own operator, which is a flash kernel where nothing is masked."""
    if case.Hq != case.Hkv:
        raise CannotDo("MultiHeadAttention has no grouped heads")
    if case.mask == "window":
        raise CannotDo("MultiHeadAttention has no window")
    padding = None if given.keep is None else given.keep[:, 0, 0].astype(np.int32)
    feeds = {**_flat(given), "bias": None, "padding": padding, "added": given.bias}
    output = np.empty_like(feeds["q"])
    causal = int(case.mask == "causal")
    run = _session("MultiHeadAttention", feeds, {"y": output}, threads, num_heads=case.Hq, unidirectional=causal)
    return Call(run, lambda _: _heads_first(output, case))


def _group_query(case: Case, given: Inputs, threads: int) -> Call:
    """Return the runtime's own causal operator, which has a window and always returns keys and values for a cache."""
    if case.mask not in ("causal", "window") or case.bias:
        raise CannotDo("GroupQueryAttention is causal")
    flat = _flat(given)
    length = {"last": np.full(case.B, case.S - 1, np.int32), "length": np.array([case.S], np.int32)}
    feeds = {**flat, "past_key": None, "past_value": None, **length}
    output = np.empty_like(flat["q"])
    results = {"y": output, "key": np.empty_like(given.key), "value": np.empty_like(given.value)}
    heads = {"num_heads": case.Hq, "kv_num_heads": case.Hkv}
    window = WINDOW if case.mask == "window" else -1
    run = _session("GroupQueryAttention", feeds, results, threads, local_window_size=window, **heads)
    return Call(run, lambda _: _heads_first(output, case))


WAYS: dict[str, Way] = {
    "Attention": _attention,
    "Attention, groups as rows": rows_for_heads(_attention),
    "Attention, heads last": _attention_flat,
    "MultiHeadAttention": _multi_head,
    "MultiHeadAttention, groups as rows": rows_for_heads(_multi_head),
    "GroupQueryAttention": _group_query,
}


def _session(
    operator: str, feeds: dict[str, Array | None], results: dict[str, Array], threads: int, **attributes: Any
) -> Callable[[], Any]:
    """Return a call of a model of this operator. Inputs go by position; None leaves one out."""
    import onnxruntime
    from onnx import helper

    domain = "" if operator == "Attention" else "com.microsoft"
    given = {name: array for name, array in feeds.items() if array is not None}

    def declared(arrays: dict[str, Array]) -> list[Any]:
        kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in arrays.items()}
        return [helper.make_tensor_value_info(name, kind, arrays[name].shape) for name, kind in kinds.items()]

    names = [name if array is not None else "" for name, array in feeds.items()]
    node = helper.make_node(operator, names, list(results), domain=domain, **attributes)
    graph = helper.make_graph([node], "bench", declared(given), declared(results))
    versions = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=10)  # 10 came with opset 23's Attention

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, array in given.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    for name, array in results.items():
        binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    memory = [*given.values(), *results.values()]

    def run() -> object:
        session.run_with_iobinding(binding)
        return memory  # named here because the binding does not keep it alive

    return run


def _full_rows(case: Case, given: Inputs) -> Array | None:
    """Return the dense mask with all its rows: the operator broadcasts heads and batch only."""
    if given.added is not None:
        return given.added
    if given.keep is None:
        return None
    return np.broadcast_to(given.keep, (*given.keep.shape[:2], case.L, case.S)).copy()


def _flat(given: Inputs) -> dict[str, Array]:
    arrays = {"q": given.query, "k": given.key, "v": given.value}
    return {name: heads_last(array).reshape(array.shape[0], array.shape[2], -1) for name, array in arrays.items()}


def _heads_first(flat: Array, case: Case) -> Array:
    return flat.reshape(case.B, case.L, case.Hq, -1).swapaxes(1, 2)
