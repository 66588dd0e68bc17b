"""What one training step costs, against the straightforward formulation of the same equations, in the same run.

    python benchmarks/training.py [--rows 5-* …] [--epochs 1 5 10] [--weights PATH] [--seconds 0.5] [--json PATH]

`make bench` writes all numbers to results/bench.json.

For each training of the table: `Training.step` of hoplib.experiment.train and the straightforward step of
hoplib.oracle, which follows the paper's equations literally (dense W with its zeros, the fixed number of iterations for
the whole batch, backpropagation through unrolled steps, Madam by its formula). First both must give the same loss,
gradients and new weights in float64 on a small network of the same kind, or the benchmark stops. Then they alternate,
on the same batches, at the same weights, to which the network is put back each time. After that the fast step
alternates with all matrix products that it makes, shape by shape, and nothing else: the share of their speed is the
last column but one.

The weights are those after so many epochs, where a training has left them (`make table`; of a HAM by any solver: nearly
all equilibria are the same) or they are committed, else those after a few steps of training. Only the fast route's cost
depends on them. Beside the whole table stands what the records say: the CPU time that their trainings took.
Rows beyond the paper have no straightforward formulation of their own: they stand against that of the paper's base, in
a training step and in inference to the same true error.
With one thread on the CPU, times are CPU time: hours of an idle core. Still, neighbours on a shared machine slow its
caches down: read the ratios.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from forward import compare, medians, save
from peer import ERROR, ours, tolerance, within
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from weights import WEIGHTS, find

import hoplib as hop
from hoplib import paper
from hoplib.experiment.config import Config
from hoplib.experiment.files import ROOT, load_network
from hoplib.experiment.measure import readout
from hoplib.experiment.results import load, per_run
from hoplib.experiment.rows import MODELS, ROWS, SEEDS, SOLVERS, TRAININGS, Row, get_row, select
from hoplib.experiment.run import can_compile, versions
from hoplib.experiment.train import Training
from hoplib.links import multiply, pack
from hoplib.oracle import Straightforward
from hoplib.paper import EPOCHS, LAYERS

TOLERANCE = 5e-6  # the largest relative difference of the two routes, in float64; one backward step more makes 2e-5
SMALL = {3: (784, 24, 10), 5: (784, 24, 18, 14, 10), 7: (784, 24, 20, 16, 14, 12, 10)}
MOST = 400  # iterations of the straightforward formulation, until a true error
STEPS, CORES = 937, 2  # steps an epoch; what the projection is for
SHARE_ROUNDS = 25  # the share of matrix-product speed is the median over at least as many, for the machine is noisy
WIDTHS = {f"× {w:g}": (784, *(int(w * n) for n in LAYERS[5][1:-1]), 10) for w in (0.25, 0.5, 1)}
DEPTHS = {f"{d} layers": (784, *[256] * (d - 2), 10) for d in (3, 5, 7, 9)}
BATCHES = (16, 64, 256)
BASES = {"3-HAM-OR": "3-HAM", "5-HAM-OR": "5-HAM", "7-HAM-OR": "7-HAM", "3-ExactCHN-OR": "3-CHN"}  # row → the paper's


# -- do both routes compute the same? ---------------------------------------------------------------------------


def straightforward(training: Training, base: Row | None = None) -> Straightforward:
    """The straightforward route from the same weights: the row's own, or that of another row."""
    row, like = base or training.config.row, training.net.b[0]
    net = MODELS[row.model](row.layers, device=like.device, dtype=like.dtype)
    net.load_state_dict(training.net.state_dict())
    return Straightforward(net, row.even_odd, row.solver == "anderson", row.readout)


def optimizer_of(training: Training) -> tuple[list[dict[str, Any]], float]:
    """What Madam remembers of each parameter, and the learning rate."""
    memory = [dict(deepcopy(training.optimizer.state[p])) for p in training.net.parameters()]
    return memory, training.optimizer.param_groups[0]["lr"]


def difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest ‖a − b‖/‖b‖, tensor by tensor; 1e99 where one is not finite."""
    found = [float((s - t).norm() / t.norm()) for s, t in zip(a, b, strict=True)]
    return max(found) if all(map(math.isfinite, found)) else 1e99


def check(row: Row) -> float:
    """The largest relative difference of the routes: ŷ of the first iterations; loss, gradients, change of weights.

    On a small network in float64, whose couplings are weak enough for all samples to converge within the paper's
    number of iterations, and strong enough for the last backward step to matter.
    """
    training = Training(Config(replace(row, layers=SMALL[len(row.layers)]), tol=1e-14), device=torch.device("cpu"))
    net = training.net.double()
    with torch.no_grad():
        for w in net.W:
            w.mul_(0.5 if row.even_odd else 0.4)
    training.optimizer = hop.Madam(net.parameters(), lr=row.lr)
    for memory in training.optimizer.state.values():
        memory["t"], memory["v"] = 100, torch.full_like(memory["v"], 1e-7)
    x = torch.rand(8, 784, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.eye(10, dtype=torch.float64)[:8]
    first = [difference(*first_iterations(training, x, n)) for n in (1, 4, 7)]
    before = [p.detach().clone() for p in net.parameters()]
    value, gradients, weights = straightforward(training).step(x, y, *optimizer_of(training))
    loss = training.step(x, y)[2]
    fast = [loss, *(p.grad for p in net.parameters() if p.grad is not None), *changes(before, net.parameters())]
    found = max(*first, difference(fast, [value, *gradients, *changes(before, weights)]))
    if not found < TOLERANCE:
        raise RuntimeError(f"{row.training}: the two routes differ by {found:.1e}, more than {TOLERANCE:g}")
    return found


def changes(before: Iterable[Tensor], after: Iterable[Tensor]) -> list[Tensor]:
    """What a step did to the weights."""
    return [b.detach() - a for a, b in zip(before, after, strict=True)]


def first_iterations(training: Training, x: Tensor, n: int) -> tuple[list[Tensor], list[Tensor]]:
    """ŷ of both routes after n iterations, where a wrong solver has not yet converged to the same."""
    net, row, slow = training.net, training.config.row, straightforward(training)
    sol = hop.solve(net, x, SOLVERS[row.solver], even_odd=row.even_odd, max_iter=n, early_stop=False)
    return [readout(net, sol.state, row)], [slow.output(slow.equilibrium(x, n)[0])]


# -- a training step --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A factor of a matrix product: its shape, and whether it lies in memory by columns, or in oneDNN's own order."""

    shape: tuple[int, int]
    transposed: bool
    packed: bool = False

    @classmethod
    def of(cls, t: Tensor) -> Operand:
        """What t is."""
        return cls(tuple(t.shape), t.stride(0) < t.stride(1))

    def make(self, device: torch.device) -> Tensor:
        """Some matrix like it."""
        rows, columns = self.shape
        return torch.rand(columns, rows, device=device).T if self.transposed else torch.rand(self.shape, device=device)


Product = tuple[Operand, Operand]


class Recorder(TorchDispatchMode):
    """All matrix products in this context, those of autograd among them."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = args[-2:]
            self.log.append((Operand.of(a), Operand.of(b)))
        elif func.overloadpacket == torch.ops.mkldnn._linear_pointwise:
            W = args[2 if func._overloadname == "binary" else 1]
            packed = Operand((W.shape[1], W.shape[0]), True, packed=True)
            self.log.append((Operand.of(args[0]), packed if W.is_mkldnn else Operand.of(W.T)))
        return func(*args, **(kwargs or {}))


class Products:
    """The same products and nothing else, by the same library and laid out in memory as the step has them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.buffers = device, dict[tuple[str, Any], Tensor]()

    def buffer(self, role: str, like: Operand) -> Tensor:
        if (role, like) not in self.buffers:
            made = like.make(self.device)
            self.buffers[role, like] = pack(made.T) if role == "packed" else made
        return self.buffers[role, like]

    @torch.no_grad()
    def run(self, log: Sequence[Product]) -> None:
        for a, b in log:
            packed = self.buffer("packed", b) if b.packed else None
            multiply(self.buffer("left", a), self.buffer("right", b), packed=packed)


def multiply_adds(log: Sequence[Product]) -> int:
    return sum(math.prod(a.shape) * b.shape[1] for a, b in log)


def backward_steps(net: hop.Network, row: Row) -> int:
    """Evaluations of the adjoint in the fast route: half for a synchronous HAM, whose output has an even-odd one."""
    halved = isinstance(net, hop.HAM) and not row.even_odd
    return paper.backward_steps(net, row.even_odd) // (2 if halved else 1)


def gradient(net: hop.Network) -> Tensor:
    """The gradient of the last step, flat."""
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@dataclass
class Bench:
    """The options, the data, and the progress bar."""

    data: hop.Data
    steps: int
    seconds: float
    batch: int
    fused: bool
    weights: Path
    epoch: int
    bar: Any

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        return cycle(self.data.train.batches(size, generator=torch.Generator().manual_seed(0)))

    def trained(self, row: Row, size: int) -> tuple[Training, Iterator[tuple[Tensor, Tensor]], bool]:
        """A training after its epochs or its warm-up, the batches that follow, and whether the epochs were found."""
        self.bar.set_postfix_str(row.training)
        training = Training(Config(row, batch_size=size, tol=row.tol), fused=self.fused)
        batches = self.batches(size)
        found = find(row, self.epoch, self.weights)
        if found is not None:
            training.net.load_state_dict(load_network(found, training.device).state_dict())
        else:
            for x, y in islice(batches, self.steps):
                training.step(x, y)
        return training, batches, found is not None

    def step(self, row: Row, size: int, base: Row | None = None) -> tuple[dict[str, float], hop.Network]:
        """Medians of both routes and of the bare products, iterations and work of the fast one; and the network."""
        training, batches, found = self.trained(row, size)
        slow, state, evaluations = straightforward(training, base), deepcopy(training.state_dict()), []
        memory = optimizer_of(training)
        batch, log, work, bare = next(batches), list[Product](), [], Products(training.device)
        gradients = list[Tensor]()

        def fresh() -> None:
            nonlocal batch
            batch = next(batches)
            training.load_state_dict(deepcopy(state))

        def fast() -> None:
            evaluations.append(training.step(*batch)[0].evaluations / size)

        def straight() -> None:
            nonlocal gradients
            gradients = slow.step(*batch, *memory)[1]

        routes: dict[str, Callable[[], object]] = {"fast": fast, "straightforward": straight}
        t, net = medians(compare(routes, self.seconds, prepare=fresh)), slow.net
        gradients_differ = difference([gradient(training.net)], [torch.cat([g.flatten() for g in gradients])])

        def fresh_and_recorded() -> None:
            nonlocal log
            fresh()
            with Recorder() as recorder:
                training.gradients(*batch)
            log = recorder.log
            work.append(multiply_adds(log))
            bare.run(log)  # so that the buffers are there

        alone: dict[str, Callable[[], object]] = {"fast": fast, "products": lambda: bare.run(log)}
        times = compare(alone, self.seconds, prepare=fresh_and_recorded, rounds=SHARE_ROUNDS)
        shares = [p / f for p, f in zip(times["products"], times["fast"], strict=True)]
        return {
            "fast": t["fast"],
            "straightforward": t["straightforward"],
            "ratio": t["straightforward"] / t["fast"],
            "evaluations": statistics.mean(evaluations),
            "backward_steps": backward_steps(net, row),
            "multiply_adds": statistics.mean(work),
            "gflops": 2 * statistics.mean(work) / t["fast"] / 1e9,
            "products": statistics.median(times["products"]),
            "share": statistics.median(shares),
            "gradients_differ": gradients_differ,
            "epochs_before": self.epoch if found else 0,
        }, net

    @torch.no_grad()
    def inference(self, row: Row, net: hop.Network, images: int, size: int = 500) -> dict[str, float]:
        """Seconds to classify so many test images: until each has converged to 1e-4, against the fixed iterations."""
        self.bar.set_postfix_str(f"{row.training}, inference")
        x = iter(self.data.test.x[:images].split(size))
        batch, evaluations = self.data.test.x[:size], []
        labels: dict[str, list[Tensor]] = {"fast": [], "straightforward": []}
        oracle = Straightforward(net, row.even_odd, row.solver == "anderson", row.readout)

        def prepare() -> None:
            nonlocal batch
            batch = next(x)

        def fast() -> None:
            sol = hop.solve(net, batch, SOLVERS[row.solver], even_odd=row.even_odd, tol=1e-4)
            labels["fast"].append(sol.output.argmax(1))
            evaluations.append(sol.evaluations / len(batch))

        def slow() -> None:
            labels["straightforward"].append(oracle.output(oracle.equilibrium(batch)[0]).argmax(1))

        rounds = math.ceil(images / size)
        t = medians(compare({"fast": fast, "straightforward": slow}, 0, prepare=prepare, rounds=rounds))
        same = torch.cat(labels["fast"]) == torch.cat(labels["straightforward"])
        return {
            **{name: rounds * seconds for name, seconds in t.items()},
            "ratio": t["straightforward"] / t["fast"],
            "evaluations": statistics.mean(evaluations),
            "same_class": float(same.double().mean()),
            "images": images,
        }

    @torch.no_grad()
    def to_true_error(self, row: Row, base: Row, images: int) -> dict[str, float | None]:
        """Seconds for a batch until 95 % of the images have an output within 1e-4 of the true one, by both routes.

        On the same trained weights; those of a CHN are the base's own where they are there, since its local steps may
        cycle in another's. The row's way gets the largest tolerance that is enough, the straightforward formulation of
        the base, which has none, the fewest iterations for all; None if these are more than 400.
        """
        self.bar.set_postfix_str(f"{row.training}, true error")
        path = find(base, EPOCHS, self.weights) or find(row, EPOCHS, self.weights)
        path = path or find(base, EPOCHS, self.weights, any_solver=True)
        assert path is not None, f"neither {row.training} nor {base.training} has weights"
        device, x = self.data.test.x.device, self.data.test.x[:images]
        nets = [MODELS[r.model](r.layers, device=device).requires_grad_(False) for r in (row, base)]
        for net in nets:
            net.load_state_dict(load_network(path, device).state_dict())
        way, oracle = ours(nets[0], SOLVERS[row.solver], row.even_odd), Straightforward(nets[1])
        exact, exact_base = (deepcopy(net).double() for net in nets)
        tol = tolerance(way, exact, x)
        enough = bisect_left(range(1, MOST + 1), True, key=lambda n: within(exact_base, oracle.equilibrium(x, n)[0], x))
        batch, n = x[: self.batch], enough + 1
        routes = {"fast": lambda: way(batch, tol), "straightforward": lambda: oracle.equilibrium(batch, min(n, MOST))}
        t = medians(compare(routes, self.seconds, rounds=3))
        return {
            "fast": t["fast"],
            "straightforward": t["straightforward"] if n <= MOST else None,
            "ratio": t["straightforward"] / t["fast"] if n <= MOST else None,
            "tolerance": tol,
            "evaluations": way(batch, tol)[1],
            "iterations": n if n <= MOST else None,
        }


# -- the tables -------------------------------------------------------------------------------------------------


def show(title: str = "", *cells: str) -> None:
    """A line above the progress bar."""
    tqdm.write(f"{title:<26}" + "".join(f"{c:>12}" for c in cells) if cells else title, file=sys.stdout)
    sys.stdout.flush()


HEAD = ("fast", "straightfwd", "ratio", "evaluations")


def cells(r: dict[str, float], unit: str = "ms") -> list[str]:
    """What all tables show: both times, their ratio, and the evaluations of the map a sample in the fast route."""
    scale = 1e3 if unit == "ms" else 1
    times = [f"{scale * r[name]:.1f} {unit}" for name in ("fast", "straightforward")]
    return [*times, f"{r['ratio']:.1f}", f"{r['evaluations']:.1f}"]


def trainings(bench: Bench, names: Sequence[str]) -> tuple[dict[str, dict[str, float]], dict[str, hop.Network]]:
    """One line for each training of the table."""
    show("a training step", *HEAD, "+ backward", "1e9 madd", "GFLOP/s", "of matmul", "Δ gradient")
    found, nets = {}, {}
    for name in names:
        row = ROWS[TRAININGS[name][-1]]
        agreement = check(row)
        r, nets[name] = bench.step(row, bench.batch)
        found[name] = {**r, "check": agreement, "epochs": row.epoch}
        work = [f"{r['backward_steps']}", f"{r['multiply_adds'] / 1e9:.2f}", f"{r['gflops']:.1f}", f"{r['share']:.0%}"]
        show(name, *cells(r), *work, f"{r['gradients_differ']:.0e}")
        bench.bar.update()
    return found, nets


def beyond(bench: Bench) -> dict[str, dict[str, float]]:
    """One line for each over-relaxed row, against the straightforward formulation of the paper's base."""
    show()
    show("against the paper's base", *HEAD)
    found = {}
    for name, base in BASES.items():
        found[name] = bench.step(get_row(name), bench.batch, get_row(base))[0]
        show(f"{name} / {base}", *cells(found[name]))
        bench.bar.update()
    return found


def whole_table(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """The cost of all trainings in hours: one seed on one core by both routes, all seeds on all cores by the fast."""
    hours = {k: sum(r[k] * STEPS * r["epochs"] for r in found.values()) / 3600 for k in ("fast", "straightforward")}
    return {
        "fast_hours": hours["fast"],
        "straightforward_hours": hours["straightforward"],
        "ratio": hours["straightforward"] / hours["fast"],
        "projected_hours": hours["fast"] * len(SEEDS) / CORES,
    }


def inference(bench: Bench, nets: dict[str, hop.Network], images: int) -> dict[str, dict[str, float]]:
    """One line for each of the networks."""
    show()
    show(f"{images} test images to 1e-4", *HEAD, "same class")
    found = {}
    for name, net in nets.items():
        r = found[name] = bench.inference(ROWS[TRAININGS[name][-1]], net, images)
        show(name, *cells(r, "s"), f"{r['same_class']:.1%}")
        bench.bar.update()
    return found


def true_error(bench: Bench, images: int) -> dict[str, dict[str, float | None]]:
    """One line for each over-relaxed row: inference to the same true error as the paper's base."""
    show()
    show(f"{bench.batch} images to a true error of {ERROR:g}", *HEAD, "iterations")
    found = {}
    for name, base in BASES.items():
        r = found[name] = bench.to_true_error(get_row(name), get_row(base), images)
        known = {k: math.nan if v is None else v for k, v in r.items()}
        show(f"{name} / {base}", *cells(known), f"{known['iterations']:.0f}")
        bench.bar.update()
    return found


def scaling(bench: Bench) -> dict[str, dict[str, dict[str, float]]]:
    """How the cost of a HAM-EO step grows with width, depth and batch."""
    row = Row("HAM", LAYERS[5], even_odd=True)
    tables = {
        "width": {name: (layers, bench.batch) for name, layers in WIDTHS.items()},
        "depth": {name: (layers, bench.batch) for name, layers in DEPTHS.items()},
        "batch": {f"{size}": (LAYERS[5], size) for size in BATCHES},
    }
    cost: dict[tuple[tuple[int, ...], int], dict[str, float]] = {}
    for title, cases in tables.items():
        show()
        show(f"HAM-EO step by {title}", *HEAD)
        for name, (layers, size) in cases.items():
            if (layers, size) not in cost:
                cost[layers, size] = bench.step(replace(row, layers=layers), size)[0]
            show(name, *cells(cost[layers, size]))
            bench.bar.update()
    return {title: {name: cost[case] for name, case in cases.items()} for title, cases in tables.items()}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", default=[], help="trainings, by name or prefix*; all by default")
    parser.add_argument("--warm-up", type=int, default=30, help="steps of training before the clock starts")
    parser.add_argument("--epochs", type=int, nargs="*", default=[1, 5, 10], help="at the weights after so many")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="where such weights are")
    parser.add_argument("--seconds", type=float, default=0.5, help="per candidate; at least 5 rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--images", type=int, default=2000, help="test images to classify")
    parser.add_argument("--error-images", type=int, default=128, help="test images to find the tolerances with")
    parser.add_argument("--scaling", action=argparse.BooleanOptionalAction, default=True, help="by width, depth, batch")
    parser.add_argument("--json", type=Path, help="where to save all numbers")
    return parser.parse_args()


def measured_hours(tables: Iterable[dict[str, float]]) -> dict[str, float]:
    """The CPU hours of one seed of the whole table, by the records; empty where a training has none.

    And the ratio to the straightforward hours measured now, which compares machines too: the records come from others.
    """
    frame = per_run(load(ROOT / "results"))
    last = [TRAININGS[name][-1] for name in select([])]
    if not len(frame) or set(last) - set(frame.row):
        return {}
    hours = float(frame[frame.row.isin(last)].groupby("row").training_hours.mean().sum())
    return {"recorded_hours": hours, "ratio": statistics.mean(t["straightforward_hours"] for t in tables) / hours}


def main() -> None:
    args = options()
    torch.set_num_threads(args.threads)
    names, fused = select(args.rows), can_compile()
    classified = [n for n in names if ROWS[TRAININGS[n][-1]].label in ("HAM", "HAM-EO-DEQ")]
    units = len(args.epochs) * (len(names) + len(BASES)) + len(classified) + len(BASES)
    units += args.scaling * (len(WIDTHS) + len(DEPTHS) + len(BATCHES))
    settings = {"device": str(hop.default_device()), **versions(), "data": "mnist", "compiled": fused}
    settings |= {k: v for k, v in vars(args).items() if k not in ("rows", "json", "weights")}
    numbers: dict[str, Any] = {"settings": settings, "epochs": {}}

    def keep(**found: Any) -> None:  # part by part: it takes half an hour
        numbers.update(found)
        if args.json:
            save(args.json, numbers, keep=["forward"])

    with tqdm(total=units, file=sys.stderr, desc="benchmark", dynamic_ncols=True) as bar:
        bench = Bench(hop.load_data("mnist"), args.warm_up, args.seconds, args.batch, fused, args.weights, 0, bar)
        show(", ".join(f"{k.replace('_', '-')} {v}" for k, v in settings.items()))
        nets = dict[str, hop.Network]()
        for bench.epoch in args.epochs:
            show()
            show(f"at the weights after epoch {bench.epoch}, where there are some")
            steps, nets = trainings(bench, names)
            table = whole_table(steps)
            numbers["epochs"][bench.epoch] = {"trainings": steps, "table": table}
            show(
                f"{len(steps)} trainings, one seed on one core: straightforward {table['straightforward_hours']:.1f} h,"
                f" fast {table['fast_hours']:.1f} h, ratio {table['ratio']:.1f}; "
                f"fast, {len(SEEDS)} seeds on {CORES} cores: {table['projected_hours']:.1f} h"
            )
            numbers["epochs"][bench.epoch]["beyond"] = beyond(bench)
            keep()
        keep(inference=inference(bench, {n: nets[n] for n in classified}, args.images))
        keep(true_error=true_error(bench, args.error_images))
        if args.scaling:
            keep(scaling=scaling(bench))
    if args.epochs and (recorded := measured_hours(e["table"] for e in numbers["epochs"].values())):
        show()
        said = "by the records' CPU times, on the machines of their days, one seed took {recorded_hours:.1f} h: "
        show((said + "{ratio:.1f} times less than straightforward here").format(**recorded))
        keep(recorded=recorded)


if __name__ == "__main__":
    main()
