"""Right kernels of different precision: what the suite must not call wrong where they say what they are."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from sdpa_ref.testing import Capabilities, Target


def as_is(x):
    return x


def to(dtype):
    return lambda x: x.astype(dtype).astype(x.dtype)


def tf32(x):
    """Round to 11 bits."""
    return ((x.astype(np.float32).view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32).astype(x.dtype)


def cut_tf32(x):
    """Cut off all but 11 bits."""
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(x.dtype)


def exp2(x):
    return np.exp2(x * x.dtype.type(np.log2(np.e)))


def rough_exp(x):
    """Return the exponential with a relative error of 2**-10, by sign of its fraction."""
    wobble = np.sin(37 * np.clip(np.nan_to_num(x), -1e3, 1e3)) * 2.0**-10
    return (np.exp(x) * (1 + np.where(x == 0, 0, wobble))).astype(x.dtype)


def table_exp(x):
    """Return 2**whole * polynomial of degree 2, as graphics units without an exponential do."""
    y = np.maximum(x * x.dtype.type(np.log2(np.e)), -150)
    whole = np.floor(y)
    f = y - whole
    made = np.ldexp(1 + f * (0.6565 + 0.3435 * f), np.nan_to_num(whole).astype(int)).astype(x.dtype)
    return np.where(x == -np.inf, 0, np.where(np.isnan(x), x, made)).astype(x.dtype)


def summed(x):
    """Return the sum over the last axis, one term after the other, in the type of x."""
    return np.add.accumulate(x, -1, dtype=x.dtype)[..., -1] if x.shape[-1] else x.sum(-1)


@dataclass(frozen=True)
class Kernel:
    """Attention in tiles of keys, with a rounding for operands and for weights, and an exponential."""

    operand: Any = as_is
    weight: Any = as_is
    exp: Any = np.exp
    tile: int = 1 << 30
    backwards: bool = False
    acc: Any = None
    scale_first: bool = False
    splits: int = 1
    in_order: bool = False
    normalised: bool = False

    def product(self, a, b):
        a, b = self.operand(a), self.operand(b)
        if self.in_order or a.dtype == np.float16:
            return summed(np.ascontiguousarray(a[..., :, None, :] * b[..., None, :, :]))
        return a @ b.swapaxes(-1, -2)

    def scores(self, q, k, options):
        scale = q.dtype.type(options.get("scale", 1 / np.sqrt(max(1, q.shape[-1]))))
        s = self.product(q * scale, k) if self.scale_first else scale * self.product(q, k)
        if "softcap" in options:
            cap = s.dtype.type(options["softcap"])
            s = cap * np.tanh(s / cap)
        keep = options.get("mask", True)
        if "bias" in options:
            most, bias = np.finfo(s.dtype).max, options["bias"]
            s = s + np.clip(bias, -most, most).astype(s.dtype)
            keep = keep & (bias > -np.inf)  # whatever the score is: in 16 bits it may be infinite
        return np.where(keep, s, -np.inf).astype(s.dtype)

    def operands(self, *arrays):
        acc = self.acc or (np.float64 if arrays[0].dtype == np.float64 else np.float32)
        group = arrays[0].shape[-3] // max(1, arrays[1].shape[-3])
        q, *kv = (a.astype(acc) for a in arrays)
        return q, *(np.repeat(a, group, -3) for a in kv)

    def folded(self, s, v, keys):
        """Return m, z and o over some keys, tile by tile."""
        m, z = np.full(s.shape[:-1], -np.inf, s.dtype), np.zeros(s.shape[:-1], s.dtype)
        o = np.zeros((*s.shape[:-1], v.shape[-1]), s.dtype)
        starts = range(keys.start, keys.stop, min(self.tile, max(1, keys.stop - keys.start)))
        for start in reversed(starts) if self.backwards else starts:
            part = slice(start, min(start + self.tile, keys.stop))
            new = np.maximum(m, s[..., part].max(-1))
            base = np.where(new == -np.inf, 0, new)
            e = self.exp(s[..., part] - base[..., None]).astype(s.dtype)
            shrink = self.exp(m - base).astype(s.dtype)
            z = z * shrink + (summed(e) if self.in_order or e.dtype == np.float16 else e.sum(-1))
            o = o * shrink[..., None] + self.mix(self.weight(e), v[..., part, :])
            m = new
        return m, z, o

    def mix(self, e, v):
        return self.product(e, v.swapaxes(-1, -2))

    def state(self, query, key, value, **options):
        with np.errstate(all="ignore"):
            q, k, v = self.operands(query, key, value)
            s = self.scores(q, k, options)
            S = s.shape[-1]
            if self.normalised:
                m = s.max(-1, keepdims=True)
                e = self.exp(s - np.where(m == -np.inf, 0, m)).astype(s.dtype)
                z = e.sum(-1, keepdims=True)
                w = e / np.where(z == 0, 1, z)
                return self.mix(self.weight(w), v).astype(query.dtype), (m + np.log(z))[..., 0]
            cuts = [S * n // self.splits for n in range(self.splits + 1)]
            parts = [self.folded(s, v, slice(a, b)) for a, b in pairwise(cuts) if b > a]
            m = np.max([part[0] for part in parts], 0)
            base = np.where(m == -np.inf, 0, m)
            shrinks = [self.exp(part[0] - base).astype(s.dtype) for part in parts]
            z = sum(part[1] * x for part, x in zip(parts, shrinks, strict=True))
            o = sum(part[2] * x[..., None] for part, x in zip(parts, shrinks, strict=True))
            output = (o / np.where(z == 0, 1, z)[..., None]).astype(query.dtype)
            return output, (m.astype(np.float64) + np.log(z.astype(np.float64))).astype(
                np.float64 if s.dtype == np.float64 else np.float32
            )

    def forward(self, query, key, value, **options):
        return self.state(query, key, value, **options)[0]

    def vjp(self, query, key, value, grad_output, **options):
        with np.errstate(all="ignore"):
            group = query.shape[-3] // key.shape[-3]
            q, k, v = self.operands(query, key, value)
            dO = grad_output.astype(q.dtype)
            s = self.scores(q, k, options)
            m = s.max(-1, keepdims=True)
            e = np.where(s == -np.inf, 0, self.exp(s - np.where(m == -np.inf, 0, m))).astype(s.dtype)
            z = e.sum(-1, keepdims=True)
            w = e / np.where(z == 0, 1, z)
            dP = self.product(dO, v)
            dS = w * (dP - (w * dP).sum(-1, keepdims=True))
            d_bias = dS
            if "softcap" in options:
                raw = self.scores(q, k, {name: x for name, x in options.items() if name == "scale"})
                dS = dS * (1 - np.tanh(raw / s.dtype.type(options["softcap"])) ** 2)
            dS = dS * s.dtype.type(options.get("scale", 1 / np.sqrt(max(1, q.shape[-1]))))
            flat = self.weight(dS)
            dq = self.mix(flat, k)
            dk = self.mix(flat.swapaxes(-1, -2), q)
            dv = self.mix(self.weight(w).swapaxes(-1, -2), dO)
            grouped = [x.reshape(*x.shape[:-3], -1, group, *x.shape[-2:]).sum(-3) for x in (dk, dv)]
            d_bias = d_bias.astype(options["bias"].dtype) if "bias" in options else None
            return dq.astype(query.dtype), *(x.astype(query.dtype) for x in grouped), d_bias, None


CLAIMS = {
    "grouped_heads": True, "value_width": True, "mask": True, "bias": "same", "mask_and_bias": True, "scale": "any",
    "softcap": True, "lse": True, "gradients": True, "dtypes": ["float32", "float16", "bfloat16"],
}  # fmt: skip
SINGLE = {"dtypes": ["float32"]}
RIGHT = {
    "plain": (Kernel(normalised=True), {}),
    "plain float64": (Kernel(normalised=True), {"dtypes": ["float64"]}),
    "scale first": (Kernel(scale_first=True), {}),
    "tiles of 16": (Kernel(tile=16), {}),
    "tiles of 64 backwards": (Kernel(tile=64, backwards=True), {}),
    "split in four": (Kernel(tile=32, splits=4), {}),
    "sums in order": (Kernel(tile=128, in_order=True), {}),
    "sums of whole rows in order": (Kernel(in_order=True), {}),
    "exp2": (Kernel(exp=exp2, tile=32), {}),
    "tf32": (Kernel(operand=tf32, tile=32), {**SINGLE, "precision": "tf32"}),
    "tf32 cut off": (Kernel(operand=cut_tf32, tile=64, scale_first=True), {**SINGLE, "precision": "tf32"}),
    "bfloat16 operands": (Kernel(operand=to(ml_dtypes.bfloat16), tile=32), {**SINGLE, "precision": "bfloat16"}),
    "bfloat16 weights": (Kernel(weight=to(ml_dtypes.bfloat16), tile=32), {**SINGLE, "precision": "bfloat16 weights"}),
    "float16 weights": (
        Kernel(weight=to(np.float16), normalised=True),
        {**SINGLE, "precision": "float16 weights", "gradients": False},
    ),
    "float16 accumulation": (
        Kernel(acc=np.float16, tile=32),
        {"dtypes": ["float16"], "precision": "float16 accumulation", "gradients": False},
    ),
    "rough exponential": (Kernel(exp=rough_exp, tile=32), {**SINGLE, "exp_error": 2.0**-10}),
    "exponential of degree 2": (Kernel(exp=table_exp, tile=64), {**SINGLE, "exp_error": 2.0**-8}),
    "weights in 16 bits": (Kernel(weight=to(np.float16), tile=64), {"dtypes": ["float16"], "gradients": False}),
}


def target(name, **claims):
    """Return a right kernel as a target, with other claims than it makes."""
    kernel, own = RIGHT[name]
    return Target(name, kernel.forward, Capabilities.of(CLAIMS | own | claims), state=kernel.state, vjp=kernel.vjp)
