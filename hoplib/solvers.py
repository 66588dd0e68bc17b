"""Fixed-point solvers: Picard and Anderson, with an account per sample of how each one ended.

The loop `iterate` serves every fixed point in the project, the equilibrium of a network and its adjoint alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from .network import Network


class Status(IntEnum):
    """How a sample's iteration ended."""

    CONVERGED = 0
    MAX_ITER = 1  # out of iterations
    CYCLING = 2  # out of iterations in a limit cycle of length 2
    NOT_FINITE = 3  # an infinity or a NaN came up


class FixedPointMap(Protocol):
    """What `iterate` asks of a map: evaluate it, and restrict it to some samples."""

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor: ...

    def restrict(self, keep: Tensor) -> FixedPointMap: ...


class Memory:
    """Picard's next iterate is the map value itself, so there is nothing to remember."""

    def next(self, x: Tensor, g: Tensor) -> Tensor:
        """The iterate after x, where the map has the value g."""
        return g

    def restrict(self, keep: Tensor) -> None:
        """Forget all samples but `keep`."""


@dataclass(frozen=True)
class Picard:
    """Picard iteration, z ← (1 − ω) z + ω f(z), with the relaxation factor ω.

    ω < 1 is damping, that is forward Euler with step ω; in an even-odd sweep ω applies to each half-step and may
    exceed 1 (over-relaxation). None takes the network's own: 0.5 for a synchronous CHN, else 1.
    """

    relaxation: float | None = None

    def __post_init__(self) -> None:
        w = self.relaxation
        if w is not None and not 0 < w < math.inf:
            raise ValueError(f"relaxation must be positive (1: none, below 1: damping), not {w}")

    def memory(self) -> Memory:
        return Memory()


@dataclass(frozen=True)
class Anderson(Picard):
    """Anderson acceleration (Walker & Ni 2011): the next iterate is Σ αⱼ g_j over the last m map values.

    α minimises ‖F α‖ with Σα = 1, F the residuals f_j = g_j − z_j, by solving (FᵀF + μI) α = 1 and rescaling, for
    each sample alone. With the safeguard the mixed point z̃ is taken only where ‖g − z̃‖/‖z̃‖ < ‖g − z‖/‖z‖, else the
    Picard step g; it also refuses good long jumps, wherever the map has an eigenvalue above about ½.
    Relaxation is part of the map, not of the mixing. Caveat: an absolute μ, the paper's, stalls the acceleration
    once ‖f‖² falls below it; `relative=True` scales μ by the mean of diag FᵀF (then 1e-8 is a good μ in float32).
    Nothing here keeps the energy from rising.
    """

    m: int = 4
    mu: float = 1e-10
    relative: bool = False
    plain_steps: int = 2
    safeguard: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.m < 1:
            raise ValueError(f"Anderson's window m must be at least 1, not {self.m}")
        if self.mu < 0:
            raise ValueError(f"Anderson's regularisation mu must not be negative, not {self.mu}")

    def memory(self) -> Memory:
        return AndersonMemory(self)


class AndersonMemory(Memory):
    """The last m residuals and map values of every sample, and the Gram matrix FᵀF, one row of it new a step."""

    def __init__(self, options: Anderson) -> None:
        self.options, self.k = options, 0

    def next(self, x: Tensor, g: Tensor) -> Tensor:
        o, (batch, n) = self.options, g.shape
        if self.k == 0:
            self.F, self.G = g.new_empty(batch, o.m, n), g.new_empty(batch, o.m, n)
            self.gram = g.new_zeros(batch, o.m, o.m)
        slot, used = self.k % o.m, min(self.k + 1, o.m)
        self.k += 1
        torch.sub(g, x, out=self.F[:, slot])
        self.G[:, slot] = g
        row = torch.bmm(self.F[:, slot, None], self.F[:, :used].mT).squeeze(1)  # ten times faster than F f
        self.gram[:, slot, :used] = self.gram[:, :used, slot] = row
        if self.k <= o.plain_steps:
            return g
        gram = self.gram[:, :used, :used]
        diagonal = gram.diagonal(dim1=1, dim2=2)
        scale = diagonal.mean(1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny) if o.relative else 1.0
        regular = gram + torch.diag_embed(torch.zeros_like(diagonal) + o.mu * scale)
        alpha = torch.linalg.solve_ex(regular, torch.ones_like(row))[0]
        alpha = alpha / alpha.sum(1, keepdim=True)
        newest = torch.zeros_like(alpha)
        newest[:, slot] = 1  # where the small system has no solution: Picard
        alpha = torch.where(alpha.isfinite().all(1, keepdim=True), alpha, newest)
        mixed = torch.bmm(alpha[:, None], self.G[:, :used]).squeeze(1)
        if not o.safeguard:
            return mixed
        taken = _norm(g - mixed) / _norm(mixed) < diagonal[:, slot].sqrt() / _norm(x)
        return torch.lerp(g, mixed, taken.to(g.dtype)[:, None])  # exact at 0 and 1, and faster than `where`

    def restrict(self, keep: Tensor) -> None:
        self.F, self.G, self.gram = self.F[keep], self.G[keep], self.gram[keep]


@dataclass
class Solution:
    """What came of a solve, sample by sample."""

    state: Tensor  # (batch, N), the last map value; for an even-odd HAM with the other block in its field
    iterations: Tensor  # (batch,), the paper's count: the first i with ‖fⁱ⁺² − fⁱ⁺¹‖/‖fⁱ⁺²‖ < tol, else n − 1
    status: Tensor  # (batch,), Status codes
    residual: Tensor  # (batch,), the last residual
    residuals: Tensor | None = None  # (n − 1, batch) with trace=True; NaN once a sample has left the batch
    evaluations: int = 0  # map evaluations, summed over the samples
    net: Network | None = field(default=None, repr=False)

    @property
    def output(self) -> Tensor:
        """ŷ, the last layer of the state."""
        assert self.net is not None
        return self.net.layer(self.state, -1)

    @property
    def converged(self) -> Tensor:
        """(batch,) bool."""
        return self.status == Status.CONVERGED

    def __repr__(self) -> str:
        ends = [f"{int((self.status == s).sum())} {s.name.lower().replace('_', ' ')}" for s in Status]
        said = ", ".join(e for e in ends if not e.startswith("0 "))
        mean = self.iterations.double().mean().item() if len(self.iterations) else 0.0
        return f"Solution({len(self.status)} samples: {said}; {mean:.1f} iterations on average)"


def residual(g: Tensor, before: Tensor) -> Tensor:
    """‖g − before‖/‖g‖ per sample, the paper's measure of convergence; 0 where both vanish, NaN where ‖g‖ overflows."""
    norm = _norm(g)
    r = _norm(g - before).div_(norm.clamp_min(torch.finfo(g.dtype).tiny))
    return r.add_(norm, alpha=0)  # 0·∞ is NaN


def _norm(t: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(t, dim=1)
    return norm


@torch.no_grad()
def trajectory(f: FixedPointMap, z: Tensor, solver: Picard | None = None, *, iterations: int) -> Tensor:
    """The map values f¹, f², … (iterations, batch, size) by the plain loop: the oracle of `iterate`."""
    memory, values = (solver or Picard()).memory(), []
    for _ in range(iterations):
        g = f(z)
        values.append(g)
        z = memory.next(z, g)
    return torch.stack(values)


_CYCLE = 1e-3  # in a cycle of length 2, two steps move the state this much less than one


def iterate(
    f: FixedPointMap,
    z: Tensor,
    solver: Picard,
    *,
    max_iter: int,
    tol: float,
    early_stop: bool = True,
    trace: bool = False,
) -> Solution:
    """Iterate z ← f(z) with a solver; `state` of the result is the last map value of each sample.

    With `early_stop` a sample is finished when its residual falls below tol; finished samples are dropped from the
    batch whenever a quarter of it is finished (their answers are those of the moment they finished, so they do not
    depend on the company they were in). Without, all samples take max_iter iterations, and nothing in the loop
    waits for the device.
    """
    batch = len(z)
    total = {
        "state": torch.empty_like(z),
        "iterations": torch.full((batch,), max(max_iter - 1, 0), device=z.device),
        "status": torch.full((batch,), Status.MAX_ITER, device=z.device),
        "residual": z.new_full((batch,), math.nan),
    }
    part = {name: t.clone() for name, t in total.items()}  # of the samples still in the batch, whose numbers are `rows`
    rows = torch.arange(batch, device=z.device)
    residuals = z.new_full((max_iter - 1, batch), math.nan) if trace else None
    memory, evaluations = solver.memory(), 0
    patience = 8 if z.is_cuda else 1  # how often to look at the device
    g, g1, g2 = z, z, z  # the last three map values
    buffers = [torch.empty_like(z) for _ in range(3)]

    r = part["residual"]
    tol_, infinity = z.new_tensor(tol), z.new_tensor(math.inf)  # tensors compare faster than numbers
    running = torch.ones(batch, dtype=torch.bool, device=z.device)
    for k in range(max_iter):
        g, g1, g2 = f(z, out=buffers[k % 3]), g, g1
        evaluations += len(z)
        if k > 0:
            r = residual(g, g1)
            if residuals is not None:
                residuals[k - 1, rows] = torch.where(running, r, math.nan) if early_stop else r
            ended = running & ((r >= tol_) & (r < infinity)).logical_not_()
            if z.device.type != "cpu" or bool(
                ended.any()
            ):  # on the CPU a look costs nothing, a pass over the states does
                hit = ended & (r < tol_)
                part["iterations"].masked_fill_(hit, k - 1)
                part["status"].masked_fill_(ended, Status.NOT_FINITE).masked_fill_(hit, Status.CONVERGED)
                running &= ~ended
                if early_stop:
                    part["state"] = torch.where(ended[:, None], g, part["state"])
                    part["residual"] = torch.where(ended, r, part["residual"])
                if early_stop and k % patience == 0:
                    keep = running.nonzero().flatten()
                    if len(keep) <= 0.75 * len(rows):
                        for name, piece in part.items():
                            total[name][rows] = piece
                        if len(keep) == 0:
                            break
                        rows, part = rows[keep], {name: piece[keep] for name, piece in part.items()}
                        f, z, g, g1, g2 = f.restrict(keep), z[keep], g[keep], g1[keep], g2[keep]
                        r, running = r[keep], running[keep]
                        memory.restrict(keep)
                        buffers = [torch.empty_like(z) for _ in range(3)]
        z = memory.next(z, g)
    else:
        part["state"] = torch.where(running[:, None], g, part["state"]) if early_stop else g
        part["residual"] = torch.where(running, r, part["residual"]) if early_stop else r
        if max_iter > 2:
            cycling = running & (residual(g, g2) < _CYCLE * part["residual"])
            part["status"] = torch.where(cycling, Status.CYCLING, part["status"])
        for name, piece in part.items():
            total[name][rows] = piece
    return Solution(**total, residuals=residuals, evaluations=evaluations, net=None)
