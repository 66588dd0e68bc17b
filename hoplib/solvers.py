"""Fixed-point solvers: Picard and Anderson, with an account per sample of how each one ended.

The loop `iterate` serves every fixed point in the project, the equilibrium of a network and its adjoint alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from . import checks, kernels
from .network import Network
from .paper import TOL
from .sweep import check_relaxation


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


class Verdict(NamedTuple):
    """On the newest map values of a batch, until the next look."""

    residual: Tensor
    error: Tensor  # the residual; of a sample that has met the criterion by chance, the error in z = f(z)
    ended: Tensor  # which of the running samples have converged, or are no longer finite
    some: bool  # may there be any?


class Values:
    """The map values of the last iterations, G (depth, batch, n), a ring in which the map leaves the newest itself.

    On one thread of a CPU the passes over memory are those of compiled loops, elsewhere of torch's operations: the same
    numbers to rounding.
    """

    def __init__(self, z: Tensor, depth: int = 3) -> None:
        self.k = -1  # the iteration that the newest value is of
        self.depth = max(3, depth)  # the loop looks back on two
        self.compiled = kernels.fit(z)
        self.hold(z.new_empty(self.depth, *z.shape))

    def hold(self, G: Tensor) -> None:
        """These map values from now on; all that every look needs is made here, once."""
        self.G, self.ring = G, G.unbind()
        if self.compiled:
            r = G.new_empty(G.shape[1])
            self.verdict = r, torch.empty_like(r), torch.empty_like(r, dtype=torch.bool)
            self.arrays, self.out = ([*map(kernels.array, tensors)] for tensors in (self.ring, self.verdict))

    def __getitem__(self, back: int) -> Tensor:
        """The map value of so many iterations ago."""
        return self.ring[(self.k - back) % self.depth]

    def evaluate(self, f: FixedPointMap, z: Tensor) -> Tensor:
        """g = f(z), kept."""
        self.k += 1
        return f(z, out=self[0])

    def judge(self, running: Tensor, tol: float, z: Tensor | None = None) -> Verdict:
        """How far the newest map values are from those before, and who has ended with that.

        Given z, of which they are the map values, a sample whose value is near the one before, but not near z, has met
        the criterion by chance and has not ended.
        """
        g, before = self[0], self[1]
        chance = math.inf if z is None else CHANCE * tol
        if self.compiled:
            g_, before_ = self.arrays[self.k % self.depth], self.arrays[(self.k - 1) % self.depth]
            z_ = g_ if z is None else kernels.array(z)
            some = kernels.judge(g_, before_, z_, kernels.array(running), float(tol), chance, *self.out)
            return Verdict(*self.verdict, some)
        r = residual(g, before)
        ended = running & ((r >= tol) & (r < math.inf)).logical_not_()
        some, error = kernels.waits(r) or bool(ended.any()), r
        if some and z is not None:
            away = residual(g, z)
            by_chance = ended & (r < tol) & (away > chance)
            error, ended = torch.where(by_chance, away, r), ended & ~by_chance
        return Verdict(r, error, ended, some)

    def restrict(self, keep: Tensor) -> None:
        """Forget all samples but `keep`."""
        self.hold(self.G.index_select(1, keep))


class Steps(Protocol):
    """A solver at work on a batch: from an iterate and the map values so far to the next iterate.

    `depth` is the number of map values that it looks back on. Steps whose iterate is always the newest map value say
    `mixes = False`. Of others two map values may be near each other by chance, which `iterate` then looks into.
    """

    @property
    def depth(self) -> int: ...

    def step(self, z: Tensor, values: Values) -> Tensor: ...

    def restrict(self, keep: Tensor) -> None: ...


def mixes(steps: Steps) -> bool:
    """May its iterate be another than the newest map value? Of whoever does not say, it may."""
    return bool(getattr(steps, "mixes", True))


class Solver(Protocol):
    """A way to find a fixed point: `init` starts it on a batch. Its ω, None for the paper's, is part of the map.

    A solver with a map of its own has `sweep(net, x, blocks, like)` besides, as `OverRelaxed`.
    """

    @property
    def relaxation(self) -> float | None: ...

    def init(self, z: Tensor) -> Steps: ...


SOLVER = "a solver such as Picard() or Anderson()"


@dataclass(frozen=True)
class Picard:
    """Picard iteration, z ← (1 − ω) z + ω f(z), with the relaxation factor ω.

    ω < 1 is damping, that is forward Euler with step ω; in an even-odd sweep ω applies to each half-step and may
    exceed 1 (over-relaxation). None takes the paper's: 0.5 for a synchronous CHN, else 1.
    """

    relaxation: float | None = None
    depth: ClassVar[int] = 1
    mixes: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "step" in vars(cls):
            cls.mixes = vars(cls).get("mixes", True)  # another step, which has to say so itself

    def __post_init__(self) -> None:
        if self.relaxation is not None:
            check_relaxation(self.relaxation)

    def init(self, z: Tensor) -> Picard:
        return self  # it remembers nothing

    def step(self, z: Tensor, values: Values) -> Tensor:
        return values[0]

    def restrict(self, keep: Tensor) -> None:
        pass


WIDEST = 1000  # window: every sample has a matrix m × m


@dataclass(frozen=True, kw_only=True)
class Anderson:
    """Anderson acceleration (Walker & Ni 2011): the next iterate is Σ αⱼ g_j over the last m map values.

    α minimises ‖F α‖ with Σα = 1, F the residuals f_j = g_j − z_j, by solving (FᵀF + μI) α = 1 and rescaling, for
    each sample alone. With the safeguard the mixed point z̃ is taken only where ‖g − z̃‖/‖z̃‖ < ‖g − z‖/‖z‖, else the
    Picard step g; it also refuses good long jumps, wherever the map has an eigenvalue above about ½.
    Relaxation is part of the map, not of the mixing. Caveat: an absolute μ, the paper's, stalls the acceleration
    once ‖f‖² falls below it; `relative=True` scales μ by the mean of diag FᵀF (then 1e-8 is a good μ in float32).
    Nothing here keeps the energy from rising.
    """

    relaxation: float | None = None
    m: int = 4
    mu: float = 1e-10
    relative: bool = False
    safeguard: bool = True

    def __post_init__(self) -> None:
        if self.relaxation is not None:
            check_relaxation(self.relaxation)
        checks.integer("Anderson's window m", self.m, 1, WIDEST)
        checks.number("Anderson's regularisation mu", self.mu, "a number of at least 0")
        checks.flag("relative", self.relative)
        checks.flag("safeguard", self.safeguard)

    def init(self, z: Tensor) -> AndersonSteps:
        return AndersonSteps(z, self)


class AndersonSteps:
    """Anderson at work: the last m residuals F of every sample, and the Gram matrix FᵀF, one row of it new a step."""

    def __init__(self, z: Tensor, options: Anderson) -> None:
        self.options, self.depth = options, max(3, options.m)
        self.F = z.new_empty(self.depth, *z.shape)
        self.gram = z.new_zeros(len(z), self.depth, self.depth)
        self.one = torch.eye(self.depth, dtype=z.dtype, device=z.device)

    def step(self, z: Tensor, values: Values) -> Tensor:
        o, g = self.options, values[0]
        slot, used = values.k % self.depth, min(values.k + 1, o.m)
        if values.compiled:
            new = torch.empty_like(g)
            z_, G_, F_, gram_, new_ = map(kernels.array, (z, values.G, self.F, self.gram, new))
            kernels.anderson(z_, G_, F_, gram_, new_, slot, used, float(o.mu), o.relative, o.safeguard)
            return new
        f = torch.sub(g, z, out=self.F[slot])
        window = slice(used) if self.depth == o.m else [(slot - j) % self.depth for j in range(used)]  # where m < 3
        F, G = self.F[window].transpose(0, 1), values.G[window].transpose(0, 1)
        row = torch.bmm(f[:, None], F.mT).squeeze(1)  # ten times faster than F f
        self.gram[:, slot, window] = self.gram[:, window, slot] = row
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
        taken = _norm(g - mixed) / _norm(mixed) < self.gram[:, slot, slot].sqrt() / _norm(z)
        return torch.lerp(g, mixed, taken.to(g.dtype)[:, None])  # exact at 0 and 1, and faster than `where`

    def restrict(self, keep: Tensor) -> None:
        self.F, self.gram = self.F.index_select(1, keep), self.gram[keep]


REACH = 1000.0  # steps that shrink by a thousandth each, from the first one on, lead this many times as far


@dataclass(frozen=True)
class Then:
    """`first` until the residual of a sample is below `at`; from there `second`, which finds the digits down to tol.

    The second takes at most `steps` iterations. Its answer counts where its residual is the smaller one and it has not
    moved the state by more than REACH times the residual that it started from: a longer way leads to another
    equilibrium. So does a way `backwards`, to the other side than where a step of the map leads: 1 of 1,918 samples of
    untrained networks went there and changed its equilibrium, and no other sample did either. Such an answer is refused
    too, except in the table's trainings, which began before this was known. With `even_odd` the second has updates of
    its own: the two share their fixed points. Iterations and status are those of `first`.
    """

    first: Solver
    second: Solver
    at: float = TOL
    steps: int = 20
    even_odd: bool | None = None
    backwards: bool = False

    def __post_init__(self) -> None:
        for name, solver in (("first", self.first), ("second", self.second)):
            checks.able(f"Then's {name}", solver, "init", SOLVER)
        checks.number("at", self.at, "a relative residual above 0", above=True)
        checks.integer("Then's steps", self.steps, 1)
        checks.flag("backwards", self.backwards)
        if self.even_odd is not None:
            checks.flag("even_odd", self.even_odd)


@dataclass
class Solution:
    """What came of a solve, sample by sample."""

    state: Tensor  # (batch, N), the last map value; for an even-odd HAM with the other block in its field
    iterations: Tensor  # (batch,), the paper's count: the first i with ‖fⁱ⁺² − fⁱ⁺¹‖/‖fⁱ⁺²‖ < tol, else n − 1;
    #                     with early_stop the first at which that is not met by chance
    status: Tensor  # (batch,), Status codes
    residual: Tensor  # (batch,), the last residual
    residuals: Tensor | None = None  # (n − 1, batch) with trace=True; NaN once a sample has left the batch
    evaluations: int = 0  # map evaluations, summed over the samples
    net: Network | None = field(default=None, repr=False)
    gradients: dict[str, int] = field(default_factory=dict)  # once there is one, how many samples' came which way

    @property
    def output(self) -> Tensor:
        """ŷ, the last layer of the state."""
        if self.net is None:
            raise ValueError("this is the solution of a map, of which only solve() knows the network: see `state`")
        return self.net.output(self.state)

    @property
    def converged(self) -> Tensor:
        """(batch,) bool."""
        return self.status == Status.CONVERGED

    def __repr__(self) -> str:
        ends = [f"{int((self.status == s).sum())} {s.name.lower().replace('_', ' ')}" for s in Status]
        said = ", ".join(e for e in ends if not e.startswith("0 "))
        mean = self.iterations.double().mean().item() if len(self.iterations) else 0.0
        ways = "; gradients: " + ", ".join(f"{n} {way}" for way, n in self.gradients.items()) if self.gradients else ""
        return f"Solution({len(self.status)} samples: {said}; {mean:.1f} iterations on average{ways})"


def residual(g: Tensor, before: Tensor) -> Tensor:
    """‖g − before‖/‖g‖ per sample, the paper's measure of convergence; 0 where both vanish, NaN where ‖g‖ overflows."""
    for name, t in (("g", g), ("the value before g", before)):
        checks.weights(name, t, 2, "a tensor (batch, n)")
    if g.shape != before.shape:
        raise ValueError(f"g has shape {tuple(g.shape)}, the value before it {tuple(before.shape)}")
    norm = _norm(g)
    r = _norm(g - before).div_(norm.clamp_min(torch.finfo(g.dtype).tiny))
    return r.add_(norm, alpha=0)  # 0·∞ is NaN


def _norm(t: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(t, dim=1)
    return norm


def _assign(target: Tensor, where: Tensor, source: Tensor) -> None:
    """target[where] = source[where], without a look at the device where that would wait for it."""
    if kernels.waits(target):
        target.copy_(torch.where(where[:, None], source, target))
    else:
        i = where.nonzero().flatten()
        target.index_copy_(0, i, source.index_select(0, i))


@torch.no_grad()
def trajectory(f: FixedPointMap, z: Tensor, solver: Solver | None = None, *, iterations: int) -> Tensor:
    """The map values f¹, f², … (iterations, batch, size) by the plain loop: the oracle of `iterate`."""
    checks.integer("iterations", iterations, 1)
    solver = Picard() if solver is None else solver
    _check(f, z, solver)
    with checks.full_precision(z):
        steps, found = solver.init(z), []
        values = Values(z, steps.depth)
        for _ in range(iterations):
            found.append(values.evaluate(f, z).clone())
            z = steps.step(z, values)
    return torch.stack(found)


def _check(f: FixedPointMap, z: Tensor, solver: Solver) -> None:
    checks.able("solver", solver, "init", SOLVER)
    checks.able("the map", f, "__call__", "one such as EvenOdd(net, x)")
    checks.weights("z", z, 2, "a tensor (batch, n)")
    shape = getattr(f, "batch", len(z)), getattr(f, "size", z.shape[1])
    if z.shape != shape:
        raise ValueError(f"the map is one of {shape} tensors, not {tuple(z.shape)}; it starts at f.start()")


@torch.no_grad()
def iterate(
    f: FixedPointMap,
    z: Tensor,
    solver: Solver,
    *,
    max_iter: int,
    tol: float,
    early_stop: bool = True,
    trace: bool = False,
) -> Solution:
    """Iterate z ← f(z) with a solver; `state` of the result is the last map value of each sample.

    With `early_stop` a sample is finished when its residual falls below tol; finished samples are dropped from the
    batch whenever a quarter of it is finished, with the answers of the moment they finished. Without, all samples take
    max_iter iterations, and nothing in the loop waits for the device. A sample's answer depends on the company it was
    in by rounding only, unless the map looks at all of them (OverRelaxed() chooses one ω for the batch). What the map
    or the solver makes of rounding is another matter: between several equilibria, an Anderson without safeguard may end
    in one or in another, or in none. Two map values of Anderson may also be near each other by chance, when z is far
    from f(z): with `early_stop` such a sample goes on.
    """
    checks.integer("max_iter", max_iter, 1)
    checks.number("tol", tol, "a relative residual of at least 0")
    for name, value in (("early_stop", early_stop), ("trace", trace)):
        checks.flag(name, value)
    _check(f, z, solver)
    with checks.full_precision(z):
        steps = solver.init(z)
        values, account = Values(z, steps.depth), Account(z, max_iter, tol, early_stop, trace, mixes(steps))
        for _ in range(max_iter if len(z) else 0):
            values.evaluate(f, z)
            keep = account.note(values, z)
            if keep is not None:
                if len(keep) == 0:
                    break
                f, z = f.restrict(keep), z.index_select(0, keep)
                values.restrict(keep)
                steps.restrict(keep)
            z = steps.step(z, values)
        return account.close(values)


def conjugate_gradients(
    K: Callable[[Tensor], Tensor],
    M: Callable[[Tensor], Tensor],
    mu: Tensor,
    r: Tensor,
    *,
    max_iter: int,
    tol: float,
) -> tuple[Tensor, Tensor]:
    """μ + M v, for each sample with the v that solves v = K M v + r; and for which samples it was found.

    By conjugate gradients in the product ⟨u, v⟩ = uᵀM v, in which K M is self-adjoint, K and M being symmetric. M must
    be positive semi-definite, I − K M positive definite in it: a sample that shows another curvature is given up.
    Found means ‖M r‖ ≤ tol·‖μ + M v‖, r what is left of the equation.
    """
    Mr = M(r)
    p, Mp, rr = r, Mr, (r * Mr).sum(1)
    solved = _norm(Mr) <= tol * _norm(mu)
    running, look = ~solved, FIRST_LOOK if kernels.waits(r) else 0
    for k in range(max_iter):
        if k >= look:
            if not bool(running.any()):
                break
            look *= 2
        q = p - K(Mp)
        curvature = (Mp * q).sum(1)
        running &= curvature > 0
        a = torch.where(running, rr / curvature, 0.0)[:, None]
        mu, r = torch.addcmul(mu, a, Mp), torch.addcmul(r, a, q, value=-1)
        Mr = M(r)
        before, rr = rr, (r * Mr).sum(1)
        hit = running & (_norm(Mr) <= tol * _norm(mu))
        solved, running = solved | hit, running & ~hit
        b = torch.where(running, rr / before, 0.0)[:, None]
        p, Mp = torch.addcmul(r, b, p), torch.addcmul(Mr, b, Mp)
    return mu, solved


CYCLE = 1e-3  # in a cycle of length 2, two steps move the state this much less than one
CHANCE = 10.0  # a sample that meets the criterion with so many times its error in z = f(z) has met it by chance
CROWD = 0.75  # a batch shrinks when no more than this share of it is still running
FIRST_LOOK = 8  # where a look waits for the device: after so many iterations, then after twice as many, and so on


class Account:
    """How the samples fare: `part` of those still in the batch, whose numbers are `rows`, `total` of all."""

    def __init__(self, z: Tensor, max_iter: int, tol: float, early_stop: bool, trace: bool, mixes: bool) -> None:
        batch, self.tol, self.early_stop, self.mixes, self.evaluations = len(z), tol, early_stop, mixes, 0
        self.total = {
            "state": torch.empty_like(z),
            "iterations": torch.full((batch,), max(max_iter - 1, 0), device=z.device),
            "status": torch.full((batch,), Status.MAX_ITER, device=z.device),
            "residual": z.new_full((batch,), math.nan),
        }
        self.part = {name: t.clone() for name, t in self.total.items()}
        self.rows = torch.arange(batch, device=z.device)
        self.running = torch.ones(batch, dtype=torch.bool, device=z.device)
        self.residual = self.part["residual"]
        self.residuals = z.new_full((max_iter - 1, batch), math.nan) if trace else None
        self.waits = kernels.waits(z)
        self.look = FIRST_LOOK if self.waits else 1  # the iteration of the next look

    def note(self, values: Values, z: Tensor) -> Tensor | None:
        """Judge the newest map values, those of z; the samples to go on with, where it pays to drop the others."""
        self.evaluations += self.rows.shape[0]
        if values.k == 0:
            return None
        at = z if self.early_stop and self.mixes else None
        r, self.residual, ended, some = values.judge(self.running, self.tol, at)
        if self.residuals is not None:
            self.residuals[values.k - 1, self.rows] = torch.where(self.running, r, math.nan) if self.early_stop else r
        if not some:
            return None
        hit = ended & (r < self.tol)
        self.part["iterations"].masked_fill_(hit, values.k - 1)
        self.part["status"].masked_fill_(ended, Status.NOT_FINITE).masked_fill_(hit, Status.CONVERGED)
        self.running &= ~ended
        if not self.early_stop:
            return None
        self.settle(ended, values[0])
        if values.k < self.look:
            return None
        self.look *= 2 if self.waits else 1
        return self.shrink()

    def settle(self, which: Tensor, g: Tensor) -> None:
        """The answers of these samples are their newest map values."""
        _assign(self.part["state"], which, g)
        self.part["residual"] = torch.where(which, self.residual, self.part["residual"])

    def shrink(self) -> Tensor | None:
        """Book the samples that have ended and go on without them, where they are many; those that stay."""
        keep = self.running.nonzero().flatten()
        if len(keep) > CROWD * len(self.rows):
            return None
        self.book()
        self.rows, self.running, self.residual = self.rows[keep], self.running[keep], self.residual[keep]
        self.part = {name: piece.index_select(0, keep) for name, piece in self.part.items()}
        return keep

    def book(self) -> None:
        for name, piece in self.part.items():
            self.total[name][self.rows] = piece

    def close(self, values: Values) -> Solution:
        """The solution, with what those that still run have come to."""
        if len(self.rows):
            g = values[0]
            self.settle(self.running if self.early_stop else torch.ones_like(self.running), g)
            if values.k > 1:
                cycling = self.running & (residual(g, values[2]) < CYCLE * self.part["residual"])
                self.part["status"] = torch.where(cycling, Status.CYCLING, self.part["status"])
            self.book()
        return Solution(**self.total, residuals=self.residuals, evaluations=self.evaluations, net=None, gradients={})
