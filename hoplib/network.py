"""Hopfield networks: layers coupled by links, and a rule that says what a neuron does in its field.

The links give every neuron its field, h = W ρ(s) + b + U ρ(x). A HAM's neuron takes it over, s ← h; a CHN's weighs it,
s ← ρ'(s) ⊙ h. Everything else is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from . import activations, checks, paper
from .activations import Activation, Effective, PerLayer
from .links import MOST, Dense, Link, Product
from .rules import ChnRule, HamRule, Rule
from .sweep import Block, Blocks, Layers, Sweep, Turn, check_omega, check_relaxation


def default_device() -> torch.device:
    """CUDA where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Network(nn.Module):
    """Layer 0 is the input x, layers 1, 2, … are the state s = [s₁; s₂; …], the last one is the output.

    By default the layers are a chain: layers l and l + 1 are coupled by a matrix W_l (n_{l+1} × n_l), Xavier uniform;
    biases are N(0, 0.01²). Both are drawn on the CPU in float64 from `seed` (an int or a CPU generator): one seed is
    one network, on any device. `links`, a mapping {(a, b): Link}, couples any layers a < b instead. `rho` is one
    activation, or one for each layer and the input. States are (batch, N) tensors with N = n₁ + n₂ + ….
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        links: Mapping[tuple[int, int], Link] | None = None,
        rho: str | Activation | Sequence[str | Activation] = "shifted-sigmoid",
        seed: int | torch.Generator = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.layers = check_layers(layers)
        checks.precision(dtype)
        device = default_device() if device is None else checks.device(device)
        if not isinstance(seed, torch.Generator):
            seed = torch.Generator("cpu").manual_seed(checks.integer("seed", seed, 0, 2**63 - 1))
        double = {"generator": seed, "dtype": torch.float64, "device": "cpu"}
        if links is None:
            pairs = enumerate(zip(self.layers, self.layers[1:], strict=False))
            links = {(l, l + 1): Dense.xavier(n, m, **double) for l, (n, m) in pairs}
        self.ends = _check_links(links, self.layers)
        self.links = nn.ModuleList(links[pair] for pair in self.ends)
        self.b = nn.ParameterList(nn.Parameter(0.01 * torch.randn(n, **double)) for n in self.layers[1:])  # type: ignore[call-overload]
        self.to(device, dtype)
        self.hidden = tuple(range(1, len(self.layers)))
        self.all = Block(self.hidden, self.layers)
        self.rho = _activation(rho, self.layers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What .to(), .half() and the like do to the parameters."""
        checks.precision(fn(self.b[0].detach()[:0]).dtype)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    # -- the state ----------------------------------------------------------------------------------------------

    @property
    def N(self) -> int:
        """The number of neurons of the state."""
        return self.all.size

    @property
    def slices(self) -> dict[int, slice]:
        """Where each layer lies in a state."""
        return self.all.slices

    @property
    def odd(self) -> tuple[int, ...]:
        """The layers of the first one's parity."""
        return tuple(l for l, colour in two_colours(self.ends, self.hidden).items() if colour == 0)

    @property
    def even(self) -> tuple[int, ...]:
        """The layers of the other parity."""
        return tuple(l for l, colour in two_colours(self.ends, self.hidden).items() if colour == 1)

    def blocks(self, even_odd: bool) -> list[tuple[int, ...]]:
        """Who is updated together, in the order of the turns: all layers, or by parity, the output's parity last."""
        return sorted([self.even, self.odd], key=lambda block: self.hidden[-1] in block) if even_odd else [self.hidden]

    @property
    def W(self) -> list[Tensor]:
        """The weights of the links, in their order: of a chain, W_0 = U, W_1, …"""
        return [p for link in self.links for p in link.parameters()]

    def layer(self, s: Tensor, l: int) -> Tensor:
        """Layer l of a state; −1 is the output layer. A view."""
        n = len(self.layers)
        if not isinstance(s, Tensor) or s.ndim != 2 or s.shape[1] != self.N:
            given = tuple(s.shape) if isinstance(s, Tensor) else type(s).__name__
            raise ValueError(f"a state must be a tensor of shape (batch, {self.N}), not {given}")
        if not checks.whole(l) or l not in [*range(1 - n, 0), *range(1, n)]:
            raise IndexError(f"the state has layers 1…{n - 1} (or −{n - 1}…−1), not {l}; layer 0 is the input x")
        return s[:, self.all.slices[l % n]]

    def output(self, s: Tensor) -> Tensor:
        """ŷ, the last layer of a state."""
        return self.layer(s, -1)

    def split(self, s: Tensor) -> Layers:
        """The layers of a state, by their number."""
        return self.all.views(s)

    def zeros(self, batch: int) -> Tensor:
        """The paper's initial state, s⁰ = 0."""
        checks.integer("the batch size", batch, 0)
        zeros: Tensor = self.b[0].new_zeros(batch, self.N)
        return zeros

    # -- fields -------------------------------------------------------------------------------------------------

    def graph(self) -> Iterator[tuple[int, int, Link]]:
        """The links with the layers that they join."""
        for (a, b), link in zip(self.ends, self.links, strict=True):
            assert isinstance(link, Link)
            yield a, b, link

    def products(self) -> dict[tuple[int, int], tuple[Product, Product]]:
        """Of every link between layers of state, for as long as the weights do not change."""
        return {(a, b): link.products() for a, b, link in self.graph() if a > 0}

    def drive(self, x: Tensor) -> Layers:
        """b + U ρ(x), constant during a solve: (batch, n_l) where the input is linked to, the bias (n_l) elsewhere."""
        self.check_kind(x)
        drive: Layers = {l: self.b[l - 1] for l in self.hidden}
        r = self.rho.at(0).rho(x)
        with checks.full_precision(x):
            for a, b, link in self.graph():
                if a == 0:
                    drive[b] = link.push(r, drive[b])
        return drive

    def rule(self, rho: Activation, sole: bool) -> Rule:
        """What a neuron does in its field; where its block is not the `sole` one, until it has settled."""
        raise NotImplementedError

    def sweep(
        self,
        x: Tensor,
        blocks: Blocks,
        omega: float = 1.0,
        *,
        like: Sweep | None = None,
        clipped: bool = False,
    ) -> Sweep:
        """The map that gives one block after the other its turn. The share of x in the field is taken from `like`."""
        (check_omega if clipped else check_relaxation)(omega)
        listed = isinstance(blocks, (list, tuple)) and all(isinstance(block, (list, tuple)) for block in blocks)
        members = [l for block in blocks for l in block] if listed else []
        if not all(map(checks.whole, members)) or sorted(members) != list(self.hidden):
            raise ValueError(f"blocks must have each of the layers {list(self.hidden)} once, not {blocks!r}")
        rules = [self.rule(self.rho.of(block), len(blocks) == 1) for block in blocks]
        drive, products = (self.drive(x), self.products()) if like is None else (like.drive, like.products)
        return Sweep(self, drive, products, blocks, rules, omega, batch=len(x), clipped=clipped)

    def field(self, s: Tensor, x: Tensor) -> Tensor:
        """h = W ρ(s) + b + U ρ(x): the bracket of Eqs. (5) and (6)."""
        f = self.sweep(x, [self.hidden])
        self.check_state(s, len(x))
        return f.field(0, self.split(self.rho.rho(s)))

    # -- the equations ------------------------------------------------------------------------------------------

    def step(self, s: Tensor, x: Tensor) -> Tensor:
        """f(s, x), one synchronous update of all layers (Eqs. 5 and 6)."""
        return self.rule(self.rho, True).settle(s, self.field(s, x))

    def flow(self, s: Tensor, x: Tensor) -> Tensor:
        """ds/dt = −s + f(s, x) (Eqs. 2 and 4, the input split off)."""
        return self.step(s, x) - s

    def energy(self, s: Tensor, x: Tensor) -> Tensor:
        """E(s) per sample (Eqs. 1 and 3), less the terms of the input x alone, which no state changes.

        For certificates ("the energy did not rise") use float64: in float32 the rounding of E hides small steps.
        """
        self.check_input(x)
        h, r = self.field(s, x), self.rho.rho(s)
        drive = torch.cat([d.expand(len(x), -1) for d in self.drive(x).values()], 1)
        return (self.rule(self.rho, True).energy(s) - r * (h + drive) / 2).sum(1)

    def pullback(
        self, turns: Sequence[Turn], x: Tensor, wants_x: bool = False
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """The gradients by the links' parameters, by the biases and by x, given what every block did in its turns.

        ∂/∂W of a link is the sum over the turns of μ_b r_aᵀ (where b had its turn) and r_b μ_aᵀ (where a had).
        """
        r_x, by_links = self.rho.at(0).rho(x), []
        mu_x = {l: self._summed(turns, l, len(x)) for l in self.hidden}
        by_r, rho = torch.zeros_like(x), self.rho.at(0)
        for a, b, link in self.graph():
            if a == 0:
                by_links += link.gradients(r_x, mu_x[b], None, None)
                by_r = link.pull(mu_x[b], by_r) if wants_x else by_r
                continue
            push, pull = ([(t.r[i], t.mu[j]) for t in turns if j in t.mu] for i, j in ((a, b), (b, a)))
            (r_a, mu_b), (r_b, mu_a) = (map(torch.cat, zip(*pairs, strict=True)) for pairs in (push, pull))
            by_links += link.gradients(r_a, mu_b, r_b, mu_a)
        by_x = rho.times(rho.slope(x), by_r) if wants_x else None
        return by_links, [mu_x[l].sum(0) for l in self.hidden], by_x

    def _summed(self, turns: Sequence[Turn], l: int, batch: int) -> Tensor:
        """μ of layer l, summed over the turns of each sample."""
        total: Tensor | None = None
        for _, same in groupby((t for t in turns if l in t.mu), lambda t: id(t.rows)):
            turn, *more = same
            mu = sum((t.mu[l] for t in more), turn.mu[l])
            if turn.rows is not None:
                mu = mu.new_zeros(batch, mu.shape[1]).index_add_(0, turn.rows, mu)
            total = mu if total is None else total + mu
        if total is None:
            total = self.b[0].new_zeros(batch, self.layers[l])
        return total

    def multiply_adds(self) -> int:
        """Multiply-adds of one iteration, per sample: every link but the input's, once in each direction."""
        return 2 * sum(link.multiply_adds for a, _, link in self.graph() if a > 0)

    # -- checks -------------------------------------------------------------------------------------------------

    def check_input(self, x: Tensor) -> None:
        """Raise an error that names the problem unless x is a finite (batch, n₀) tensor like the weights."""
        checks.precision(self.b[0].dtype)
        self.check_kind(x)
        for w in self.W:
            _check_like("a weight", w, self.b[0])
        if not x.is_meta and not bool(x.isfinite().all()):
            bad = (~x.isfinite()).any(1).nonzero().flatten().tolist()
            raise ValueError(f"x has non-finite values in {len(bad)} of {len(x)} samples (the first: {bad[0]})")

    def check_kind(self, x: Tensor) -> None:
        """The same, without a look at its values."""
        self._check_tensor("x", x, self.layers[0])

    def check_state(self, s: Tensor, batch: int) -> None:
        """Raise an error that names the problem unless s is a (batch, N) tensor like the weights."""
        self._check_tensor("the state", s, self.N, batch)

    def _check_tensor(self, name: str, t: object, n: int, batch: int | None = None) -> None:
        shape = f"({'batch' if batch is None else batch}, {n})"
        if not isinstance(t, Tensor) or t.layout != torch.strided or t.is_nested:
            kind = type(t).__name__
            if isinstance(t, Tensor):
                kind = "a nested tensor" if t.is_nested else f"a tensor of layout {t.layout}"
            raise TypeError(f"{name} must be a dense torch tensor of shape {shape}, not {kind}")
        if t.ndim != 2 or t.shape[1] != n or batch not in (None, len(t)):
            raise ValueError(f"{name} must have shape {shape} for layers={list(self.layers)}, not {tuple(t.shape)}")
        _check_like(name, t, self.b[0])

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("a network is solved by hop.solve(net, x); in a torch model it is hop.Layer(net)")

    def extra_repr(self) -> str:
        return f"layers={list(self.layers)}, rho={self.rho!r}"


class HAM(Network):
    """Hierarchical associative memory: E = sᵀρ − L(s) − ½ρᵀWρ − bᵀρ (Eq. 3), s ← W ρ(s) + b + U ρ(x) (Eq. 6).

    A field h has its energy minimum at s = h exactly (the Legendre transform): one step settles a block.
    """

    def rule(self, rho: Activation, sole: bool) -> Rule:
        return HamRule(rho)


class CHN(Network):
    """Continuous Hopfield network: E = ½‖s‖² − ½ρᵀWρ − bᵀρ (Eq. 1), s ← ρ'(s) ⊙ (W ρ(s) + b + U ρ(x)) (Eq. 5).

    A block settles by `local_iterations` damped local steps, as in the paper; that approaches ς⁻¹(h) but may fall
    into a 2-cycle where |ρ''(s) h| is large.
    """

    local_iterations: int = paper.LOCAL_STEPS
    local_damping: float = paper.DAMPING

    def rule(self, rho: Activation, sole: bool) -> Rule:
        if sole:
            return ChnRule(rho)
        steps = checks.integer("local_iterations", self.local_iterations, 1)
        return ChnRule(rho, steps, checks.number("local_damping", self.local_damping, "a positive number", above=True))


class ExactCHN(HAM):
    """A CHN whose neurons settle at once: the HAM with ρ∘ς⁻¹ in the variable h = ς(s) (Theorem 2, Eq. 16).

    Its states are the fields h; the output is ŷ = ς⁻¹(h). One update, h ← W ρ(ς⁻¹(h)) + b + U ρ(x), is what the local
    steps of `CHN` approach, without their 2-cycles. Needs an activation that has a ς⁻¹.
    """

    def __init__(self, layers: Sequence[int], *, rho: str | Activation = "shifted-sigmoid", **options: Any) -> None:
        self.base = activations.get(rho)
        super().__init__(layers, rho=Effective(self.base), **options)

    def output(self, s: Tensor) -> Tensor:
        return self.base.varsigma_inv(self.layer(s, -1))


def two_colours(ends: Sequence[tuple[int, int]], hidden: Sequence[int]) -> dict[int, int]:
    """A colour, 0 or 1, for every layer of state, such that no link joins two of one colour; layer 1 has colour 0.

    An odd cycle of links has no such colours: an error that names it.
    """
    near: dict[int, list[int]] = {l: [] for l in hidden}
    for a, b in ends:
        if a > 0:
            near[a].append(b)
            near[b].append(a)
    path: dict[int, list[int]] = {}  # from the first layer of each part to every other
    for root in hidden:
        if root not in path:
            path[root], waiting = [root], [root]
            for l in waiting:
                for j in near[l]:
                    if j not in path:
                        path[j] = [*path[l], j]
                        waiting.append(j)
                    elif (len(path[j]) - len(path[l])) % 2 == 0:
                        shared = sum(p == q for p, q in zip(path[l], path[j], strict=False))
                        cycle = [*path[l][shared - 1 :], *path[j][shared:][::-1]]
                        raise ValueError(
                            f"the layers {'–'.join(map(str, [*cycle, cycle[0]]))} are linked in an odd cycle, so they "
                            "cannot be updated in turns of even and odd; use synchronous updates, or blocks of your own"
                        )
    return {l: (len(p) + 1) % 2 for l, p in path.items()}


def _activation(rho: object, layers: Sequence[int]) -> Activation:
    if isinstance(rho, (str, Activation)):
        one = activations.get(rho)
        return one if one.elementwise else PerLayer([one] * len(layers), layers)  # of a layer's neurons, not a block's
    if not isinstance(rho, Sequence) or len(rho) != len(layers):
        raise ValueError(f"rho must be one activation, or {len(layers)}, one for each layer and the input; not {rho!r}")
    return PerLayer([activations.get(r) for r in rho], layers)


def _check_links(links: Mapping[tuple[int, int], Link], layers: Sequence[int]) -> list[tuple[int, int]]:
    if not isinstance(links, Mapping):
        raise TypeError(f"links must map pairs of layers to links, such as {{(0, 1): Dense(W)}}, not {links!r}")
    for pair, link in links.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(type(l) is int for l in pair)):
            raise TypeError(f"a link joins a pair of layers such as (0, 1), not {pair!r}")
        a, b = pair
        if not isinstance(link, Link):
            raise TypeError(f"the link {pair} must be a Link such as Dense(W), not {type(link).__name__}")
        if not 0 <= a < b < len(layers):
            raise ValueError(f"a link joins layers a < b of 0…{len(layers) - 1}, not {(a, b)}")
        if link.sizes != (layers[a], layers[b]):
            raise ValueError(
                f"the link {(a, b)} couples {link.sizes} neurons, but the layers have {layers[a]}, {layers[b]}"
            )
    return list(links)


def check_layers(layers: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(layers, (list, tuple)):
        raise TypeError(f"layers must be a list of sizes such as [784, 1990, 10], not {layers!r}")
    if len(layers) < 2:
        raise ValueError(f"a network needs at least 2 layers, the input and the output; got layers={list(layers)}")
    return tuple(checks.integer(f"every size in layers={list(layers)}", n, 1, MOST) for n in layers)


def check_network(net: object) -> None:
    if not isinstance(net, Network):
        raise TypeError(f"net must be a network such as hop.HAM(layers=[784, 1990, 10]), not {type(net).__name__}")


def _check_like(name: str, t: Tensor, w: Tensor) -> None:
    if t.dtype != w.dtype:
        raise TypeError(f"{name} has dtype {t.dtype}, the network {w.dtype}; convert with .to({w.dtype})")
    if t.device != w.device:
        raise ValueError(f"{name} is on {t.device}, the network on {w.device}; move it with .to({str(w.device)!r})")


def Synchronous(net: Network, x: Tensor, relaxation: float = 1.0) -> Sweep:
    """s ↦ (1 − ω) s + ω f(s, x): Eq. (5) for a CHN, Eq. (6) for a HAM. With ω the step size, it is forward Euler."""
    check_network(net)
    return net.sweep(x, net.blocks(even_odd=False), relaxation)


def EvenOdd(net: Network, x: Tensor, relaxation: float = 1.0, *, clipped: bool = False) -> Sweep:
    """The layers without the output settle in the field of the others, then those in the field of the first.

    `clipped`: over-relaxation (ω > 1) stops short of where it could raise the energy (`hop.OverRelaxed`).
    """
    check_network(net)
    return net.sweep(x, net.blocks(even_odd=True), relaxation, clipped=clipped)
