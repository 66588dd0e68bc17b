"""Madam, a multiplicative optimizer (Bernstein et al. 2020), and the paper's loss and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

CHUNK = 1 << 15  # on the CPU a parameter is updated piece by piece, so that a piece stays in the cache


class Madam(Optimizer):
    """p ← p · exp(−lr · ĝ · sign p), clamped to ±p_scale · rms(p₀); ĝ = g/√v̂ clamped to ±g_bound.

    v̂ is the bias-corrected running mean of g² (decay β). A weight never changes its sign, and a weight that is
    exactly 0 stays 0.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.01,
        *,
        beta: float = 0.999,
        g_bound: float = 3.0,
        p_scale: float = 1024.0,
    ) -> None:
        if not lr > 0:
            raise ValueError(f"lr must be positive, not {lr}")
        if not 0 <= beta < 1:
            raise ValueError(f"beta must lie in [0, 1), not {beta}")
        if not (g_bound > 0 and p_scale > 0):
            raise ValueError(f"g_bound and p_scale must be positive, not {g_bound} and {p_scale}")
        super().__init__(params, {"lr": lr, "beta": beta, "g_bound": g_bound, "p_scale": p_scale})
        for group in self.param_groups:
            for p in group["params"]:
                rms = float(p.detach().double().square().mean().sqrt()) if not p.is_meta else 1.0
                self.state[p] = {"t": 0, "v": torch.zeros_like(p), "bound": group["p_scale"] * rms}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["t"] += 1
                chunk = CHUNK if p.device.type == "cpu" else p.numel()
                flat = (t.view(-1).split(chunk) for t in (p, p.grad.contiguous(), state["v"]))
                for q, g, v in zip(*flat, strict=True):
                    update(q, g, v, state["t"], state["bound"], group["lr"], group["beta"], group["g_bound"])
        return loss


def update(p: Tensor, g: Tensor, v: Tensor, t: int, bound: float, lr: float, beta: float, g_bound: float) -> None:
    """Madam's formula, in place on p and v. Where g = 0 the update is 0, also when v = 0 (0/0 = 0)."""
    v.mul_(beta).addcmul_(g, g, value=1 - beta)
    ghat = (v / (1 - beta**t)).sqrt_().clamp_min_(torch.finfo(v.dtype).tiny)
    torch.div(g, ghat, out=ghat).clamp_(-g_bound, g_bound)
    p.mul_(ghat.mul_(torch.sign(p)).mul_(-lr).exp_()).clamp_(-bound, bound)


def linear_decay(optimizer: Optimizer, epochs: int = 10) -> LinearLR:
    """The paper's schedule, stepped once an epoch: epoch e uses lr·(1 − 0.9·e/(epochs − 1)), from lr to lr/10."""
    return LinearLR(optimizer, start_factor=1.0, end_factor=0.1 if epochs > 1 else 1.0, total_iters=max(epochs - 1, 1))


def loss(y_hat: Tensor, y: Tensor) -> Tensor:
    """½ Σ (ŷ − y)² / batch size, the paper's loss on the last layer's state."""
    if y_hat.shape != y.shape:
        raise ValueError(f"ŷ has shape {tuple(y_hat.shape)}, the one-hot targets {tuple(y.shape)}")
    return (y_hat - y).square().sum() / (2 * len(y))
