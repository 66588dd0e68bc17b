"""Activations ρ with their derivatives, their Lagrangian, and the map ς of Theorem 2 with its inverse.

Each is an object; `get("shifted-sigmoid")` finds one by name. All functions are element-wise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from . import checks, kernels


class Activation:
    """ρ = ∂L/∂s, element-wise. A subclass writes `rho`, `drho`, `d2rho`, `lagrangian` and, where ρ' > 0, `log_drho`.

    One that derives from another activation and writes another `rho` inherits nothing that belongs to the other's ρ.
    """

    name = "activation"
    bijective = False  # is ς(s) = s/ρ'(s) a bijection of the real line?
    elementwise = True  # else `slope` and `times` say what the Jacobian of ρ does
    kappa: float | None = None  # sup |ρ''/ρ'|: by how much log ρ' changes at most; None: there is no bound

    def __init_subclass__(cls) -> None:
        its = ("drho", "d2rho", "slope", "times", "slopes", "lagrangian", "log_drho", "dlog_drho", "bijective", "kappa")
        checks.inherit(cls, Activation, "rho", those=its)

    def rho(self, s: Tensor, out: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def drho(self, s: Tensor) -> Tensor:
        raise NotImplementedError

    def d2rho(self, s: Tensor) -> Tensor:
        raise NotImplementedError

    def at(self, l: int) -> Activation:
        """The activation of layer l."""
        return self

    def of(self, layers: Sequence[int]) -> Activation:
        """The activation of a block of layers, side by side."""
        return self

    def slope(self, s: Tensor) -> Tensor:
        """D = ρ'(s), or whatever of the shape of s `times` needs."""
        return self.drho(s)

    def times(self, D: Tensor, v: Tensor) -> Tensor:
        """D v: the Jacobian of ρ, which is symmetric, times v."""
        return D * v

    def slopes(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """ρ'(s) and ρ''(s) together: cheaper than one by one, with absolute accuracy."""
        return self.drho(s), self.d2rho(s)

    def lagrangian(self, s: Tensor) -> Tensor:
        raise NotImplementedError

    def log_drho(self, s: Tensor) -> Tensor:
        raise NotImplementedError

    def varsigma(self, s: Tensor) -> Tensor:
        """ς(s) = s ⊘ ρ'(s) (Theorem 2). Where ρ'(s) = 0 it is ±∞ (NaN at s = 0)."""
        return s / self.drho(s)

    def dvarsigma_inv(self, s: Tensor) -> Tensor:
        """dς⁻¹/dh at h = ς(s): ρ'/χ."""
        return self.drho(s) / self.chi(s)

    def chi(self, s: Tensor) -> Tensor:
        """χ(s) = 1 − s ρ''/ρ', with which ς' = χ/ρ'."""
        return 1 - s * self.dlog_drho(s)

    def dlog_drho(self, s: Tensor) -> Tensor:
        """(log ρ')' = ρ''/ρ', written so that it does not become 0/0 where ρ saturates."""
        return self.d2rho(s) / self.drho(s)

    def varsigma_inv(self, h: Tensor) -> Tensor:
        """ς⁻¹(h), the state s with s = ρ'(s)·h: what a CHN's neuron settles to in the field h.

        Newton steps from a table: relative error of a few units in the last place over the whole range of float32
        and float64. Differentiable, in closed form.
        """
        if not self.bijective:
            raise ValueError(
                f"{self.name} has no ς⁻¹: ς(s) = s/ρ'(s) is no bijection, for ρ' vanishes on an interval; "
                f"activations that have one: {', '.join(sorted(a.name for a in ALL.values() if a.bijective))}"
            )
        return _VarsigmaInv.apply(h, self)  # type: ignore[no-any-return]

    def _asinh_varsigma(self, s: Tensor) -> Tensor:
        """asinh(s/ρ') without overflow: for large |s| it is log(|s| + √(s² + ρ'²)) − log ρ'."""
        log_drho = self.log_drho(s)
        far = torch.log(s.abs() + torch.hypot(s, log_drho.exp())) - log_drho
        near = torch.asinh(s * torch.exp(-log_drho.clamp_min(-20.0)))
        return torch.where(log_drho > -20, near, torch.copysign(far, s))

    @lru_cache(maxsize=16)  # noqa: B019 (the activations live as long as the module)
    def _table(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
        """ς⁻¹ on a grid of t = ±log(1 + |h|) that spans the numbers of the dtype, and the grid points per unit of t.

        Newton on asinh ς(s) = asinh h, which is nearly linear on both tails, with the derivative
        χ/√(s² + ρ'²). In float64, once.
        """
        half = 1 << (13 if dtype == torch.float32 else 16)
        end = math.log(torch.finfo(dtype).max) + 1e-3
        t = torch.linspace(-end, end, 2 * half + 1, dtype=torch.float64, device="cpu")
        a = t.abs()
        target = torch.where(a > 20, a + math.log(2), torch.asinh(torch.expm1(a.clamp_max(20)))).copysign(t)
        s = 0.22 * target
        for _ in range(16):
            s = s - (self._asinh_varsigma(s) - target) / (self.chi(s) / torch.hypot(s, self.drho(s)))
        return s.to(device, dtype), half / end

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


_NEWTON_STEPS = {torch.float32: 1, torch.float64: 3}


class _VarsigmaInv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, activation: Activation) -> Tensor:
        if h.dtype not in _NEWTON_STEPS:
            raise TypeError(f"ς⁻¹ needs float32 or float64, not {h.dtype}")
        table, density = activation._table(h.dtype, h.device)
        position = torch.log1p(h.abs()).mul_(density).copysign_(h)
        i = position.nan_to_num().floor_().clamp_(-(len(table) // 2), len(table) // 2 - 1)
        j = (i + len(table) // 2).long().flatten()
        left, right = (table.index_select(0, k).view_as(h) for k in (j, j + 1))
        s = torch.lerp(left, right, position - i)
        for _ in range(_NEWTON_STEPS[h.dtype]):  # on s − h ρ'(s) = 0
            q = h * activation.drho(s)
            s = s - (s - q) / (1 - q * activation.dlog_drho(s))
        ctx.activation = activation
        ctx.save_for_backward(s)
        return s

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (s,) = ctx.saved_tensors
        return grad * ctx.activation.dvarsigma_inv(s), None


@lru_cache(maxsize=16)
def _minus_2(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(-2.0, dtype=dtype, device=device)


class ShiftedSigmoid(Activation):
    """ρ(s) = σ(4s − 2), the paper's activation: ρ(½) = ½ with slope 1."""

    name = "shifted-sigmoid"
    bijective = True
    kappa = 4.0
    compiled = True  # kernels.py has loops for just this one

    def rho(self, s: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return torch.sigmoid(4 * s - 2)
        if kernels.rho(self, s, out):
            return out
        return torch.add(_minus_2(s.dtype, s.device), s, alpha=4, out=out).sigmoid_()  # 4s − 2 in one pass

    def slopes(self, s: Tensor) -> tuple[Tensor, Tensor]:
        r = self.rho(s, out=torch.empty_like(s))
        drho = torch.addcmul(r, r, r, value=-1).mul_(4)
        return drho, r.mul_(-8).add_(4).mul_(drho)  # ρ'' = 4(1 − 2ρ) ρ'

    def drho(self, s: Tensor) -> Tensor:
        u = 4 * s - 2
        return 4 * torch.sigmoid(u) * torch.sigmoid(-u)  # not 4ρ(1 − ρ): 1 − ρ loses all digits when ρ ≈ 1

    def d2rho(self, s: Tensor) -> Tensor:
        return self.dlog_drho(s) * self.drho(s)

    def dlog_drho(self, s: Tensor) -> Tensor:
        return -4 * torch.tanh(2 * s - 1)  # 4(1 − 2ρ)

    def lagrangian(self, s: Tensor) -> Tensor:
        return -logsigmoid(2 - 4 * s) / 4  # softplus, which torch's own rounds to a line above 20

    def log_drho(self, s: Tensor) -> Tensor:
        u = 4 * s - 2
        return math.log(4) + logsigmoid(u) + logsigmoid(-u)


class Tanh(Activation):
    """ρ(s) = tanh s."""

    name = "tanh"
    bijective = True
    kappa = 2.0

    def rho(self, s: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.tanh(s, out=out)

    def drho(self, s: Tensor) -> Tensor:
        return 4 * torch.sigmoid(2 * s) * torch.sigmoid(-2 * s)  # 1 − tanh² without cancellation

    def d2rho(self, s: Tensor) -> Tensor:
        return self.dlog_drho(s) * self.drho(s)

    def dlog_drho(self, s: Tensor) -> Tensor:
        return -2 * torch.tanh(s)

    def lagrangian(self, s: Tensor) -> Tensor:
        a = s.abs()
        return a - logsigmoid(2 * a) - math.log(2)  # log cosh

    def log_drho(self, s: Tensor) -> Tensor:
        return -2 * self.lagrangian(s)


class ReLU(Activation):
    """ρ(s) = max(s, 0), extended by ρ'(0) = 1 (the paper's example after Theorem 2)."""

    name = "relu"
    top = math.inf

    def rho(self, s: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.clamp(s, min=0, max=self.top, out=out)

    def drho(self, s: Tensor) -> Tensor:
        return ((s >= 0) & (s <= self.top)).to(s.dtype)

    def d2rho(self, s: Tensor) -> Tensor:
        return torch.zeros_like(s)

    def lagrangian(self, s: Tensor) -> Tensor:
        r = self.rho(s)
        return r * (s - r / 2)


class HardSigmoid(ReLU):
    """ρ(s) = min(max(s, 0), 1), with ρ' = 1 on the closed interval [0, 1]."""

    name = "hard-sigmoid"
    top = 1.0


GRID = (64, 128)  # of ρ∘ς⁻¹ for the compiled loop: fields up to this size, points per unit


class Effective(Activation):
    """ρ ∘ ς⁻¹: with it a HAM is the CHN of ρ in the variable h = ς(s), with the same energy (Theorem 2, Eq. 16).

    The input keeps ρ itself, for x is no field. Its κ is the largest value of a scan in float64, rounded up by a
    millionth: 7.66 for the shifted sigmoid, 1.73 for tanh.
    """

    def __init__(self, base: str | Activation) -> None:
        self.base = get(base)
        if not self.base.bijective:
            raise ValueError(
                f"Effective(ρ) needs a ρ whose ς is a bijection, shifted-sigmoid or tanh; not {self.base!r}"
            )
        self.name = f"effective {self.base.name}"
        with torch.inference_mode(False), torch.enable_grad():
            s = torch.linspace(-20, 20, 400_001, dtype=torch.float64, device="cpu", requires_grad=True)
            log_drho = 2 * self.base.log_drho(s) - torch.log(self.base.chi(s))  # at h = ς(s)
            (by_s,) = torch.autograd.grad(log_drho.sum(), s)
        self.kappa = 1.000001 * float((by_s * self.base.dvarsigma_inv(s.detach())).abs().max())

    def at(self, l: int) -> Activation:
        return self if l else self.base

    def rho(self, s: Tensor, out: Tensor | None = None) -> Tensor:
        if out is not None and kernels.interpolate(self._grid, GRID[1], s, out):
            return out
        found = self.base.rho(self.base.varsigma_inv(s))
        return found if out is None else out.copy_(found)

    @lru_cache(maxsize=16)  # noqa: B019 (few are made)
    def _grid(self) -> NDArray[np.float32]:
        """ρ∘ς⁻¹ step by step of the grid: there cubics are exact to rounding in float32."""
        end, density = GRID
        h = torch.arange(-end * density, end * density + 1, dtype=torch.float64, device="cpu") / density
        return kernels.cubics(self.rho(h), self.drho(h) / density)

    def drho(self, s: Tensor) -> Tensor:
        settled = self.base.varsigma_inv(s)
        return self.base.drho(settled) * self.base.dvarsigma_inv(settled)

    def lagrangian(self, s: Tensor) -> Tensor:
        settled = self.base.varsigma_inv(s)
        return s * self.base.rho(settled) - settled.square() / 2

    def __repr__(self) -> str:
        return f"Effective({self.base!r})"


class PerLayer(Activation):
    """An activation for each layer: parts[l] for layer l of `sizes`, side by side in a state of the layers above 0."""

    name = "one for each layer"

    def __init__(self, parts: Sequence[Activation], sizes: Sequence[int], layers: Sequence[int] | None = None) -> None:
        self.parts, self.sizes = list(parts), list(sizes)
        self.layers = list(range(1, len(parts))) if layers is None else list(layers)
        self.elementwise = all(parts[l].elementwise for l in self.layers)
        bounds = [kappa for l in self.layers if (kappa := parts[l].kappa) is not None]
        self.kappa = max(bounds, default=0.0) if len(bounds) == len(self.layers) else None

    def at(self, l: int) -> Activation:
        return self.parts[l]

    def of(self, layers: Sequence[int]) -> Activation:
        return PerLayer(self.parts, self.sizes, layers)

    def _each(self, function: str, *states: Tensor) -> Tensor:
        sizes = [self.sizes[l] for l in self.layers]
        pieces = zip(*(torch.split(s, sizes, 1) for s in states), strict=True)
        found = [getattr(self.parts[l], function)(*p) for l, p in zip(self.layers, pieces, strict=True)]
        return torch.cat(found, 1) if found else states[0]

    def rho(self, s: Tensor, out: Tensor | None = None) -> Tensor:
        found = self._each("rho", s)
        return found if out is None else out.copy_(found)

    def drho(self, s: Tensor) -> Tensor:
        return self._each("drho", s)

    def d2rho(self, s: Tensor) -> Tensor:
        return self._each("d2rho", s)

    def slope(self, s: Tensor) -> Tensor:
        return self._each("slope", s)

    def times(self, D: Tensor, v: Tensor) -> Tensor:
        return self._each("times", D, v)

    def lagrangian(self, s: Tensor) -> Tensor:
        return self._each("lagrangian", s)

    def __repr__(self) -> str:
        return repr(self.parts)


ALL: dict[str, Activation] = {a.name: a for a in (ShiftedSigmoid(), Tanh(), ReLU(), HardSigmoid())}


def get(rho: str | Activation) -> Activation:
    """The activation of that name; an Activation is returned as it is."""
    if isinstance(rho, Activation):
        for name in ("rho", "drho" if rho.elementwise else "times"):
            if getattr(type(rho), name) is getattr(Activation, name):
                raise TypeError(f"{type(rho).__name__} must have a method {name}: see hoplib.Activation")
        return rho
    if not isinstance(rho, str) or rho not in ALL:
        raise ValueError(f"unknown activation {rho!r}; choose from {', '.join(ALL)}, or pass an Activation")
    return ALL[rho]
