"""The batch: which trainings are wanted, which records are missing and why, and the runner of one of them.

    python -m hoplib.experiment.batch run 3-HAM-EO 0       train one row at one seed, through notebook 07 and papermill
    python -m hoplib.experiment.batch status               what is done, running, missing, failed; and the time left
    python -m hoplib.experiment.batch table …              Snakemake with these options; Ctrl-C stops all of it

Runs other than the table's (fewer epochs, smaller layers) have records, logs and checkpoints under names of their own.
The Snakefile asks `Plan` what is missing; Snakemake does the rest (parallel jobs, retries, logs, clusters).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from .. import paper
from .config import Config, configure
from .files import ROOT, RunError, imported, sweep_up, writable, write
from .records import record_path, why_not
from .rows import MODELS, SEEDS, get_row, select

NOTEBOOK = ROOT / "notebooks" / "07_train.ipynb"
ALIVE = 120  # seconds: a run writes a heartbeat much more often


Reader = Callable[[str], Any]


def _list(kind: Reader) -> Reader:
    return lambda text: [kind(word) for word in text.replace(",", " ").split()]


# Option → how it is read. The sizes make a run other than the table's.
SIZES: dict[str, Reader] = {"layers": _list(int), "epochs": int, "train_images": int, "test_images": int, "tol": float}
OPTIONS: dict[str, Reader] = {"rows": _list(str), "seeds": _list(int), "data": str, "output": Path, **SIZES}


@dataclass(frozen=True)
class Job:
    """One training at one seed, and the rows (name → epoch) that it has to leave a record of."""

    training: str
    config: Config
    rows: dict[str, int]

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def name(self) -> str:
        """The name of its last record, and of its logs."""
        return max(self.rows, key=lambda name: self.rows[name])


@dataclass(frozen=True)
class Plan:
    """The jobs that `rows` × `seeds` ask for, and the folder `output` that holds runs/, checkpoints/ and logs/."""

    rows: Sequence[str] = ()
    seeds: Sequence[int] = SEEDS
    data: str = "mnist"
    output: Path = ROOT / "results"
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Plan:
        """From strings, as the command line or Snakemake gives them; an unknown option or value is an error."""
        unknown = [k for k in options if k not in OPTIONS]
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}; choose from {', '.join(sorted(OPTIONS))}")
        try:
            given = {k: OPTIONS[k](str(v)) for k, v in options.items() if v not in (None, "")}
        except ValueError as e:
            raise ValueError(f"seeds, layers, epochs and images must be integers, tol a number: {e}") from None
        sizes = {k: given.pop(k) for k in SIZES if k in given}
        seeds, output = given.pop("seeds", ()) or SEEDS, given.pop("output", cls.output)
        plan = cls(**given, seeds=tuple(dict.fromkeys(seeds)), output=output.resolve(), sizes=sizes)
        if plan.output.is_file():
            raise ValueError(f"output must be a folder; {plan.output} is a file")
        plan.jobs()  # raises on a wrong value
        return plan

    def job(self, training: str, seed: int) -> Job:
        return Job(training, *configure(training, seed, data=self.data, **self.sizes))

    def jobs(self) -> list[Job]:
        return [self.job(training, seed) for training in select(self.rows) for seed in self.seeds]

    def why(self, job: Job) -> str:
        """Why the job has to run: the first of its records that does not count. "" if all do."""
        reasons = {name: why_not(self.record(name, job.seed), job.config, epoch) for name, epoch in job.rows.items()}
        return next((f"{name}: {reason}" for name, reason in reasons.items() if reason), "")

    def record(self, row: str, seed: int) -> Path:
        return record_path(self.output / "runs", row, seed)

    def log(self, job: Job) -> Path:
        return self.output / "logs" / job.name / f"seed-{job.seed}.log"

    def progress(self, job: Job) -> tuple[float, float] | None:
        """Of a run that is alive: the share of its steps that is done, and the seconds left; else None."""
        path = self.output / "checkpoints" / job.config.name / f"seed-{job.seed}.progress"
        names = ("epoch", "epochs", "step", "steps", "seconds_left", "time")
        try:
            beat = json.loads(path.read_bytes())
            epoch, epochs, step, steps, left, then = numbers = [float(beat[name]) for name in names]
            share = (epoch - 1 + step / steps) / epochs
        except Exception:  # no file, or whatever a foreign one holds
            return None
        possible = all(map(math.isfinite, numbers)) and 0 <= share <= 1 and left >= 0
        return (share, left) if possible and abs(time.time() - then) < ALIVE else None

    def parameters(self, job: Job) -> dict[str, Any]:
        """The parameters of notebook 07."""
        c = job.config
        return {
            "row": job.training,
            "seed": job.seed,
            "epochs": max(job.rows.values()),
            "data": c.data,
            "layers": list(c.row.layers),
            "train_images": c.train_images,
            "test_images": c.test_images,
            "tol": c.tol,
            "output": str(self.output),
        }

    def arguments(self) -> list[str]:
        """The options of `python -m hoplib.experiment.batch run` that give this plan again."""
        values = {"data": self.data, "output": self.output, **self.sizes}
        text = {k: " ".join(map(str, v)) if isinstance(v, list) else str(v) for k, v in values.items()}
        return [f"--{k.replace('_', '-')}={v}" for k, v in text.items()]


def run_job(plan: Plan, job: Job) -> None:
    """Execute notebook 07 for one job. Success means that its records are there and valid, nothing else does."""
    try:
        from .notebooks import run
    except ImportError as e:
        raise RunError(f"{e}: a training needs the extra `notebooks` (pip install 'hoplib[notebooks]')") from None
    if plan.why(job):
        writable(plan.output)
        run(NOTEBOOK, plan.log(job).with_suffix(".ipynb"), plan.parameters(job))
    if reason := plan.why(job):
        raise RunError(f"the notebook ended, but the record does not count ({reason})")


def table(options: list[str]) -> int:
    """Snakemake in a session of its own. Ctrl-C, SIGTERM or a closed terminal stops all of it, with one line."""
    own = {"start_new_session": True, "preexec_fn": _heed_interrupts} if os.name == "posix" else {}
    command = [sys.executable, "-m", "snakemake", *options]
    imported()
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup's is ignored, and stays so
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **own) as process:  # type: ignore[call-overload]
        try:
            for line in process.stdout:
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
            return int(process.wait())
        except (KeyboardInterrupt, SystemExit) as e:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is stopping: a second Ctrl-C adds nothing
            if os.name == "posix":
                os.killpg(process.pid, signal.SIGINT)  # Snakemake cancels its jobs; what they say now is not shown
            process.communicate()
            print("stopped; the same command goes on from the last epochs", file=sys.stderr)
            if isinstance(e, SystemExit):
                return int(e.code or 0)
            return 0 if "MAKELEVEL" in os.environ else 130  # make ends with Ctrl-C too, and adds a line to any but 0


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it, and so would its children


# -- status -----------------------------------------------------------------------------------------------------


def cost(job: Job) -> float:
    """A rough guess of what a training costs, in units of its own: products and element-wise work an iteration."""
    row = job.config.row
    net = MODELS[row.model](row.layers, device="meta")
    local = 20 if row.model == "CHN" and row.even_odd else 4 if row.solver == "anderson" else 2
    steps = max(job.rows.values()) * (job.config.train_images // job.config.batch_size)
    return steps * paper.max_iter(net, row.even_odd) * (net.multiply_adds() + 300 * local * net.N)


def seconds(plan: Plan, job: Job) -> float | None:
    """How long the training took, by its record."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return float(json.loads(plan.record(job.name, job.seed).read_bytes())["seconds"]["training"])
    return None


KINDS = ("done", "running", "failed", "damaged", "changed", "missing")


def state(plan: Plan, job: Job) -> tuple[str, str, float | None]:
    """One of KINDS, the word for it, and the seconds left where a heartbeat tells them."""
    why = plan.why(job)
    if not why:
        return "done", "done", 0.0
    if beat := plan.progress(job):
        return "running", f"{beat[0]:.0%}", beat[1]
    reason = why.split(": ", 1)[1]
    failed = plan.log(job).with_suffix(".failed").exists()
    kind = "failed" if failed else reason if reason in KINDS else "changed"
    return kind, reason if kind == "changed" else kind, None


def status(plan: Plan, workers: int) -> str:
    """A line for every training, a word for every seed, and the time that the rest will take."""
    jobs = {(job.training, job.seed): job for job in plan.jobs()}
    states = {key: state(plan, job) for key, job in jobs.items()}
    took = {key: s for key, job in jobs.items() if states[key][0] == "done" and (s := seconds(plan, job))}
    rates = [s / cost(jobs[key]) for key, s in took.items()]
    left = 0.0
    for key, (_, _, rest) in states.items():
        if rest is None:  # as long as the same training at other seeds, else as all others by their cost
            known = [s for (training, _), s in took.items() if training == key[0]]
            rest = fmean(known) if known else fmean(rates or [0.0]) * cost(jobs[key])
        left += rest
    width = max(12, *(len(word) + 2 for _, word, _ in states.values()))
    header = f"{'seed':26}" + "".join(f"{s:>{width}}" for s in plan.seeds)
    lines = [f"{t:26}" + "".join(f"{states[t, s][1]:>{width}}" for s in plan.seeds) for t in select(plan.rows)]
    kinds = [kind for kind, _, _ in states.values()]
    total = ", ".join(f"{kinds.count(kind)} {kind}" for kind in KINDS if kind in kinds)
    time_left = f"; about {_hours(left / workers)} left on {workers} workers" if left else ""
    unknown = "" if rates or {*kinds} <= {"done", "running"} else " (no finished run to estimate from)"
    failed = [job for key, job in jobs.items() if states[key][0] == "failed"]
    failures = [f"failed: see {os.path.relpath(plan.log(job))}" for job in failed]
    return "\n".join([header, *lines, total + time_left + unknown, *failures])


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{max(seconds / 60, 1):.0f} min"


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"{word!r} has no value: write {word}=…")
    return name, value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hoplib.experiment.batch", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table", help="Snakemake with the options that follow")
    one = commands.add_parser("run", help="train one row at one seed")
    one.add_argument("row")
    one.add_argument("seed", type=int)
    look = commands.add_parser("status", help="what is done, running, missing, failed")
    look.add_argument("--rows", default="", help="names, or prefixes such as 3-*; default: all")
    look.add_argument("--seeds", default="", help="default: 0 1 2 3 4")
    look.add_argument("sizes", nargs="*", metavar="name=value", help="the same as --name=value, as `make table` has it")
    for command in (one, look):
        for name in ("data", "output", *SIZES):
            command.add_argument(f"--{name.replace('_', '-')}", default="")
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["table"]:
        return table(argv[1:])
    options = vars(parser.parse_args(argv))
    workers = torch.cuda.device_count() or os.cpu_count() or 1
    try:
        if options.pop("command") == "status":
            words = dict(_pair(word) for word in options.pop("sizes"))
            print(status(Plan.parse({**options, **words}), workers))
            return 0
        row, seed = get_row(options.pop("row")).training, options.pop("seed")
        plan = Plan.parse({**options, "rows": row, "seeds": seed})
        job = plan.job(row, seed)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    failed = plan.log(job).with_suffix(".failed")
    try:
        with contextlib.suppress(OSError):
            failed.unlink(missing_ok=True)
            sweep_up(failed.parent, failed.stem)
        run_job(plan, job)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last epoch", file=sys.stderr)
        return 130
    except Exception as e:
        print(f"error: {e}", file=sys.stderr)
        with contextlib.suppress(OSError, RunError):
            write(failed, f"{e}\n".encode())
        return 1
    for name in job.rows:
        record = json.loads(plan.record(name, seed).read_bytes())
        print(
            f"{name}, seed {seed}, {record['data']}: {record['test_accuracy']:.2%} of the test images right, "
            f"{record['iterations_mean']:.1f} iterations"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
