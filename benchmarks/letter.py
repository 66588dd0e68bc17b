"""Is the short way of training the paper's? The gradients of both, on the same batches, along a training of every row.

    python benchmarks/letter.py [--rows 7-* …] [--steps 240] [--every 20]     writes results/letter.json

Each row is trained by the short way for some steps from its start. Every so often, and wherever the gradient is four
times as long as its median so far, the gradient is also computed to the letter: all iterations for every sample,
and the derivative along the paper's number of further steps. Then the same on some batches in a trained network.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from weights import find

import hoplib as hop
from hoplib.experiment.config import configure
from hoplib.experiment.files import ROOT, load_network, write
from hoplib.experiment.measure import readout
from hoplib.experiment.rows import BEYOND, SHORT, select
from hoplib.experiment.train import Training, equilibrium

SEED = 7  # none of the table's
TRAINED = 10  # batches in a trained network
LONG = 4  # times the median: a gradient that is looked at


def short(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """The gradient by which the rows are trained, flat."""
    training.gradients(x, y)
    return torch.cat([p.grad.flatten() for p in training.net.parameters() if p.grad is not None])


def to_the_letter(training: Training, x: Tensor, y: Tensor) -> Tensor:
    net, row = training.net, training.config.row
    value = hop.loss(readout(net, equilibrium(net, x, row, 0.0).state, row), y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(net.parameters()))])


def compared(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The cosine of the angle between two gradients, and the ratio of their lengths."""
    a, b = a.double(), b.double()
    return float(a @ b / (a.norm() * b.norm())), float(a.norm() / b.norm())


def measure(name: str, steps: int, every: int, data: hop.Data) -> dict[str, float]:
    """How far the two ways are from each other, at the worst of the batches that were looked at."""
    training, found, lengths = Training(configure(name, SEED, tol=SHORT)[0]), [], list[float]()
    batches = data.train.batches(64, generator=training.generator)
    for i, (x, y) in enumerate(islice(batches, steps), 1):
        g = short(training, x, y)
        lengths.append(float(g.norm()))
        if i % every == 0 or lengths[-1] > LONG * statistics.median(lengths):
            found.append(compared(g, to_the_letter(training, x, y)))
        training.optimizer.step()
    if (path := find(training.config.row, any_solver=True)) is not None:
        training.net.load_state_dict(load_network(path, training.device).state_dict())
        for x, y in islice(batches, TRAINED):
            found.append(compared(short(training, x, y), to_the_letter(training, x, y)))
    cosines, ratios = zip(*found, strict=True)
    return {
        "steps": steps,
        "compared": len(found),
        "least_cosine": min(cosines),
        "least_ratio": min(ratios),
        "largest_ratio": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", nargs="*", default=[], help="trainings, by name or prefix*; the paper's by default")
    parser.add_argument("--steps", type=int, default=240, help="of training")
    parser.add_argument("--every", type=int, default=20, help="so many steps one is compared")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "letter.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = hop.load_data("mnist")
    known = json.loads(args.output.read_text()) if args.output.exists() else {}
    names = [n for n in select(args.rows) if n not in BEYOND]  # the paper has no letter for those
    for name in tqdm(names, desc="trainings"):
        known[name] = measure(name, args.steps, args.every, data)
        write(args.output, known)
        tqdm.write(f"{name}: {known[name]}")


if __name__ == "__main__":
    main()
