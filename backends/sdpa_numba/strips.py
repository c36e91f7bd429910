"""Problems that no kernel takes as they are: a strip of query rows at a time, their rules are evaluated with NumPy."""

import numpy as np

NUMBERS_AT_ONCE = 2**22  # scores in a strip: what a rule makes of them stays in the cache and below 32 MiB


def strips(problem):
    """Return the row ranges to take one by one."""
    rows = max(1, NUMBERS_AT_ONCE // max(1, problem.B * problem.Hq * problem.S))
    return [(i, min(i + rows, problem.L)) for i in range(0, problem.L, rows)]


def with_scores(problem):
    """Return `problem` with its scores, as the user's function leaves them, in the place of the bias and no other rule."""
    q, k, acc = problem.query, problem.key, problem.acc_dtype
    grouped = (*problem.batch, problem.Hkv, problem.group, problem.L, problem.E)
    shape = (*problem.batch, problem.Hq, problem.L, problem.S)
    with np.errstate(all="ignore"):
        s = q.astype(acc).reshape(grouped) @ k.astype(acc).swapaxes(-1, -2)[..., None, :, :]
        s = s.reshape(shape) * acc.type(problem.scale)
        if problem.softcap is not None:
            s = np.tanh(s / acc.type(problem.softcap)) * acc.type(problem.softcap)
        keep = True if problem.dense is None else problem.dense
        if problem.bias is not None:
            bias, largest = problem.bias.astype(np.float64), float(np.finfo(acc).max)
            keep = keep & (bias != -np.inf)
            s += np.where(np.isfinite(bias), np.clip(bias, -largest, largest), bias).astype(acc)
        if problem.slopes is not None:
            distance = np.abs(problem.positions[..., None, :, None] - np.arange(problem.S))
            s -= (problem.slopes[:, None, None] * distance).astype(acc)
        indices = np.ogrid[: problem.B, : problem.Hq, problem.first_row : problem.first_row + problem.L, : problem.S]
        s = problem.score_mod(s.reshape(problem.B, *shape[-3:]), *indices)
        s = np.broadcast_to(np.asarray(s, acc), (problem.B, *shape[-3:])).reshape(shape)
    return problem._replace(
        query=q[..., :0], key=k[..., :0], E=0, scale=1.0, softcap=None, bias=s, slopes=None, positions=None,
        dense=None if keep is True else np.broadcast_to(keep, shape), score_mod=None, plans={},
    )  # fmt: skip
