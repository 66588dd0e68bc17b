"""Training a row of the table, and measuring it: checkpoints that resume bitwise, and the record of a run.

A training is a row and a seed. It may be killed at any instant: after each epoch a checkpoint is put in place
atomically, and the record, written last, is what tells that a run is done.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from . import kernels
from .data import Data, load_data
from .equilibrium import RecurrentBackprop, attach, solve
from .madam import Madam, linear_decay, loss
from .measure import look, measure, readout
from .network import HAM, EvenOdd, Network, Synchronous, default_device
from .records import (
    RunError,
    atomic,
    read_checkpoint,
    record_path,
    save_network,
    why_not,
    write,
    write_checkpoint,
    write_record,
)
from .solvers import Anderson, Picard, Solution, iterate
from .table import EPOCHS, MODELS, SOLVERS, TOL, Config, Row

FINISH = Anderson(m=5, mu=1e-8, relative=True, plain_steps=1, safeguard=False)
FINISH_STEPS = 20
KEPT = (1, 5)  # the epochs after which the weights are kept, besides the last: what a step costs depends on them


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


def equilibrium(net: Network, x: Tensor, row: Row, tol: float) -> Solution:
    """s* with the paper's gradient: as the paper does with tol = 0, else the same equilibrium and gradient for less.

    Each sample is iterated by the row's own solver until the paper's criterion, within the paper's number of
    iterations. Where that was met, Anderson without safeguard finds the digits from there to tol, and the gradient is
    in closed form; the others, often in limit cycles, get the paper's unrolled steps.

    The output of a synchronous HAM, hence the gradient, depends on one half of it alone, an even-odd network that under
    Picard iteration never meets the other half (Appendix E): k steps are k/2 sweeps of that half.
    """
    solver, even_odd = SOLVERS[row.solver], row.even_odd
    n, k = net.max_iter(even_odd), net.backward_steps(even_odd)
    if tol == 0:
        return solve(net, x, solver, even_odd=even_odd, early_stop=False, backward=RecurrentBackprop(k))
    with torch.no_grad():
        half = isinstance(net, HAM) and not even_odd
        f = EvenOdd(net, x) if half or even_odd else Synchronous(net, x, net.damping)
        own = Synchronous(net, x, like=f) if half and type(solver) is not Picard else f
        sol = iterate(own, own.start(), solver, max_iter=n // 2 if half and own is f else n, tol=TOL)
        z = sol.state if own is f else f.cut(sol.state)
        near = sol.converged.nonzero().flatten()
        end = iterate(f.restrict(near), z[near], FINISH, max_iter=FINISH_STEPS, tol=tol)
        good = end.residual < sol.residual[near]
        z[near] = torch.where(good[:, None], end.state, z[near])
        sol.residual[near] = torch.where(good, end.residual, sol.residual[near])
        sol.evaluations += end.evaluations
    backward = RecurrentBackprop(k // 2 if half else k, closed_form=TOL)
    sol.net, sol.state = net, attach(backward, f, x, z, sol.residual)
    return sol


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
        self.schedule = linear_decay(self.optimizer, EPOCHS)
        self.history: list[dict[str, float]] = []

    @property
    def epoch(self) -> int:
        """The number of epochs trained."""
        return len(self.history)

    def gradients(self, x: Tensor, y: Tensor) -> tuple[Solution, Tensor, Tensor]:
        """Those of the loss of one batch, left with the parameters; its solution, predictions ŷ and loss."""
        sol = equilibrium(self.net, x, self.config.row, self.config.tol)
        y_hat = readout(self.net, sol.state, self.config.row)
        value = loss(y_hat, y)
        self.optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        return sol, y_hat.detach(), value.detach()

    def step(self, x: Tensor, y: Tensor) -> tuple[Solution, Tensor, Tensor]:
        """One update of the weights by one batch; its solution, predictions ŷ and loss."""
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


# -- a run ------------------------------------------------------------------------------------------------------


def load_checkpoint(training: Training, path: Path) -> bool:
    """Go on from a checkpoint of the same configuration and numerics; False if there is none, or a damaged one."""
    if not path.exists():
        return False
    state = read_checkpoint(path, training.device)
    if state is None:
        warnings.warn(f"the checkpoint {path} is damaged and not used: training starts anew", stacklevel=2)
        return False
    if state.get("fingerprint") != training.config.fingerprint:
        return False
    training.load_state_dict(state)
    return True


def keep(training: Training, path: Path) -> None:
    """The network as it is now, with its configuration."""
    save_network(training.net, path, training=training.config.settings(), epoch=training.epoch)


def record(training: Training, name: str, numbers: dict[str, Any], seconds: dict[str, Any]) -> dict[str, Any]:
    """What is known of a run: its numbers, its history, its configuration, and where and how long it ran."""
    config, history = training.config, training.history
    return {
        "row": name,
        "seed": config.seed,
        "data": config.data,
        "epoch": training.epoch,
        **numbers,
        "seconds": {
            "training": sum(h["seconds"] for h in history),
            "training_cpu": sum(h["cpu_seconds"] for h in history),
            **seconds,
        },
        "history": history,
        "config": config.settings(),
        "versions": versions(),
        "device": device_name(training.device),
        "fused": training.fused,
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    from . import __version__

    found = {"hoplib": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return found if kernels.numba is None else {**found, "numba": kernels.numba.__version__}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def can_compile() -> bool:
    """Is there the C++ compiler that torch.compile needs?"""
    return any(shutil.which(c) for c in (os.environ.get("CXX") or "g++", "clang++"))


def run(
    config: Config,
    rows: dict[str, int],
    runs: Path,
    checkpoints: Path,
    *,
    device: torch.device | str | None = None,
    fused: bool | None = None,
    report: Callable[[Progress], object] = lambda _: None,
    data: Data | None = None,
) -> list[Path]:
    """Train until every record (name → epoch) is there, from the last checkpoint if there is one.

    The names are those of `configure`: a run other than the table's has records of other names. The networks after some
    epochs and after the last stay in the folder weights/ beside `runs`.
    `fused=None` compiles the optimizer where a compiler is found and the run is long enough to repay it.
    """
    device = default_device() if device is None else torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError("device='cuda' is asked for, but torch sees no GPU; use device='cpu', or None for the default")
    last = max(rows.values())
    if fused is None:
        fused = can_compile() and last * (config.train_images // config.batch_size) >= 2000
    checkpoint = checkpoints / config.name / f"seed-{config.seed}.pt"
    for folder in (runs, checkpoint.parent):
        with atomic(folder / ".writable"):
            pass
        (folder / ".writable").unlink(missing_ok=True)
    with FileLock(checkpoint.with_suffix(".lock")):  # a second run of the same training waits, and finds it done
        return _run(config, rows, runs, checkpoint, device, fused, report, data)


def _run(
    config: Config,
    rows: dict[str, int],
    runs: Path,
    checkpoint: Path,
    device: torch.device,
    fused: bool,
    report: Callable[[Progress], object],
    data: Data | None,
) -> list[Path]:
    heartbeat = checkpoint.with_suffix(".progress")
    paths = {name: record_path(runs, name, config.seed) for name in rows}
    missing = {name: epoch for name, epoch in rows.items() if why_not(paths[name], config, epoch)}
    training = Training(config, device, fused)
    if missing and load_checkpoint(training, checkpoint) and training.epoch > min(missing.values()):
        training = Training(config, device, fused)  # past the epoch of a missing record: from the start
    if missing and data is None:
        data = load_data(config.data, device=device)

    def beat(progress: Progress) -> None:
        with contextlib.suppress(RunError):  # a lost heartbeat costs nothing
            write(heartbeat, asdict(progress))
        report(progress)

    while missing:
        assert data is not None
        for name in [name for name, epoch in missing.items() if epoch == training.epoch]:
            numbers, arrays, seconds = measure(training.net, config.row, data, config.test_images)
            if training.epoch == max(rows.values()):
                keep(training, runs.parent / "weights" / name / f"seed-{config.seed}.safetensors")
            write_record(paths[name], record(training, name, numbers, seconds), arrays)
            del missing[name]
        if missing:
            training.train_epoch(data, max(missing.values()), beat)
            write_checkpoint(checkpoint, training.state_dict())
            if training.epoch in KEPT:
                part = f"seed-{config.seed}-epoch-{training.epoch}.safetensors"
                keep(training, runs.parent / "weights" / config.name / part)
    heartbeat.unlink(missing_ok=True)
    for name, path in paths.items():
        if reason := why_not(path, config, rows[name]):
            raise RunError(f"the record {path} is not valid after the run ({reason})")
    if training.epoch == 0:
        warnings.warn("all records are there already: nothing was trained", stacklevel=2)
    return list(paths.values())
