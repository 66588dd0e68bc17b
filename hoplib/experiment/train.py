"""Training a row of the table: the equilibrium with the paper's gradient, and all batches of an epoch.

The state of a training can be saved and loaded after any epoch: what follows is the same, bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .. import paper
from ..data import Data
from ..equilibrium import RecurrentBackprop, solve
from ..madam import Madam, linear_decay, loss
from ..network import Network, default_device
from ..relaxation import OverRelaxed, best_omega
from ..solvers import Anderson, Picard, Solution, Then
from .config import Config
from .files import RunError
from .measure import look, readout
from .rows import MODELS, SOLVERS, Row

FINISH = Anderson(m=5, mu=1e-8, relative=True, safeguard=False)
RETUNE = 50  # steps after which over-relaxation chooses its ω anew: that costs about as much as a third of a step


@dataclass
class Progress:
    """Where a training stands: what progress bars and `make status` show."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float = math.nan
    accuracy: float = math.nan
    iterations: float = math.nan
    seconds_left: float = math.nan
    time: float = field(default_factory=time.time)


# -- the equations of training ----------------------------------------------------------------------------------


def equilibrium(net: Network, x: Tensor, row: Row, tol: float, omega: float | None = None) -> Solution:
    """s* with the paper's gradient: as the paper does with tol = 0, else the same equilibrium and gradient for less.

    Each sample is iterated by the row's own solver until the paper's criterion, within the paper's number of
    iterations. Where that was met, Anderson without safeguard finds the digits from there to tol, and the gradient is
    in closed form; the others, often in limit cycles, get the paper's unrolled steps.

    The output of a synchronous HAM, hence the gradient, depends on one half of it alone, an even-odd network that under
    Picard iteration never meets the other half (Appendix E): k steps are k/2 sweeps of that half.

    Over-relaxed, with ω = `omega`, a sample goes on in its own way to tol, and half as many terms give the gradient,
    since the adjoint sweeps are over-relaxed too.
    """
    solver, even_odd = SOLVERS[row.solver], row.even_odd
    n, k = paper.max_iter(net, even_odd), paper.backward_steps(net, even_odd)
    if tol == 0:
        return solve(net, x, solver, even_odd=even_odd, early_stop=False, backward=RecurrentBackprop(k))
    if row.solver == "over-relaxed":
        over = OverRelaxed(best_omega(net, x) if omega is None else omega)
        backward = RecurrentBackprop(k // 2, closed_form=paper.TOL)
        return solve(net, x, Then(over, over, backwards=True), even_odd=True, tol=tol, backward=backward)
    undamped = (paper.relaxation(net, even_odd) if solver.relaxation is None else solver.relaxation) == 1
    halves = not even_odd and undamped and not net.rule(net.rho, True).memory
    if halves and isinstance(solver, Picard):
        even_odd, n = True, n // 2
    how = Then(solver, FINISH, even_odd=even_odd or halves, backwards=True)
    backward = RecurrentBackprop(k // 2 if halves else k, closed_form=paper.TOL)
    return solve(net, x, how, even_odd=even_odd, max_iter=n, tol=tol, backward=backward)


@dataclass
class Training:
    """The state of a training: network, optimizer, schedule, generator, and the history of its epochs."""

    config: Config
    device: torch.device = field(default_factory=default_device)
    fused: bool = False

    def __post_init__(self) -> None:
        self.generator = torch.Generator("cpu").manual_seed(self.config.seed)
        row = self.config.row
        self.net = MODELS[row.model](row.layers, seed=self.generator, device=self.device)
        self.optimizer = Madam(self.net.parameters(), lr=row.lr, fused=self.fused)
        self.schedule = linear_decay(self.optimizer, paper.EPOCHS)
        self.history: list[dict[str, float]] = []
        self.omega: float | None = None  # of over-relaxation: chosen anew every so many steps of an epoch
        self.taken = 0

    @property
    def epoch(self) -> int:
        """The number of epochs trained."""
        return len(self.history)

    def gradients(self, x: Tensor, y: Tensor) -> tuple[Solution, Tensor, Tensor]:
        """Those of the loss of one batch, left with the parameters; its solution, predictions ŷ and loss."""
        sol = equilibrium(self.net, x, self.config.row, self.config.tol, self.omega)
        y_hat = readout(self.net, sol.state, self.config.row)
        value = loss(y_hat, y)
        self.optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        return sol, y_hat.detach(), value.detach()

    def step(self, x: Tensor, y: Tensor) -> tuple[Solution, Tensor, Tensor]:
        """One update of the weights by one batch; its solution, predictions ŷ and loss."""
        if self.config.row.solver == "over-relaxed" and self.taken % RETUNE == 0:
            self.omega = best_omega(self.net, x)
        self.taken += 1
        found = self.gradients(x, y)
        self.optimizer.step()
        return found

    def train_epoch(self, data: Data, epochs: int, report: Callable[[Progress], object]) -> None:
        """All batches once, in an order that the generator draws."""
        c = self.config
        train = replace(data.train, **{k: getattr(data.train, k)[: c.train_images] for k in ("x", "y", "label")})
        steps, looked = c.train_images // c.batch_size, 0.0
        start, cpu, before = time.perf_counter(), time.process_time(), sum(h["seconds"] for h in self.history)
        names = "loss", "accuracy", "iterations", "not_converged"
        self.taken = 0
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for i, (x, y) in enumerate(train.batches(c.batch_size, generator=self.generator), 1):
            sol, y_hat, value = self.step(x, y)
            right = (y_hat.argmax(1) == y.argmax(1)).double().mean()
            away = 1 - sol.converged.double().mean()
            sums += torch.stack([value.double(), right, sol.iterations.double().mean(), away])
            seconds = time.perf_counter() - start
            if seconds - looked > 0.5 or i == steps:  # now and then: a look waits for the device
                looked = seconds
                if not math.isfinite(sums[0]):
                    raise RunError(f"the loss is no longer finite in epoch {self.epoch + 1}, step {i}")
                done, total = self.epoch * steps + i, epochs * steps
                left = (before + seconds) / done * (total - done)
                value_, right_, iterations, _ = (sums / i).tolist()
                report(Progress(self.epoch + 1, epochs, i, steps, value_, right_, iterations, left))
        self.schedule.step()
        times = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        numbers = dict(zip(names, (sums / steps).tolist(), strict=True))
        self.history.append({**numbers, **look(self.net, c.row, data, c.test_images), **times})

    def state_dict(self) -> dict[str, Any]:
        return {
            "fingerprint": self.config.fingerprint,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "generator": self.generator.get_state(),
            "history": self.history,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.generator.set_state(state["generator"].cpu())
        self.history = state["history"]
