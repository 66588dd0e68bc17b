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

from . import kernels
from .network import Network


class Status(IntEnum):
    """How a sample's iteration ended."""

    CONVERGED = 0
    MAX_ITER = 1  # out of iterations
    CYCLING = 2  # out of iterations in a limit cycle of length 2
    NOT_FINITE = 3  # an infinity or a NaN came up


class FixedPointMap(Protocol):
    """What `iterate` asks of a map: evaluate it, into `out` where that is given, and restrict it to some samples."""

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor: ...

    def restrict(self, keep: Tensor) -> FixedPointMap: ...


class Memory:
    """The map values of the last iterations, G (depth, batch, n), a ring in which the map leaves the newest itself.

    Picard's next iterate is the newest of them; the loop looks back on two more. On one thread of a CPU the passes over
    memory are those of compiled loops, elsewhere of torch's operations: the same numbers to rounding.
    """

    def __init__(self, z: Tensor, depth: int = 3) -> None:
        self.k, self.depth = -1, depth  # k: the iteration that the newest value is of
        self.G = z.new_empty(depth, *z.shape)
        self.compiled = kernels.fit(z)

    def __getitem__(self, back: int) -> Tensor:
        """The map value of so many iterations ago."""
        return self.G[(self.k - back) % self.depth]

    def evaluate(self, f: FixedPointMap, z: Tensor) -> Tensor:
        """g = f(z), kept."""
        self.k += 1
        return f(z, out=self[0])

    def judge(self, running: Tensor, tol: float) -> tuple[Tensor, Tensor, bool]:
        """The residual of each sample, which of the running ones have ended with it, and whether there may be any."""
        if self.compiled:
            r, ended = self.G.new_empty(len(running)), torch.empty_like(running)
            g, before, going = (t.detach().numpy() for t in (self[0], self[1], running))
            return r, ended, kernels.judge(g, before, going, float(tol), r.numpy(), ended.numpy())
        r = residual(self[0], self[1])
        ended = running & ((r >= tol) & (r < math.inf)).logical_not_()
        return r, ended, r.device.type != "cpu" or bool(ended.any())  # elsewhere a look would wait for the device

    def next(self, x: Tensor) -> Tensor:
        """The iterate after x, given the newest map value, which is that of x."""
        return self[0]

    def restrict(self, keep: Tensor) -> None:
        """Forget all samples but `keep`."""
        self.G = self.G.index_select(1, keep)


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

    def memory(self, z: Tensor) -> Memory:
        return Memory(z)


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
    plain_steps: int = 1
    safeguard: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.m < 1:
            raise ValueError(f"Anderson's window m must be at least 1, not {self.m}")
        if self.mu < 0:
            raise ValueError(f"Anderson's regularisation mu must not be negative, not {self.mu}")

    def memory(self, z: Tensor) -> Memory:
        return AndersonMemory(z, self)


class AndersonMemory(Memory):
    """Also the last m residuals F of every sample, and the Gram matrix FᵀF, one row of it new a step."""

    def __init__(self, z: Tensor, options: Anderson) -> None:
        super().__init__(z, depth=max(3, options.m))
        self.options, self.F = options, torch.empty_like(self.G)
        self.gram = z.new_zeros(len(z), self.depth, self.depth)
        self.one = torch.eye(self.depth, dtype=z.dtype, device=z.device)

    def next(self, x: Tensor) -> Tensor:
        o, g, mix = self.options, self[0], self.k >= self.options.plain_steps
        slot, used = self.k % self.depth, min(self.k + 1, o.m)
        if self.compiled:
            z = torch.empty_like(g) if mix else g
            x_, G_, F_, gram_, z_ = (t.detach().numpy() for t in (x, self.G, self.F, self.gram, z))
            kernels.anderson(x_, G_, F_, gram_, z_, slot, used, mix, float(o.mu), o.relative, o.safeguard)
            return z
        f = torch.sub(g, x, out=self.F[slot])
        window = slice(used) if self.depth == o.m else [(slot - j) % self.depth for j in range(used)]  # where m < 3
        F, G = self.F[window].transpose(0, 1), self.G[window].transpose(0, 1)
        row = torch.bmm(f[:, None], F.mT).squeeze(1)  # ten times faster than F f
        self.gram[:, slot, window] = self.gram[:, window, slot] = row
        if not mix:
            return g
        gram = self.gram[:, window][:, :, window].clone()
        diagonal = gram.diagonal(dim1=1, dim2=2)
        tiny = torch.finfo(g.dtype).tiny
        diagonal += o.mu * diagonal.mean(1, keepdim=True).clamp_min(tiny) if o.relative else o.mu
        alpha = torch.linalg.solve_ex(gram, torch.ones_like(row))[0]
        alpha /= alpha.sum(1, keepdim=True)
        solved = alpha.isfinite().all(1, keepdim=True)
        alpha = torch.where(solved, alpha, self.one[slot][window])  # where there is no solution: Picard
        mixed = torch.bmm(alpha[:, None].contiguous(), G).squeeze(1)  # alpha comes column by column
        if not o.safeguard:
            return mixed
        taken = _norm(g - mixed) / _norm(mixed) < self.gram[:, slot, slot].sqrt() / _norm(x)
        return torch.lerp(g, mixed, taken.to(g.dtype)[:, None])  # exact at 0 and 1, and faster than `where`

    def restrict(self, keep: Tensor) -> None:
        super().restrict(keep)
        self.F, self.gram = self.F.index_select(1, keep), self.gram[keep]


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


def _assign(target: Tensor, where: Tensor, source: Tensor) -> None:
    """target[where] = source[where], without a look at the device where that would wait for it."""
    if target.device.type == "cpu":
        i = where.nonzero().flatten()
        target.index_copy_(0, i, source.index_select(0, i))
    else:
        target.copy_(torch.where(where[:, None], source, target))


@torch.no_grad()
def trajectory(f: FixedPointMap, z: Tensor, solver: Picard | None = None, *, iterations: int) -> Tensor:
    """The map values f¹, f², … (iterations, batch, size) by the plain loop: the oracle of `iterate`."""
    memory, values = (solver or Picard()).memory(z), []
    for _ in range(iterations):
        values.append(memory.evaluate(f, z).clone())
        z = memory.next(z)
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
    memory, evaluations = solver.memory(z), 0
    patience = 8 if z.is_cuda else 1  # how often to look at the device

    r = part["residual"]
    running = torch.ones(batch, dtype=torch.bool, device=z.device)
    for k in range(max_iter):
        g = memory.evaluate(f, z)
        evaluations += rows.shape[0]
        if k > 0:
            r, ended, some = memory.judge(running, tol)
            if residuals is not None:
                residuals[k - 1, rows] = torch.where(running, r, math.nan) if early_stop else r
            if some:
                hit = ended & (r < tol)
                part["iterations"].masked_fill_(hit, k - 1)
                part["status"].masked_fill_(ended, Status.NOT_FINITE).masked_fill_(hit, Status.CONVERGED)
                running &= ~ended
                if early_stop:
                    _assign(part["state"], ended, g)
                    part["residual"] = torch.where(ended, r, part["residual"])
                if early_stop and k % patience == 0:
                    keep = running.nonzero().flatten()
                    if len(keep) <= 0.75 * len(rows):
                        for name, piece in part.items():
                            total[name][rows] = piece
                        if len(keep) == 0:
                            break
                        rows, part = rows[keep], {name: piece.index_select(0, keep) for name, piece in part.items()}
                        f, z, r, running = f.restrict(keep), z.index_select(0, keep), r[keep], running[keep]
                        memory.restrict(keep)
        z = memory.next(z)
    else:
        g = memory[0]
        if early_stop:
            _assign(part["state"], running, g)
            part["residual"] = torch.where(running, r, part["residual"])
        else:
            part["state"], part["residual"] = g, r
        if max_iter > 2:
            cycling = running & (residual(g, memory[2]) < _CYCLE * part["residual"])
            part["status"] = torch.where(cycling, Status.CYCLING, part["status"])
        for name, piece in part.items():
            total[name][rows] = piece
    return Solution(**total, residuals=residuals, evaluations=evaluations, net=None)
