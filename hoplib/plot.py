"""How the notebooks draw: one style, the paper's two colours, and the pictures that several of them share.

A function here takes data and an axes and returns the axes; it computes nothing and loads nothing. Needs matplotlib,
so `hoplib` does not import it by itself.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

EVEN, ODD = "#F08C00", "#6741D9"  # the paper's colours for even and odd layers
COLOURS = {"synchronous": "#343A40", "even-odd": EVEN, "even-odd + Anderson": "#1098AD", "Anderson": "#2F9E44"}


def use_style() -> None:
    """Switch matplotlib to the project's style."""
    plt.style.use(Path(__file__).with_name("paper.mplstyle"))


def band(ax: Axes, values: Tensor, label: str, colour: str | None = None, first: int = 1) -> Axes:
    """The median over samples of `values` (iterations, batch) against the iteration, with the 10–90 % range."""
    v = values.double().cpu()
    n = torch.arange(first, first + len(v))
    low, mid, high = torch.nanquantile(v, torch.tensor([0.1, 0.5, 0.9], dtype=v.dtype), dim=1)
    (line,) = ax.plot(n.numpy(), mid.numpy(), label=label, color=colour)
    ax.fill_between(n.numpy(), low.numpy(), high.numpy(), color=line.get_color(), alpha=0.15, linewidth=0)
    return ax


def digit(ax: Axes, x: Tensor, title: str = "") -> Axes:
    """One image of 784 pixels, dark on light."""
    ax.imshow(x.detach().cpu().numpy().reshape(28, 28), cmap="gray_r", vmin=0, vmax=1)
    ax.set(title=title, xticks=[], yticks=[])
    ax.grid(False)
    return ax


def matrix(ax: Axes, M: Tensor, edges: tuple[list[int], list[int]], title: str = "") -> Axes:
    """A matrix by the magnitude of its entries, with lines between its blocks at the given (row, column) edges."""
    A = M.detach().abs().cpu().numpy()
    ax.imshow(A, cmap="Greys", interpolation="nearest", aspect="equal", vmax=A.max())
    for e in edges[0]:
        ax.axhline(e - 0.5, color="0.6", linewidth=0.6)
    for e in edges[1]:
        ax.axvline(e - 0.5, color="0.6", linewidth=0.6)
    ax.set(title=title, xticks=[], yticks=[])
    ax.grid(False)
    return ax
