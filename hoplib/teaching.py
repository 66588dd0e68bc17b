"""What several notebooks need to look at a network: small networks in float64, their matrices, exact derivatives.

Dense and slow, for networks of a few dozen neurons. `hoplib` does not import it by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import oracle, paper
from .activations import Activation
from .network import Network
from .solvers import trajectory
from .sweep import Sweep

EXACT: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **EXACT)


def network(
    model: type[Network],
    layers: Sequence[int],
    *,
    seed: int = 0,
    gain: float = 1.0,
    rho: str | Activation = "shifted-sigmoid",
    bias: float = 0.01,
) -> Network:
    """A random network without gradients: weights of `gain` times Xavier's, biases of the standard deviation `bias`."""
    net = model(list(layers), rho=rho, seed=seed, **EXACT).requires_grad_(False)
    for W in net.W:
        W.mul_(gain)
    for b in net.b:
        b.mul_(bias / 0.01)  # as drawn, their deviation is 0.01
    return net


def sample(net: Network, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random inputs x in [0, 1] and random states s, standard normal; independent of the weights of the same seed."""
    g = torch.Generator().manual_seed(seed + 1000)
    x = torch.rand(batch, net.layers[0], generator=g, **EXACT)
    return x, torch.randn(batch, net.N, generator=g, **EXACT)


def pair(
    model: type[Network],
    coupling: float,
    bias: Sequence[float] = (0.0, 0.0),
    rho: str | Activation = "shifted-sigmoid",
) -> Network:
    """Two neurons of state, s₁ (odd) and s₂ (even), that excite each other by one weight; the input has weight 0."""
    net = model([1, 1, 1], rho=rho, **EXACT).requires_grad_(False)
    for p, value in zip([*net.W, *net.b], [0.0, coupling, *bias], strict=True):
        p.fill_(value)
    return net


@torch.no_grad()
def whole(net: Network, b_0: float = 0.0) -> tuple[Tensor, Tensor]:
    """W and b of the paper's Figure 1, where the input, with the bias b₀, is the first layer of the state [s₀; s₁; …].

    Of a chain of layers: block (i + 1, i) is W_i, block (i, i + 1) is W_iᵀ, all else is zero.
    """
    layers = range(len(net.layers))
    return oracle.matrix(net, layers, layers), torch.cat([torch.full((net.layers[0],), b_0, **EXACT), *net.b])


def gather(net: Network, s: Tensor, layers: Sequence[int]) -> Tensor:
    """These layers of a state, side by side; `net.even` and `net.odd` give the paper's two blocks."""
    return torch.cat([net.layer(s, l) for l in layers], 1)


def thresholds(rho: Activation, omega: float = paper.DAMPING) -> tuple[float, float]:
    """The fields below and above 0 beyond which a CHN's neuron at rest no longer attracts its local steps.

    Damped by ω they have the slope 1 − ω χ(s) at rest, in s = ς⁻¹(h). It is −1 where χ(s) = 2/ω; by bisection.
    """
    near, far = torch.zeros(2, **EXACT), torch.tensor([-60.0, 60.0], **EXACT)
    for _ in range(60):
        middle = (near + far) / 2
        beyond = rho.chi(middle) > 2 / omega
        near, far = torch.where(beyond, near, middle), torch.where(beyond, middle, far)
    low, high = rho.varsigma(near).tolist()
    return low, high


def path(f: Sweep, s: Tensor, steps: int) -> Tensor:
    """The states s, f(s), f(f(s)), …: (steps + 1, batch, size)."""
    return torch.cat([s[None], trajectory(f, s, iterations=steps)])


@torch.no_grad()
def half_steps(f: Sweep, s: Tensor, turns: int) -> Tensor:
    """The state s, and after each of so many turns of the sweep's blocks: (turns + 1, batch, N)."""
    blocks, states = f.every(s), [s]
    for k in islice(cycle(blocks), turns):
        blocks[k] = f.half(k, blocks)
        states.append(f.whole(blocks))
    return torch.stack(states)


@torch.no_grad()
def rises(f: Sweep, x: Tensor, s: Tensor, turns: int) -> Tensor:
    """By how much each of so many turns of the sweep's blocks raises the energy: (turns, batch)."""
    states = half_steps(f, s, turns)
    return f.net.energy(states.flatten(0, 1), x.repeat(turns + 1, 1)).view(turns + 1, -1).diff(dim=0)


@torch.no_grad()
def rounding(net: Network, s: Tensor) -> float:
    """What the rounding of the energy can be at states such as s: 1e-14 of the sum of its terms' sizes."""
    return 1e-14 * (1 + sum(float(W.abs().sum()) for W in net.W) + float(s.abs().sum(1).max()))


def gap(a: Tensor, b: Tensor, relative: bool = False) -> float:
    """The largest difference between two tensors (0 for empty ones), in units of b's largest entry if `relative`."""
    if not a.numel():
        return 0.0
    return float((a - b).abs().max() / (b.abs().max() if relative else 1.0))


def gradient(f: Callable[..., Tensor], *at: Any) -> Tensor:
    """∂f/∂(the first argument), by autograd; of the sum, where f gives several numbers."""
    with torch.enable_grad():
        first = at[0].detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(f(first, *at[1:]).sum(), first)
    return slope  # type: ignore[no-any-return]


def jacobian(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """J = ∂f/∂z at one state z (1, size): a matrix."""
    with torch.enable_grad():
        return torch.autograd.functional.jacobian(lambda v: f(v[None])[0], z[0].detach())  # type: ignore


class Sine(Activation):
    """ρ(s) = sin s: not monotone, so a HAM with it does not descend its energy."""

    name = "sine"

    def rho(self, s: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.sin(s, out=out)

    def drho(self, s: Tensor) -> Tensor:
        return torch.cos(s)

    def lagrangian(self, s: Tensor) -> Tensor:
        return -torch.cos(s)


class MultiplyAdds(TorchFunctionMode):
    """While it is active, adds up the multiply-adds of every product of two matrices."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("mm", "addmm", "matmul", "__matmul__"):
            (n, k), (_, m) = (a.shape for a in args[-2:])
            self.count += n * k * m
        return func(*args, **(kwargs or {}))
