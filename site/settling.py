"""The same digits settle four ways in one trained network: the README's first figure, and the numbers behind it.

They are computed from the committed weights, kept in results/settling.npz, and computed anew when the weights change.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from hoplib import paper, plot
from hoplib.data import load_data
from hoplib.equilibrium import solve, updates
from hoplib.experiment.files import load_network, pack, write
from hoplib.experiment.measure import CROSS, Arrays
from hoplib.network import Network
from hoplib.relaxation import OverRelaxed, best_omega
from hoplib.solvers import Anderson, Picard, Solver, Status, trajectory

WEIGHTS = "7-HAM-EO-seed-0-half.safetensors"
QUANTILES = (0.25, 0.5, 0.75)  # of the synchronous iterations: the digits that are shown, beside one that cycles
SHOWN = 100  # iterations


def ways(omega: float) -> dict[str, tuple[bool, Solver]]:
    """Name → even-odd or not, solver."""
    return {
        "synchronous": (False, Picard()),
        "even-odd": (True, Picard()),
        "even-odd + Anderson": (True, Anderson()),
        "over-relaxed": (True, OverRelaxed(omega)),
    }


@torch.no_grad()
def outputs(net: Network, x: Tensor, even_odd: bool, solver: Solver) -> Tensor:
    """ρ of the output layer after each iteration, (batch, iterations, 10)."""
    f = updates(net, x, solver, net.blocks(even_odd))
    found = trajectory(f, f.start(), solver, iterations=SHOWN)
    return torch.stack([net.rho.rho(net.layer(f.join(z), -1)) for z in found], 1)


def choose(iterations: Tensor, status: Tensor, others: Tensor) -> list[int]:
    """Of the images that all other ways settle: at the quantiles of the synchronous iterations, and in a 2-cycle."""
    settled = (status == Status.CONVERGED) & others
    wanted = iterations[settled].double().quantile(torch.tensor(QUANTILES, dtype=torch.float64))
    away = [torch.where(settled, (iterations - n).abs().double(), torch.inf) for n in wanted]
    cycling = ((status == Status.CYCLING) & others).nonzero().flatten()[:1].tolist()
    return [int(d.argmin()) for d in away] + cycling


def compute(weights: Path, images: int = CROSS) -> Arrays:
    """The iterations of each image in each way, and the outputs of a few images after each iteration."""
    net = load_network(weights, "cpu").requires_grad_(False)
    x = load_data("mnist", device="cpu").test.x[:images]
    omega = best_omega(net, x)
    solved = [solve(net, x, solver, even_odd=even_odd) for even_odd, solver in ways(omega).values()]
    first, *rest = solved
    chosen = choose(first.iterations, first.status, torch.stack([s.converged for s in rest]).all(0))
    strips = torch.stack([outputs(net, x[chosen], even_odd, solver) for even_odd, solver in ways(omega).values()])
    return {
        "weights": np.array(digest(weights)),
        "omega": np.array(omega),
        "max_iter": np.array(paper.max_iter(net, True)),
        "iterations": torch.stack([s.iterations for s in solved]).numpy().astype(np.int16),
        "settled": torch.stack([s.converged for s in solved]).numpy(),
        "chosen": np.array(chosen),
        "images": (x[chosen] * 255).round().to(torch.uint8).numpy(),
        "outputs": (strips * 255).round().to(torch.uint8).numpy(),
    }


def digest(weights: Path) -> str:
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def settled(results: Path) -> Arrays | None:
    """The numbers for the committed weights, from their file where it is of these weights; None without weights."""
    weights, path = results / "weights" / WEIGHTS, results / "settling.npz"
    if not weights.exists():
        return None
    if path.exists():
        with np.load(path, allow_pickle=False) as known:
            if str(known["weights"]) == digest(weights):
                return {name: known[name] for name in known.files}
    found = compute(weights)
    write(path, pack(found))
    return found


def picture(found: Arrays) -> Figure:
    """The same digits settle in several ways: the ten outputs after each iteration, and all images below."""
    names, digits, shown = list(ways(1.0)), len(found["chosen"]), found["outputs"].shape[2]
    colours = [plot.COLOURS[name] for name in names]
    fig = plt.figure(figsize=(8, 0.8 * digits + 3.2), layout="constrained")
    above, below = fig.subfigures(2, 1, height_ratios=[0.8 * digits + 0.9, 2.3])  # type: ignore[misc]
    axes = above.subplots(digits, 1 + len(names), width_ratios=[1] + [2.6] * len(names))
    for d, row in enumerate(axes):
        plot.digit(row[0], torch.from_numpy(found["images"][d]) / 255)
        for w, ax in enumerate(row[1:]):
            n, settled = int(found["iterations"][w, found["chosen"][d]]), found["settled"][w, found["chosen"][d]]
            ax.imshow(found["outputs"][w, d].T, cmap="Greys", vmin=0, vmax=255, aspect="auto", interpolation="nearest")
            if settled:
                ax.axvline(n, color=colours[w], linewidth=2.5)
            ax.set(xticks=[], yticks=[])
            ax.grid(False)
            told = f"settled after {n}" if settled else "never settles"
            ax.set_xlabel(told, fontsize=9, labelpad=2)
            if d == 0:
                ax.set_title(names[w], fontsize=11, loc="center")
        row[1].set_yticks([0, 9], ["0", "9"], fontsize=8)
    told = f"The ten outputs of one network, iterations 1 to {shown}; a line where the image has settled"
    above.suptitle(told, x=0.01, ha="left")
    ax = below.subplots()
    order = np.arange(1, int(found["max_iter"]) + 1)
    for w, name in enumerate(names):
        done = np.where(found["settled"][w], found["iterations"][w], np.inf)
        ax.plot(order, [100 * (done <= n).mean() for n in order], color=colours[w], linewidth=2.5, label=name)
    ax.set(xlim=(0, order[-1]), ylim=(0, 102), xlabel="iterations", ylabel="settled images, %")
    ax.set_title(f"{found['iterations'].shape[1]:,} test images in the same network", loc="left", fontsize=11)
    ax.legend(loc="lower right")
    return fig


def sentence(found: Arrays) -> str:
    """What the figure shows, in words and means."""
    names, images = list(ways(1.0)), found["iterations"].shape[1]
    means = ", ".join(f"{name} {mean:.0f}" for name, mean in zip(names, found["iterations"].mean(1), strict=True))
    never = ", ".join(f"{1 - share:.1%}".replace("%", " %") for share in found["settled"].mean(1))
    return (
        f"Iterations until a test image has settled, on average over {images:,} images: {means}. "
        f"Not settled after {int(found['max_iter'])} iterations, in the same order: {never} of the images; "
        f"they count as {int(found['max_iter']) - 1}."
    )
