"""A NumPy kernel that works as FlashAttention-2 does: its roundings are not the rounded run's, and it can err."""

from __future__ import annotations

import numpy as np

from flashgen.oracle import allowed_pairs
from flashgen.spec import causal

LOG2_E = 1.4426950408889634


def products(a, b):
    """``a @ b.T`` in an order that does not depend on the tile, unlike BLAS: both passes see the same scores."""
    return (a[:, None, :] * b[None, :, :]).sum(axis=2)


def tiled_head(spec, q, k, v, allowed, scale, tile, mistake):
    """Online softmax over tiles of keys, in base two, P not normalised: as FlashAttention-2 does it."""
    dtype = spec.element.numpy()
    scale_log2 = np.float32(scale * LOG2_E)
    peak = np.full(len(q), -np.inf, np.float32)
    total = np.zeros(len(q), np.float32)
    acc = np.zeros((len(q), spec.head_dim_v), np.float32)
    for start in range(0, len(k), tile):
        keys = slice(start, start + tile)
        s = np.where(allowed[:, keys], products(q, k[keys]), np.float32(-np.inf))
        new_peak = np.maximum(peak, s.max(axis=1))
        shift = np.where(new_peak == -np.inf, np.float32(0), new_peak) * scale_log2
        old_shift = np.where(peak == -np.inf, np.float32(-np.inf), peak * scale_log2)
        p = np.exp2((s.astype(np.float64) * scale_log2 - shift[:, None]).astype(np.float32))
        p = np.where(allowed[:, keys], p, np.float32(0))
        rescale = np.exp2(old_shift - shift)
        if mistake == "no rescale":
            rescale = np.ones_like(rescale)
        total = total * rescale + p.sum(axis=1)
        values = v[keys].copy()
        # A NaN in V may meet rows that may not attend to it: add it where it is allowed only.
        finite = np.isfinite(values)
        acc = acc * rescale[:, None] + p.astype(dtype).astype(np.float32) @ np.where(finite, values, 0)
        for j in np.flatnonzero(~finite.all(axis=1)):
            acc[allowed[:, start + j]] = np.nan
        peak = new_peak
    safe = np.where(total == 0, np.float32(1), total)
    base = np.where(peak == -np.inf, np.float32(0), peak) * scale_log2
    return acc / safe[:, None], (base + np.log2(total)) * np.float32(1 / LOG2_E)


def tiled_head_backward(spec, q, k, v, do, o, lse, of_lse, allowed, scale, mistake):
    def store(x):
        return x.astype(spec.element.numpy()).astype(np.float32)

    scale_log2 = np.float32(scale * LOG2_E)
    attended = allowed & (lse != -np.inf)[:, None]
    exponent = products(q, k).astype(np.float64) * scale_log2 - (lse * np.float32(LOG2_E))[:, None]
    p = np.where(attended, np.exp2(exponent.astype(np.float32)), np.float32(0))
    row_sum = 0 if mistake == "no row sum" else (do * o).sum(axis=1)[:, None]
    row_sum = row_sum + of_lse[:, None] if mistake == "sign of dlse" else row_sum - of_lse[:, None]
    ds = store(np.where(attended, p * (do @ v.T - row_sum), np.float32(0)))
    clean = [np.where(np.isfinite(x), x, np.float32(0)) for x in (q, k, do)]
    dq = (ds @ clean[1]) * np.float32(scale)
    for j in np.flatnonzero(~np.isfinite(k).all(axis=1)):
        dq[allowed[:, j]] = np.nan
    return dq, (ds.T @ clean[0]) * np.float32(scale), store(p).T @ clean[2]


def tiled_kernel(spec, q, k, v, do, scale, *, dlse=None, tile=16, mistake=None, output=None, factor=1.0):
    """The results of both passes; ``output`` is off by ``factor`` before it is rounded, and no other one by that."""
    dtype = spec.element.numpy()
    mask = causal(align="top-left") if mistake == "top-left" else spec.mask
    allowed = allowed_pairs(mask, q.shape[1], k.shape[1])
    if mistake == "last key":
        allowed[:, -1:] = False
    group = q.shape[2] // max(1, k.shape[2])
    q, k, v, do = (x.astype(np.float32) for x in (q, k, v, do))
    o, lse = np.zeros(do.shape, np.float32), np.zeros((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    of_lse = np.zeros_like(lse) if dlse is None else dlse
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(q.shape[0], q.shape[2]):
            h_kv = h % k.shape[2] if mistake == "head index" else h // group
            head = q[b, :, h], k[b, :, h_kv], v[b, :, h_kv]
            o[b, :, h], lse[b, h] = tiled_head(spec, *head, allowed, scale, tile, mistake)
            head_o = o[b, :, h].astype(dtype).astype(np.float32)
            results = head_o, lse[b, h], of_lse[b, h]
            grads = tiled_head_backward(spec, *head, do[b, :, h], *results, allowed, scale, mistake)
            dq[b, :, h] = grads[0]
            dk[b, :, h_kv] += grads[1]
            dv[b, :, h_kv] += grads[2]
        results = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        if output is not None:
            results[output] = (results[output].astype(np.float64) * factor).astype(np.float32)
        return tuple(x if name == "lse" else x.astype(dtype) for name, x in results.items())
