"""The kernels of gradients: which serve a kind of call, how they are specialised, and one call of them.

``flow.cu`` computes what flows into each row, ``pull_query.cu`` the gradient of a tile of rows, ``pull_key.cu`` those
of a tile of keys and values. Each block has sums of its own, in one order: the bits are the same in every run.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.backend import Form, Gradients, Problem, Result

from .flows import Flow
from .parameters import AXES, bands_of, bound, in_chunks, with_flows
from .plan import Plan, copies_16, fused, host_address, numbers_of, options_of
from .stored import DENSE, TYPES
from .variants import (
    LARGEST,
    LOG2_E,
    MOST_KERNELS,
    ROW_BYTES,
    WIDEST,
    Launch,
    Options,
    has_matrix_units,
    padded,
    room_of,
    table_bytes,
)

MOST_SUMS = 1024  # bytes of the sums of dK and dV in a row: of more, each has a launch of its own


class Tile(NamedTuple):
    """How a kernel cuts the work: warps of a block, of 16 rows each, and rows of the other side at a time."""

    warps: int
    keys: int

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 16 * self.warps

    def shared(self, form: Form, tables: int) -> int:
        """Return the bytes of shared memory, with `tables` for what is not a tile of rows."""
        row = (padded(form.E) + padded(form.Ev)) * form.dtype.itemsize + 32
        return tables + (self.rows + self.keys) * row


class Pulls(NamedTuple):
    """The launches of one kind of call, without a grid, and the rows and keys of a block."""

    flow: Launch
    query: Launch
    keys: tuple[Launch, ...]
    query_rows: int
    key_rows: int


def unpulled(problem: Problem, arch: int) -> str | None:
    """Return why the kernels cannot compute the gradients of a problem, or None where they can."""
    p = problem._replace(blockwise=False)
    if p.score_mod is not None:
        return "score_mod is differentiated by its own function"
    if reason := fused(p, frozenset(), arch):
        return reason
    if len(p.batch) > AXES:
        return f"{len(p.batch)} leading axes: the kernels of gradients go up to {AXES}"
    if max(p.E, p.Ev) > WIDEST:
        return f"E = {p.E} and Ev = {p.Ev}: the kernels of gradients go up to {WIDEST}"
    if p.B * max(p.Hq * p.L, p.Hkv * p.S) > LARGEST:
        return "the fused kernels count rows, keys and blocks in 31 bits"
    if pulls_for(p.form, arch, Options(True), False, p.dtype.name) is None:
        return f"E = {p.E} and Ev = {p.Ev} of {p.dtype} do not fit the shared memory of this device"
    return None


def pull(problem: Problem, flow: Flow, arch: int, launcher: Any, xp: Any) -> Gradients:
    """Return the gradients of a problem without rules, by the kernels, in the accumulation type.

    That of the bias is of the scores' shape, where there is one.
    """
    p, acc = problem, problem.acc_dtype
    keys = (*p.batch, p.Hkv, p.S)
    vector = copies_16(p) and in_chunks(flow.grad, host_address(flow.grad))
    kernels = pulls_for(p.form, arch, options_of(p), vector, flow.output.dtype.name)
    assert kernels is not None, "unpulled says so"
    into = Gradients(
        launcher.empty(p.query.shape, acc), launcher.empty((*keys, p.E), acc), launcher.empty((*keys, p.Ev), acc),
        None if p.bias is None else xp.zeros(p.scores_shape, acc),
    )  # fmt: skip
    tiles, rows = -(-p.L // kernels.query_rows), p.B * p.Hq * p.L
    grids = -(-rows // 4), p.B * p.Hq * tiles, p.B * p.Hkv * -(-p.S // kernels.key_rows)
    groups = (kernels.flow,), (kernels.query,), kernels.keys
    launches = tuple(
        each._replace(grid=(grid, 1, 1)) for grid, group in zip(grids, groups, strict=True) for each in group
    )
    workspace = launcher.empty((3 * rows * acc.itemsize,), np.uint8)
    plan = Plan(launches, workspace.nbytes, numbers_of(p, 1, tiles, 1, p.S, LOG2_E))
    result = Result(flow.output, m=flow.m, z=flow.z)
    bands = launcher.moved(bands_of(p.visible, p.batch))
    parameters = bound(plan, launcher.address, p, result, *map(launcher.address, (workspace, bands)))
    arrays = flow.grad, flow.grad_lse, *into[:4]
    parameters = with_flows(parameters, launcher.address, p, arrays)
    for launch in launches:
        launcher.run(launch, parameters)
    return into


@lru_cache(maxsize=MOST_KERNELS)
def pulls_for(form: Form, arch: int, options: Options, vector: bool, output: str) -> Pulls | None:
    """Return the kernels for a kind of call whose output has this type, or None where no tiles fit the device."""
    matrices, acc = has_matrix_units(form, arch), form.acc_dtype.itemsize
    width, value_width, flow = padded(form.E), padded(form.Ev), 3 * acc
    fits = [Tile(warps, keys) for warps in (4, 2, 1) for keys in (32, 16, *(() if matrices else (8,)))]
    by_query = [t for t in fits if t.shared(form, table_bytes(t.rows, t.warps) + t.rows * flow) <= room_of(arch)]
    by_key = [t for t in fits if t.shared(form, t.keys * (ROW_BYTES + flow)) <= room_of(arch)]
    if not (by_query and by_key):
        return None
    query, key = by_query[0], by_key[0]
    common = (
        ("GRADIENTS", 1), ("ELEMENT", TYPES[form.dtype.name]), ("TURING", int(arch < 80)), ("STORED", DENSE),
    )  # fmt: skip
    special = (
        *common, ("WIDTH", width), ("VALUE_WIDTH", value_width), ("MATRICES", int(matrices)), ("VECTOR", int(vector)),
        ("SOFTCAP", options.softcap), ("BIAS", options.bias), ("DROPOUT", options.dropout),
    )  # fmt: skip

    def launch(name: str, tile: Tile, tables: int, *more: tuple[str, int]) -> Launch:
        defines = (*special, ("WARPS", tile.warps), ("KEYS", tile.keys), *more)
        return Launch(name, f"{name}.cu", defines, (0, 1, 1), 32 * tile.warps, tile.shared(form, tables))

    parts = (3,) if (width + value_width) * acc <= MOST_SUMS else (1, 2)
    return Pulls(
        Launch("flow", "flow.cu", (*common, ("OUTPUT", TYPES[output])), (0, 1, 1), 128, 0),
        launch("pull_query", query, table_bytes(query.rows, query.warps) + query.rows * flow),
        tuple(launch("pull_key", key, key.keys * (ROW_BYTES + flow), ("PARTS", part)) for part in parts),
        query.rows,
        key.rows,
    )
