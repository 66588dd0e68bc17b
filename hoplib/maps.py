"""The two fixed-point maps of a network on an input, and their adjoints.

`Synchronous` updates all layers at once (Eqs. 5 and 6); `EvenOdd` settles one block of layers given the other, then
the other given the first (Eqs. 7 to 10). Both work by blocks, on a flat variable z of shape (batch, size): the whole
state, or for an even-odd HAM just the block that holds the output. Called with `out` (under `torch.no_grad`), a map
writes there and allocates next to nothing; called without, it can be differentiated by autograd.

Linearised at a fixed point, a local rule is δs' = A δs + C δh with diagonal A and C, and δh = W D δs with D = ρ'(s*).
The adjoint of a map is then a map of the same two-block form, of the same cost; it is written out below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from copy import copy

import torch
from torch import Tensor

from .network import Couplings, Network, Slopes, slices


class Map:
    """z ↦ f(z) for a batch of inputs x, whose share b + U ρ(x) of the field is computed once, or taken from `like`."""

    size: int
    drive: dict[int, Tensor]
    M: Couplings

    def __init__(self, net: Network, x: Tensor, relaxation: float = 1.0, *, like: Map | None = None) -> None:
        self.net, self.relaxation = net, relaxation
        self.drive, self.M = (net.drive(x), net.couplings()) if like is None else (like.drive, like.M)
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def restrict(self, keep: Tensor) -> Map:
        """The map of the samples `keep` (indices) alone."""
        part = copy(self)
        part.drive, part._buffers = {**self.drive, 1: self.drive[1].index_select(0, keep)}, {}
        return part

    def start(self, s: Tensor | None = None) -> Tensor:
        """z⁰: the paper's s⁰ = 0, or that part of the given state."""
        drive = self.drive[1]
        return drive.new_zeros(len(drive), self.size) if s is None else self.cut(s)

    def join(self, z: Tensor) -> Tensor:
        """The state (batch, N) that z stands for."""
        raise NotImplementedError

    def cut(self, s: Tensor) -> Tensor:
        """The part z of a state that the map iterates."""
        raise NotImplementedError

    def adjoint(self, s: Tensor, grad: Tensor) -> AdjointMap:
        """λ ↦ g + Jᵀλ at the fixed point s (the whole state), for the gradient `grad` by it."""
        raise NotImplementedError

    def along(self, z: Tensor, steps: int, grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The derivative along so many steps from z, for the gradient `grad` by the state after them.

        Step by step, the last one first: the state on which the step's weights act, and the gradient by the field of
        every neuron. At a fixed point their sum is `adjoint(…).neumann(steps)`; elsewhere each step has its own slopes.
        """
        raise NotImplementedError

    def relax(self, z: Tensor, settled: Tensor, out: Tensor | None = None) -> Tensor:
        """(1 − ω) z + ω f: damping for ω < 1 (the step of forward Euler), over-relaxation for ω > 1."""
        if self.relaxation == 1:
            return settled if out is None or out is settled else out.copy_(settled)
        return torch.lerp(z, settled, self.relaxation, out=out)

    def relax_slopes(self, slopes: Slopes) -> Slopes:
        """The slopes of a relaxed rule: A ← 1 − ω + ω A, C ← ω C."""
        w, (a, c) = self.relaxation, slopes
        if w == 1:
            return slopes
        scalar = self.drive[1].new_full((1, 1), w)
        return (1 - scalar if a is None else 1 - w * (1 - a)), (scalar if c is None else w * c)

    def buffer(self, name: str, batch: int, size: int) -> Tensor:
        """A scratch tensor that lives as long as the map."""
        if name not in self._buffers:
            self._buffers[name] = self.drive[1].new_empty(batch, size)
        return self._buffers[name]


class Block:
    """Layers of one parity and their place in a flat tensor that holds just them."""

    def __init__(self, net: Network, members: Sequence[int]) -> None:
        self.net, self.members = net, members
        self.slices = slices(net.layers, members)
        self.size = sum(net.layers[l] for l in members)

    def views(self, z: Tensor) -> dict[int, Tensor]:
        return {l: z[:, self.slices[l]] for l in self.members}

    def gather(self, s: Tensor) -> Tensor:
        """The block's part of a whole state."""
        return torch.cat([s[:, self.net.slices[l]] for l in self.members] or [s[:, :0]], 1)

    def couple(
        self,
        r: Tensor,
        source: Block,
        M: Couplings,
        drive: Mapping[int, Tensor] | None = None,
        out: Tensor | None = None,
        lit: Set[int] | None = None,
    ) -> Tensor:
        """The field of this block from the activations r of the other one: W_P r or W_Pᵀ r, plus the drive.

        `lit` are the layers of r that may differ from 0; None: all.
        """
        views, r_ = None if out is None else self.views(out), source.views(r)
        if lit is not None:
            r_ = {l: t for l, t in r_.items() if l in lit}
        h = self.net.couple(r_, self.members, drive, views, M)
        return (torch.cat(h, 1) if h else r[:, :0]) if out is None else out


class Synchronous(Map):
    """s ↦ (1 − ω) s + ω f(s, x): Eq. (5) for a CHN, Eq. (6) for a HAM. With ω the step size, it is forward Euler."""

    def __init__(self, net: Network, x: Tensor, relaxation: float = 1.0, *, like: Map | None = None) -> None:
        super().__init__(net, x, relaxation, like=like)
        self.all = Block(net, net.hidden)
        self.size = net.N

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        r = self.net.rho.rho(z, out=None if out is None else self.buffer("r", *z.shape))
        h = self.all.couple(r, self.all, self.M, self.drive, out)
        return self.relax(z, self.net.local(z, h) if out is None else self.net.local_(z, h, r), out)

    def join(self, z: Tensor) -> Tensor:
        return z

    def cut(self, s: Tensor) -> Tensor:
        return s

    @torch.no_grad()
    def adjoint(self, s: Tensor, grad: Tensor) -> SynchronousAdjoint:
        h = s if self.net.identity else self.all.couple(self.net.rho.rho(s), self.all, self.M, self.drive)
        slopes = self.relax_slopes(self.net.local_slopes(s, h))
        return SynchronousAdjoint(self.all, self.M, slopes, self.net.rho.drho(s), grad)

    @torch.no_grad()
    def along(self, z: Tensor, steps: int, grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        states, mu, none = [z], [], torch.zeros_like(grad)
        for _ in range(steps - 1):
            states.append(self(states[-1], out=torch.empty_like(z)))
        for s in reversed(states):
            step = self.adjoint(s, none)
            mu.append(step.cotangent(grad))
            grad = step(grad)
        return states[::-1], mu


class EvenOdd(Map):
    """One sweep: the block without the output settles in the field of the other, then that one in its field.

    For a HAM without relaxation z is the output's block alone (s_even for an odd number of layers) and a sweep is
    Eq. (9); otherwise z = [output's block; other block], for each half-step needs the block's own state.
    """

    def __init__(self, net: Network, x: Tensor, relaxation: float = 1.0, *, like: Map | None = None) -> None:
        super().__init__(net, x, relaxation, like=like)
        blocks = Block(net, net.even), Block(net, net.odd)
        self.main, self.aux = blocks if len(net.layers) % 2 else blocks[::-1]
        self.memoryless = net.memoryless and relaxation == 1
        self.size = self.main.size if self.memoryless else net.N

    def parts(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return z[:, : self.main.size], z[:, self.main.size :]

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            main, aux = self.sweep(z, None, None)
            return main if self.memoryless else torch.cat([main, aux], 1)
        main_out, aux_out = self.parts(out)
        self.sweep(z, main_out, self.buffer("aux", len(z), self.aux.size) if self.memoryless else aux_out)
        return out

    def sweep(self, z: Tensor, main_out: Tensor | None, aux_out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both half-steps: s_aux in the field of s_main, then s_main in the field of the new s_aux."""
        main, aux = self.parts(z)
        new_aux = self.half(aux, main, self.aux, self.main, aux_out)
        return self.half(main, new_aux, self.main, self.aux, main_out), new_aux

    def half(self, s: Tensor, other: Tensor, block: Block, source: Block, out: Tensor | None) -> Tensor:
        """s ← (1 − ω) s + ω · (the settled state of the block in the field of the other block)."""
        if out is None:
            h = block.couple(self.net.rho.rho(other), source, self.M, self.drive)
            return self.relax(s, self.net.settle(s, h))
        batch, (mine, theirs) = len(other), ("main", "aux") if block is self.main else ("aux", "main")
        r = self.net.rho.rho(other, out=self.buffer("r" + theirs, batch, source.size))
        if self.memoryless:
            return block.couple(r, source, self.M, self.drive, out)
        h = block.couple(r, source, self.M, self.drive, self.buffer("h" + mine, batch, block.size))
        return self.relax(s, self.net.settle_(s, h, self.buffer("r" + mine, batch, block.size), out), out)

    def join(self, z: Tensor) -> Tensor:
        main, aux = self.parts(z)
        if self.memoryless:
            aux = self.half(aux, main, self.aux, self.main, None)
        return self.whole(main, aux)

    def cut(self, s: Tensor) -> Tensor:
        main = self.main.gather(s)
        return main if self.memoryless else torch.cat([main, self.aux.gather(s)], 1)

    def adjoint(self, s: Tensor, grad: Tensor) -> EvenOddAdjoint:
        main, aux = self.main.gather(s), self.aux.gather(s)
        return self.linearise(main, aux, aux, grad)

    @torch.no_grad()
    def linearise(self, main: Tensor, aux: Tensor, new_aux: Tensor, grad: Tensor) -> EvenOddAdjoint:
        """λ ↦ g + Jᵀλ for the sweep from [main; aux], whose first half leads to new_aux."""
        rho = self.net.rho
        slopes, drho = [], [rho.drho(main), rho.drho(new_aux)]
        for block, own, source, other in ((self.main, main, self.aux, new_aux), (self.aux, aux, self.main, main)):
            h = own if self.net.identity else block.couple(rho.rho(other), source, self.M, self.drive)
            slopes.append(self.relax_slopes(self.net.settle_slopes(own, h)))
        known = grad.device.type == "cpu"  # elsewhere a look would wait for the device
        lit = {l for l, g in self.net.split(grad).items() if not known or bool(g.any())}
        return EvenOddAdjoint(self, slopes, drho, [self.main.gather(grad), self.aux.gather(grad)], lit)

    @torch.no_grad()
    def along(self, z: Tensor, steps: int, grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        sweeps = []
        for _ in range(steps):
            main, aux = self.parts(z)
            new_main, new_aux = (z.new_empty(len(z), block.size) for block in (self.main, self.aux))
            self.sweep(z, new_main, new_aux)
            sweeps.append((main, new_aux if self.memoryless else aux, new_aux))
            z = new_main if self.memoryless else torch.cat([new_main, new_aux], 1)
        end = self.join(z)
        last = self.adjoint(end, grad)
        back, lit, states, mu = last.start, last.lit, [], []
        if self.memoryless:  # at the end, the other block is settled once more
            states, mu = [end], [self.whole(torch.zeros_like(last.grads[0]), last.grads[1])]
            lit = last.grow(lit)
        none = torch.zeros_like(grad)
        for main, aux, new_aux in reversed(sweeps):
            cotangent, back, lit = self.linearise(main, aux, new_aux, none).sweep(back, lit)
            states.append(self.whole(main, new_aux))
            mu.append(self.whole(*cotangent))
        return states, mu

    def whole(self, main: Tensor, aux: Tensor) -> Tensor:
        """The state or cotangent (batch, N) with these two blocks."""
        layers = {**self.main.views(main), **self.aux.views(aux)}
        return torch.cat([layers[l] for l in self.net.hidden], 1)


def _scale(c: Tensor | None, t: Tensor) -> Tensor:
    return t if c is None else c * t


def _pick(t: Tensor | None, keep: Tensor) -> Tensor | None:
    return t if t is None or len(t) == 1 else t[keep]


class AdjointMap:
    """λ ↦ g + Jᵀλ. Its fixed point is the adjoint state; k steps from g are k + 1 terms of the Neumann series."""

    start: Tensor  # g, in the variables of z

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def restrict(self, keep: Tensor) -> AdjointMap:
        raise NotImplementedError

    def cotangent(self, z: Tensor) -> Tensor:
        """The gradient by the field h of every neuron, (batch, N): what `pullback` turns into parameter gradients."""
        raise NotImplementedError

    def neumann(self, terms: int) -> Tensor:
        """The cotangent of so many terms of the series."""
        z = self.start
        for _ in range(terms - 1):
            z = self(z)
        return self.cotangent(z)


class SynchronousAdjoint(AdjointMap):
    """Jᵀλ = A ⊙ λ + D ⊙ W (C ⊙ λ), since W is symmetric."""

    def __init__(self, block: Block, M: Couplings, slopes: Slopes, drho: Tensor, grad: Tensor) -> None:
        self.block, self.M, self.slopes, self.drho, self.start = block, M, slopes, drho, grad

    @torch.no_grad()
    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        a, c = self.slopes
        out = torch.empty_like(z) if out is None else out
        self.block.couple(_scale(c, z), self.block, self.M, out=out)
        torch.addcmul(self.start, self.drho, out, out=out)
        return out if a is None else out.addcmul_(a.expand_as(z), z)

    def restrict(self, keep: Tensor) -> SynchronousAdjoint:
        a, c = (_pick(t, keep) for t in self.slopes)
        return SynchronousAdjoint(self.block, self.M, (a, c), self.drho[keep], self.start[keep])

    @torch.no_grad()
    def cotangent(self, z: Tensor) -> Tensor:
        return _scale(self.slopes[1], z)


class EvenOddAdjoint(AdjointMap):
    """The sweep's own transpose: the cotangent passes from the main block to the other one and back.

    t_aux = λ_aux + D_aux ⊙ W_P (C_main ⊙ λ_main), then Jᵀλ = [A_main ⊙ λ_main + D_main ⊙ W_Pᵀ (C_aux ⊙ t_aux);
    A_aux ⊙ t_aux]. Where A_aux = 0 (a HAM without relaxation) λ_aux = g_aux, and λ_main is iterated alone.

    `lit` are the layers in which the gradient is not 0, as a rule the output. Each half-step carries it on by one
    layer, and products with layers that it has not reached are left out.
    """

    def __init__(
        self, f: EvenOdd, slopes: Sequence[Slopes], drho: Sequence[Tensor], grads: Sequence[Tensor], lit: Set[int]
    ) -> None:
        self.f, self.slopes, self.drho, self.grads, self.lit = f, slopes, drho, grads, lit
        self.start = self.to_main(None, grads[1], lit) if f.memoryless else torch.cat(list(grads), 1)

    def to_aux(self, main: Tensor, aux: Tensor, lit: Set[int]) -> Tensor:
        """t_aux, the whole cotangent that arrives at the other block in one sweep."""
        t = torch.empty_like(aux)
        self.f.aux.couple(_scale(self.slopes[0][1], main), self.f.main, self.f.M, out=t, lit=lit)
        return torch.addcmul(aux, self.drho[1], t, out=t)

    def to_main(self, main: Tensor | None, t: Tensor, lit: Set[int]) -> Tensor:
        """g_main + (Jᵀλ)_main, given t_aux; without λ_main where that is 0."""
        new = torch.empty_like(self.grads[0])
        self.f.main.couple(_scale(self.slopes[1][1], t), self.f.aux, self.f.M, out=new, lit=lit)
        torch.addcmul(self.grads[0], self.drho[0], new, out=new)
        a = self.slopes[0][0]
        return new if a is None or main is None else new.addcmul_(a.expand_as(main), main)

    def sweep(self, z: Tensor, lit: Set[int]) -> tuple[tuple[Tensor, Tensor], Tensor, Set[int]]:
        """The gradients by both fields, then g + Jᵀλ and the layers lit in it, given λ and the layers lit in that."""
        main, aux = self.f.parts(z)
        t = self.to_aux(main, self.grads[1] if self.f.memoryless else aux, lit)
        cotangent = _scale(self.slopes[0][1], main), _scale(self.slopes[1][1], t)
        new, lit = self.to_main(main, t, self.grow(lit)), self.grow(self.grow(lit))
        if self.f.memoryless:
            return cotangent, new, lit
        a = self.slopes[1][0]
        return cotangent, torch.cat([new, torch.addcmul(self.grads[1], a.expand_as(t), t)], 1), lit  # type: ignore[union-attr]

    def grow(self, lit: Set[int]) -> Set[int]:
        return {j for l in lit for j in (l - 1, l, l + 1)} & set(self.f.net.hidden)

    @torch.no_grad()
    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        _, new, _ = self.sweep(z, set(self.f.net.hidden))
        return new if out is None else out.copy_(new)

    def restrict(self, keep: Tensor) -> EvenOddAdjoint:
        slopes = [(_pick(a, keep), _pick(c, keep)) for a, c in self.slopes]
        return EvenOddAdjoint(self.f, slopes, [d[keep] for d in self.drho], [g[keep] for g in self.grads], self.lit)

    @torch.no_grad()
    def cotangent(self, z: Tensor, lit: Set[int] | None = None) -> Tensor:
        main, aux = self.f.parts(z)
        lit = set(self.f.net.hidden) if lit is None else lit
        t = self.to_aux(main, self.grads[1] if self.f.memoryless else aux, lit)
        return self.f.whole(_scale(self.slopes[0][1], main), _scale(self.slopes[1][1], t))

    @torch.no_grad()
    def neumann(self, terms: int) -> Tensor:
        z, lit = self.start, self.grow(self.lit) if self.f.memoryless else self.lit
        for _ in range(terms - 1):
            _, z, lit = self.sweep(z, lit)
        return self.cotangent(z, lit)
