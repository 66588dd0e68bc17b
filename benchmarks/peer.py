"""Inference to a true error of 1e-4, on one trained network: hoplib's ways, the paper's base, and a general DEQ solver.

    python benchmarks/peer.py [--weights PATH] [--images 256] [--batch 64] [--seconds 2] [--json PATH]

A solver's tolerance is not an error: one that moves slowly stops far from the equilibrium. So each way gets the
largest tolerance with which 95 % of the images have an output within 1e-4 of the equilibrium that even-odd sweeps in
float64 lead to from there; then all ways are timed at their tolerances, in turn. The general solver is torchdeq's
(PyPI), as its user would write it: the state a tuple of layers, the map one synchronous update. It is no dependency of
this project: `pip install --no-deps torchdeq==0.1.0`; without it its lines are left out.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import math
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forward import compare, medians
from torch import Tensor

import hoplib as hop
from hoplib.experiment.files import ROOT, load_network, write
from hoplib.experiment.run import versions

ERROR, SHARE = 1e-4, 0.95
TOLERANCES = [10 ** (-e / 4) for e in range(29)]  # 1 … 1e-7
Way = Callable[[Tensor, float], tuple[Tensor, float]]  # x, tolerance → state, evaluations of the map per image


def ours(net: hop.Network, solver: hop.Solver | None = None, even_odd: bool | None = None) -> Way:
    def way(x: Tensor, tol: float) -> tuple[Tensor, float]:
        sol = hop.solve(net, x, solver, even_odd=even_odd, tol=tol, max_iter=400)
        return sol.state, sol.evaluations / len(x)

    return way


def general(net: hop.Network, solver: str) -> Way:
    """torchdeq's solver on the synchronous update, the state a tuple of layers."""
    get_deq = importlib.import_module("torchdeq").get_deq  # by name: no dependency
    W, b = [w.detach() for w in net.W], [v.detach() for v in net.b]
    rho = net.rho.rho

    def way(x: Tensor, tol: float) -> tuple[Tensor, float]:
        calls, drive = 0, rho(x) @ W[0].T + b[0]

        def update(*s: Tensor) -> tuple[Tensor, ...]:
            nonlocal calls
            calls += 1
            r, new = [rho(t) for t in s], []
            for l in range(len(s)):
                below = drive if l == 0 else r[l - 1] @ W[l].T + b[l]
                new.append(below if l == len(s) - 1 else below + r[l + 1] @ W[l + 1])
            return tuple(new)

        deq = get_deq(f_solver=solver, f_max_iter=400, f_tol=tol, ift=True).eval()
        s, _ = deq(update, tuple(x.new_zeros(len(x), n) for n in net.layers[1:]))
        return torch.cat(list(s[-1]), 1), float(calls)

    return way


@torch.no_grad()
def error(exact: hop.Network, state: Tensor, x: Tensor) -> Tensor:
    """‖ŷ − ŷ*‖/‖ŷ*‖ of each image, s* the equilibrium that float64 sweeps lead to from the state."""
    there = hop.solve(exact, x.double(), even_odd=True, tol=1e-12, max_iter=3000, s0=state.double()).output
    return torch.linalg.vector_norm(exact.output(state.double()) - there, dim=1) / torch.linalg.vector_norm(
        there, dim=1
    )


def within(exact: hop.Network, state: Tensor, x: Tensor) -> bool:
    """Whether 95 % of the images have an output within 1e-4 of the true one."""
    return bool(error(exact, state, x).nan_to_num(math.inf).quantile(SHARE) <= ERROR)


@torch.no_grad()
def tolerance(way: Way, exact: hop.Network, x: Tensor) -> float:
    """The largest one that is good enough; NaN if none is. By bisection: a smaller one is better."""

    first = bisect_left(TOLERANCES, True, key=lambda tol: within(exact, way(x, tol)[0], x))
    return TOLERANCES[first] if first < len(TOLERANCES) else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--weights", type=Path, nargs="*", help="networks; those in results/weights by default")
    parser.add_argument("--images", type=int, default=256, help="test images to find the tolerances with")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="per way")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = hop.load_data("mnist", device="cpu").test.x
    paths = args.weights or sorted((ROOT / "results" / "weights").glob("*-HAM-EO-seed-0-half.safetensors"))
    numbers: dict[str, Any] = {"settings": {**versions(), "images": args.images, "batch": args.batch}}
    for path in paths:
        net = load_network(path, "cpu").requires_grad_(False)
        exact = copy.deepcopy(net).double()
        ways = {
            "synchronous": ours(net, hop.Picard(), False),
            "even-odd": ours(net, hop.Picard(), True),
            "even-odd, Anderson": ours(net, hop.Anderson(), True),
            "over-relaxed": ours(net, hop.OverRelaxed(hop.best_omega(net, x[-64:])), True),
            "by itself": ours(net),
        }
        if importlib.util.find_spec("torchdeq"):
            ways |= {f"torchdeq, {name}": general(net, name) for name in ("anderson", "broyden", "fixed_point_iter")}
        tolerances = {name: tolerance(way, exact, x[: args.images]) for name, way in ways.items()}
        runs = {
            name: (lambda way=way, tol=tolerances[name]: way(x[: args.batch], tol))
            for name, way in ways.items()
            if not math.isnan(tolerances[name])
        }
        with torch.no_grad():
            times = medians(compare(runs, args.seconds))
            work = {name: run()[1] for name, run in runs.items()}
        print(f"\n{path.stem}\n{'':24}{'tolerance':>12}{'ms':>10}{'evaluations':>14}{'against over-relaxed':>24}")
        for name in ways:
            if name not in runs:
                print(f"{name:24}{'95 % of the images never come within 1e-4':>60}")
                continue
            ratio = times[name] / times["over-relaxed"]
            print(f"{name:24}{tolerances[name]:12.1e}{1e3 * times[name]:10.1f}{work[name]:14.1f}{ratio:23.1f}x")
        numbers[path.stem] = {
            name: {"tolerance": tolerances[name], "seconds": times[name], "evaluations": work[name]} for name in runs
        }
    if args.json:
        write(args.json, numbers)


if __name__ == "__main__":
    main()
