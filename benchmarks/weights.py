"""The trained networks that the benchmarks start from: those that trainings have left, else the committed ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hoplib.experiment.files import ROOT
from hoplib.experiment.rows import SEEDS, TRAININGS, Row, get_row
from hoplib.paper import EPOCHS

WEIGHTS = ROOT / "results" / "weights"


def find(
    row: Row, epoch: int = EPOCHS, folder: Path = WEIGHTS, *, committed: Path = WEIGHTS, any_solver: bool | None = None
) -> Path | None:
    """The weights of the row's training after so many epochs, or at its end, of any seed; None where there are none.

    Or those of another training of the same network: with any solver, if so asked; by default of all but a CHN, for
    nearly all equilibria of a HAM are the same with every solver. The committed ones, in half precision, are final.
    """
    alike = row.model != "CHN" if any_solver is None else any_solver
    fit = [n for n in TRAININGS if _network(get_row(n)) == _network(row)]  # the name alone says nothing of the sizes
    names = [n for n in fit if n == row.training] + [n for n in fit if alike]
    return next((path for path in _places(names, epoch, folder, committed) if path.exists()), None)


def _places(names: list[str], epoch: int, folder: Path, committed: Path) -> Iterator[Path]:
    ends = {name: get_row(TRAININGS[name][-1]).epoch for name in names}
    for name in names:
        part = "" if epoch >= ends[name] else f"-epoch-{epoch}"
        for seed in SEEDS:
            yield folder / name / f"seed-{seed}{part}.safetensors"
    for name in names:
        if epoch >= ends[name]:
            yield committed / f"{name}-seed-0-half.safetensors"


def _network(row: Row) -> tuple[str, tuple[int, ...]]:
    return row.model, row.layers
