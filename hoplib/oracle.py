"""The paper's equations read off the page: dense matrices with all their zeros, fixed iterations, autograd.

The oracle of the fast route. Nothing here is fast, and nothing here is shared with the code that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import links, paper
from .network import CHN, Network, check_network


@dataclass(frozen=True)
class Dense:
    """W̃, U and b of Section 3.1, and P, W_P, U_odd, b_even and b_odd of Theorem 1."""

    W: Tensor  # (N, N), symmetric, with zero blocks on the diagonal
    U: Tensor  # (N, n₀)
    b: Tensor  # (N,)
    P: Tensor  # (N, N), a permutation: P s = [s_even; s_odd]
    W_P: Tensor  # (N_odd, N_even)
    U_odd: Tensor  # (N_odd, n₀)
    b_even: Tensor
    b_odd: Tensor


@torch.no_grad()
def dense(net: Network) -> Dense:
    """All of the network's matrices, as the paper prints them. Its layers must be a chain."""
    check_network(net)
    if net.ends != list(pairwise(range(len(net.layers)))) or not all(isinstance(l, links.Dense) for l in net.links):
        raise ValueError(f"the paper's matrices are those of a chain of dense links; this network has {net.ends}")
    hidden, even, odd = net.hidden, net.even, net.odd
    eye = torch.eye(net.N, dtype=net.W[0].dtype, device=net.W[0].device)
    return Dense(
        W=matrix(net, hidden, hidden),
        U=matrix(net, hidden, [0]),
        b=bias(net, hidden),
        P=torch.cat([eye[net.slices[l]] for l in (*even, *odd)]),
        W_P=matrix(net, odd, even),
        U_odd=matrix(net, odd, [0]),
        b_even=bias(net, even),
        b_odd=bias(net, odd),
    )


# -- the maps ---------------------------------------------------------------------------------------------------

Map = Callable[[Tensor], Tensor]


def block(net: Network, l: int, j: int) -> Tensor:
    """The weights to layer l from layer j of a chain: W_{l−1}, W_lᵀ, or 0 where the layers are no neighbours."""
    if abs(l - j) != 1:
        return net.W[0].new_zeros(net.layers[l], net.layers[j])
    return net.W[j] if j < l else net.W[l].T


def matrix(net: Network, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    """The blocks between two sets of layers as one dense matrix, differentiable by the W_i."""
    if not rows or not columns:  # of a network without hidden layers
        return net.W[0].new_zeros(sum(net.layers[l] for l in rows), sum(net.layers[j] for j in columns))
    return torch.cat([torch.cat([block(net, l, j) for j in columns], 1) for l in rows])


def bias(net: Network, layers: Sequence[int]) -> Tensor:
    return torch.cat([net.b[0][:0], *(net.b[l - 1] for l in layers)])


def synchronous(net: Network, x: Tensor, relaxation: float = 1.0) -> Map:
    """s ↦ (1 − ω) s + ω f(s, x), f by Eq. (5) or (6), read off the page."""
    rho, W = net.rho, matrix(net, net.hidden, net.hidden)
    drive = rho.rho(x) @ matrix(net, net.hidden, [0]).T + bias(net, net.hidden)

    def f(s: Tensor) -> Tensor:
        h = rho.rho(s) @ W + drive
        new = rho.drho(s) * h if isinstance(net, CHN) else h
        return new if relaxation == 1 else (1 - relaxation) * s + relaxation * new

    return f


def even_odd(net: Network, x: Tensor, relaxation: float = 1.0) -> Map:
    """[s_even; s_odd] ↦ the same after a sweep by Eqs. (7) and (8), the output's block last."""
    rho, W_P = net.rho, matrix(net, net.odd, net.even)
    drive = {0: bias(net, net.even), 1: rho.rho(x) @ matrix(net, net.odd, [0]).T + bias(net, net.odd)}
    order = (1, 0) if net.hidden[-1] in net.even else (0, 1)

    def settled(s: Tensor, h: Tensor) -> Tensor:
        if not isinstance(net, CHN):
            return h
        for _ in range(net.local_iterations):
            s = (1 - net.local_damping) * s + net.local_damping * rho.drho(s) * h
        return s

    def f(s: Tensor) -> Tensor:
        parts = [s[:, : W_P.shape[1]], s[:, W_P.shape[1] :]]
        for k in order:
            new = settled(parts[k], rho.rho(parts[1 - k]) @ (W_P if k == 0 else W_P.T) + drive[k])
            parts[k] = new if relaxation == 1 else (1 - relaxation) * parts[k] + relaxation * new
        return torch.cat(parts, 1)

    return f


def reduced(net: Network, x: Tensor) -> Map:
    """s_even ↦ s_even of a HAM whose output is even: Eq. (9)."""
    rho, W_P = net.rho.rho, matrix(net, net.odd, net.even)
    b_even, drive_odd = bias(net, net.even), rho(x) @ matrix(net, net.odd, [0]).T + bias(net, net.odd)
    return lambda s: rho(rho(s) @ W_P.T + drive_odd) @ W_P + b_even


# -- the solvers ------------------------------------------------------------------------------------------------


def picard(f: Map, s: Tensor, iterations: int) -> Tensor:
    for _ in range(iterations):
        s = f(s)
    return s


def anderson(f: Map, x: Tensor, iterations: int, m: int = 4) -> Tensor:
    """Σ αⱼ g_j with (FᵀF + 1e-10·I) α ∝ 1, a small system for each sample; g itself where that is no improvement."""
    X, G = (x.new_zeros(len(x), m, x.shape[1]) for _ in range(2))
    g = x
    for k in range(iterations):
        g, n = f(x), min(k + 1, m)
        X[:, k % m], G[:, k % m] = x, g
        if k < 1:
            x = g
            continue
        F = G[:, :n] - X[:, :n]
        gram = torch.bmm(F, F.mT) + 1e-10 * torch.eye(n, dtype=x.dtype, device=x.device)
        alpha = torch.linalg.solve_ex(gram, x.new_ones(len(x), n))[0]
        mixed = torch.einsum("bj,bjn->bn", alpha / alpha.sum(1, keepdim=True), G[:, :n])
        better = (g - mixed).norm(dim=1) / mixed.norm(dim=1) < (g - x).norm(dim=1) / x.norm(dim=1)  # false for NaN
        x = torch.where(better[:, None], mixed, g)
    return g


# -- the experiment ---------------------------------------------------------------------------------------------


def madam(p: Tensor, g: Tensor, v: Tensor, t: int, lr: float, bound: float) -> tuple[Tensor, Tensor]:
    """The new weights and the new mean square of the gradients."""
    v = 0.999 * v + 0.001 * g**2
    ghat = (g / (v / (1 - 0.999**t)).sqrt()).nan_to_num(nan=0.0).clamp(-3, 3)
    return (p * torch.exp(-lr * ghat * p.sign())).clamp(-bound, bound), v


@dataclass
class Straightforward:
    """A training of the paper from its equations: dense W with its zeros, the fixed number of iterations for all.

    `readout` as in the rows of the table. It leaves its network as it is.
    """

    net: Network
    even_odd: bool = False
    accelerated: bool = False  # by Anderson
    readout: str = "output"

    def equilibrium(self, x: Tensor, iterations: int | None = None) -> tuple[Tensor, Map]:
        """s* after so many iterations (None: the paper's number), for all samples alike, and the map."""
        net, size = self.net, self.net.N
        if not self.even_odd:
            f = synchronous(net, x, paper.relaxation(net, False))
        elif isinstance(net, CHN):
            f = even_odd(net, x)
        else:
            f, size = reduced(net, x), sum(net.layers[l] for l in net.even)
        with torch.no_grad():
            solver = anderson if self.accelerated else picard
            return solver(f, x.new_zeros(len(x), size), iterations or paper.max_iter(net, self.even_odd)), f

    def output(self, s: Tensor) -> Tensor:
        """ŷ: the last ten entries of the state, but of s_even in [s_even; s_odd] (unless 'as published')."""
        first = self.even_odd and isinstance(self.net, CHN) and self.readout == "output"
        end = sum(self.net.layers[l] for l in self.net.even) if first else s.shape[1]
        return s[:, end - 10 : end]

    def gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The loss, and its gradients through the paper's number of steps from s*."""
        s, f = self.equilibrium(x)
        error = self.output(s) - y  # at s*; the steps that follow give the derivative only
        s = picard(f, s, paper.backward_steps(self.net, self.even_odd))
        found = torch.autograd.grad(self.output(s), list(self.net.parameters()), error / len(y))
        return error.square().sum() / (2 * len(y)), list(found)

    def step(
        self, x: Tensor, y: Tensor, optimizer: Sequence[dict[str, Any]], lr: float
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Loss, gradients and new weights, given v, t and bound of each parameter."""
        value, gradients = self.gradients(x, y)
        with torch.no_grad():
            steps = zip(self.net.parameters(), gradients, optimizer, strict=True)
            weights = [madam(p, g, o["v"], o["t"] + 1, lr, o["bound"])[0] for p, g, o in steps]
        return value, gradients, weights
