"""How the notebooks draw: one style, the paper's two colours, and the pictures that several of them share.

A function here takes data and an axes and returns the axes; it computes nothing and loads nothing. Needs matplotlib,
so `hoplib` does not import it by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
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


def residuals(ax: Axes, counts: np.ndarray, criteria: Mapping[float, float], tol: float = 1e-4) -> QuadMesh:
    """Figures 3–4 of the paper: how many samples have which residual, iteration by iteration.

    counts: (iterations, bins) over log10 residuals from −8 to 0. criteria: residual → mean iterations to reach it
    (cyan), with a ring at the criterion `tol` (dashed). Returns the coloured mesh, for a colour bar.
    """
    n, bins = counts.shape
    x, y = np.arange(n + 1) - 0.5, np.logspace(-8, 0, bins + 1)
    mesh = ax.pcolormesh(x, y, np.ma.masked_equal(counts.T, 0), norm=LogNorm(1), cmap="magma_r", rasterized=True)
    ax.set_facecolor(mesh.get_cmap()(0.0))
    ax.axhline(tol, color="white", linestyle="--", linewidth=1)
    ax.plot(list(criteria.values()), list(criteria), color="cyan", linewidth=1.5)
    ax.plot(criteria[tol], tol, "o", markerfacecolor="none", markeredgecolor="white", markeredgewidth=1.5)
    ax.set(yscale="log", xlim=(-0.5, n - 0.5), ylim=(1e-8, 1), xlabel="iteration", ylabel="relative residual")
    ax.grid(False)
    return mesh
