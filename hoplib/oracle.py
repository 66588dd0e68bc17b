"""The paper's matrices, dense and with all their zeros: the oracle of the block maps.

Nothing here is fast, and nothing here is shared with the code that is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .network import CHN, Network


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


def dense(net: Network) -> Dense:
    """All of the network's matrices, as the paper prints them."""
    at, N = net.all.slices, net.N
    W = net.W[0].new_zeros(N, N)
    for i in net.hidden[:-1]:
        W[at[i + 1], at[i]] = net.W[i].detach()
        W[at[i], at[i + 1]] = net.W[i].detach().T
    U = net.W[0].new_zeros(N, net.layers[0])
    U[at[1]] = net.W[0].detach()
    b = torch.cat([b.detach() for b in net.b])
    eye = torch.eye(N, dtype=W.dtype, device=W.device)
    P = torch.cat([eye[at[l]] for l in (*net.even, *net.odd)])
    n = sum(net.layers[l] for l in net.even)
    PWP, PU, Pb = P @ W @ P.T, P @ U, P @ b
    return Dense(W, U, b, P, PWP[n:, :n], PU[n:], Pb[:n], Pb[n:])


def synchronous(net: Network, s: Tensor, x: Tensor, relaxation: float = 1.0) -> Tensor:
    """(1 − ω) s + ω f(s, x) by Eq. (5) or (6), read off the page."""
    d, rho = dense(net), net.rho
    h = rho.rho(s) @ d.W.T + d.b + rho.rho(x) @ d.U.T
    f = rho.drho(s) * h if isinstance(net, CHN) else h
    return (1 - relaxation) * s + relaxation * f


def even_odd(net: Network, s: Tensor, x: Tensor, relaxation: float = 1.0) -> Tensor:
    """One even-odd sweep of a whole state, by Eqs. (7) and (8): the output's block is updated last."""
    d, rho = dense(net), net.rho
    n = d.W_P.shape[1]
    Ps = s @ d.P.T
    even, odd = Ps[:, :n], Ps[:, n:]

    def settled(own: Tensor, h: Tensor) -> Tensor:
        if not isinstance(net, CHN):
            return h
        for _ in range(net.local_iterations):
            own = (1 - net.local_damping) * own + net.local_damping * rho.drho(own) * h
        return own

    def update_odd() -> Tensor:
        h = rho.rho(even) @ d.W_P.T + d.b_odd + rho.rho(x) @ d.U_odd.T
        return (1 - relaxation) * odd + relaxation * settled(odd, h)

    def update_even() -> Tensor:
        h = rho.rho(odd) @ d.W_P + d.b_even
        return (1 - relaxation) * even + relaxation * settled(even, h)

    if len(net.layers) % 2:
        odd = update_odd()
        even = update_even()
    else:
        even = update_even()
        odd = update_odd()
    return torch.cat([even, odd], 1) @ d.P
