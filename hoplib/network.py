"""The two Hopfield networks of the paper, written as one structure: couplings between layers, and a local rule.

The couplings give every neuron its field, h = W ρ(s) + b + U ρ(x); the local rule says what a neuron does in its
field. A HAM takes it over, s ← h; a CHN weighs it, s ← ρ'(s) ⊙ h. Everything else is shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from . import activations
from .activations import Activation

NARROW = 32  # a product with so few columns is twice as fast the other way round, on the CPU

Couplings = dict[tuple[int, int], Tensor]
Slopes = tuple[Tensor | None, Tensor | None]  # (∂s'/∂s, ∂s'/∂h) of a local rule; None is 0 and 1 respectively


def default_device() -> torch.device:
    """CUDA where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Network(nn.Module):
    """A layered Hopfield network: layer 0 is the input x, layers 1, 2, … are the state s = [s₁; s₂; …].

    `W[i]` (n_{i+1} × n_i) couples layers i and i+1 in both directions, `b[l-1]` is the bias of layer l. States are
    (batch, N) tensors with N = n₁ + n₂ + …. Weights are Xavier uniform layer by layer, biases N(0, 0.01²), drawn
    on the CPU in float64 from `seed` (an int or a CPU generator): one seed is one network, on any device.
    """

    damping: ClassVar[float] = 1.0  # the paper's relaxation of the synchronous update
    memoryless: ClassVar[bool] = False  # does a block's minimiser forget the block's own state?
    identity: ClassVar[bool] = False  # is the local rule s ← h, so that an equilibrium is its own field?

    def __init__(
        self,
        layers: Sequence[int],
        *,
        rho: str | Activation = "shifted-sigmoid",
        seed: int | torch.Generator = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.layers = _check_layers(layers)
        self.rho = activations.get(rho)
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype must be torch.float32 or torch.float64, not {dtype}")
        device = default_device() if device is None else torch.device(device)
        generator = seed if isinstance(seed, torch.Generator) else torch.Generator("cpu").manual_seed(int(seed))

        def draw(t: Tensor) -> nn.Parameter:
            return nn.Parameter(t.to(device, dtype))

        double = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
        self.W = nn.ParameterList()
        for n, m in zip(self.layers, self.layers[1:], strict=False):
            bound = math.sqrt(6 / (n + m))
            self.W.append(draw((2 * torch.rand(m, n, **double) - 1) * bound))  # type: ignore[call-overload]
        self.b = nn.ParameterList(draw(0.01 * torch.randn(n, **double)) for n in self.layers[1:])  # type: ignore[call-overload]
        self.hidden = tuple(range(1, len(self.layers)))
        self.even = self.hidden[1::2]
        self.odd = self.hidden[0::2]
        self.slices = slices(self.layers, self.hidden)

    # -- the state ----------------------------------------------------------------------------------------------

    @property
    def N(self) -> int:
        """The number of neurons of the state."""
        return sum(self.layers[1:])

    def layer(self, s: Tensor, l: int) -> Tensor:
        """Layer l of a state; −1 is the output layer. A view."""
        n = len(self.layers)
        if not (1 <= l < n or -n < l < 0):
            raise IndexError(f"the state has layers 1…{n - 1} (or −{n - 1}…−1), not {l}; layer 0 is the input x")
        return s[:, self.slices[l % n]]

    def split(self, s: Tensor) -> dict[int, Tensor]:
        """The layers of a state, by their number."""
        return {l: s[:, self.slices[l]] for l in self.hidden}

    def zeros(self, batch: int) -> Tensor:
        """The paper's initial state, s⁰ = 0."""
        return torch.zeros(batch, self.N, dtype=self.W[0].dtype, device=self.W[0].device)

    # -- couplings ----------------------------------------------------------------------------------------------

    def drive(self, x: Tensor) -> dict[int, Tensor]:
        """b + U ρ(x), constant during a solve: (batch, n₁) in layer 1, the bias (n_l) in the layers above."""
        drive: dict[int, Tensor] = {l: self.b[l - 1] for l in self.hidden}
        drive[1] = torch.addmm(drive[1], self.rho.rho(x), self.W[0].T)
        return drive

    def couplings(self) -> Couplings:
        """The blocks of W between layers of state, as factors from the right: h_l = Σ_j r_j M[l, j]."""
        M = {}
        for i, w in zip(self.hidden, list(self.W)[1:], strict=False):
            M[i, i + 1] = w
            # A transposed copy multiplies some 5 % faster, and one copy serves all iterations of a solve.
            M[i + 1, i] = w.T if torch.is_grad_enabled() or min(w.shape) < 64 else w.T.contiguous()
        return M

    def couple(
        self,
        r: Mapping[int, Tensor],
        targets: Sequence[int],
        drive: Mapping[int, Tensor] | None = None,
        out: Mapping[int, Tensor] | None = None,
        M: Couplings | None = None,
    ) -> list[Tensor]:
        """h_l = W_{l−1} r_{l−1} + W_lᵀ r_{l+1} + drive_l for every target l: the block rows of W r, zeros skipped."""
        M = self.couplings() if M is None else M
        result = []
        for l in targets:
            h = None if drive is None else drive[l]
            buffer = None if out is None else out[l]
            neighbours = [j for j in (l - 1, l + 1) if j in r]
            for j in neighbours:
                if buffer is not None and self.layers[l] < NARROW:
                    part = torch.mm(M[l, j].T, r[j].T).T
                    h = buffer.copy_(part) if h is None else torch.add(h, part, out=buffer)
                else:
                    h = torch.mm(r[j], M[l, j], out=buffer) if h is None else torch.addmm(h, r[j], M[l, j], out=buffer)
            if not neighbours and buffer is not None:  # say, two layers: nobody speaks to the one layer of state
                h = buffer.zero_() if h is None else buffer.copy_(h)
            assert h is not None, "a layer without neighbours needs a drive or a buffer"
            result.append(h)
        return result

    def field(self, s: Tensor, x: Tensor) -> Tensor:
        """h = W ρ(s) + b + U ρ(x), by blocks: the bracket of Eqs. (5) and (6)."""
        return torch.cat(self.couple(self.split(self.rho.rho(s)), self.hidden, self.drive(x)), 1)

    # -- the equations ------------------------------------------------------------------------------------------

    def local(self, s: Tensor, h: Tensor) -> Tensor:
        """The new state of a neuron in state s and field h: the right-hand side of Eq. (5) or (6)."""
        raise NotImplementedError

    def settle(self, s: Tensor, h: Tensor) -> Tensor:
        """The state of least energy of a neuron in a fixed field h, approached from s."""
        raise NotImplementedError

    def local_(self, s: Tensor, h: Tensor, r: Tensor) -> Tensor:
        """`local` in the place of h, given r = ρ(s), which is used up: fewer passes over memory, not differentiable."""
        return h.copy_(self.local(s, h))

    def settle_(self, s: Tensor, h: Tensor, r: Tensor, out: Tensor) -> Tensor:
        """`settle` into `out`; h and the scratch tensor r are used up. Not differentiable."""
        return out.copy_(self.settle(s, h))

    def local_slopes(self, s: Tensor, h: Tensor) -> Slopes:
        """The partial derivatives of `local`, by s and by h."""
        raise NotImplementedError

    def settle_slopes(self, s: Tensor, h: Tensor) -> Slopes:
        """The partial derivatives of `settle`, by s and by h."""
        raise NotImplementedError

    def self_energy(self, s: Tensor) -> Tensor:
        """The part of the energy that couples nothing, neuron by neuron."""
        raise NotImplementedError

    def step(self, s: Tensor, x: Tensor) -> Tensor:
        """f(s, x), one synchronous update of all layers (Eqs. 5 and 6)."""
        return self.local(s, self.field(s, x))

    def flow(self, s: Tensor, x: Tensor) -> Tensor:
        """ds/dt = −s + f(s, x) (Eqs. 2 and 4, the input split off)."""
        return self.step(s, x) - s

    def energy(self, s: Tensor, x: Tensor) -> Tensor:
        """E(s) per sample (Eqs. 1 and 3), less the terms of the input x alone, which no state changes.

        For certificates ("the energy did not rise") use float64: in float32 the rounding of E hides small steps.
        """
        self.check_input(x)
        self.check_state(s, len(x))
        r = self.rho.rho(s)
        drive = torch.cat([d.expand(len(x), -1) for d in self.drive(x).values()], 1)
        h = torch.cat(self.couple(self.split(r), self.hidden, self.drive(x)), 1)
        return (self.self_energy(s) - r * (h + drive) / 2).sum(1)

    def pullback(
        self, s: Tensor, mu: Tensor, x: Tensor, mu_x: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients by W and b, given μ, the gradient by the field h of every neuron, at the states s (rows, N).

        ∂/∂W_i = μ_{i+1} ρ(s_i)ᵀ + ρ(s_{i+1}) μ_iᵀ, for W_i serves both directions; ∂/∂b = μ. A sample may have several
        rows, one for each step; `mu_x` (batch, N) is then their sum, all that the input and the biases need.
        """
        r, m, m_x = self.split(self.rho.rho(s)), self.split(mu), self.split(mu if mu_x is None else mu_x)
        by_W = [m_x[1].T @ self.rho.rho(x)]
        by_W += [torch.addmm(m[i + 1].T @ r[i], r[i + 1].T, m[i]) for i in self.hidden[:-1]]
        return by_W, [m_x[l].sum(0) for l in self.hidden]

    def pullback_input(self, mu: Tensor, x: Tensor) -> Tensor:
        """The gradient by x: ρ'(x) ⊙ W_0ᵀ μ₁."""
        by_x: Tensor = self.rho.drho(x) * (self.layer(mu, 1) @ self.W[0])
        return by_x

    # -- the paper's settings -----------------------------------------------------------------------------------

    def relaxation(self, even_odd: bool) -> float:
        """The paper's damping: 0.5 for the synchronous CHN, none otherwise."""
        return 1.0 if even_odd else self.damping

    def max_iter(self, even_odd: bool) -> int:
        """The paper's forward iterations: 40·⌊layers/2⌋, in ODE time (so twice as many for a damping of 0.5)."""
        return round(40 * (len(self.layers) // 2) / self.relaxation(even_odd))

    def backward_steps(self, even_odd: bool) -> int:
        """The paper's backward iterations: 8·⌊layers/2⌋ in ODE time."""
        return self.max_iter(even_odd) // 5

    def multiply_adds(self) -> int:
        """Multiply-adds of one iteration, a sample: every W_i but the input's, once in each direction."""
        return 2 * sum(n * m for n, m in zip(self.layers[1:], self.layers[2:], strict=False))

    # -- checks -------------------------------------------------------------------------------------------------

    def check_input(self, x: Tensor) -> None:
        """Raise an error that names the problem unless x is a finite (batch, n₀) tensor like the weights."""
        n, w = self.layers[0], self.W[0]
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a torch tensor of shape (batch, {n}), not {type(x).__name__}")
        if x.ndim != 2 or x.shape[1] != n:
            raise ValueError(f"x must have shape (batch, {n}) for layers={list(self.layers)}, not {tuple(x.shape)}")
        _check_like("x", x, w)
        if not x.is_meta and not bool(x.isfinite().all()):
            bad = (~x.isfinite()).any(1).nonzero().flatten().tolist()
            raise ValueError(f"x has non-finite values in {len(bad)} of {len(x)} samples (the first: {bad[0]})")

    def check_state(self, s: Tensor, batch: int) -> None:
        """Raise an error that names the problem unless s is a (batch, N) tensor like the weights."""
        if s.shape != (batch, self.N):
            raise ValueError(f"a state must have shape ({batch}, {self.N}), not {tuple(s.shape)}")
        _check_like("the state", s, self.W[0])

    def extra_repr(self) -> str:
        return f"layers={list(self.layers)}, rho={self.rho!r}"


class HAM(Network):
    """Hierarchical associative memory: E = sᵀρ − L(s) − ½ρᵀWρ − bᵀρ (Eq. 3), s ← W ρ(s) + b + U ρ(x) (Eq. 6).

    A field h has its energy minimum at s = h exactly (the Legendre transform): one step settles a block.
    """

    memoryless = identity = True

    def local(self, s: Tensor, h: Tensor) -> Tensor:
        return h

    def settle(self, s: Tensor, h: Tensor) -> Tensor:
        return h

    def local_(self, s: Tensor, h: Tensor, r: Tensor) -> Tensor:
        return h

    def local_slopes(self, s: Tensor, h: Tensor) -> Slopes:
        return None, None

    def settle_slopes(self, s: Tensor, h: Tensor) -> Slopes:
        return None, None

    def self_energy(self, s: Tensor) -> Tensor:
        return s * self.rho.rho(s) - self.rho.lagrangian(s)


class CHN(Network):
    """Continuous Hopfield network: E = ½‖s‖² − ½ρᵀWρ − bᵀρ (Eq. 1), s ← ρ'(s) ⊙ (W ρ(s) + b + U ρ(x)) (Eq. 5).

    A block settles by `local_iterations` damped local steps, as in the paper; that approaches ς⁻¹(h) but may fall
    into a 2-cycle where |ρ''(s) h| is large.
    """

    damping = 0.5
    local_iterations: int = 10
    local_damping: float = 0.5

    def local(self, s: Tensor, h: Tensor) -> Tensor:
        return self.rho.drho(s) * h

    def settle(self, s: Tensor, h: Tensor) -> Tensor:
        for _ in range(self.local_iterations):
            s = torch.lerp(s, self.local(s, h), self.local_damping)
        return s

    def local_(self, s: Tensor, h: Tensor, r: Tensor) -> Tensor:
        if type(self).local is not CHN.local:  # a subclass with a rule of its own
            return super().local_(s, h, r)
        return self.rho.weigh(h, s, r, out=h).mul_(self.rho.steepness)

    def settle_(self, s: Tensor, h: Tensor, r: Tensor, out: Tensor) -> Tensor:
        if type(self).settle is not CHN.settle:
            return super().settle_(s, h, r, out)
        return self.rho.settle(s, h, self.local_damping, self.local_iterations, r, out)

    def local_slopes(self, s: Tensor, h: Tensor) -> Slopes:
        drho, d2rho = self.rho.slopes(s)
        return d2rho * h, drho

    def settle_slopes(self, s: Tensor, h: Tensor) -> Slopes:
        """The chain rule along the local steps: A ← a A, C ← a C + ρ', with a = 1 − ω + ω ρ''h; then A and ω C.

        Not only at their fixed point: where they fall into a 2-cycle, s may come back without being an equilibrium.
        """
        w = self.local_damping
        A, C, h = torch.ones_like(s), torch.zeros_like(s), w * h
        for _ in range(self.local_iterations):
            drho, d2rho = self.rho.slopes(s)
            a = d2rho.mul_(h).add_(1 - w)
            A.mul_(a)
            torch.addcmul(drho, C, a, out=C)
            s = drho.mul_(h).add_(s, alpha=1 - w)
        return A, C.mul_(w)

    def self_energy(self, s: Tensor) -> Tensor:
        return s.square() / 2


def slices(layers: Sequence[int], members: Sequence[int]) -> dict[int, slice]:
    """Where each of the member layers lies in their concatenation."""
    ends = torch.tensor([0, *(layers[l] for l in members)], device="cpu").cumsum(0).tolist()
    return {l: slice(a, b) for l, a, b in zip(members, ends, ends[1:], strict=False)}


def _check_layers(layers: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(layers, (list, tuple)):
        raise TypeError(f"layers must be a list of sizes such as [784, 1990, 10], not {layers!r}")
    if len(layers) < 2:
        raise ValueError(f"a network needs at least 2 layers, the input and the output; got layers={list(layers)}")
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in layers):
        raise ValueError(f"every layer size must be a positive integer; got layers={list(layers)}")
    return tuple(layers)


def _check_like(name: str, t: Tensor, w: Tensor) -> None:
    if t.dtype != w.dtype:
        raise TypeError(f"{name} has dtype {t.dtype}, the network {w.dtype}; convert with .to({w.dtype})")
    if t.device != w.device:
        raise ValueError(f"{name} is on {t.device}, the network on {w.device}; move it with .to({str(w.device)!r})")
