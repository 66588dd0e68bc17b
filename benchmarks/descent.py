"""Thousands of random networks try to raise the energy in a clipped half-step; and how many end elsewhere.

    python benchmarks/descent.py [--networks 5000] [--json results/descent.json]

In float64: HAMs of 3 to 8 layers of 1 to 24 neurons, weights from 1/4 to 4 times Xavier's, starts from 0.1 to 10, ω up
to 1.95; 16 starts each. First the largest rise of the energy in 24 half-steps, clipped and not, in units of what the
rounding of the energy can be. Then over-relaxed and plain even-odd updates from the same starts, each to 1e-9: do they
end at the same equilibrium? Notebook 11 does the first with fewer networks and has the proof.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import trange

import hoplib as hop
from hoplib import teaching
from hoplib.experiment.files import ROOT, write
from hoplib.experiment.run import versions

SAMPLES, HALF_STEPS = 16, 24
GAINS = [0.25, 0.5, 1.0, 2.0, 4.0]
SOLVED = {"tol": 1e-9, "max_iter": 3000}
ELSEWHERE = 1e-3  # relative distance of two equilibria


def case(k: int) -> tuple[hop.HAM, Tensor, Tensor, float, float]:
    """Random network k, its inputs and starts, ω and the factor on its weights."""
    g = np.random.default_rng(k)
    layers = g.integers(1, 25, g.integers(3, 9)).tolist()
    gain, spread, omega = 4 ** g.uniform(-1, 1), 10 ** g.uniform(-1, 1), g.uniform(1, 1.95)
    net = teaching.network(hop.HAM, layers, gain=gain, seed=k)
    x, s = teaching.draw(SAMPLES, layers[0], seed=k + 1), spread * teaching.draw(SAMPLES, net.N, seed=k)
    return net, x, s, omega, gain


def rise(net: hop.HAM, x: Tensor, s: Tensor, omega: float, clipped: bool) -> float:
    """The largest rise of the energy in a half-step, in units of its rounding."""
    f = hop.EvenOdd(net, x, omega, clipped=clipped)
    return float(teaching.rises(f, x, s, HALF_STEPS).max().clamp_min(0)) / teaching.rounding(net, s)


def elsewhere(net: hop.HAM, x: Tensor, s: Tensor, omega: float) -> tuple[int, int]:
    """Of the starts from which both ways settle: how many, and how many of them not at the same equilibrium."""
    plain = hop.solve(net, x, hop.Picard(), even_odd=True, s0=s, **SOLVED)
    over = hop.solve(net, x, hop.OverRelaxed(omega), even_odd=True, s0=s, **SOLVED)
    both = plain.converged & over.converged
    return int(both.sum()), int((both & (hop.residual(over.state, plain.state) > ELSEWHERE)).sum())


@torch.no_grad()
def measure(networks: int) -> dict[str, Any]:
    """All networks: rises with and without the clip, and ends by the factor on the weights."""
    rises: dict[bool, list[float]] = {True: [], False: []}
    ends = np.zeros((len(GAINS) - 1, 2), int)
    for k in trange(networks, desc="random networks"):
        net, x, s, omega, gain = case(k)
        for clipped, found in rises.items():
            found.append(rise(net, x, s, omega, clipped))
        ends[np.searchsorted(GAINS, gain) - 1] += elsewhere(net, x, s, omega)
    settled, other = ends.T.tolist()
    return {
        "networks": networks,
        "half_steps": networks * SAMPLES * HALF_STEPS,
        "largest_rise_in_roundings": max(rises[True]),
        "networks_that_rise": sum(r > 1 for r in rises[True]),
        "networks_that_rise_without_the_clip": sum(r > 1 for r in rises[False]),
        "gains": GAINS,
        "settled_both_ways": settled,
        "elsewhere": other,
        **versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--networks", type=int, default=5000)
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "descent.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(args.networks)
    write(args.json, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
