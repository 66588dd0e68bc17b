"""Rules: what a neuron does in its field h. A rule settles, has slopes, and has an energy.

    HamRule      s ← h, the minimum of the energy in the field itself (Eq. 6)
    ChnRule      s ← (1 − ω) s + ω ρ'(s) h, so many times (Eq. 5; ten damped steps for a block of an even-odd sweep)
    ExactRule    s ← ς⁻¹(h), where these steps lead: the CHN as Theorem 2 has it
    Relaxed      s ← (1 − ω) s + ω s', only ω of the way of another rule, or beyond
    Affine       λ ← g + A λ + D h, the linearised rule: with it the adjoint is a sweep like any other

`slopes` are A = ∂s'/∂s and C = ∂s'/∂h, element-wise; None stands for 0 and 1. Where a tensor `out` is given (then no
gradient is wanted), the result is left there; h may be that tensor, or be used up. r is ρ(s), where it is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from . import checks, kernels
from .activations import Activation

Slopes = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Rule:
    """What a sweep asks of a rule, for the neurons of a block with the activation ρ.

    A subclass must write `settle`. What it does not say about it is safe, not inherited from another rule: the slopes
    are then autograd's, the neurons may have a memory, and `Relaxed` relaxes it.
    """

    rho: Activation
    memory: ClassVar[bool] = True  # does what a neuron settles to depend on where it was?
    plain: ClassVar[bool] = False  # is a neuron at rest just where s = h? Then no field is needed for its slopes there

    def __init_subclass__(cls) -> None:
        checks.inherit(cls, Rule, "settle", those=("slopes", "memory", "plain", "kappa", "relaxed"))

    @property
    def kappa(self) -> float | None:
        """How fast the curvature of the neuron's energy may change on the way beyond its minimum; None: no bound."""
        return None

    def emit(self, s: Tensor, out: Tensor | None = None) -> Tensor:
        """What the block shows to others: ρ(s)."""
        return self.rho.rho(s, out=out)

    def settle(self, s: Tensor, h: Tensor, out: Tensor | None = None, r: Tensor | None = None) -> Tensor:
        """The new state in the field h."""
        raise NotImplementedError

    def slopes(self, s: Tensor, h: Tensor) -> Slopes:
        """∂s'/∂s and ∂s'/∂h of `settle`."""
        with torch.enable_grad():
            s, h = s.detach().requires_grad_(), h.detach().requires_grad_()
            total = self.settle(s, h).sum()
        a, c = torch.autograd.grad(total, [s, h], allow_unused=True, materialize_grads=True)
        return a, c

    def energy(self, s: Tensor) -> Tensor:
        """The part of the energy that couples nothing, neuron by neuron."""
        raise NotImplementedError

    def relaxed(self, omega: float, clip: float = math.inf) -> Rule:
        """The rule that goes ω of the way, but not further than (ω − 1)·clip beyond its end."""
        return self if omega == 1 else Relaxed(self.rho, self, omega, clip)

    def restrict(self, keep: Tensor) -> Rule:
        """The rule of the samples `keep` alone."""
        return self


@dataclass(frozen=True)
class Relaxed(Rule):
    """s ← (1 − ω) s + ω s', where a rule settles to s'; or, clipped at c, s ← s' + (ω − 1)·clamp(s' − s, −c, c)."""

    rule: Rule
    omega: float
    clip: float = math.inf

    @property
    def plain(self) -> bool:  # type: ignore[override]
        return self.rule.plain

    def emit(self, s: Tensor, out: Tensor | None = None) -> Tensor:
        return self.rule.emit(s, out)

    def settle(self, s: Tensor, h: Tensor, out: Tensor | None = None, r: Tensor | None = None) -> Tensor:
        new, w, c = self.rule.settle(s, h, out, r), self.omega, self.clip
        if c == math.inf:
            return torch.lerp(s, new, w, out=out)
        if out is not None and kernels.relax(s, new, w - 1, c, out):
            return out
        return torch.add(new, (new - s).clamp(-c, c), alpha=w - 1, out=out)

    def slopes(self, s: Tensor, h: Tensor) -> Slopes:
        """A ← 1 − ω + ω A and C ← ω C; where the overshoot is clipped, those of the rule itself."""
        a, c = self.rule.slopes(s, h)
        w, one = self.omega, s.new_full((1, 1), self.omega)
        A, C = (1 - one if a is None else 1 - w * (1 - a)), (one if c is None else w * c)
        if self.clip == math.inf or (self.plain and h is s):  # at rest nothing is clipped
            return A, C
        inside = (self.rule.settle(s, h) - s).abs() < self.clip
        zero, unit = torch.zeros_like(s), torch.ones_like(s)
        return torch.where(inside, A, zero if a is None else a), torch.where(inside, C, unit if c is None else c)

    def energy(self, s: Tensor) -> Tensor:
        return self.rule.energy(s)

    def restrict(self, keep: Tensor) -> Rule:
        return replace(self, rule=self.rule.restrict(keep))


class HamRule(Rule):
    """s ← h; the neuron's energy s ρ(s) − L(s) − h ρ(s) has its minimum there (the Legendre transform)."""

    memory, plain = False, True

    @property
    def kappa(self) -> float | None:
        return self.rho.kappa

    def settle(self, s: Tensor, h: Tensor, out: Tensor | None = None, r: Tensor | None = None) -> Tensor:
        return h if out is None or out is h else out.copy_(h)

    def slopes(self, s: Tensor, h: Tensor) -> Slopes:
        return None, None

    def energy(self, s: Tensor) -> Tensor:
        return s * self.rho.rho(s) - self.rho.lagrangian(s)


@dataclass(frozen=True)
class ChnRule(Rule):
    """`steps` times s ← (1 − ω) s + ω ρ'(s) h, which approaches ς⁻¹(h) but may fall into a 2-cycle in a large field.

    One step with ω = 1 is Eq. (5). The neuron's energy is ½ s² − h ρ(s).
    """

    steps: int = 1
    omega: float = 1.0

    def settle(self, s: Tensor, h: Tensor, out: Tensor | None = None, r: Tensor | None = None) -> Tensor:
        if out is not None and kernels.settle(self.rho, s, h, self.omega, self.steps, out, r):
            return out
        for _ in range(self.steps):
            s = torch.lerp(s, self.rho.drho(s) * h, self.omega)
        return s if out is None else out.copy_(s)

    def slopes(self, s: Tensor, h: Tensor) -> Slopes:
        """The chain rule along the steps: A ← a A, C ← a C + ω ρ', with a = 1 − ω + ω ρ''h.

        Not only at their fixed point: where they fall into a 2-cycle, s may come back without being an equilibrium.
        """
        w = self.omega
        A, C, h = torch.ones_like(s), torch.zeros_like(s), w * h
        for _ in range(self.steps):
            drho, d2rho = self.rho.slopes(s)
            a = d2rho.mul_(h).add_(1 - w)
            A.mul_(a)
            torch.addcmul(drho, C, a, out=C)
            s = drho.mul_(h).add_(s, alpha=1 - w)
        return A, C.mul_(w)

    def relaxed(self, omega: float, clip: float = math.inf) -> Rule:
        """One step takes ω upon itself: no second pass over memory."""
        one = self.steps == 1 and clip == math.inf
        return replace(self, omega=omega * self.omega) if one else super().relaxed(omega, clip)

    def energy(self, s: Tensor) -> Tensor:
        return s.square() / 2


class ExactRule(Rule):
    """s ← ς⁻¹(h), the solution of s = ρ'(s) h: the CHN's neuron at rest in its field, whatever it was before."""

    memory = False

    def settle(self, s: Tensor, h: Tensor, out: Tensor | None = None, r: Tensor | None = None) -> Tensor:
        settled = self.rho.varsigma_inv(h)
        return settled if out is None else out.copy_(settled)

    def slopes(self, s: Tensor, h: Tensor) -> Slopes:
        return None, self.rho.dvarsigma_inv(self.rho.varsigma_inv(h))

    def energy(self, s: Tensor) -> Tensor:
        return s.square() / 2


@dataclass(frozen=True)
class Affine(Rule):
    """The linearised rule of a block: it shows C ⊙ λ and settles to g + A ⊙ λ + D h."""

    A: Tensor | None
    C: Tensor | None
    D: Tensor
    g: Tensor

    @property
    def memory(self) -> bool:  # type: ignore[override]
        return self.A is not None

    def emit(self, s: Tensor, out: Tensor | None = None) -> Tensor:
        return s if self.C is None else torch.mul(self.C, s, out=out)

    def settle(self, s: Tensor, h: Tensor, out: Tensor | None = None, r: Tensor | None = None) -> Tensor:
        if self.rho.elementwise:
            new = torch.addcmul(self.g, self.D, h, out=out)
        else:
            new = torch.add(self.g, self.rho.times(self.D, h), out=out)
        return new if self.A is None else new.addcmul_(self.A.expand_as(s), s)

    def restrict(self, keep: Tensor) -> Affine:
        A, C = (t if t is None or len(t) == 1 else t[keep] for t in (self.A, self.C))
        return Affine(self.rho, A, C, self.D[keep], self.g[keep])
