"""Everything that determines the numbers of a training, and the names of its records."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .. import checks
from ..data import SOURCES
from ..paper import BATCH, EPOCHS, TOL
from . import rows as table
from .rows import EVERY, SHORT, TRAININGS, Row, choose, get_row, given


@dataclass(frozen=True)
class Config:
    """Everything that determines the numbers of a training, but the epoch at which it is looked at."""

    row: Row
    seed: int = 0
    data: str = "mnist"
    train_images: int = 60_000
    test_images: int = 10_000
    batch_size: int = BATCH
    tol: float = SHORT  # where training stops a sample; 0: to the letter

    def __post_init__(self) -> None:
        if not isinstance(self.row, Row):
            raise TypeError(f"row must be a Row, not {self.row!r}; configure() finds one by its name")
        layers = self.row.layers
        if layers[0] != 784 or layers[-1] != 10:
            raise ValueError(f"digits need 784 input and 10 output neurons; got layers={list(layers)}")
        checks.choice("data set", self.data, SOURCES)
        counts = SOURCES[self.data].counts
        for name, least, most in (
            ("seed", 0, 2**31 - 1),
            ("train_images", BATCH if isinstance(self.batch_size, int) and self.batch_size == BATCH else 1, counts[0]),
            ("batch_size", 1, self.train_images),
            ("test_images", 1, counts[1]),
        ):
            object.__setattr__(self, name, checks.integer(name, getattr(self, name), least, most))
        wanted = f"a number from 0 (the paper's iterations, all of them) to less than {TOL:g}, the paper's criterion"
        tol = checks.number("tol", self.tol, wanted, most=math.nextafter(TOL, 0))
        object.__setattr__(self, "tol", tol)  # 0 and 0.0 are one configuration, of one name

    def settings(self) -> dict[str, Any]:
        """As plain data, with all that the paper's protocol fixes by the row."""
        values = {**self.row.settings(), **asdict(self)}
        del values["row"]
        return json.loads(json.dumps({**values, "schedule": EPOCHS, "numerics": self.numerics}))  # type: ignore[no-any-return]

    @property
    def numerics(self) -> int:
        """The version of the last change that touched this training."""
        return table.NUMERICS if self.row.solver == "anderson" and self.tol > 0 else table.UNTOUCHED

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def variant(self) -> str:
        """What distinguishes it from the table's training of that name, "" if nothing does: part of file names."""
        row = self.row
        usual = (
            get_row(TRAININGS[row.training][-1])
            if row.training in TRAININGS
            else replace(row, layers=(784, 10), lr=0.005)
        )
        ours, theirs = self.settings(), Config(usual, self.seed, tol=usual.tol).settings()
        theirs["numerics"] = self.numerics  # no record has it in its name
        other = {k: "-".join(map(str, v)) if isinstance(v, list) else v for k, v in ours.items() if v != theirs[k]}
        text = "".join(f"_{k}={v}" for k, v in other.items())
        return text if len(text) <= 150 else "_" + hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """The folder of its checkpoints; no other configuration has the same, but for the seed."""
        return self.row.training + self.variant


def configure(
    row: str | Row,
    seed: int = 0,
    *,
    layers: Sequence[int] = (),
    epochs: int | None = None,
    tol: float | None = None,
    **options: Any,
) -> tuple[Config, dict[str, int]]:
    """The configuration of a row's training, and what it measures: the name of each record → epoch.

    `row` is a name of the table or a Row of one's own. `layers` (as many as a named row has), `epochs` and the options
    make a run another one than the row's; its records then have names of their own. `epochs` may also be more than the
    row has. `tol` None is the row's own.
    """
    named = row if isinstance(row, Row) else get_row(row)
    if isinstance(row, str):
        choose(row, layers=layers)  # another depth is an error: the record would have the row's name
    names = [n for n in TRAININGS.get(named.training, ()) if EVERY[n].epoch <= named.epoch]
    rows = {n: EVERY[n] for n in names} if isinstance(row, str) else {named.training: named}
    last = named.epoch if epochs is None else epochs
    own = replace(named, layers=given(layers) or named.layers, epoch=last)
    config = Config(own, seed, tol=named.tol if tol is None else tol, **options)
    records = {}
    for name, r in rows.items():
        epoch = own.epoch if r.epoch == named.epoch else min(own.epoch, r.epoch)
        usual = name in EVERY and epoch == EVERY[name].epoch
        records[name + config.variant + ("" if usual else f"_epochs={epoch}")] = epoch
    return config, records
