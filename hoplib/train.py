"""Training a row of the table, and measuring it: checkpoints that resume bitwise, and the record of a run.

A training is a row and a seed. It may be killed at any instant: after each epoch a checkpoint is put in place
atomically, and the record, written last, is what tells that a run is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import platform
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from . import kernels
from .data import SOURCES, Data, load_data
from .equilibrium import RecurrentBackprop, attach, solve
from .madam import Madam, linear_decay, loss
from .maps import EvenOdd, Synchronous
from .network import Network, default_device
from .solvers import Anderson, Picard, Solution, iterate, residual
from .table import EPOCHS, MODELS, ROWS, SOLVERS, TRAININGS, Row, get_row

NUMERICS = 3  # raise it with every change that changes a trained network: older records and checkpoints are then void
CRITERIA = tuple(10 ** (e / 2) for e in range(-16, -3))  # 1e-8 … 1e-2 in half decades
BINS = np.linspace(-8, 0, 401)  # of log10 residuals
TOL = 1e-4  # the paper's criterion
FINISH = Anderson(m=5, mu=1e-8, relative=True, plain_steps=1, safeguard=False)
FINISH_STEPS = 20


class RunError(RuntimeError):
    """A run cannot go on; the message names the problem and the way out."""


@dataclass(frozen=True)
class Config:
    """Everything that determines the numbers of a training, but the epoch at which it is looked at."""

    row: Row
    seed: int = 0
    data: str = "mnist"
    train_images: int = 60_000
    test_images: int = 10_000
    batch_size: int = 64
    tol: float = 1e-6  # where training stops a sample, far below the criterion of the measurement; 0: to the letter

    def __post_init__(self) -> None:
        layers = self.row.layers
        if layers[0] != 784 or layers[-1] != 10:
            raise ValueError(f"digits need 784 input and 10 output neurons; got layers={list(layers)}")
        if self.data not in SOURCES:
            raise ValueError(f"unknown data set {self.data!r}; choose from {', '.join(SOURCES)}")
        counts = SOURCES[self.data].counts
        for name, least, most in (
            ("seed", 0, 2**31 - 1),
            ("batch_size", 1, self.train_images),
            ("train_images", 1, counts[0]),
            ("test_images", 1, counts[1]),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ValueError(f"{name} must be an integer from {least} to {most}, not {value!r}")
        if not 0 <= self.tol < TOL:
            raise ValueError(
                f"tol must lie between 0 (the paper's iterations, all of them) and {TOL:g}, the criterion of the "
                f"measurement; not {self.tol!r}"
            )

    def settings(self) -> dict[str, Any]:
        """As plain data, with all that the paper's protocol fixes by the row."""
        values = {**self.row.settings(), **asdict(replace(self, row=self.row))}
        values.pop("row")
        return json.loads(json.dumps({**values, "schedule": EPOCHS, "numerics": NUMERICS}))  # type: ignore[no-any-return]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()[:16]


def configure(
    row: str | Row, seed: int = 0, *, layers: Sequence[int] = (), epochs: int | None = None, **options: Any
) -> tuple[Config, dict[str, int]]:
    """The configuration of a row's training, and the rows that it measures: name → epoch.

    `row` is a name of the table or a Row of one's own. `layers` and `epochs` make a run smaller than the row's.
    """
    named = get_row(row) if isinstance(row, str) else row
    names = [n for n in TRAININGS.get(named.training, ()) if ROWS[n].epoch <= named.epoch]
    rows = {n: ROWS[n] for n in names} if isinstance(row, str) else {row.training: row}
    config = Config(replace(named, layers=tuple(layers) or named.layers), seed, **options)
    return config, {name: r.at(epochs).epoch for name, r in rows.items()}


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
        half = net.memoryless and not even_odd
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


def readout(net: Network, s: Tensor, row: Row) -> Tensor:
    """ŷ: the last layer, or for the rows 'as published' the last ten neurons of the last odd layer."""
    return net.layer(s, -1) if row.readout == "output" else net.layer(s, net.odd[-1])[:, -10:]


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
        steps, start, looked = c.train_images // c.batch_size, time.perf_counter(), 0.0
        before = sum(h["seconds"] for h in self.history)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for i, (x, y) in enumerate(train.batches(c.batch_size, generator=self.generator), 1):
            sol, y_hat, value = self.step(x, y)
            right = (y_hat.argmax(1) == y.argmax(1)).double().mean()
            sums += torch.stack([value.double(), right, sol.iterations.double().mean()])
            seconds = time.perf_counter() - start
            if seconds - looked > 0.5 or i == steps:  # now and then: a look waits for the device
                looked = seconds
                if not math.isfinite(sums[0]):
                    raise RunError(f"the loss is no longer finite in epoch {self.epoch + 1}, step {i}")
                done, total = self.epoch * steps + i, epochs * steps
                left = (before + seconds) / done * (total - done)
                value_, right_, iterations = (sums / i).tolist()
                report(Progress(self.epoch + 1, epochs, i, steps, value_, right_, iterations, left))
        self.schedule.step()
        numbers = dict(zip(("loss", "accuracy", "iterations"), (sums / steps).tolist(), strict=True))
        self.history.append({**numbers, "seconds": time.perf_counter() - start})

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


# -- the measurement --------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(net: Network, row: Row, data: Data, images: int = 10_000, batch: int = 500) -> dict[str, Any]:
    """The paper's measurement on the test images: all iterations for all samples, every residual kept.

    iterations of a sample: the first i whose residual is below 1e-4, n − 1 where none is. `equation_error` is
    ‖f(s, x) − s‖/‖s‖ of the synchronous equation at the final state: whether what converged is an equilibrium.
    """
    x, label = data.test.x[:images], data.test.label[:images]
    counts = np.zeros((net.max_iter(row.even_odd) - 1, len(BINS) - 1), np.int64)
    right, errors, reached = 0, [], []
    for i in range(0, len(x), batch):
        sol = solve(
            net, x[i : i + batch], SOLVERS[row.solver], even_odd=row.even_odd, tol=TOL, early_stop=False, trace=True
        )
        assert sol.residuals is not None
        right += int((readout(net, sol.state, row).argmax(1) == label[i : i + batch]).sum())
        errors.append(residual(net.step(sol.state, x[i : i + batch]), sol.state))
        reached.append(torch.stack([_first_below(sol.residuals, c) for c in CRITERIA]))
        log = sol.residuals.double().log10().cpu().numpy()
        for k, values in enumerate(log):
            counts[k] += np.histogram(values[np.isfinite(values)], BINS)[0]
    iterations = torch.cat(reached, 1).double()  # (criteria, images)
    at_tol = iterations[CRITERIA.index(TOL)]
    mean, std = at_tol.mean().item(), at_tol.std(correction=0).item()
    error = torch.cat(errors).double()
    quantiles = error.quantile(error.new_tensor([0.5, 0.95, 1.0]))
    per_iteration = net.multiply_adds()
    return {
        "test_accuracy": right / len(x),
        "iterations_mean": mean,
        "iterations_std": std,
        "not_converged": (at_tol == len(counts)).double().mean().item(),
        "criteria": {f"{c:.3g}": m for c, m in zip(CRITERIA, iterations.mean(1).tolist(), strict=True)},
        "equation_error": dict(zip(("median", "95 %", "max"), quantiles.tolist(), strict=True)),
        "multiply_adds": {
            "iteration": per_iteration,
            "input": net.layers[0] * net.layers[1],
            "solve": net.layers[0] * net.layers[1] + mean * per_iteration,
        },
        "histogram": counts,
    }


def _first_below(residuals: Tensor, tol: float) -> Tensor:
    """The first i with residuals[i] < tol, else the number of residuals; per sample."""
    below = residuals < tol
    return torch.where(below.any(0), below.int().argmax(0), len(residuals))


# -- files ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of `path` when all went well, and is removed otherwise."""
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        part.touch()
        yield part
        with part.open("rb") as f:
            os.fsync(f.fileno())
        os.replace(part, path)
    except OSError as e:
        raise RunError(f"cannot write {path}: {e.strerror or e}") from e
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def write(path: Path, content: bytes | dict[str, Any]) -> None:
    """Put bytes, or plain data as JSON, in a file, atomically."""
    with atomic(path) as part:
        part.write_bytes(content if isinstance(content, bytes) else (json.dumps(content, indent=1) + "\n").encode())


def save_checkpoint(training: Training, path: Path) -> None:
    memory = io.BytesIO()  # torch.save straight to a full disk raises no OSError
    torch.save(training.state_dict(), memory)
    write(path, memory.getvalue())


def load_checkpoint(training: Training, path: Path) -> bool:
    """Go on from a checkpoint of the same configuration and numerics; False if there is none. Runs no code."""
    if not path.exists():
        return False
    try:
        state = torch.load(path, map_location=training.device, weights_only=True)
        if state["fingerprint"] != training.config.fingerprint:
            return False
        training.load_state_dict(state)
    except Exception as e:  # whatever a damaged file makes the reader raise
        raise RunError(
            f"the checkpoint {path} is damaged ({type(e).__name__}). Delete it to train from the start; "
            "records that are already written stay."
        ) from e
    return True


def record_path(runs: Path, row: str, seed: int) -> Path:
    return runs / row / f"seed-{seed}.json"


def read_record(path: Path, config: Config, epoch: int) -> dict[str, Any] | None:
    """The record, if it is there and belongs to this configuration, epoch and version of the numerics."""
    return None if why_not(path, config, epoch) else json.loads(path.read_text())


def why_not(path: Path, config: Config, epoch: int) -> str:
    """Why the record at `path` does not count: missing, damaged, changed; "" if it does."""
    if not path.exists():
        return "missing"
    try:
        record = json.loads(path.read_text())
        with np.load(path.with_suffix(".npz")) as arrays:
            arrays["histogram"]
        settings = record["config"]
        for name in ("test_accuracy", "iterations_mean", "iterations_std", "not_converged"):
            float(record[name])
    except (OSError, ValueError, KeyError, TypeError):
        return "damaged"
    expected = config.settings()
    if settings.get("numerics") != NUMERICS:
        return f"numerics {settings.get('numerics')}, now {NUMERICS}"
    changed = [k for k in expected if settings.get(k) != expected[k]]
    if changed or record["epoch"] != epoch:
        return "changed: " + ", ".join(changed or ["epoch"])
    return ""


def write_record(runs: Path, name: str, training: Training, measured: dict[str, Any], seconds: float) -> Path:
    """The histogram as .npz, then the record: its presence means that the run is complete."""
    config, path = training.config, record_path(runs, name, training.config.seed)
    arrays = io.BytesIO()
    np.savez_compressed(arrays, histogram=measured["histogram"].astype(np.uint16), bins=BINS.astype(np.float32))
    write(path.with_suffix(".npz"), arrays.getvalue())
    record = {
        "row": name,
        "seed": config.seed,
        "data": config.data,
        "epoch": training.epoch,
        **{k: v for k, v in measured.items() if k != "histogram"},
        "seconds": {"training": sum(h["seconds"] for h in training.history), "evaluation": seconds},
        "history": training.history,
        "config": config.settings(),
        "versions": versions(),
        "device": device_name(training.device),
        "fused": training.fused,
        "threads": torch.get_num_threads(),
    }
    write(path, record)
    return path


def versions() -> dict[str, str]:
    from . import __version__

    found = {"hoplib": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return found if kernels.numba is None else {**found, "numba": kernels.numba.__version__}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def can_compile() -> bool:
    """Is there the C++ compiler that torch.compile needs?"""
    return any(shutil.which(c) for c in (os.environ.get("CXX") or "g++", "clang++"))


# -- a run ------------------------------------------------------------------------------------------------------


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
    """Train until every row (name → epoch of its measurement) has its record, from the last checkpoint if there is one.

    `fused=None` compiles the optimizer where a compiler is found and the run is long enough to repay it.
    """
    device = default_device() if device is None else torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError("device='cuda' is asked for, but torch sees no GPU; use device='cpu', or None for the default")
    last = max(rows.values())
    if fused is None:
        fused = can_compile() and last * (config.train_images // config.batch_size) >= 2000
    checkpoint = checkpoints / config.row.training / f"seed-{config.seed}.pt"
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
            start = time.perf_counter()
            measured = evaluate(training.net, config.row, data, config.test_images)
            write_record(runs, name, training, measured, time.perf_counter() - start)
            del missing[name]
        if missing:
            training.train_epoch(data, max(missing.values()), beat)
            save_checkpoint(training, checkpoint)
    heartbeat.unlink(missing_ok=True)
    for name, path in paths.items():
        if reason := why_not(path, config, rows[name]):
            raise RunError(f"the record {path} is not valid after the run ({reason})")
    if training.epoch == 0:
        warnings.warn("all records are there already: nothing was trained", stacklevel=2)
    return list(paths.values())
