"""Anderson's step and the residual as loops over samples, compiled by Numba: one pass over memory instead of many.

For one thread of a CPU, on which torch's own operations, one after the other, wait for memory most of the time. On
other devices, with several threads and without Numba `solvers` uses those: the same numbers to rounding. A sample's
answer does not depend on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # (batch, n); of the last iterations (depth, batch, n)
Loop = TypeVar("Loop", bound=Callable[..., None])


def compiled(loop: Loop) -> Loop:
    """Sums may be reordered, so that they run in vectors; infinities and NaNs keep their meaning."""
    decorate = numba.njit(fastmath={"reassoc", "contract", "nsz"}, error_model="numpy", cache=True)
    return decorate(loop)  # type: ignore[return-value]


@compiled
def residual(g: Array, before: Array, r: Array) -> None:
    """r = ‖g − before‖/‖g‖: 0 where both vanish, NaN where ‖g‖ overflows."""
    tiny = np.finfo(g.dtype).tiny
    for i in range(len(g)):
        a, b = g[i], before[i]
        gg = dd = g.dtype.type(0)
        for j in range(len(a)):
            gg += a[j] * a[j]
            dd += (a[j] - b[j]) * (a[j] - b[j])
        r[i] = np.sqrt(dd) / max(np.sqrt(gg), tiny) + 0 * gg


@compiled
def weights(A: Array, alpha: Array) -> None:
    """α with A α ∝ 1 and Σα = 1, by elimination; A, positive definite, is used up. Not finite where A is singular."""
    n, total = len(A), A.dtype.type(0)
    for p in range(n):
        alpha[p] = 1
    for p in range(n):
        for q in range(p + 1, n):
            c = A[q, p] / A[p, p]
            for k in range(p + 1, n):
                A[q, k] -= c * A[p, k]
            alpha[q] -= c * alpha[p]
    for p in range(n - 1, -1, -1):
        for q in range(p + 1, n):
            alpha[p] -= A[p, q] * alpha[q]
        alpha[p] /= A[p, p]
        total += alpha[p]
    for p in range(n):
        alpha[p] /= total


@compiled
def anderson(
    x: Array,
    G: Array,
    F: Array,
    gram: Array,
    z: Array,
    slot: int,
    used: int,
    mix: bool,
    mu: float,
    relative: bool,
    safeguard: bool,
) -> None:
    """f = g − x and its row of FᵀF; then, to mix, z = Σ αⱼ g_j, or g where that is no number or not taken."""
    A, alpha = np.empty((used, used), G.dtype), np.empty(used, G.dtype)
    tiny, window = np.finfo(G.dtype).tiny, [(slot - back) % len(G) for back in range(used)]
    for i in range(len(x)):
        g = G[slot, i]  # one by one: writing through a view that was unpacked from a tuple may be optimised away
        f = F[slot, i]
        x_ = x[i]
        z_ = z[i]
        xx = zz = gz = trace = G.dtype.type(0)
        for j in range(len(f)):
            f[j] = g[j] - x_[j]
            xx += x_[j] * x_[j]
        for k in window:
            older, dot = F[k, i], G.dtype.type(0)
            for j in range(len(f)):
                dot += f[j] * older[j]
            gram[i, slot, k] = gram[i, k, slot] = dot
            trace += gram[i, k, k]
        if not mix:
            continue
        for p in range(used):
            for q in range(used):
                A[p, q] = gram[i, window[p], window[q]]
            A[p, p] += mu * max(trace / used, tiny) if relative else mu
        weights(A, alpha)
        for j in range(len(z_)):
            z_[j] = alpha[0] * g[j]
        for p in range(1, used):
            older, c = G[window[p], i], alpha[p]
            for j in range(len(z_)):
                z_[j] += c * older[j]
        for j in range(len(z_)):
            zz += z_[j] * z_[j]
            gz += (g[j] - z_[j]) * (g[j] - z_[j])
        taken = np.isfinite(alpha).all()
        if safeguard:
            taken &= np.sqrt(gz) / np.sqrt(zz) < np.sqrt(gram[i, slot, slot]) / np.sqrt(xx)
        if not taken:
            z[i] = g
