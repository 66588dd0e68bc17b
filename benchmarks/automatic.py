"""What `hop.solve(net, x)` gains by choosing its way itself, against plain even-odd updates, in the same run.

    python benchmarks/automatic.py [--json results/automatic.json]

Trained and untrained networks of the paper's sizes, batches of 1, 64 and 500 test images, both ways to the paper's 1e-4
with at most 400 iterations. Each batch size sees other images. The two ways alternate, in turns of order, and the ratio
of their CPU times is the median over the rounds. At a batch of 1 a round solves eight images, one after the other.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from forward import compare
from torch import Tensor
from tqdm import tqdm
from weights import WEIGHTS

import hoplib as hop
from hoplib.experiment.files import ROOT, load_network, write
from hoplib.experiment.run import versions
from hoplib.paper import LAYERS

BATCHES = {1: 8, 64: 1, 500: 1}  # size → how many of them a round solves
WORK: dict[str, Any] = {"max_iter": 400}  # an untrained network needs more than the paper's number
EVEN_ODD: dict[str, Any] = {"solver": hop.Picard(), "even_odd": True}


def networks() -> Iterator[tuple[str, str, hop.Network]]:
    """Name, "trained" or "untrained", and the network."""
    for depth, layers in LAYERS.items():
        yield f"{depth}-HAM", "trained", load_network(WEIGHTS / f"{depth}-HAM-EO-seed-0-half.safetensors", "cpu")
        yield f"{depth}-HAM", "untrained", hop.HAM(layers, seed=0, device="cpu")
    chn = load_network(WEIGHTS / "3-CHN-EO-seed-0-half.safetensors", "cpu")
    yield "3-CHN", "trained", chn
    yield "3-CHN", "untrained", hop.CHN(LAYERS[3], seed=0, device="cpu")
    exact = hop.ExactCHN(LAYERS[3], device="cpu")
    exact.load_state_dict(chn.state_dict())  # Theorem 2: the same equilibria
    yield "3-ExactCHN", "trained", exact
    for depth, layers in LAYERS.items():
        yield f"{depth}-ExactCHN", "untrained", hop.ExactCHN(layers, seed=0, device="cpu")


def measure(net: hop.Network, batches: list[Tensor], seconds: float) -> dict[str, float]:
    """Iterations and evaluations of both ways, and the median of their ratio in CPU time."""
    found: dict[str, list[hop.Solution]] = {}

    def way(name: str, **options: Any) -> Callable[[], None]:
        hop.solve(net, batches[0][:8], **options, **WORK)  # so that the loops are compiled

        def run() -> None:
            found[name] = [hop.solve(net, x, **options, **WORK) for x in batches]

        return run

    ways = {"plain": way("plain", **EVEN_ODD), "automatic": way("automatic")}
    there = compare(ways, seconds / 2, rounds=1)
    back = compare(dict(reversed(ways.items())), seconds / 2, rounds=1)
    times = {name: there[name] + back[name] for name in ways}
    numbers = {name: torch.cat([sol.iterations for sol in sols]).double().mean().item() for name, sols in found.items()}
    images = sum(map(len, batches))
    ratios = [a / p for a, p in zip(times["automatic"], times["plain"], strict=True)]
    return {
        "iterations_plain": numbers["plain"],
        "iterations_automatic": numbers["automatic"],
        "milliseconds_plain": 1e3 * statistics.median(times["plain"]) / images,
        "milliseconds_automatic": 1e3 * statistics.median(times["automatic"]) / images,
        "time_ratio": statistics.median(ratios),
        "rounds": len(ratios),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES), choices=BATCHES)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each way; at least one round in each order")
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "automatic.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    images, lines = hop.load_data("mnist", device="cpu").test.x, []
    for name, state, net in tqdm(list(networks()), desc="networks"):
        net.requires_grad_(False)
        for size in args.batches:
            batches = list(images[size : size + size * BATCHES[size]].split(size))
            line = {"network": name, "state": state, "batch": size, **measure(net, batches, args.seconds)}
            lines.append(line)
            tqdm.write(
                f"{name:12}{state:10}{size:5}  iterations {line['iterations_plain']:6.1f} → "
                f"{line['iterations_automatic']:6.1f}  time × {line['time_ratio']:.2f} ({line['rounds']} rounds)"
            )
    write(args.json, {**versions(), **WORK, "lines": lines})


if __name__ == "__main__":
    main()
