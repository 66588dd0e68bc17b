"""Madam, a multiplicative optimizer (Bernstein et al. 2020), and the paper's loss and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from . import checks, kernels

CHUNK = 1 << 16  # on the CPU a parameter is updated piece by piece, so that a piece stays in the cache


class Madam(Optimizer):
    """p ← p · exp(−lr · ĝ · sign p), clamped to ±p_scale · rms(p₀); ĝ = g/√v̂ clamped to ±g_bound.

    v̂ is the bias-corrected running mean of g² (decay β). A weight never changes its sign, but a rate of tens may round
    it to 0, and a weight that is exactly 0 stays 0. `fused=True` compiles the update into one pass over memory
    (torch.compile, which needs a C++ compiler on the CPU): the same numbers to rounding.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.01,
        *,
        beta: float = 0.999,
        g_bound: float = 3.0,
        p_scale: float = 1024.0,
        fused: bool = False,
    ) -> None:
        checks.flag("fused", fused)
        checks.able("params", params, "__iter__", "parameters such as net.parameters()")
        self.fused = torch.compile(update, dynamic=True) if fused else None
        super().__init__(params, {"lr": lr, "beta": beta, "g_bound": g_bound, "p_scale": p_scale})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """More parameters (the constructor's come this way too), each with the bound of its weights as they are now."""
        values = {**self.defaults, **param_group} if isinstance(param_group, dict) else self.defaults
        for name in ("lr", "g_bound", "p_scale"):  # with more a weight may overflow
            checks.number(name, values[name], "a positive number up to 1e6", most=1e6, above=True)
        checks.number("beta", values["beta"], "a number from 0 to less than 1", most=math.nextafter(1, 0))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            checks.weights("a parameter", p, p.ndim, "a dense tensor of real numbers")
            rms = float(p.detach().double().square().mean().sqrt()) if p.numel() and not p.is_meta else 1.0
            checks.number("the root mean square of a parameter", rms, "finite")
            bound = min(group["p_scale"] * rms, torch.finfo(p.dtype).max)
            self.state[p] = {"t": 0, "v": torch.zeros_like(p), "bound": bound}

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
                checks.weights("a gradient", p.grad, p.ndim, "a dense tensor")
                state = self.state[p]
                state["t"] += 1
                c = math.sqrt(1 - group["beta"] ** state["t"])
                scalars = (group["lr"] * c, group["g_bound"] / c, state["bound"])
                if not p.is_contiguous():
                    update(p, p.grad, state["v"], group["beta"], *scalars)
                    continue
                flat = [t.view(-1) for t in (p, p.grad.contiguous(), state["v"])]
                if self.fused is not None:  # numbers that change would be compiled in; tensors are not
                    as_tensors = (torch.tensor(a, dtype=p.dtype, device=p.device) for a in scalars)
                    self.fused(*flat, group["beta"], *as_tensors)  # type: ignore[call-arg]
                    continue
                chunk = p.numel() if kernels.waits(p) else CHUNK
                for q, g, v in zip(*(t.split(chunk) for t in flat), strict=True):
                    update(q, g, v, group["beta"], *scalars)
        return loss


def update(p: Tensor, g: Tensor, v: Tensor, beta: float, rate: Any, g_bound: Any, bound: Any) -> None:
    """Madam's formula, in place on p and v. Where g = 0 the update is 0, also when v = 0 (0/0 = 0).

    With c = √(1 − βᵗ), so that √v̂ = √v/c, `rate` is c·lr and `g_bound` the bound of ĝ divided by c, numbers or tensors.
    """
    v.mul_(beta).addcmul_(g, g, value=1 - beta)
    ghat = v.sqrt().clamp_min_(torch.finfo(v.dtype).tiny)
    torch.div(g, ghat, out=ghat).clamp_(-g_bound, g_bound)
    p.mul_(ghat.mul_(torch.sign(p)).mul_(-rate).exp_()).clamp_(-bound, bound)


def linear_decay(optimizer: Optimizer, epochs: int = 10) -> LinearLR:
    """The paper's schedule, stepped once an epoch: epoch e uses lr·(1 − 0.9·e/(epochs − 1)), from lr to lr/10."""
    checks.integer("epochs", epochs, 1)
    return LinearLR(optimizer, start_factor=1.0, end_factor=0.1 if epochs > 1 else 1.0, total_iters=max(epochs - 1, 1))


def loss(y_hat: Tensor, y: Tensor) -> Tensor:
    """½ Σ (ŷ − y)² / batch size, the paper's loss on the last layer's state."""
    if not (isinstance(y_hat, Tensor) and isinstance(y, Tensor)):
        raise TypeError(f"ŷ and the one-hot targets must be tensors, not {type(y_hat).__name__}, {type(y).__name__}")
    if y_hat.shape != y.shape or y.ndim == 0:
        raise ValueError(f"ŷ has shape {tuple(y_hat.shape)}, the one-hot targets {tuple(y.shape)}")
    if not y_hat.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise TypeError(f"ŷ and the one-hot targets must be real numbers, not {y_hat.dtype} and {y.dtype}")
    if len(y) == 0:
        raise ValueError("the loss of an empty batch is not defined; give at least one sample")
    return (y_hat - y).square().sum() / (2 * len(y))
