"""`solve`: the equilibrium of a network on a batch of inputs, with a gradient by any of three methods.

How the equilibrium is found and how it is differentiated are independent choices.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import checks, paper
from .network import EvenOdd, Network, Synchronous
from .relaxation import OverRelaxed
from .solvers import Picard, Solution, Solver, Then, iterate
from .sweep import Sweep, Turn

RESIDUAL = "a relative residual of at least 0"


class Backward(Protocol):
    """A way to differentiate s*: the turns that a gradient by the state s* = join(z*) is carried back through.

    `residual` (batch,) tells how far z* is from a fixed point.
    """

    def turns(self, f: Sweep, z_star: Tensor, state: Tensor, residual: Tensor, grad: Tensor) -> list[Turn]: ...


@dataclass(frozen=True)
class Adjoint:
    """Implicit differentiation: λ = g + Jᵀλ at s*, with Jᵀλ written out, then one outer product for each W_i.

    With `steps=k` the first k terms of its Neumann series, which at an equilibrium is what the paper's k steps of
    recurrent backpropagation compute; else iterated until the residual of each sample is below `tol` (32 units of
    rounding), with Picard or, for speed, Anderson. Memory does not grow with the iterations. Exact only at an
    equilibrium; where the adjoint does not converge (s* is no attractor) it warns.
    """

    steps: int | None = None
    solver: Solver = field(default_factory=Picard)
    tol: float | None = None
    max_iter: int = 2000

    def __post_init__(self) -> None:
        if self.steps is not None:
            checks.integer("Adjoint's steps", self.steps, 1)
        if self.tol is not None:
            checks.number("tol", self.tol, RESIDUAL)
        checks.integer("max_iter", self.max_iter, 1)

    def turns(self, f: Sweep, z_star: Tensor, state: Tensor, residual: Tensor, grad: Tensor) -> list[Turn]:
        split, r = f.net.split, f.net.rho.rho(state, out=torch.empty_like(state))
        return [Turn(split(r), split(self.cotangent(f, state, grad)))]

    def cotangent(self, f: Sweep, state: Tensor, grad: Tensor) -> Tensor:
        """The gradient by the field of every neuron, given the gradient by the state."""
        adjoint = f.adjoint(state, grad)
        if self.steps is not None:
            return adjoint.neumann(self.steps)
        tol = 32 * torch.finfo(grad.dtype).eps if self.tol is None else self.tol
        sol = iterate(adjoint, adjoint.first, self.solver, max_iter=self.max_iter, tol=tol)
        if not bool(sol.converged.all()):
            warnings.warn(f"the adjoint did not converge: {sol!r}", RuntimeWarning, stacklevel=2)
        return adjoint.cotangent(sol.state)


@dataclass(frozen=True)
class RecurrentBackprop:
    """The paper's method: the derivative along `steps` more Picard steps from s*; the value is that at s* itself.

    None takes the paper's number, 8·⌊layers/2⌋ in ODE time. Memory grows with the steps. Samples whose residual ended
    below `closed_form` take Adjoint(steps) instead, which is the same at an equilibrium, and cheap. Away from one it
    is not: around a limit cycle the steps have bounded derivatives, while powers of the Jacobian at one point explode.
    """

    steps: int | None = None
    closed_form: float = 0.0

    def __post_init__(self) -> None:
        if self.steps is not None:
            checks.integer("RecurrentBackprop's steps", self.steps, 1)
        checks.number("closed_form", self.closed_form, RESIDUAL)

    def turns(self, f: Sweep, z_star: Tensor, state: Tensor, residual: Tensor, grad: Tensor) -> list[Turn]:
        steps = paper.backward_steps(f.net, len(f.blocks) > 1) if self.steps is None else self.steps
        near = residual < self.closed_form
        found = 0 if self.closed_form == 0 else int(near.sum())  # the only look at the device
        if found == 0:
            return f.along(z_star, steps, grad)
        if found == len(near):
            return Adjoint(steps).turns(f, z_star, state, residual, grad)
        i, j = near.argsort(descending=True, stable=True).tensor_split([found])
        closed = Adjoint(steps).turns(f.restrict(i), z_star[i], state[i], residual[i], grad[i])
        further = f.restrict(j).along(z_star[j], steps, grad[j])
        return [replace(t, rows=i) for t in closed] + [replace(t, rows=j) for t in further]


class _Implicit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: Backward, f: Sweep, z_star: Tensor, residual: Tensor, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        state = f.join(z_star)
        ctx.how, ctx.f = how, f
        ctx.save_for_backward(x, z_star, state, residual, *parameters)  # a weight that changes meanwhile is an error
        return state.clone() if state is z_star else state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, z_star, state, residual, *_ = ctx.saved_tensors
        turns = ctx.how.turns(ctx.f, z_star, state, residual, grad)
        by_links, by_b, by_x = ctx.f.net.pullback(turns, x, ctx.needs_input_grad[4])
        return None, None, None, None, by_x, *by_links, *by_b


def attach(how: Backward, f: Sweep, x: Tensor, z_star: Tensor, residual: Tensor) -> Tensor:
    """The state that z* stands for, connected to the parameters and to x."""
    return _Implicit.apply(how, f, z_star, residual, x, *f.net.W, *f.net.b)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ThroughTime:
    """Backpropagation through all max_iter Picard steps from s⁰: the oracle of the others. Memory grows with them."""


def _unroll(f: Sweep, x: Tensor, z: Tensor, steps: int) -> Tensor:
    f = f.again(x)  # its drive anew, with a graph
    for _ in range(steps):
        z = f(z)
    return f.join(z)


def solve(
    net: Network,
    x: Tensor,
    solver: Solver | Then | None = None,
    *,
    even_odd: bool = False,
    tol: float = paper.TOL,
    max_iter: int | None = None,
    early_stop: bool = True,
    trace: bool = False,
    s0: Tensor | None = None,
    backward: Backward | ThroughTime | None = None,
) -> Solution:
    """The equilibrium s* of the network on the inputs x (batch, n₀), from s⁰ = 0 or from `s0` (batch, N).

    solver      Picard(), Anderson(m=4), OverRelaxed() or Then(…, …); its relaxation is part of the map.
    even_odd    update even and odd layers in turn instead of all at once.
    tol         the relative residual that counts as convergence.
    max_iter    at most this many iterations; None: the paper's number for the depth.
    early_stop  finish each sample at tol; False: max_iter iterations for all, as the paper does.
    trace       keep every residual, (max_iter − 1, batch).
    backward    Adjoint(), RecurrentBackprop() or ThroughTime(): makes `state` differentiable by W, b and x.
    """
    solver = Picard() if solver is None else solver
    first = solver.first if isinstance(solver, Then) else solver
    if not hasattr(first, "init"):
        raise TypeError(f"solver must be Picard(), Anderson() or Then(…, …), not {solver!r}")
    if isinstance(backward, ThroughTime) and not isinstance(solver, Picard):
        raise ValueError(f"ThroughTime unrolls Picard steps; it cannot follow {solver!r}. Use Adjoint() instead.")
    if isinstance(solver, Then) and not early_stop:
        raise ValueError("Then goes on from where its first solver has met its criterion: it needs early_stop=True")
    for name, value in (("even_odd", even_odd), ("early_stop", early_stop), ("trace", trace)):
        checks.flag(name, value)
    max_iter = paper.max_iter(net, even_odd) if max_iter is None else checks.integer("max_iter", max_iter, 1)
    checks.number("tol", tol, RESIDUAL)
    if backward is not None and not isinstance(backward, ThroughTime) and not hasattr(backward, "turns"):
        raise TypeError(f"backward must be Adjoint(), RecurrentBackprop() or ThroughTime(), not {backward!r}")
    net.check_input(x)
    with torch.no_grad():
        f = _sweep(net, x, first, even_odd)
        if s0 is not None:
            net.check_state(s0, len(x))
        z0 = f.start(s0)
        until = solver.at if isinstance(solver, Then) else tol
        sol = iterate(f, z0, first, max_iter=max_iter, tol=until, early_stop=early_stop, trace=trace)
        if isinstance(solver, Then):
            f = _finish(f, sol, solver, even_odd, x, tol)
    sol.net = net
    if isinstance(backward, ThroughTime):
        sol.state = _unroll(f, x, z0, max_iter)
    elif backward is not None:
        sol.state = attach(backward, f, x, sol.state, sol.residual)
    else:
        with torch.no_grad():
            sol.state = f.join(sol.state)
    return sol


def _sweep(net: Network, x: Tensor, solver: Solver, even_odd: bool, like: Sweep | None = None) -> Sweep:
    """The map of these updates, with the solver's ω or the paper's."""
    if isinstance(solver, OverRelaxed):
        return solver.sweep(net, x, even_odd, like)
    omega = paper.relaxation(net, even_odd) if solver.relaxation is None else solver.relaxation
    return (EvenOdd if even_odd else Synchronous)(net, x, omega, like=like)


def _finish(f: Sweep, sol: Solution, then: Then, even_odd: bool, x: Tensor, tol: float) -> Sweep:
    """Go on from the samples of `sol` that have met the first criterion; the sweep that the state is now one of."""
    own = even_odd if then.even_odd is None else then.even_odd
    g, z = f, sol.state
    if own != even_odd or then.second.relaxation is not None or isinstance(then.second, OverRelaxed):
        g = _sweep(f.net, x, then.second, own, like=f)
        z = g.cut(f.join(z))
    near = sol.converged.nonzero().flatten()
    end = iterate(g.restrict(near), z[near], then.second, max_iter=then.steps, tol=tol)
    good = end.residual < sol.residual[near]
    z[near] = torch.where(good[:, None], end.state, z[near])
    sol.residual[near] = torch.where(good, end.residual, sol.residual[near])
    sol.state, sol.evaluations = z, sol.evaluations + end.evaluations
    return g
