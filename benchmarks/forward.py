"""How near a forward solve comes to plain matrix products of the same shapes, in the same run.

    python benchmarks/forward.py [--threads 1] [--batch 64] [--seconds 1] [--json PATH]

For each network and schedule: one solve with a fixed number of iterations (the paper's), against a bare loop of the
same matrix products on preallocated buffers, alternating so that both see the same machine. The ratio of the times
of the products alone to those of the whole solve is the share of matrix-product speed that is reached. A second
column compares with the dense N × N formulation. Timings on shared machines are noisy: read the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import hoplib as hop
from hoplib.experiment.files import write
from hoplib.paper import LAYERS

ITERATIONS = 20
BESIDE = ("settings", "epochs", "inference", "true_error", "scaling", "recorded")  # what training.py saves


def products(net: hop.Network, batch: int, iterations: int = ITERATIONS) -> Callable[[], None]:
    """The products of that many iterations, and nothing else: each W_i but the input's, in both directions.

    Each is written the way that is fastest, as the solver does.
    """
    links = [link for a, _, link in net.graph() if a > 0]
    pairs = [pair for link in links for pair in zip(link.products(), link.sizes, strict=True)]
    states = {n: torch.rand(batch, n, device=net.b[0].device) for n in net.layers[1:]}

    def run() -> None:
        for _ in range(iterations):
            for product, n in pairs:
                product(states[n])

    return run


def dense(net: hop.Network, x: torch.Tensor) -> Callable[[], None]:
    """The synchronous iteration with the paper's full N × N matrix."""
    d, rho, rule = hop.dense(net), net.rho, net.rule(net.rho, sole=True)

    def run() -> None:
        drive = rho.rho(x) @ d.U.T + d.b
        s = net.zeros(len(x))
        for _ in range(ITERATIONS):
            s = rule.settle(s, rho.rho(s) @ d.W.T + drive)

    return run


def compare(
    candidates: dict[str, Callable[[], object]],
    seconds: float,
    *,
    prepare: Callable[[], object] = lambda: None,
    rounds: int = 5,
) -> dict[str, list[float]]:
    """Seconds of each in each round, run in turn for about that long; `prepare` runs before a round and is not timed.

    With one thread on the CPU these are seconds of CPU time, so that other work on the machine does not count.
    """
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    clock = time.process_time if alone else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in candidates}
    end = time.perf_counter() + seconds * len(candidates)
    while time.perf_counter() < end or len(next(iter(times.values()))) < rounds:
        prepare()
        for name, run in candidates.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = clock()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(clock() - start)
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(t) for name, t in times.items()}


def save(path: Path, numbers: Mapping[str, Any], keep: Iterable[str]) -> None:
    """Write the numbers as JSON; of those that were there before, only the kept names stay."""
    before = json.loads(path.read_text()) if path.exists() else {}
    write(path, {**{k: before[k] for k in keep if k in before}, **numbers})


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.0, help="per candidate")
    parser.add_argument("--json", type=Path, help="where to save all numbers, beside those of training.py")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = hop.default_device()
    print(f"{device}, {args.threads} threads, batch {args.batch}, {ITERATIONS} iterations, torch {torch.__version__}")
    print(f"{'':28}{'GFLOP/s':>10}{'of matmul':>12}{'vs dense':>10}")
    found: dict[str, dict[str, float]] = {}
    for depth, layers in LAYERS.items():
        net = hop.HAM(layers, seed=0)
        x = torch.rand(args.batch, 784, generator=torch.Generator().manual_seed(0)).to(device)

        def solver(
            even_odd: bool, method: hop.Solver, net: hop.Network = net, x: torch.Tensor = x
        ) -> Callable[[], object]:
            return lambda: hop.solve(net, x, method, even_odd=even_odd, max_iter=ITERATIONS, early_stop=False)

        candidates: dict[str, Callable[[], object]] = {
            "products": products(net, args.batch),
            "dense": dense(net, x),
            "input": lambda net=net, x=x: net.drive(x),  # type: ignore[misc]
            "HAM": solver(False, hop.Picard()),
            "HAM-EO": solver(True, hop.Picard()),
            "HAM-DEQ": solver(False, hop.Anderson()),
            "HAM-EO-DEQ": solver(True, hop.Anderson()),
            "HAM-OR": solver(True, hop.OverRelaxed()),
        }
        t = medians(compare(candidates, args.seconds))
        flops = 2 * net.multiply_adds() * ITERATIONS * args.batch + 2 * layers[0] * layers[1] * args.batch
        ideal = t["products"] + t["input"]  # the product with the input weights belongs to a solve too
        for name in ("HAM", "HAM-EO", "HAM-DEQ", "HAM-EO-DEQ", "HAM-OR"):
            row = f"{depth} layers {name:<14}"
            r = {"gflops": flops / t[name] / 1e9, "share": ideal / t[name], "against_dense": t["dense"] / t[name]}
            found[f"{depth}-{name}"] = {"seconds": t[name], **r}
            print(f"{row:28}{r['gflops']:10.1f}{r['share']:11.0%}{r['against_dense']:9.1f}x")
    if args.json:
        save(args.json, {"forward": found}, keep=BESIDE)


if __name__ == "__main__":
    main()
