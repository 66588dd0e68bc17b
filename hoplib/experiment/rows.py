"""The rows of the paper's Table 2, as data: everything that distinguishes one row from another, and its results.

The 17 rows of the paper come from 16 trainings a seed: plain CHN is one training, measured after 3 and 10 epochs.
Two more trainings read the output where the authors' code reads it for the CHN-EO rows: 19 rows, 18 trainings.
Beyond the paper are rows with clipped over-relaxation (OR), and of the CHN through ς⁻¹ (ExactCHN).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from .. import checks
from ..network import CHN, HAM, ExactCHN, Network, check_layers
from ..paper import EPOCHS, LAYERS, LR
from ..relaxation import OverRelaxed
from ..solvers import Anderson, Picard, Solver

MODELS: dict[str, type[Network]] = {"CHN": CHN, "HAM": HAM, "ExactCHN": ExactCHN}
SOLVERS: dict[str, Solver] = {"picard": Picard(), "anderson": Anderson(), "over-relaxed": OverRelaxed()}
SUFFIXES = {("picard", False): "", ("anderson", False): "-DEQ", ("picard", True): "-EO", ("anderson", True): "-EO-DEQ"}
UPDATES = {"synchronous": False, "even-odd": True}  # → Row.even_odd
READOUTS = ("output", "published")
SEEDS = (0, 1, 2, 3, 4)
# Raise it with every change that changes a trained network: older records and checkpoints are then void.
NUMERICS = 4
UNTOUCHED = 3  # the version of the trainings that the last change did not touch
# 1: the first. 2: samples that have not converged get the derivative along unrolled steps, not the closed form.
# 3: Anderson mixes from the second map value on, not from the third; loss, prediction and the gradient by ŷ are those
#    at s*, the state after the forward iterations, not after the backward ones.
# 4: a sample that meets the criterion by chance, under Anderson, is no longer taken for an equilibrium. In 7 layers
#    that gave gradients thousands of times too large, every fifty steps or so. Picard's map values do not come near
#    each other by chance, and to the letter no sample ends early: those trainings are as in 3.
MOST_WEIGHTS = 10**9  # of a training, which keeps eight numbers for each: more is a slip of the pen
SHORT = 1e-6  # where the short way of training stops a sample, far below the criterion of the measurement


@dataclass(frozen=True)
class Published:
    """A row of the paper's table, means ± standard deviations over 5 seeds, on EMNIST's 'mnist' split."""

    iterations: float
    iterations_std: float
    speedup: float
    accuracy: float
    accuracy_std: float


@dataclass(frozen=True)
class Row:
    """One row: a network, how it is solved, and the epoch after which it is measured.

    `readout` is where ŷ is read: "output", the last layer, as the paper describes; or "published", the last ten
    neurons of the last odd layer. The authors' code (github.com/cgoemaere/hopdeq, commit 16a58db) reads it there for
    CHN-EO: its state is [s_even; s_odd] (deq_modules/even_odd/evenoddfunction.py, line 244), and the last ten entries
    of the state are taken for the output (deq_modules/onematrix/litonematrixdeq.py, line 45).
    """

    model: str
    layers: tuple[int, ...]
    solver: str = "picard"
    even_odd: bool = False
    lr: float = 0.005
    epoch: int = EPOCHS
    readout: str = "output"
    published: Published | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", check_layers(self.layers))
        if (weights := sum(n * m for n, m in pairwise(self.layers))) > MOST_WEIGHTS:
            raise ValueError(
                f"layers={list(self.layers)} make {weights:.0e} weights; at most {MOST_WEIGHTS:.0e} are trained"
            )
        for name, choices in (("model", MODELS), ("solver", SOLVERS), ("readout", READOUTS)):
            checks.choice(name, getattr(self, name), choices)
        checks.flag("even_odd", self.even_odd)
        if self.solver == "over-relaxed" and (self.model == "CHN" or not self.even_odd):
            raise ValueError("over-relaxed updates are even-odd ones of a HAM or an ExactCHN")
        lr = checks.number("lr", self.lr, "a positive number up to 1e6", most=1e6, above=True)
        object.__setattr__(self, "lr", lr)
        object.__setattr__(self, "epoch", checks.integer("epochs", self.epoch, 1, EPOCHS))
        if self.readout == "published" and self.layers[len(self.layers) // 2 * 2 - 1] < 10:
            raise ValueError(f"the published readout needs ten neurons in the last odd layer; got layers={self.layers}")

    @property
    def label(self) -> str:
        """The paper's name of the method."""
        return self.model + SUFFIXES.get((self.solver, self.even_odd), "-OR")

    @property
    def training(self) -> str:
        """The name of the training, which rows measured after different epochs share."""
        return f"{len(self.layers)}-{self.label}" + ("" if self.readout == "output" else f"-{self.readout}")

    @property
    def tol(self) -> float:
        """Where its training stops a sample; 0: nowhere, to the letter, where the local steps of a CHN may be chaotic.

        Notebook 08 (Section 4) has the reason: no target holds the output layer of the rows as published.
        """
        return 0.0 if self.readout == "published" else SHORT

    def settings(self) -> dict[str, Any]:
        """What defines the training."""
        return {k: v for k, v in asdict(self).items() if k not in ("epoch", "published")}


def _rows() -> dict[str, Row]:
    published = {  # iterations ± std, speed-up, accuracy ± std
        (3, "CHN", 10): (75.5, 2.1, 0.5, 97.9, 0.1),
        (3, "CHN", 3): (39.1, 3.8, 1.0, 97.0, 0.2),
        (3, "CHN-DEQ", 4): (20.6, 0.2, 1.9, 97.2, 0.3),
        (3, "CHN-EO", 10): (16.8, 0.5, 0.1, 97.1, 0.1),
        (3, "CHN-EO-DEQ", 10): (16.2, 1.0, 0.1, 97.1, 0.2),
        (3, "HAM", 10): (11.9, 0.4, 1.0, 97.9, 0.0),
        (3, "HAM-DEQ", 10): (9.9, 0.3, 1.2, 97.9, 0.1),
        (3, "HAM-EO", 10): (8.0, 0.2, 1.5, 97.9, 0.1),
        (3, "HAM-EO-DEQ", 10): (6.6, 0.2, 1.8, 97.9, 0.1),
        (5, "HAM", 10): (36.0, 1.8, 1.0, 97.1, 0.1),
        (5, "HAM-DEQ", 10): (33.0, 0.6, 1.1, 97.1, 0.2),
        (5, "HAM-EO", 10): (18.3, 0.5, 2.0, 97.1, 0.1),
        (5, "HAM-EO-DEQ", 10): (17.7, 0.3, 2.0, 97.1, 0.1),
        (7, "HAM", 10): (67.1, 2.9, 1.0, 95.6, 0.2),
        (7, "HAM-DEQ", 10): (56.0, 1.4, 1.2, 95.6, 0.1),
        (7, "HAM-EO", 10): (32.2, 0.8, 2.1, 95.5, 0.2),
        (7, "HAM-EO-DEQ", 10): (31.0, 1.0, 2.2, 95.5, 0.2),
    }
    rows = {}
    for (depth, label, epoch), numbers in published.items():
        solver, even_odd = ("anderson" if "DEQ" in label else "picard"), "EO" in label
        row = Row(label[:3], LAYERS[depth], solver, even_odd, LR[depth], epoch, published=Published(*numbers))
        rows[row.training + ("-3-epochs" if epoch == 3 else "")] = row
        if row.model == "CHN" and even_odd:
            hidden = replace(row, readout="published")
            rows[hidden.training] = hidden
    return rows


def _beyond() -> dict[str, Row]:
    """What the paper does not have: over-relaxed HAMs of every depth, and the CHN through ς⁻¹ in the same ways."""
    ways = [("picard", False), ("picard", True), ("anderson", True)]
    rows = [Row("ExactCHN", LAYERS[3], solver, even_odd, LR[3]) for solver, even_odd in ways]
    rows += [Row(model, LAYERS[d], "over-relaxed", True, LR[d]) for model in ("HAM", "ExactCHN") for d in LAYERS]
    return {row.training: row for row in rows}


ROWS = _rows()
BEYOND = _beyond()
EVERY = {**ROWS, **BEYOND}
TRAININGS: dict[str, list[str]] = {}  # training → its rows, by the epoch of their measurement
for _name, _row in sorted(EVERY.items(), key=lambda item: item[1].epoch):
    TRAININGS.setdefault(_row.training, []).append(_name)


def get_row(name: str) -> Row:
    """The row of that name."""
    return EVERY[checks.choice("row", name, EVERY)]


def given(layers: Sequence[int]) -> tuple[int, ...]:
    """The layers, if there are any; an error if they are impossible."""
    return () if isinstance(layers, (list, tuple)) and not layers else check_layers(layers)


def choose(
    row: str = "", *, model: str = "", solver: str = "", updates: str = "", layers: Sequence[int] = ()
) -> str | Row:
    """A row of the table by its name; or, where that is "", the row that the others describe. "" means: not given.

    A named row may have layers of other sizes. What contradicts it is an error: another depth, model, solver or way of
    updating makes another network. Without a name only `layers` must be given; the rest is an even-odd HAM's.
    """
    layers = given(layers)
    if updates != "":
        checks.choice("updates", updates, UPDATES)
    if row == "":
        if len(layers) < 2:
            raise ValueError(f"a network of your own needs its layers, such as [784, 500, 200, 10]; not {list(layers)}")
        even_odd = UPDATES[updates or "even-odd"]
        return Row(model or "HAM", tuple(layers), solver or "picard", even_odd, LR.get(len(layers), LR[5]))
    named = get_row(row)
    own = {"model": named.model, "solver": named.solver, "updates": [*UPDATES][named.even_odd]}
    for name, value in {"model": model, "solver": solver, "updates": updates}.items():
        if value and value != own[name]:
            raise ValueError(
                f"{name}={value!r} contradicts the row {row!r}, which has {name}={own[name]!r}: leave {name} empty, "
                f"choose another row, or leave row empty and give layers to train a network of your own"
            )
    if layers and len(layers) != len(named.layers):
        raise ValueError(
            f"layers={list(layers)} contradicts the row {row!r}, which has {len(named.layers)} layers: give as many "
            f"sizes, or leave row empty to train a network of your own"
        )
    return row


def select(names: Sequence[str]) -> list[str]:
    """The trainings that the named rows need; no names mean all of the paper. * stands for anything (3-*, *-OR)."""
    chosen: list[str] = []
    for name in names or ROWS:
        chosen += [r for r in EVERY if fnmatchcase(r, name)] or [name]  # an unknown name: let get_row say so
    wanted = {get_row(name).training for name in chosen}
    return [t for t in dict.fromkeys(r.training for r in EVERY.values()) if t in wanted]
