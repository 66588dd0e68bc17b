"""What a solve does between its matrix products, as loops compiled by Numba: one pass over memory instead of many.

For one thread of a CPU, on which torch's own operations, one after the other, wait for memory most of the time. On
other devices, with several threads and without Numba those are used: the same numbers to rounding (in Anderson's step
amplified by the condition of FᵀF). Each sample is computed by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

numba: Any
try:
    numba = import_module("numba")
    if numba.config.DISABLE_JIT:  # interpreted, the loops would take for ever
        numba = None
except ImportError:
    numba = None


def versions() -> dict[str, str]:
    """Who compiles the loops, for the records."""
    return {} if numba is None else {"numba": numba.__version__}


Array = NDArray[Any]  # (batch, n); of the last iterations (depth, batch, n)
Loop = TypeVar("Loop", bound=Callable[..., Any])


def waits(t: Tensor) -> bool:
    """Would a look at a value of t wait for its device, so that it is better to look rarely and to work on all samples?

    Every choice between the ways of a CPU and of other devices asks this one question: a test answers it for the CPU.
    """
    return not t.is_cpu


def fit(
    *tensors: Tensor, dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64), strided: bool = False
) -> bool:
    """Are the loops for these tensors? They must be alike, need no gradient, and, unless `strided`, be contiguous."""
    if numba is None or torch.get_num_threads() > 1 or waits(tensors[0]):
        return False
    dtype, shape, grad = tensors[0].dtype, tensors[0].shape, torch.is_grad_enabled()
    if dtype not in dtypes:
        return False
    for t in tensors:  # no generator: this is asked in every half-step
        if not t.is_cpu or t.dtype != dtype or t.shape != shape or (grad and t.requires_grad):
            return False
        if not (strided or t.is_contiguous()):
            return False
    return True


def array(t: Tensor) -> Array:
    """The numbers of a tensor, for the loops."""
    return (t.detach() if t.requires_grad else t).numpy()  # a view that nobody needs would cost as much as a loop


def flat(t: Tensor) -> Array:
    """The same of a contiguous tensor, in one row."""
    return array(t).reshape(-1)


def compiled(loop: Loop) -> Loop:
    """Sums may be reordered, so that they run in vectors; infinities and NaNs keep their meaning."""
    if numba is None:
        return loop
    options = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}
    try:
        return numba.njit(**options, cache=True)(loop)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder is writable: compiled anew in every process
        return numba.njit(**options)(loop)  # type: ignore[no-any-return]


# -- the solvers ------------------------------------------------------------------------------------------------


@compiled
def _residual(a: Array, b: Array) -> Any:
    """‖a − b‖/‖a‖ of one sample: 0 where both vanish, NaN where ‖a‖ overflows."""
    aa = dd = a.dtype.type(0)
    for j in range(len(a)):
        aa += a[j] * a[j]
        dd += (a[j] - b[j]) * (a[j] - b[j])
    return np.sqrt(dd) / max(np.sqrt(aa), np.finfo(a.dtype).tiny) + 0 * aa


@compiled
def judge(
    g: Array, before: Array, z: Array, running: Array, tol: float, chance: float, r: Array, error: Array, ended: Array
) -> bool:
    """r = ‖g − before‖/‖g‖; which of the running samples have ended, below tol or not finite; and whether any has.

    A sample that is below tol, but with ‖g − z‖/‖g‖ above `chance`, has not; `error` is then this, and r elsewhere.
    """
    some, limit, most = False, r.dtype.type(tol), r.dtype.type(chance)  # rounded, as torch does when it compares
    for i in range(len(r)):
        r[i] = error[i] = _residual(g[i], before[i])
        ended[i] = running[i] and not limit <= r[i] < np.inf
        if ended[i] and r[i] < limit and most < np.inf:
            away = _residual(g[i], z[i])
            if away > most:
                error[i], ended[i] = away, False
        some |= ended[i]
    return some


@compiled
def weights(A: Array, alpha: Array) -> None:
    """α with A α ∝ 1 and Σα = 1, by elimination; A, positive definite, is used up. Where A is singular, any numbers."""
    n, total = len(A), A.dtype.type(0)
    alpha[:] = 1
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
    alpha /= total


@compiled
def anderson(
    x: Array,
    G: Array,
    F: Array,
    gram: Array,
    z: Array,
    slot: int,
    used: int,
    mu: float,
    relative: bool,
    safeguard: bool,
) -> None:
    """f = g − x and its row of FᵀF; then z = Σ αⱼ g_j, or g where that is no number or not taken."""
    A, alpha = np.empty((used, used), G.dtype), np.empty(used, G.dtype)
    tiny, window = np.finfo(G.dtype).tiny, [(slot - back) % len(G) for back in range(used)]
    for i in range(len(x)):
        g = G[slot, i]  # one by one: Numba 0.68 drops `z_[:] = g` where z_ was unpacked from a tuple
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


# -- over-relaxation --------------------------------------------------------------------------------------------


@compiled
def _relax(s: Array, h: Array, eta: Any, c: Any, out: Array, shape: tuple[int, int], strides: Any) -> None:
    """Of flat arrays: so that the compiler knows that rows are contiguous, and works on vectors."""
    n, (a, b, d) = shape[1], strides
    for i in range(shape[0]):
        s_, h_, out_ = s[i * a : i * a + n], h[i * b : i * b + n], out[i * d : i * d + n]
        for j in range(n):
            v = h_[j] - s_[j]
            v = c if v > c else v  # a NaN is neither, and stays
            v = -c if v < -c else v
            out_[j] = h_[j] + eta * v


def _by_rows(*tensors: Tensor) -> bool:
    """Are they alike, for the loops, and their rows contiguous, as those of a block in a larger state are?"""
    return tensors[0].ndim == 2 and fit(*tensors, strided=True) and all(t.stride(1) == 1 for t in tensors)


def _rows(*tensors: Tensor) -> list[Array]:
    """Each from the first number of its first row to the last of its last row."""
    rows, n = tensors[0].shape
    return [array(t.as_strided(((rows - 1) * t.stride(0) + n,), (1,))) for t in tensors]


def relax(s: Tensor, h: Tensor, eta: float, c: float, out: Tensor) -> bool:
    """h + η·clamp(h − s, −c, c) into `out`, if the loops are for these tensors; did it?"""
    if not _by_rows(s, h, out):
        return False
    if s.numel():
        (rows, n), (a, b, d) = s.shape, _rows(s, h, out)
        strides = s.stride(0), h.stride(0), out.stride(0)
        _relax(a, b, a.dtype.type(eta), a.dtype.type(c), d, (rows, n), strides)
    return True


# -- ρ(s) = σ(4s − 2) in float32 --------------------------------------------------------------------------------

_1, _2, _4, _HALF, _87 = (np.float32(v) for v in (1, 2, 4, 0.5, 87))
_PER_LOG2, _LOG2, _REST = (np.float32(v) for v in (1 / math.log(2), 0.693359375, math.log(2) - 0.693359375))
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / math.factorial(k)) for k in range(2, 8))


@compiled
def sigma(u: Any) -> Any:
    """1/(1 + e⁻ᵘ), e⁻ᵘ = 2ᵏ eᶠ with |f| ≤ ½ log 2, by its series: as near as torch comes. At least 1e-38."""
    x = -u
    if x > _87:  # a NaN is neither, and stays
        x = _87
    if x < -_87:
        x = -_87
    k = np.floor(x * _PER_LOG2 + _HALF)
    f = x - k * _LOG2 - k * _REST
    e = _1 + f * (_1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * (_C6 + f * _C7))))))
    power = np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)  # 2ᵏ by its bits
    return _1 / (_1 + e * power)


@compiled
def _rho(s: Array, out: Array) -> None:
    for j in range(len(s)):
        out[j] = sigma(_4 * s[j] - _2)


@compiled
def _local(s: Array, h: Array, w: Any, out: Array) -> None:
    """(1 − ω) s + ω ρ'(s) h for one sample, ρ' = 4ρ(1 − ρ)."""
    for j in range(len(s)):
        r = sigma(_4 * s[j] - _2)
        out[j] = (_1 - w) * s[j] + _4 * w * r * (_1 - r) * h[j]


@compiled
def _settle(s: Array, h: Array, w: Any, steps: int, out: Array) -> None:
    both = np.empty((2, s.shape[1]), s.dtype)
    for i in range(len(s)):
        both[0] = s[i]
        for k in range(steps):
            _local(both[k % 2], h[i], w, both[(k + 1) % 2])
        out[i] = both[steps % 2]


@compiled
def _step(s: Array, r: Array, w: Any, h: Array) -> None:
    """One local step in the place of h (two names for one array would keep the loop from running in vectors)."""
    for j in range(len(s)):
        h[j] = (_1 - w) * s[j] + _4 * w * r[j] * (_1 - r[j]) * h[j]


def rho(activation: Any, s: Tensor, out: Tensor) -> bool:
    """ρ(s) into `out`, if there are loops for this activation and these tensors; did it?"""
    if not _serves(activation, s, out):
        return False
    _rho(flat(s), flat(out))
    return True


def settle(activation: Any, s: Tensor, h: Tensor, w: float, steps: int, out: Tensor, r: Tensor | None = None) -> bool:
    """So many local steps of a CHN into `out`, if there are loops for this activation and these tensors; did it?"""
    if steps == 1 and r is not None and h is out and _serves(activation, s, r, out):
        _step(flat(s), flat(r), np.float32(w), flat(out))
        return True
    if not _serves(activation, s, h, out, strided=True):
        return False
    _settle(array(s), array(h), np.float32(w), steps, array(out))
    return True


@compiled
def _interpolate(s: Array, cubics: Array, density: Any, out: Array, shape: tuple[int, int], strides: Any) -> bool:
    """A function around 0 from its cubics, one per step of a grid; were all s on the grid? Flat, as in `_relax`."""
    n, (a, b), half, outside = shape[1], strides, len(cubics) // 8, np.int32(0)
    end = s.dtype.type(half) / density
    for i in range(shape[0]):
        s_, out_ = s[i * a : i * a + n], out[i * b : i * b + n]
        for j in range(n):
            off = not -end < s_[j] < end  # as a NaN is
            outside += off
            p = s.dtype.type(0) if off else s_[j] * density
            left = np.floor(p)
            u = p - left
            k = np.uint32(4) * np.uint32(np.int32(half) + np.int32(left))
            out_[j] = cubics[k] + u * (cubics[k + 1] + u * (cubics[k + 2] + u * cubics[k + 3]))
    return bool(outside == 0)


def cubics(values: Tensor, slopes: Tensor) -> Array:
    """For `interpolate`, from the values and slopes (per step) at the points of a grid: four coefficients per step."""
    a, b, da, db = values[:-1], values[1:], slopes[:-1], slopes[1:]
    coefficients = torch.stack([a, da, 3 * (b - a) - 2 * da - db, da + db - 2 * (b - a)], 1)
    return coefficients.float().flatten().numpy()


def interpolate(cubics: Callable[[], Array], density: float, s: Tensor, out: Tensor) -> bool:
    """The function of these cubics at s into `out`, if the loops are for these tensors and all s are on the grid."""
    if s.dtype != torch.float32 or not _by_rows(s, out) or not s.numel():
        return False
    (rows, n), (a, b), strides = s.shape, _rows(s, out), (s.stride(0), out.stride(0))
    return bool(_interpolate(a, cubics(), np.float32(density), b, (rows, n), strides))


def _serves(activation: Any, *tensors: Tensor, strided: bool = False) -> bool:
    """Of the class itself that says so: a subclass may have another ρ."""
    exact = type(activation).__dict__.get("compiled", False)
    return exact and tensors[0].ndim == 2 and fit(*tensors, dtypes=[torch.float32], strided=strided)
