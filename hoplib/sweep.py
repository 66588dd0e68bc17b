"""A sweep settles one block of layers after the other, each in the field of the others.

One block is the synchronous update (Eqs. 5 and 6), two blocks of alternating layers are the even-odd one (Eqs. 7 to
10), a block for each layer is the asynchronous one (Remark 1). With the relaxation ω each block goes only ω of its way:
damping for ω < 1 (forward Euler with that step), over-relaxation for ω > 1. Clipped, over-relaxation keeps the energy
from rising (`clip`).

The adjoint of a sweep is a sweep too: of the linearised rule, with the blocks in reverse. Linearised, a rule is
δs' = A δs + C δh with diagonal A and C, and δh = W D δs with D = ρ'(s): a cotangent settles to λ = g + A λ + D W C λ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import checks, kernels
from .links import Product
from .rules import Affine, Rule

if TYPE_CHECKING:
    from .network import Network
    from .relaxation import Pace

Layers = dict[int, Tensor]
Products = Mapping[tuple[int, int], tuple[Product, Product]]
Blocks = Sequence[Sequence[int]]  # the layers that are updated together, in the order of their turns


class Block:
    """Some layers side by side in a flat tensor (batch, size) that holds just them; or some blocks."""

    def __init__(self, members: Iterable[int], sizes: Sequence[int]) -> None:
        self.members = tuple(members)
        ends = [0, *accumulate(sizes[l] for l in self.members)]
        self.size = ends[-1]
        self.slices = {l: slice(a, b) for l, (a, b) in zip(self.members, pairwise(ends), strict=True)}

    def views(self, z: Tensor) -> dict[int, Tensor]:
        if len(self.members) == 1:
            return {self.members[0]: z}
        return {l: z[:, part] for l, part in self.slices.items()}

    def gather(self, parts: Mapping[int, Tensor], like: Tensor) -> Tensor:
        """The flat tensor of these parts."""
        return torch.cat([parts[l] for l in self.members], 1) if self.members else like[:, :0]


@dataclass
class Turn:
    """What one block did in a sweep: the activations that it saw, and the gradient by its field. For `pullback`."""

    r: Layers
    mu: Layers
    rows: Tensor | None = None  # the samples; None: all
    way: str = "steps"  # how μ was found: along steps; at rest, by a series; at rest, exactly


def check_relaxation(omega: float) -> None:
    checks.number("relaxation", omega, "positive, from 1e-6 to 1e6 (1: none, below 1: damping)", 1e-6, 1e6)


def check_omega(omega: float) -> None:
    """Raise an error unless over-relaxation by ω converges near a minimum (Ostrowski–Reich)."""
    checks.number(
        "over-relaxation's ω", omega, "a number with 0 < ω < 2, at least 1e-6 (1: none)", 1e-6, math.nextafter(2, 0)
    )


def clip(omega: float, rule: Rule) -> float:
    """c: a half-step s ← h + (ω − 1)·clamp(h − s, −c, c) never raises the energy, for c = −2 ln(ω − 1)/(κω).

    With η = ω − 1, the neuron's energy above its minimum is ∫ u ρ'(h − u) du from 0 to h − s before the step, and after
    it at most ∫ η² u ρ'(h + ηu) du over a part of the same way, the part where u ≤ c. There the second integrand is the
    smaller one: log ρ' changes by at most κ(1 + η)u between the two points, and η² exp(κ(1 + η)c) = 1. Notebook 11
    has the proof in full. The layers of a block must not be coupled with each other.
    """
    check_omega(omega)
    if rule.kappa is None:
        raise ValueError(
            f"over-relaxation cannot be clipped for {type(rule).__name__} with {rule.rho!r}: it needs a bound κ of "
            "|ρ''/ρ'|, which the shifted sigmoid and tanh have, and a HAM's rule. A CHN is a HAM with Effective(ρ)."
        )
    return -2 * math.log(omega - 1) / (rule.kappa * omega) if omega > 1 and rule.kappa > 0 else math.inf


class Sweep:
    """z ↦ f(z), the state after a sweep, by blocks in the order of their turns.

    z (batch, size) holds the blocks, the last one first. If there are two and a block forgets where it was (a HAM's
    without relaxation, with no links of its own), the first block follows from the second and is left out of z: Eq. (9)
    for s_even alone.
    Called with `out` (under `torch.no_grad` and without autocast), a sweep writes there and allocates next to nothing;
    called without, it can be differentiated by autograd.
    """

    def __init__(
        self,
        net: Network,
        drive: Layers,
        products: Products,
        blocks: Blocks,
        rules: Sequence[Rule],
        omega: float = 1.0,
        *,
        batch: int,
        clipped: bool = False,
    ) -> None:
        self.net, self.drive, self.unrelaxed, self.batch, self.clipped = net, drive, list(rules), batch, clipped
        self.like: Tensor = net.b[0]  # of the network's type and on its device
        self.relax(omega)
        self.blocks = [Block(members, net.layers) for members in blocks]
        self.link(products)
        of = {l: k for k, block in enumerate(self.blocks) for l in block.members}
        self.sources = [sorted({of[j] for l in block.members for j, _ in self.incoming[l]}) for block in self.blocks]
        self.forgets = len(self.blocks) == 2 and not self.rules[0].memory and 0 not in self.sources[0]
        held = range(1 if self.forgets else 0, len(self.blocks))
        self.held = Block(reversed(held), [block.size for block in self.blocks])
        self.size = self.held.size
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self.pace: Pace | None = None
        coupled = [self.blocks[k].members for k, sources in enumerate(self.sources) if k in sources]
        if clipped and coupled:
            raise ValueError(
                f"the layers {coupled[0]} are updated together and coupled with each other, so over-relaxation may "
                "raise the energy, clipped or not; update them in turns (even_odd=True)"
            )

    def relax(self, omega: float) -> None:
        """From now on each block goes ω of its way."""
        self.omega = omega
        self.rules = [rule.relaxed(omega, clip(omega, rule) if self.clipped else math.inf) for rule in self.unrelaxed]

    def link(self, products: Products) -> None:
        """Note for every layer who speaks to it, and through which product."""
        self.products = products
        self.incoming: dict[int, list[tuple[int, Product]]] = {l: [] for l in self.net.hidden}
        for (a, b), (up, down) in sorted(products.items()):
            self.incoming[b].append((a, up))
            self.incoming[a].append((b, down))

    # -- one sweep ----------------------------------------------------------------------------------------------

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        s, targets = self.open(z), {} if out is None else self.open(out)
        if out is not None and self.forgets:
            targets[0] = self.buffer("first", 0)
        for k in range(len(self.blocks)):
            s[k] = self.half(k, s, targets.get(k))
        new = self.held.gather(s, z) if out is None else out
        if self.pace is not None:
            self.pace(self, z, new)
        return new

    def half(self, k: int, s: Mapping[int, Tensor], out: Tensor | None = None, lit: Set[int] | None = None) -> Tensor:
        """Block k's turn: what its neurons settle to in the field of the blocks s.

        `lit` are the layers whose activations may differ from 0; None: all.
        """
        own = s.get(k, self.like)  # where it is not known, nobody asks
        shown = {j: self.rules[j].emit(s[j], None if out is None else self.buffer("r", j)) for j in self.sources[k]}
        r = self.layers(shown)
        if lit is not None:
            r = {l: t for l, t in r.items() if l in lit}
        place = out if out is None or out.is_contiguous() else self.buffer("h", k)  # products go there faster
        return self.rules[k].settle(own, self.field(k, r, place), out, shown.get(k))

    def field(self, k: int, r: Mapping[int, Tensor], out: Tensor | None = None, *, driven: bool = True) -> Tensor:
        """h of block k: the drive (unless not `driven`), plus every link's product with the activations r."""
        views = None if out is None else self.blocks[k].views(out)
        fields: list[Tensor] = []
        with checks.full_precision(self.like) if out is None else nullcontext():
            for l in self.blocks[k].members:
                h, target, silent = self.drive.get(l) if driven else None, None if views is None else views[l], True
                for j, product in self.incoming[l]:
                    if j in r:
                        h, silent = product(r[j], h, target), False
                if h is None:
                    h = self.like.new_zeros(1, self.net.layers[l])
                if silent:  # nobody speaks to the layer
                    h = h.expand(self.batch, -1) if target is None else target.copy_(h)
                fields.append(h)
        return (torch.cat(fields, 1) if fields else self.like.new_zeros(self.batch, 0)) if out is None else out

    def buffer(self, name: str, k: int) -> Tensor:
        """A scratch tensor that lives as long as the sweep."""
        if (name, k) not in self._buffers:
            self._buffers[name, k] = self.like.new_empty(self.batch, self.blocks[k].size)
        return self._buffers[name, k]

    # -- states -------------------------------------------------------------------------------------------------

    def open(self, z: Tensor) -> dict[int, Tensor]:
        """The blocks that z holds, by their number."""
        return self.held.views(z)

    def complete(self, z: Tensor) -> dict[int, Tensor]:
        """All blocks: those that z holds, and the one that follows from them."""
        s = self.open(z)
        return {0: self.half(0, s), **s} if self.forgets else s

    def start(self, s: Tensor | None = None) -> Tensor:
        """z⁰: the paper's s⁰ = 0, or that part of the given state."""
        return self.like.new_zeros(self.batch, self.size) if s is None else self.cut(s)

    def join(self, z: Tensor) -> Tensor:
        """The state (batch, N) that z stands for."""
        return self.whole(self.complete(z))

    def cut(self, s: Tensor) -> Tensor:
        """The part z of a state that the sweep iterates."""
        layers = self.net.split(s)
        return torch.cat([self.blocks[k].gather(layers, s) for k in self.held.members], 1)

    def layers(self, s: Mapping[int, Tensor]) -> Layers:
        """The layers of these blocks."""
        return {l: t for k, flat in s.items() for l, t in self.blocks[k].views(flat).items()}

    def whole(self, s: Mapping[int, Tensor]) -> Tensor:
        """The state (batch, N) of all blocks."""
        return self.net.all.gather(self.layers(s), self.like)

    def every(self, s: Tensor) -> dict[int, Tensor]:
        """All blocks of a state (batch, N)."""
        layers = self.net.split(s)
        return {k: block.gather(layers, s) for k, block in enumerate(self.blocks)}

    def again(self, x: Tensor) -> Sweep:
        """The same sweep for the inputs x, with the graph of autograd where that is on."""
        part = copy(self)
        part.drive, part.batch, part._buffers, part.pace = self.net.drive(x), len(x), {}, None
        part.link(self.net.products())
        return part

    def restrict(self, keep: Tensor) -> Sweep:
        """The sweep of the samples `keep` (indices) alone."""
        part = copy(self)
        part.drive = {l: d.index_select(0, keep) if d.ndim == 2 else d for l, d in self.drive.items()}
        part.unrelaxed = [rule.restrict(keep) for rule in self.unrelaxed]
        part.relax(self.omega)
        part.batch, part._buffers = len(keep), {}
        part.pace = None if self.pace is None else self.pace.restrict(keep)
        return part

    # -- derivatives --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def adjoint(self, s: Tensor, grad: Tensor) -> AdjointSweep:
        """The sweep whose fixed point is the cotangent of the fixed point s (batch, N), for the gradient by it."""
        states, g = self.every(s), self.every(grad)
        rules = []
        for k, own in states.items():
            h = own
            if not self.rules[k].plain:
                r = {l: t for j in self.sources[k] for l, t in self.seen(j, states[j]).items()}
                h = self.field(k, r)
            rho = self.rules[k].rho
            rules.append(Affine(rho, *self.rules[k].slopes(own, h), rho.slope(own), g[k]))
        last = len(rules) - 1
        order = [*reversed(range(last)), last]
        blocks = [self.blocks[k].members for k in order]
        lit = {l for l, t in self.net.split(grad).items() if kernels.waits(t) or bool(t.any())}
        return AdjointSweep(self.net, self.products, blocks, [rules[k] for k in order], lit)

    def seen(self, k: int, s: Tensor) -> Layers:
        """The activations of block k."""
        return self.blocks[k].views(self.rules[k].emit(s))

    @torch.no_grad()
    def along(self, z: Tensor, steps: int, grad: Tensor) -> list[Turn]:
        """The derivative along so many sweeps from z, for the gradient `grad` by the state after them.

        Turn by turn, each with slopes of its own: the chain rule, without autograd. At a fixed point the sum is that
        of `adjoint(…).neumann(steps)`.
        """
        turns, s = [], self.open(z)
        for k in [*range(len(self.blocks))] * steps + [0] * self.forgets:
            own = s.get(k, z)
            states = {j: s[j] for j in self.sources[k]}
            r = {l: t for j, state in states.items() for l, t in self.seen(j, state).items()}
            h = self.field(k, r)
            turns.append((k, states, r, self.rules[k].slopes(own, h)))
            s = {**s, k: self.rules[k].settle(own, h, out=torch.empty_like(h))}
        back, found = self.every(grad), []
        for k, states, r, (a, c) in reversed(turns):
            mu = back[k] if c is None else c * back[k]
            views = self.blocks[k].views(mu)
            found.append(Turn(r, views))
            back[k] = torch.zeros_like(mu) if a is None else a * back[k]
            for j, state in states.items():
                h = self.transposed(j, views)
                back[j] = back[j] + self.rules[j].rho.times(self.rules[j].rho.slope(state), h)
        return found

    def transposed(self, k: int, mu: Layers) -> Tensor:
        """W μ in block k: what the fields of other blocks do to it, W being symmetric."""
        return self.field(k, mu, driven=False)


class AdjointSweep(Sweep):
    """λ ↦ g + A λ + D W C λ, block by block in reverse; the block that was updated last comes last again.

    `lit` are the layers in which the gradient is not 0, as a rule the output. Each turn carries it on by one layer,
    and products with layers that it has not reached are left out.
    """

    def __init__(
        self,
        net: Network,
        products: Products,
        blocks: Blocks,
        rules: Sequence[Affine],
        lit: Set[int],
    ) -> None:
        super().__init__(net, {}, products, blocks, rules, batch=len(rules[0].g))
        self.lit = lit

    @property
    def affine(self) -> list[Affine]:
        """Its rules, as what they are."""
        return self.rules  # type: ignore[return-value]

    @torch.no_grad()
    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return super().__call__(z, out)

    def grow(self, lit: Set[int] | None, k: int) -> Set[int] | None:
        """The layers that are lit after block k's turn; None: all."""
        if lit is None or len(lit) == len(self.net.hidden):
            return None
        members, memory = self.blocks[k].members, self.rules[k].memory
        reached = {l for l in members if l in self.lit or any(j in lit for j, _ in self.incoming[l])}
        return reached | {l for l in lit if memory or l not in members}

    @torch.no_grad()
    def neumann(self, terms: int) -> Tensor:
        """The cotangent of so many terms of the series: what autograd through as many sweeps gives at a fixed point.

        It starts from g in the last block, to which a forgotten one adds what its own g makes there.
        """
        g, last = [rule.g for rule in self.affine], len(self.blocks) - 1
        turns = [*range(last + 1)] * terms
        s = {k: torch.zeros_like(t) for k, t in enumerate(g)} | {last: g[last]}
        lit: Set[int] | None = self.lit & {*self.blocks[last].members}
        if self.forgets and self.lit != lit:
            s[0], lit, turns = g[0], self.lit, [last, *turns]
        for k in turns[:-1]:
            s[k] = self.half(k, s, torch.empty_like(s[k]), lit)
            lit = self.grow(lit, k)
        return self.cotangent_of(s)

    @torch.no_grad()
    def cotangent(self, z: Tensor) -> Tensor:
        """The gradient by the field of every neuron, (batch, N), given the fixed point."""
        return self.cotangent_of(self.complete(z))

    def cotangent_of(self, s: Mapping[int, Tensor]) -> Tensor:
        return self.whole({k: self.rules[k].emit(t) for k, t in s.items()})
