"""Train the playground's three small networks: `python -m playground.train` writes playground/networks.safetensors.

Even-odd HAMs on MNIST, small enough to travel inside a page, in half precision. All that the page says about them is
measured here, of the weights as they are stored. The same machine and versions give the same file, in some 8 minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

import hoplib as hop
from hoplib.data import Data
from hoplib.experiment.config import Config
from hoplib.experiment.files import write
from hoplib.experiment.rows import Row
from hoplib.experiment.train import Training
from hoplib.paper import LR, TOL

from . import ways

LAYERS = {3: (784, 96, 10), 5: (784, 96, 64, 32, 10), 7: (784, 80, 96, 96, 64, 48, 10)}
EPOCHS = 5
OMEGAS = [1 + i / 20 for i in range(1, 16)]
LOOK = 1000  # images: of the training set to choose ω, of the test set to count iterations
MAX_ITER = 200  # as on the page
EACH, CYCLING = 2, 4  # sample digits: of each class, and such that synchronous updates never settle


def train(layers: tuple[int, ...], data: Data) -> hop.HAM:
    """As a row of the table, but with all its learning rates in a few epochs; rounded to half precision."""
    config = Config(Row("HAM", layers, "picard", True, LR[len(layers)]))
    training = Training(config, torch.device("cpu"))
    training.schedule = hop.linear_decay(training.optimizer, EPOCHS)
    for _ in range(EPOCHS):
        training.train_epoch(data, EPOCHS, lambda _: None)
        print(f"{len(layers)} layers, epoch {training.epoch}: {training.history[-1]['test_accuracy']:.1%}", flush=True)
    net = hop.HAM(layers, device="cpu", dtype=torch.float64).requires_grad_(False)
    net.load_state_dict({k: t.half().double() for k, t in training.net.state_dict().items()})
    return net


def best_omega(net: hop.HAM, x: Tensor) -> float:
    """The ω of the over-relaxed sweep with the fewest iterations on average."""

    def mean(omega: float) -> float:
        f = hop.EvenOdd(net, x, omega, clipped=True)
        sol = hop.iterate(f, f.start(), hop.Picard(), max_iter=MAX_ITER, tol=TOL)
        return sol.iterations.double().mean().item()

    return min(OMEGAS, key=mean)


def facts(net: hop.HAM, data: Data) -> dict[str, Any]:
    """What the page says about a network."""
    sol = hop.solve(net, data.test.x, even_odd=True, max_iter=MAX_ITER)
    omega = best_omega(net, data.train.x[:LOOK])
    solved = ways.settle(net, data.test.x[:LOOK], omega, MAX_ITER)
    return {
        "layers": list(net.layers),
        "epochs": EPOCHS,
        "test_accuracy": (sol.output.argmax(1) == data.test.label).double().mean().item(),
        "omega": omega,
        "images": LOOK,
        # as the page counts: all that were made
        "iterations": {name: s.iterations.double().mean().item() + 2 for name, s in solved.items()},
        "not_settled": {name: 1 - s.converged.double().mean().item() for name, s in solved.items()},
    }


def choose(net: hop.HAM, data: Data, omega: float) -> tuple[list[int], list[int]]:
    """The first test images of each class; and the first that only synchronous updates cannot settle."""
    label = data.test.label
    chosen = [int(i) for c in range(10) for i in (label == c).nonzero().flatten()[:EACH]]
    sync, *others = ways.settle(net, data.test.x[:LOOK], omega, MAX_ITER).values()
    settled = torch.stack([s.converged & (s.output.argmax(1) == label[:LOOK]) for s in others]).all(0)
    only = (sync.status == hop.Status.CYCLING) & settled
    return chosen, only.nonzero().flatten()[:CYCLING].tolist()


def main(path: Path = ways.FILE) -> None:
    torch.set_num_threads(1)
    data = hop.load_data("mnist", device="cpu")
    double = hop.load_data("mnist", device="cpu", dtype=torch.float64)
    tensors: dict[str, Tensor] = {}
    known: dict[int, dict[str, Any]] = {}
    for depth, layers in LAYERS.items():
        net = train(layers, data)
        tensors |= {f"{depth}.{k}": t.half().contiguous() for k, t in net.state_dict().items()}
        known[depth] = facts(net, double)
        print(json.dumps(known[depth]), flush=True)
    usual, cycling = choose(net, double, known[depth]["omega"])  # of the deepest
    chosen = usual + cycling
    tensors["samples"] = (data.test.x[chosen] * 255).round().to(torch.uint8)
    tensors["labels"] = data.test.label[chosen].to(torch.uint8)
    tensors["mean"] = (data.train.x.mean(0) * 255).round().to(torch.uint8)
    write(path, save(tensors, {"networks": json.dumps(known), "cycling": str(len(cycling))}))


if __name__ == "__main__":
    main()
