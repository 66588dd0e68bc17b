"""The records as tables: one tidy frame for each question, and the paper's Table 2 beside ours.

Everything is read from the records that count; nothing is typed by hand. Needs the `notebooks` extra.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]

from .config import configure
from .measure import WAYS, Arrays
from .records import read_record, record_path, why_not
from .rows import EVERY, SEEDS, Row

MEASURED = {"iterations_mean": 1, "test_accuracy": 100, "not_converged": 100, "false_convergence": 100}  # × for people


@dataclass(frozen=True)
class Run:
    """A record with its arrays."""

    row: str
    seed: int
    numbers: dict[str, Any]
    arrays: Arrays


def load(results: Path | str, data: str = "mnist", rows: list[str] | None = None, **options: Any) -> list[Run]:
    """The records below results/runs that count, row by row and seed by seed. `options` as for `configure`."""
    found = []
    for name in EVERY if rows is None else rows:
        for seed in SEEDS:
            config, records = configure(name, seed, data=data, **options)
            record, epoch = list(records.items())[-1]
            path = record_path(Path(results) / "runs", record, seed)
            if not why_not(path, config, epoch):
                found.append(Run(name, seed, *read_record(path)))
    return found


# -- tidy frames ------------------------------------------------------------------------------------------------


def _facts(run: Run) -> dict[str, Any]:
    row = EVERY[run.row]
    return {
        "row": run.row,
        "seed": run.seed,
        "layers": len(row.layers),
        "model": row.model,
        "method": row.label,
        "solver": row.solver,
        "updates": "even-odd" if row.even_odd else "synchronous",
    }


def per_run(runs: list[Run]) -> pd.DataFrame:
    """One line for each record: the numbers of Table 2, and what they cost."""
    return pd.DataFrame(
        {
            **_facts(r),
            **{name: r.numbers[name] for name in MEASURED},
            "multiply_adds": r.numbers["multiply_adds"]["solve"],
            "speed-up in time": _in_time(r),
            "training_hours": r.numbers["seconds"]["training_cpu"] / 3600,
            **{f"iterations to {c}": n for c, n in r.numbers["criteria"].items()},
        }
        for r in runs
    )


def _in_time(run: Run) -> float:
    """CPU seconds of the base's way of solving over those of the row's own: one network, 1,000 images, one run.

    Seconds of different records do not compare: they come from other days, machines and libraries.
    """
    row = EVERY[run.row]
    plain, seconds = EVERY[base(row)], run.numbers["seconds"]["cross_cpu"]
    return float(seconds[way(plain)] / seconds[way(row)]) if plain.model == row.model else float("nan")


def per_epoch(runs: list[Run]) -> pd.DataFrame:
    """One line for each epoch of each training."""
    return pd.DataFrame(
        {**_facts(r), "epoch": e, **numbers} for r in runs for e, numbers in enumerate(r.numbers["history"], 1)
    )


def per_image(runs: list[Run]) -> pd.DataFrame:
    """One line for each test image of each record."""
    return _joined(
        {
            **_facts(r),
            "image": range(len(r.arrays["iterations"])),
            "iterations": r.arrays["iterations"].astype(int),
            "predicted": r.arrays["predicted"].astype(int),
            "equation_error": 10.0 ** (r.arrays["equation_error"].astype(float) / 10),
        }
        for r in runs
    )


def per_way(runs: list[Run]) -> pd.DataFrame:
    """One line for each record and way of solving: what a solver does, whatever the network was trained with."""
    return pd.DataFrame(
        {**_facts(r), "way": name, **r.numbers["cross"][name], "cpu_seconds": r.numbers["seconds"]["cross_cpu"][name]}
        for r in runs
        for name in WAYS
    )


def per_radius(runs: list[Run]) -> pd.DataFrame:
    """One line for each image whose spectral radius is known: the radius, and the even-odd iterations it took."""
    k = list(WAYS).index("even-odd")
    return _joined(
        {
            **_facts(r),
            "image": range(len(radii)),
            "spectral_radius": radii.astype(float),
            "iterations": r.arrays["cross_iterations"][k, : len(radii)].astype(int),
        }
        for r in runs
        if (radii := r.arrays.get("spectral_radius")) is not None
    )


def _joined(columns: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """The lines of all frames with these columns."""
    frames = [pd.DataFrame(c) for c in columns]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


# -- Table 2 ----------------------------------------------------------------------------------------------------


def way(row: Row) -> str:
    """The row's own way of solving, by its name in the cross measurement."""
    if row.solver == "over-relaxed":
        return row.solver
    return ("even-odd" if row.even_odd else "synchronous") + (", Anderson" if row.solver == "anderson" else "")


def base(row: Row) -> str:
    """The row that the paper's speed-up compares with."""
    return "3-CHN-3-epochs" if len(row.layers) == 3 and row.model != "HAM" else f"{len(row.layers)}-HAM"


def charge(row: Row) -> int:
    """State updates of one iteration, as the paper counts them: 20 for CHN-EO, with its 2 × 10 local steps."""
    return 20 if row.model == "CHN" and row.even_odd else 1


def table(runs: list[Run]) -> pd.DataFrame:
    """Every row over its seeds, means and standard deviations, beside the paper's; NaN where nothing is known.

    Below the paper's rows stand those beyond it that have a record.

    Three speed-ups: in state updates, as the paper counts; in multiply-adds of a whole solve, the product with the
    input among them; in CPU time, on the row's own network, where the base's way can solve it too.
    """
    frame = per_run(runs)
    lines = {}
    for name, row in EVERY.items():
        ours = frame[frame.row == name] if len(frame) else frame
        paper = row.published
        if paper is None and not len(ours):
            continue
        line: dict[str, float] = {"records": len(ours)}
        if len(ours):
            for key, scale in MEASURED.items():
                line[key], line[f"{key} std"] = scale * ours[key].mean(), scale * ours[key].std()
            line |= {key: ours[key].mean() for key in ("multiply_adds", "training_hours")}
            line["speed-up in time"] = ours["speed-up in time"].median()  # a first call may have compiled a loop
            line["updates"] = charge(row) * line["iterations_mean"]
        if paper is not None:
            line |= {"paper iterations": paper.iterations, "paper iterations std": paper.iterations_std}
            line |= {"paper speed-up": paper.speedup, "paper accuracy": paper.accuracy}
            line["paper accuracy std"] = paper.accuracy_std
        lines[name] = line
    found = pd.DataFrame(lines).T.rename_axis("row")
    for speed_up, key in (("speed-up", "updates"), ("speed-up in multiply-adds", "multiply_adds")):
        if key in found:
            found[speed_up] = [found[key].get(base(EVERY[n])) / found[key][n] for n in found.index]
    return found


def beyond(runs: list[Run]) -> pd.DataFrame:
    """The over-relaxed rows that have records, beside the other ways of their depth and model: means over the seeds."""
    found, lines = table(runs), {}
    for name in (n for n in found.index if EVERY[n].solver == "over-relaxed"):
        plain = name.removesuffix("-OR")
        names = {"synchronous": plain, "even-odd": f"{plain}-EO", "even-odd, Anderson": f"{plain}-EO-DEQ"}
        line = {way: found.iterations_mean.get(other, float("nan")) for way, other in names.items()}
        line |= {"over-relaxed": found.iterations_mean[name], "accuracy %": found.test_accuracy[name]}
        line["even-odd's accuracy %"] = found.test_accuracy.get(f"{plain}-EO", float("nan"))
        lines[name] = {"seeds": found.records[name], **line}
    return pd.DataFrame(lines).T.rename_axis("row")


def spread(mean: float, std: float, digits: int) -> str:
    """mean ± std; no ± where there is one seed, nothing where there is none."""
    if pd.isna(mean):
        return ""
    return f"{mean:.{digits}f}" + ("" if pd.isna(std) else f" ± {std:.{digits}f}")


def shown(found: pd.DataFrame, data: str) -> pd.DataFrame:
    """The table as people read it: ours beside the paper's."""

    def column(key: str, digits: int) -> list[str]:
        numbers = found.reindex(columns=[key, f"{key} std"]).to_numpy()
        return [spread(mean, std, digits) for mean, std in numbers]

    columns = {
        "seeds": [f"{n:.0f} of {len(SEEDS)}" for n in found.records],
        "iterations": column("iterations_mean", 1),
        "paper's": column("paper iterations", 1),
        "speed-up": column("speed-up", 2),
        "paper's ": column("paper speed-up", 1),
        "in multiply-adds": column("speed-up in multiply-adds", 2),
        "in time": column("speed-up in time", 2),
        f"accuracy %, {data.upper()}": column("test_accuracy", 2),
        "paper's, EMNIST": column("paper accuracy", 1),
        "not converged %": column("not_converged", 2),
        "falsely converged %": column("false_convergence", 2),
    }
    return pd.DataFrame(columns, index=found.index)


def brief(found: pd.DataFrame) -> pd.DataFrame:
    """The paper's seventeen rows and its three numbers, ours beside and below them: what the README shows."""
    people = shown(found[[EVERY[name].readout == "output" for name in found.index]], "mnist")
    names = {
        "seeds": "seeds",
        "iterations": "iterations",
        "paper's": "paper",
        "speed-up": "speed-up",
        "paper's ": "paper ",
        "accuracy %, MNIST": "accuracy %",
        "paper's, EMNIST": "paper  ",
    }
    people = people[[*names]].rename(columns=names)
    return people.replace({" of .*": "", " ± ": "\u00a0±\u00a0"}, regex=True)  # no number goes over two lines


# -- files ------------------------------------------------------------------------------------------------------


def markdown(frame: pd.DataFrame) -> str:
    """A Markdown table."""
    lines = [[str(frame.index.name or ""), *map(str, frame.columns)], ["---"] + ["---:"] * len(frame.columns)]
    lines += [[str(name), *map(str, values)] for name, values in zip(frame.index, frame.to_numpy(), strict=True)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def latex(frame: pd.DataFrame) -> str:
    """A LaTeX tabular, for the package booktabs."""
    text: str = frame.reset_index().to_latex(index=False, escape=True, column_format="l" + "r" * len(frame.columns))
    return text.replace("±", r"$\pm$")


def rendered(runs: list[Run]) -> dict[str, str]:
    """The text of every table file, by name."""
    found = table(runs)
    people = shown(found, "mnist")
    return {
        "table.csv": found.to_csv(float_format="%.6g", lineterminator="\n"),
        "table.md": markdown(people),
        "table.tex": latex(people),
        "summary.md": markdown(brief(found)),
    }


def source(runs: list[Run], rows: list[str]) -> str:
    """What a figure of these rows is drawn from: a digest of their records."""
    sums = "".join(r.numbers["npz_sha256"] for r in runs if r.row in rows)
    return f"records {hashlib.sha256(sums.encode()).hexdigest()}"
