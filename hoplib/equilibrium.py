"""`solve`: the equilibrium of a network on a batch of inputs, with a gradient by any of three methods.

How the equilibrium is found and how it is differentiated are independent choices.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from . import checks, paper
from .network import Network, check_network
from .relaxation import automatic
from .solvers import REACH, SOLVER, Picard, Solution, Solver, Then, conjugate_gradients, iterate, mixes, residual
from .sweep import AdjointSweep, Block, Blocks, Sweep, Turn

RESIDUAL = "a relative residual of at least 0"


class Backward(Protocol):
    """A way to differentiate s*: the turns that a gradient by the state s* = join(z*) is carried back through.

    `residual` (batch,) tells how far z* is from a fixed point.
    """

    def turns(self, f: Sweep, z_star: Tensor, state: Tensor, residual: Tensor, grad: Tensor) -> list[Turn]: ...


@dataclass(frozen=True)
class Adjoint:
    """Implicit differentiation: λ = g + Jᵀλ at s*, with Jᵀλ written out, then one outer product for each W_i.

    - `Adjoint()`: the first terms of its Neumann series, as many as the paper takes steps of recurrent backpropagation,
      and at an equilibrium the same numbers. For a sample that has not met the paper's criterion, the derivative along
      as many steps: `RecurrentBackprop(closed_form=1e-4)`.
    - `Adjoint(steps=k)`: the first k terms, at every sample. Away from an equilibrium they may explode.
    - `Adjoint(tol=1e-6)`: exact, to that relative residual: by conjugate gradients or, given a solver, by iteration. A
      sample that is at no stable equilibrium, or is not solved in `max_iter` steps, has no such gradient: it takes that
      of `Adjoint()`, with a warning.

    Memory does not grow with the steps. `Solution.gradients` tells how many samples took which way.
    """

    steps: int | None = None
    solver: Solver | None = None
    tol: float | None = None
    max_iter: int = 2000

    def __post_init__(self) -> None:
        if self.steps is not None:
            checks.integer("Adjoint's steps", self.steps, 1)
            if self.tol is not None or self.solver is not None:
                raise ValueError("Adjoint takes a number of steps, or a tol (and a solver) to be exact; not both")
        if self.tol is not None:
            checks.number("tol", self.tol, RESIDUAL)
        if self.solver is not None:
            checks.able("Adjoint's solver", self.solver, "init", SOLVER)
        checks.integer("max_iter", self.max_iter, 1)

    def turns(self, f: Sweep, z_star: Tensor, state: Tensor, residual: Tensor, grad: Tensor) -> list[Turn]:
        if self.steps is not None:
            return _at_rest(f, state, f.adjoint(state, grad).neumann(self.steps), "series")
        bounded = RecurrentBackprop(closed_form=paper.TOL)
        if self.tol is None and self.solver is None:
            return bounded.turns(f, z_star, state, residual, grad)
        near = (residual < paper.TOL).nonzero().flatten()
        mu, solved = self.exact(f.restrict(near), state[near], grad[near])
        good = near[solved]
        turns = _of(good, _at_rest(f, state[good], mu[solved], "exact"))
        if len(good) < len(grad):
            rest = torch.ones_like(residual, dtype=torch.bool).index_fill_(0, good, False).nonzero().flatten()
            turns += _of(rest, bounded.turns(f.restrict(rest), z_star[rest], state[rest], residual[rest], grad[rest]))
            warnings.warn(
                f"{len(rest)} of {len(grad)} samples have no exact gradient, being at no stable equilibrium or not "
                f"solved in {self.max_iter} steps: they take the truncated one",
                RuntimeWarning,
                stacklevel=2,
            )
        return turns

    def exact(self, f: Sweep, state: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient by the field of every neuron, given the gradient by the state; and where it was found."""
        adjoint = f.adjoint(state, grad)
        tol = 32 * torch.finfo(grad.dtype).eps if self.tol is None else self.tol
        if self.solver is not None:
            sol = iterate(adjoint, adjoint.start(), self.solver, max_iter=self.max_iter, tol=tol)
            return adjoint.cotangent(sol.state), sol.converged
        mu, solved, symmetric = _symmetric(adjoint, tol, self.max_iter)
        if not bool(symmetric.all()):
            i = symmetric.logical_not().nonzero().flatten()
            mu[i], solved[i] = replace(self, solver=Picard()).exact(f.restrict(i), state[i], grad[i])
        return mu, solved


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
        return _of(i, closed) + _of(j, f.restrict(j).along(z_star[j], steps, grad[j]))


def _symmetric(f: AdjointSweep, tol: float, max_iter: int) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangent μ = C λ by conjugate gradients, for which samples it was found, and for which this is the way.

    At the fixed point μ = E g + M W μ, with E = C/(1 − A) and M = E D. So v = W μ has (I − W M) v = W E g. If M ≥ 0,
    this operator is self-adjoint in the product uᵀM v, and positive definite at a strict minimum of the energy, that is
    at every equilibrium that attracts. Of two blocks without links of their own one is eliminated: half the size, and
    about half the steps.
    """
    two = len(f.blocks) == 2 and not any(k in sources for k, sources in enumerate(f.sources))
    mine = Block([1] if two else range(len(f.blocks)), [block.size for block in f.blocks])
    E, symmetric = [], torch.ones(f.batch, dtype=torch.bool, device=f.like.device)
    for rule in f.affine:
        A, C = (rule.g.new_full((1, 1), x) if t is None else t for t, x in ((rule.A, 0.0), (rule.C, 1.0)))
        E.append(C / (1 - A))
        if rule.rho.elementwise:
            symmetric &= (E[-1] * rule.D >= 0).all(1)
        elif E[-1].numel() > 1:
            symmetric.fill_(False)
    Eg = {k: E[k] * rule.g for k, rule in enumerate(f.affine)}

    def weigh(k: int, v: Tensor) -> Tensor:
        rule = f.affine[k]
        return E[k] * rule.rho.times(rule.D, v)

    def M(flat: Tensor) -> Tensor:
        return torch.cat([weigh(k, t) for k, t in mine.views(flat).items()], 1)

    def W(flat: Tensor, other: Tensor | float = 0.0) -> Tensor:
        """W μ in my blocks; through the other block where there is one, which adds to what it has of its own."""
        mu = mine.views(flat)
        if two:
            mu = {0: weigh(0, f.transposed(0, f.layers(mu))) + other}
        return torch.cat([f.transposed(k, f.layers(mu)) for k in mine.members], 1)

    first = mine.gather(Eg, f.like)
    flat, solved = conjugate_gradients(W, M, first, W(first, Eg[0]), max_iter=max_iter, tol=tol)
    found = mine.views(flat)
    if two:
        found[0] = Eg[0] + weigh(0, f.transposed(0, f.layers(found)))
    return f.whole(found), solved, symmetric


def _at_rest(f: Sweep, state: Tensor, mu: Tensor, way: str) -> list[Turn]:
    """The one turn of all layers at an equilibrium."""
    split, r = f.net.split, f.net.rho.rho(state, out=torch.empty_like(state))
    return [Turn(split(r), split(mu), way=way)]


def _of(rows: Tensor, turns: list[Turn]) -> list[Turn]:
    """The turns of a part of a batch, as turns of the batch; `rows` are the numbers of its samples."""
    return [replace(t, rows=rows if t.rows is None else rows[t.rows]) for t in turns]


class _Implicit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: Backward,
        f: Sweep,
        z_star: Tensor,
        residual: Tensor,
        ways: dict[str, int],
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        state = f.join(z_star)
        ctx.how, ctx.f, ctx.ways, ctx.rho = how, f, ways, f.net.rho
        ctx.save_for_backward(x, z_star, state, residual, *parameters)  # a weight that changes meanwhile is an error
        return state.clone() if state is z_star else state

    @staticmethod
    @checks.uncompiled
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        checks.ordinary(grad)
        x, z_star, state, residual, *parameters = ctx.saved_tensors
        if ctx.f.net.rho is not ctx.rho:
            raise RuntimeError("the network's activation has been replaced since the solve: solve again")
        with torch.no_grad(), checks.full_precision(x):
            turns = ctx.how.turns(ctx.f, z_star, state, residual, grad)
            found = _pullback(ctx.f.net, parameters, turns, x, ctx.needs_input_grad[5])
            bad = _overflow(turns, grad)
            if found[2] is not None:
                bad |= ~found[2].isfinite().all(1)
            ctx.ways.clear()
            if not grad.is_meta and bool(bad.any()):
                bad &= grad.isfinite().all(1) | ~state.isfinite().all(1)  # a NaN that came with `grad` alone stays
                turns, ctx.ways["left out"] = _without(bad, turns)
                found = _pullback(ctx.f.net, parameters, turns, x, ctx.needs_input_grad[5])
            ctx.ways.update({t.way: len(grad if t.rows is None else t.rows) for t in turns})
        by_links, by_b, by_x = found
        gradients = [by_x, *by_links, *by_b]
        if torch.is_grad_enabled():  # create_graph=True
            before = grad, x, *parameters
            gradients = list(_Once.apply(len(before), *before, *gradients))
        return None, None, None, None, None, *gradients


class _Pullback(nn.Module):
    """`Network.pullback` as a module's call."""

    def __init__(self, net: Network) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        return self.net.pullback(*args)


def _pullback(net: Network, weights: list[Tensor], *args: Any) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """With the weights of the solve, [*net.W, *net.b]: after torch.func.functional_call the network has others."""
    if all(a.data_ptr() == b.data_ptr() for a, b in zip(weights, net.W, strict=False)):
        return net.pullback(*args)
    names = [f"net.links.{i}.{name}" for i, link in enumerate(net.links) for name, _ in link.named_parameters()]
    return torch.func.functional_call(_Pullback(net), dict(zip(names, weights, strict=False)), args)  # type: ignore[no-any-return]


def _overflow(turns: list[Turn], grad: Tensor) -> Tensor:
    """(batch,) bool: the samples whose part of the gradient, sums of products of μ and r, may be no number."""
    bad, none, terms = grad.new_zeros(len(grad), dtype=torch.bool), grad.new_zeros(()), 2.0 * len(grad) * len(turns)
    for t in turns:
        r, mu = (sum((part.abs().amax(1) for part in layers.values()), none) for layers in (t.r, t.mu))
        hit = ~torch.isfinite(terms * mu * (1 + r))
        bad = bad | hit if t.rows is None else bad.index_put((t.rows,), hit | bad[t.rows])
    return bad


def _without(bad: Tensor, turns: list[Turn]) -> tuple[list[Turn], int]:
    """The turns without these samples, and the number of these."""
    warnings.warn(f"the gradient of {int(bad.sum())} of {len(bad)} samples overflows: left out", stacklevel=2)
    found = []
    for t in turns:
        i = torch.arange(len(bad), device=bad.device) if t.rows is None else t.rows
        keep = (~bad[i]).nonzero().flatten()
        r, mu = ({l: part[keep] for l, part in layers.items()} for layers in (t.r, t.mu))
        found.append(Turn(r, mu, i[keep], t.way))
    return found, int(bad.sum())


class _Once(torch.autograd.Function):
    """Gradients, as they are, that depend on the `n` tensors before them; they have no derivative."""

    @staticmethod
    def forward(ctx: Any, n: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[n:]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("Adjoint() and RecurrentBackprop() have no second derivatives; ThroughTime() has them")


@dataclass(frozen=True)
class ThroughTime:
    """Backpropagation through all max_iter Picard steps from s⁰: the oracle of the others. Memory grows with them."""


def _unroll(f: Sweep, x: Tensor, z: Tensor, steps: int) -> Tensor:
    f = f.again(x)  # its drive anew, with a graph
    for _ in range(steps):
        z = f(z)
    return f.join(z)


@checks.uncompiled
def solve(
    net: Network,
    x: Tensor,
    solver: Solver | Then | None = None,
    *,
    even_odd: bool | None = None,
    tol: float = paper.TOL,
    max_iter: int | None = None,
    early_stop: bool = True,
    trace: bool = False,
    s0: Tensor | None = None,
    backward: Backward | ThroughTime | None = None,
) -> Solution:
    """The equilibrium s* of the network on the inputs x (batch, n₀), from s⁰ = 0 or from `s0` (batch, N).

    solver      Picard(), Anderson(m=4), OverRelaxed() or Then(…, …); its relaxation is part of the map.
    even_odd    True: even and odd layers take turns; False: all at once, as with a solver alone.
    tol         the relative residual that counts as convergence.
    max_iter    at most this many iterations; None: the paper's number for the depth.
    early_stop  finish each sample at tol; False: max_iter iterations for all, as the paper does.
    trace       keep every residual, (max_iter − 1, batch).
    backward    Adjoint(), RecurrentBackprop() or ThroughTime(): makes `state` differentiable by W, b and x.

    With neither solver nor even_odd it takes the fast way for this network, as `relaxation.automatic` chooses.
    """
    check_network(net)
    if solver is None:
        solver, even_odd = automatic(net) if even_odd is None else (Picard(), even_odd)
    even_odd = False if even_odd is None else even_odd
    first, then = (solver.first, solver) if isinstance(solver, Then) else (solver, None)
    checks.able("solver", first, "init", SOLVER)
    if then is not None and not early_stop:
        raise ValueError("Then goes on from where its first solver has met its criterion: it needs early_stop=True")
    for name, value in (("even_odd", even_odd), ("early_stop", early_stop), ("trace", trace)):
        checks.flag(name, value)
    max_iter = paper.max_iter(net, even_odd) if max_iter is None else checks.integer("max_iter", max_iter, 1)
    checks.number("tol", tol, RESIDUAL)
    if backward is not None and not isinstance(backward, ThroughTime):
        checks.able("backward", backward, "turns", "Adjoint(), RecurrentBackprop() or ThroughTime()")
        checks.own_weights(net)
    checks.ordinary(*(t for t in (x, s0) if isinstance(t, Tensor)), *net.parameters())
    if isinstance(x, Tensor):
        x = x.to(net.b[0].dtype) if checks.autocast(x) else x  # as in any layer that autocast leaves as it is
    net.check_input(x)
    if s0 is not None:
        net.check_state(s0, len(x))
    with checks.full_precision(x):
        with torch.no_grad():
            f = updates(net, x, first, net.blocks(even_odd))
            z0 = f.start(s0)
            if isinstance(backward, ThroughTime) and (then is not None or mixes(first.init(z0))):
                raise ValueError(f"ThroughTime unrolls Picard steps, not those of {solver!r}: use Adjoint()")
            until = tol if then is None else then.at
            sol = iterate(f, z0, first, max_iter=max_iter, tol=until, early_stop=early_stop, trace=trace)
            if then is not None:
                f = _finish(f, sol, then, x, tol)
        sol.net = net
        if isinstance(backward, ThroughTime):
            sol.state = _unroll(f, x, z0, max_iter)
        elif backward is not None:
            sol.state = _Implicit.apply(backward, f, sol.state, sol.residual, sol.gradients, x, *net.W, *net.b)
        else:
            with torch.no_grad():
                sol.state = f.join(sol.state)
    return sol


class Layer(nn.Module):
    """A network as a layer of a torch model: x (batch, n₀) ↦ the output at the equilibrium.

    `options` are those of `solve`. It is differentiable by x and by the weights, in training and in evaluation.
    """

    def __init__(
        self, net: Network, solver: Solver | Then | None = None, *, backward: Backward | None = None, **options: Any
    ) -> None:
        super().__init__()
        check_network(net)
        backward = Adjoint() if backward is None else backward
        self.net, self.solver, self.options = net, solver, {"backward": backward, **options}
        if not net.b[0].is_meta:  # on no input: what is wrong with the options is said here
            solve(net, net.b[0].new_zeros(0, net.layers[0]), solver, **{**self.options, "s0": None})

    def forward(self, x: Tensor) -> Tensor:
        return solve(self.net, x, self.solver, **self.options).output

    def extra_repr(self) -> str:
        return ", ".join([f"solver={self.solver!r}", *(f"{name}={value!r}" for name, value in self.options.items())])


def updates(net: Network, x: Tensor, solver: Solver, blocks: Blocks, like: Sweep | None = None) -> Sweep:
    """The map that a solver iterates: its own where it has one, or a sweep of the blocks with its ω or the paper's."""
    if hasattr(solver, "sweep"):
        own: Sweep = solver.sweep(net, x, blocks, like)
        return own
    omega = paper.relaxation(net, len(blocks) > 1) if solver.relaxation is None else solver.relaxation
    return net.sweep(x, blocks, omega, like=like)


def _finish(f: Sweep, sol: Solution, then: Then, x: Tensor, tol: float) -> Sweep:
    """Go on from the samples of `sol` that have met the first criterion; the sweep that the state is now one of."""
    blocks = [block.members for block in f.blocks]
    own = blocks if then.even_odd is None else f.net.blocks(then.even_odd)
    g, z = f, sol.state
    if own != blocks or then.second.relaxation is not None or hasattr(then.second, "sweep"):
        g = updates(f.net, x, then.second, own, like=f)
        z = g.cut(f.join(z))
    near = sol.converged.nonzero().flatten()
    end = iterate(g.restrict(near), z[near], then.second, max_iter=then.steps, tol=tol)
    r, way = sol.residual[near], residual(end.state, z[near])
    good = (end.residual < r) & (way < REACH * r)
    if not then.backwards:
        step = g.restrict(near)(z[near]) - z[near]
        good &= (step * (end.state - z[near])).sum(1) > 0
        sol.evaluations += len(near)
    z[near] = torch.where(good[:, None], end.state, z[near])
    sol.residual[near] = torch.where(good, end.residual, r)
    sol.state, sol.evaluations = z, sol.evaluations + end.evaluations
    return g
