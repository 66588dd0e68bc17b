"""How the notebooks draw: seaborn's theme, one colour for one meaning, and the pictures that several of them share.

A function here takes data and an axes and returns the axes; it computes nothing and loads nothing. Needs matplotlib
and seaborn, so `hoplib` does not import it by itself.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns  # type: ignore[import-untyped]
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from .experiment.results import Run

EVEN, ODD = "#D55E00", "#6741D9"  # layers: the paper's orange and violet
COLOURS = {  # all but the greys and violet are of seaborn's palette "colorblind"
    "synchronous": "#0173B2",  # ways to settle
    "even-odd": "#DE8F05",
    "Anderson": "#029E73",
    "even-odd + Anderson": "#029E73",
    "over-relaxed": "#CC78BC",
    "over-relaxed even-odd": "#CC78BC",
    "HAM": "#56B4E9",  # models
    "CHN": "#CA9161",
    "flow": "#343A40",  # continuous time, or what is true of all
}
REST, WRONG = "#ECE133", "#A50F3C"  # an equilibrium; what should not happen: uphill, a cycle, a broken hypothesis

SHARES = LogNorm(2e-5, 1)  # of the images; 2e-5 is one image of five seeds
FIGURES = {  # file → rows; Figures 3 and 4 as the paper has them: plain above, even-odd below
    "figure-3-dynamics-3-layers": [
        *("3-CHN-3-epochs", "3-CHN-DEQ", "3-HAM", "3-HAM-DEQ"),
        *("3-CHN-EO", "3-CHN-EO-DEQ", "3-HAM-EO", "3-HAM-EO-DEQ"),
    ],
    "figure-4-dynamics-5-and-7-layers": [
        *("5-HAM", "5-HAM-DEQ", "7-HAM", "7-HAM-DEQ"),
        *("5-HAM-EO", "5-HAM-EO-DEQ", "7-HAM-EO", "7-HAM-EO-DEQ"),
    ],
    "dynamics-beyond-the-paper": [
        *("3-HAM-OR", "5-HAM-OR", "7-HAM-OR", "3-ExactCHN", "3-ExactCHN-EO"),
        *("3-ExactCHN-OR", "5-ExactCHN-OR", "7-ExactCHN-OR", "3-ExactCHN-EO-DEQ"),
    ],
}


def use_style() -> None:
    """Seaborn's theme and colour-blind palette, and on top what is ours (paper.mplstyle)."""
    ours = rc_params_from_file(Path(__file__).with_name("paper.mplstyle"), use_default_template=False)
    sns.set_theme(style="whitegrid", palette="colorblind", rc=ours)


def digit(ax: Axes, x: Tensor, title: str = "") -> Axes:
    """One image of 784 pixels, dark on light."""
    ax.imshow(x.detach().cpu().numpy().reshape(28, 28), cmap="gray_r", vmin=0, vmax=1)
    ax.set(title=title, xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.grid(False)
    return ax


def gif(fig: Figure, draw: Callable[[int], object], frames: Iterable[int], alt: str, fps: float = 5) -> str:
    """The figure in motion as an HTML image, without JavaScript; draw(n) changes the figure to frame n."""
    images, stream = [], io.BytesIO()
    for n in frames:
        draw(n)
        fig.canvas.draw()
        fig.set_layout_engine("none")  # laid out once: the frames stand still, and are drawn faster
        pixels = np.asarray(fig.canvas.buffer_rgba())  # type: ignore[attr-defined]
        images.append(Image.fromarray(pixels).convert("RGB").quantize(48))
    images[0].save(stream, "GIF", save_all=True, append_images=images[1:], duration=1000 / fps, loop=0)
    plt.close(fig)
    return f'<img alt="{alt}" src="data:image/gif;base64,{base64.b64encode(stream.getvalue()).decode()}">'


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


def residuals(ax: Axes, counts: np.ndarray, criteria: Mapping[float, float], images: int | None = None) -> QuadMesh:
    """Figures 3–4 of the paper: what share of the images has which residual, iteration by iteration.

    counts: (iterations, bins) over log10 residuals from −8 to 0, of so many images (by default, those of the first
    iteration). criteria: residual → mean iterations to reach it (cyan), with a ring at the paper's criterion (dashed).
    Returns the coloured mesh, for a colour bar.
    """
    n, bins = counts.shape
    x, y = np.arange(n + 1) - 0.5, np.logspace(-8, 0, bins + 1)
    share = np.ma.masked_equal(counts.T, 0) / (images or max(int(counts[0].sum()), 1))
    mesh = ax.pcolormesh(x, y, share, norm=SHARES, cmap="magma_r", rasterized=True)
    ax.set_facecolor(mesh.get_cmap()(0.0))
    outline = [Stroke(linewidth=3, foreground="black", alpha=0.6), Normal()]  # seen on light and on dark
    tol = 1e-4
    ax.axhline(tol, color="black", linewidth=1.2)
    ax.axhline(tol, color="white", linestyle="--", linewidth=1.2)
    ax.plot(list(criteria.values()), list(criteria), color="cyan", linewidth=1.5, path_effects=outline)
    ax.plot(criteria[tol], tol, "o", mfc="none", mec="white", mew=1.5, path_effects=outline)
    ax.set(yscale="log", xlim=(-0.5, n - 0.5), ylim=(1e-8, 1), xlabel="iteration", ylabel="relative residual")
    ax.grid(False)
    return mesh


def dynamics(runs: Sequence[Run], rows: Sequence[str]) -> Figure | None:
    """Figure 3 or 4: `residuals` of those rows that have records, over all their seeds; None if there are none."""
    found = {name: mine for name in rows if (mine := [r for r in runs if r.row == name])}
    if not found:
        return None
    lines = -(-len(found) // 4)
    columns = -(-len(found) // lines)
    size = (min(2.9 * columns + 1, 9.2), 2.3 * lines + 0.3)  # as wide as a page: what is written stays legible
    fig, axes = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for ax, (name, mine) in zip(axes.flat, found.items(), strict=False):
        counts = np.sum([r.arrays["histogram"].astype(int) for r in mine], 0)
        criteria = [r.numbers["criteria"] for r in mine]
        means = {float(c): float(np.mean([numbers[c] for numbers in criteria])) for c in criteria[0]}
        mesh = residuals(ax, counts, means, images=sum(len(r.arrays["iterations"]) for r in mine))
        ax.set_title(f"{name}, {len(mine)} seed{'s' if len(mine) > 1 else ''}", fontsize=10)
    for i, ax in enumerate(axes.flat):
        ax.set_ylabel("" if i % columns else "relative residual")
        ax.set_visible(i < len(found))
    fig.colorbar(mesh, ax=axes, label="share of the images per bin", shrink=0.8, aspect=30)
    return fig


def save(fig: Figure, path: Path, source: str) -> None:
    """As PNG and as PDF, with a word on the data that it was drawn from; the same bytes for the same figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None, "Description": source})
    fig.savefig(path.with_suffix(".pdf"), dpi=200, metadata={"CreationDate": None, "Subject": source})
