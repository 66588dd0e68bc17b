"""What is measured of a trained network: the paper's iterations to convergence, and what tells why.

`evaluate` is the paper's measurement on the test images. `cross` runs one network in every way of solving, which
separates what a solver does from what training with it does. `spectral_radius` predicts the iterations of a HAM.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import paper
from ..data import Data
from ..equilibrium import solve
from ..network import HAM, Network
from ..paper import TOL
from ..relaxation import OverRelaxed, best_omega, radius
from ..solvers import Anderson, Picard, Solver, Status, residual
from .rows import SOLVERS, Row

CRITERIA = tuple(10 ** (e / 2) for e in range(-16, -3))  # 1e-8 … 1e-2 in half decades
BINS = np.linspace(-8, 0, 401)  # of log10 residuals
FALSE = 1e-3  # an image that met the criterion with a larger error of the network's equation has converged to nothing
LOOK, CROSS, RADII = 1000, 1000, 200  # test images: after each epoch; in every way of solving; for the spectral radius
QUANTILES = {"median": 0.5, "95 %": 0.95, "max": 1.0}
TUNING = 64  # training images that choose ω
OMEGAS = (1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6)
WAYS: dict[str, tuple[bool, Solver]] = {  # name → even-odd or not, solver
    "synchronous": (False, Picard()),
    "synchronous, Anderson": (False, Anderson()),
    "even-odd": (True, Picard()),
    "even-odd, Anderson": (True, Anderson()),
    **{f"even-odd, omega {w:g}": (True, Picard(w)) for w in OMEGAS},
}

Numbers = dict[str, Any]
Arrays = dict[str, NDArray[Any]]


def readout(net: Network, s: Tensor, row: Row) -> Tensor:
    """ŷ: the last layer, or for the rows 'as published' the last ten neurons of the last odd layer."""
    return net.output(s) if row.readout == "output" else net.layer(s, net.odd[-1])[:, -10:]


def tuned(net: Network, row: Row, data: Data) -> Solver:
    """The row's solver; over-relaxation with the ω that suits the network best on some training images."""
    if row.solver != "over-relaxed":
        return SOLVERS[row.solver]
    return OverRelaxed(best_omega(net, data.train.x[:TUNING], TUNING))


def ways(row: Row) -> dict[str, tuple[bool, Solver]]:
    """All ways of solving, and the row's own where that is over-relaxation."""
    return {**WAYS, "over-relaxed": (True, SOLVERS[row.solver])} if row.solver == "over-relaxed" else WAYS


@torch.no_grad()
def evaluate(net: Network, row: Row, data: Data, images: int = 10_000, batch: int = 500) -> tuple[Numbers, Arrays]:
    """The paper's measurement on the test images: all iterations for all samples, every residual counted.

    iterations of a sample: the first i whose residual is below 1e-4, n − 1 where none is. `equation_error` is
    ‖f(s, x) − s‖/‖f(s, x)‖ of the synchronous equation at the final state: whether what converged is an equilibrium.
    """
    x, label = data.test.x[:images], data.test.label[:images]
    n, solver = paper.max_iter(net, row.even_odd), tuned(net, row, data)
    counts = np.zeros((n - 1, len(BINS) - 1), np.int64)
    predicted, errors, reached = [], [], []
    for i in range(0, len(x), batch):
        part = x[i : i + batch]
        sol = solve(net, part, solver, even_odd=row.even_odd, tol=TOL, early_stop=False, trace=True)
        assert sol.residuals is not None
        predicted.append(readout(net, sol.state, row).argmax(1))
        errors.append(residual(net.step(sol.state, part), sol.state))
        reached.append(torch.stack([_first_below(sol.residuals, c) for c in CRITERIA]))
        for k, values in enumerate(sol.residuals.double().log10().cpu().numpy()):
            counts[k] += np.histogram(values[np.isfinite(values)], BINS)[0]
    iterations = torch.cat(reached, 1)  # (criteria, images)
    at_tol, error, said = iterations[CRITERIA.index(TOL)], torch.cat(errors).double(), torch.cat(predicted)
    mean, met = at_tol.double().mean().item(), at_tol < n - 1
    per_iteration, per_input = net.multiply_adds(), net.layers[0] * net.layers[1]
    numbers: Numbers = {
        "test_accuracy": _share(said == label),
        "iterations_mean": mean,
        "iterations_std": at_tol.double().std(correction=0).item(),
        "not_converged": _share(~met),
        "false_convergence": _share(met & ~(error <= FALSE)),
        "criteria": {f"{c:.3g}": m for c, m in zip(CRITERIA, iterations.double().mean(1).tolist(), strict=True)},
        "equation_error": _quantiles(error),
        "multiply_adds": {
            "iteration": per_iteration,
            "input": per_input,
            "solve": per_input + mean * per_iteration,
        },
    }
    if row.solver == "over-relaxed":
        numbers["omega"] = solver.relaxation
    tenths = (10 * error.log10()).nan_to_num(127, posinf=127, neginf=-128).round().clamp(-128, 127)
    arrays: Arrays = {
        "histogram": counts.astype(np.uint16),  # (iterations, 400): images, by log10 residual
        "iterations": at_tol.cpu().numpy().astype(np.uint16),  # (images,): to 1e-4
        "predicted": said.cpu().numpy().astype(np.uint8),  # (images,): class
        "equation_error": tenths.cpu().numpy().astype(np.int8),  # (images,): 10 log10 of the error; 127: not finite
    }
    return numbers, arrays


@torch.no_grad()
def cross(net: Network, row: Row, data: Data, images: int = CROSS) -> tuple[Numbers, Arrays, dict[str, float]]:
    """The network in every way of solving, each image until the criterion; and the CPU seconds of each way."""
    x, label = data.test.x[:images], data.test.label[:images]
    numbers, iterations, seconds = {}, [], {}
    for name, (even_odd, solver) in ways(row).items():
        solver = tuned(net, row, data) if name == "over-relaxed" else solver
        start = time.process_time()
        sol = solve(net, x, solver, even_odd=even_odd, tol=TOL)
        seconds[name] = time.process_time() - start
        error = residual(net.step(sol.state, x), sol.state)
        numbers[name] = {
            "iterations": sol.iterations.double().mean().item(),
            "not_converged": _share(~sol.converged),
            "not_finite": _share(sol.status == Status.NOT_FINITE),
            "false_convergence": _share(sol.converged & ~(error <= FALSE)),
            "accuracy": _share(readout(net, sol.state, row).argmax(1) == label),
        }
        iterations.append(sol.iterations.cpu().numpy().astype(np.uint16))
    return numbers, {"cross_iterations": np.stack(iterations)}, seconds  # (ways, images)


@torch.no_grad()
def spectral_radius(net: Network, x: Tensor, steps: int = 40) -> Tensor:
    """The spectral radius of a HAM's even-odd Jacobian at s*, for each input, in float64 (Section 3.5)."""
    net, x = copy.deepcopy(net).double(), x.double()
    s = solve(net, x, even_odd=True, tol=1e-10, max_iter=5 * paper.max_iter(net, True)).state
    return radius(net, x, s, steps)


def measure(net: Network, row: Row, data: Data, images: int) -> tuple[Numbers, Arrays, dict[str, Any]]:
    """All that a record holds: its numbers, its arrays, and the seconds that parts of the measurement took."""
    wall, cpu = time.perf_counter(), time.process_time()
    numbers, arrays = evaluate(net, row, data, images)
    seconds: dict[str, Any] = {"evaluation": time.perf_counter() - wall, "evaluation_cpu": time.process_time() - cpu}
    numbers["cross"], crossed, seconds["cross_cpu"] = cross(net, row, data, min(images, CROSS))
    arrays |= crossed
    if isinstance(net, HAM):
        radii = spectral_radius(net, data.test.x[: min(images, RADII)])
        numbers["spectral_radius"] = _quantiles(radii)
        arrays["spectral_radius"] = radii.cpu().numpy().astype(np.float32)
    return numbers, arrays, seconds


def look(net: Network, row: Row, data: Data, images: int) -> dict[str, float]:
    """The numbers of an epoch: those of the measurement, on the first test images."""
    found, _ = evaluate(net, row, data, min(images, LOOK))
    names = ("test_accuracy", "iterations_mean", "not_converged", "false_convergence")
    return {f"test_{name.removeprefix('test_').removesuffix('_mean')}": found[name] for name in names}


def _first_below(residuals: Tensor, tol: float) -> Tensor:
    """The first i with residuals[i] < tol, else the number of residuals; per sample."""
    below = residuals < tol
    return torch.where(below.any(0), below.int().argmax(0), len(residuals))


def _quantiles(values: Tensor) -> dict[str, float]:
    return dict(zip(QUANTILES, values.quantile(values.new_tensor([*QUANTILES.values()])).tolist(), strict=True))


def _share(which: Tensor) -> float:
    return which.double().mean().item()
