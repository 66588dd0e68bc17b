"""Why a training of CHN-EO as published can get stuck: the first epoch of it, by the short way and to the letter.

    python benchmarks/published.py [--seeds 0 1 …] [--steps 937]     writes results/published.json

The published readout takes ŷ from ten hidden neurons. No target holds the neurons of the output layer then, and their
fields may grow beyond the threshold above which the paper's local steps cycle (notebook 04). For each training: the
longest gradient, the first step at which a gradient is longer than LONG, and how many fields of output neurons are
beyond the threshold after the epoch.
"""

from __future__ import annotations

import argparse
import math
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import hoplib as hop
from hoplib.experiment.config import configure
from hoplib.experiment.files import ROOT, write
from hoplib.experiment.measure import LOOK, look
from hoplib.experiment.rows import SHORT
from hoplib.experiment.run import can_compile
from hoplib.experiment.train import Training
from hoplib.teaching import thresholds

TRAININGS = ["3-CHN-EO", "3-CHN-EO-published", "3-CHN-EO-DEQ", "3-CHN-EO-DEQ-published"]
WAYS = {"short": SHORT, "to the letter": 0.0}
LONG = 100  # a gradient is about 1 long


@torch.no_grad()
def output_fields(net: hop.Network, x: torch.Tensor) -> torch.Tensor:
    """The fields of the output neurons at what an even-odd solve comes to."""
    s = hop.solve(net, x, hop.Picard(), even_odd=True, early_stop=False).state
    return net.field(s, x)[:, -net.layers[-1] :]


def first_epoch(name: str, seed: int, steps: int, data: hop.Data, tol: float) -> dict[str, Any]:
    config, _ = configure(name, seed, tol=tol)
    training = Training(config, fused=can_compile() and steps > 100)
    lengths = []
    for x, y in islice(data.train.batches(config.batch_size, generator=training.generator), steps):
        training.step(x, y)
        lengths.append(math.hypot(*(float(p.grad.norm()) for p in training.net.parameters() if p.grad is not None)))
    fields, limit = output_fields(training.net, data.test.x[:LOOK]), thresholds(training.net.rho)[1]
    return {
        "steps": len(lengths),
        "longest gradient": max(lengths),
        "first long gradient": next((i for i, length in enumerate(lengths, 1) if not length <= LONG), None),
        "accuracy": look(training.net, config.row, data, LOOK)["test_accuracy"],
        "fields beyond": float((fields > limit).double().mean()),
        "largest field": float(fields.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=937, help="of training: an epoch has 937")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "published.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = hop.load_data("mnist")
    found: list[dict[str, Any]] = []
    asked = [(n, s, w) for s, n, w in product(args.seeds, TRAININGS, WAYS) if n.endswith("published") or w == "short"]
    for name, seed, way in tqdm(asked, desc="first epochs"):
        numbers = first_epoch(name, seed, args.steps, data, WAYS[way])
        found.append({"training": name, "seed": seed, "way": way, **numbers})
        write(args.output, {"threshold": thresholds(hop.ShiftedSigmoid())[1], "long": LONG, "runs": found})
        tqdm.write(str(found[-1]))


if __name__ == "__main__":
    main()
