"""Records that prove themselves: a JSON file of numbers beside an .npz of small arrays.

A record carries the SHA-256 of both, so that one that is there and counts is right; whatever is wrong with it,
`why_not` says "damaged", and the training is done again.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import checks, paper
from ..network import HAM, Network
from .config import Config
from .files import pack, write
from .measure import BINS, CRITERIA, CROSS, FALSE, QUANTILES, RADII, Arrays, ways
from .rows import MODELS


def record_path(runs: Path, name: str, seed: int) -> Path:
    return runs / name / f"seed-{seed}.json"


def digest(record: Mapping[str, Any]) -> str:
    """The SHA-256 of a record's content, whatever its layout."""
    content = {k: v for k, v in record.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_record(path: Path, record: Mapping[str, Any], arrays: Arrays) -> None:
    """The arrays as .npz, then the record: its presence means that the run is complete."""
    packed = pack(arrays)
    write(path.with_suffix(".npz"), packed)
    record = {**record, "npz_sha256": hashlib.sha256(packed).hexdigest()}
    write(path, {**record, "sha256": digest(record)})


def read_record(path: Path) -> tuple[dict[str, Any], Arrays]:
    """A record and its arrays as they are on disk, if they are complete and unchanged; else a ValueError."""
    try:
        record = json.loads(path.read_bytes())
        packed = path.with_suffix(".npz").read_bytes()
        if record["sha256"] != digest(record) or record["npz_sha256"] != hashlib.sha256(packed).hexdigest():
            raise ValueError("a digest does not match")
        with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
            return record, {name: arrays[name] for name in arrays.files}
    except Exception as e:  # whatever a foreign file makes the readers raise
        raise ValueError(f"{path} is damaged: {e}") from e


def why_not(path: Path, config: Config, epoch: int) -> str:
    """Why the record at `path` does not count: missing, damaged, of other numerics, changed; "" if it does."""
    if not path.exists():
        return "missing"
    try:
        record, arrays = read_record(path)
        numerics = checks.integer("numerics", record["config"]["numerics"], 1)
        if numerics != config.numerics:
            return f"numerics {numerics}, now {config.numerics}"
        if changed := _changed(record, config, epoch):
            return "changed: " + ", ".join(changed)
        _check(record, arrays, config, path.parent.name, epoch)
    except Exception:  # whatever a foreign file makes the checks raise
        return "damaged"
    return ""


def _changed(record: Mapping[str, Any], config: Config, epoch: int) -> list[str]:
    """The settings in which the record differs from the configuration."""
    ours, theirs = config.settings(), record["config"]
    other = [k for k in ours if k not in theirs or not _fits(theirs[k], ours[k])]
    return other or (["epoch"] if type(record["epoch"]) is int and record["epoch"] != epoch else [])


def _check(record: dict[str, Any], arrays: Arrays, config: Config, name: str, epoch: int) -> None:
    """Raise an error unless the record is of the right form, and its arrays and its numbers agree."""
    net = MODELS[config.row.model](config.row.layers, device="meta")
    if {k: (str(a.dtype), a.shape) for k, a in arrays.items()} != _kinds(config, net):
        raise ValueError("an array is missing, or has another type or shape")
    if not _fits(record, _form(config, net, name, epoch, arrays)):
        raise ValueError("a number is missing, or has an impossible value")
    if not _agree(record, arrays, config, net):
        raise ValueError("the arrays do not agree with the numbers")


SHARE, FINITE = (0.0, 1.0), (0.0, 1e300)
UNKNOWN_ERROR = 127  # in the array of equation errors: not finite, or beyond its range


def _form(config: Config, net: Network, name: str, epoch: int, arrays: Arrays) -> dict[str, Any]:
    """What a record looks like: at each place a range (least, most), a type, or the one value that is right."""
    row = config.row
    iterations = (0, paper.max_iter(net, row.even_odd))
    whole = arrays["equation_error"].max() < UNKNOWN_ERROR
    shares = dict.fromkeys(("not_converged", "false_convergence"), SHARE)
    way = {"iterations": (0, paper.max_iter(net, False)), **shares, "not_finite": SHARE, "accuracy": SHARE}
    training = {"loss": FINITE, "accuracy": SHARE, "iterations": iterations, "not_converged": SHARE}
    looked = {"test_accuracy": SHARE, "test_iterations": iterations, **{f"test_{k}": SHARE for k in shares}}
    times = ("training", "training_cpu", "evaluation", "evaluation_cpu")
    return {
        "row": name,
        "seed": config.seed,
        "data": config.data,
        "epoch": epoch,
        "test_accuracy": SHARE,
        "iterations_mean": iterations,
        "iterations_std": iterations,
        **shares,
        "criteria": {f"{c:.3g}": iterations for c in CRITERIA},
        "equation_error": dict.fromkeys(QUANTILES, FINITE if whole else float),
        "multiply_adds": {
            "iteration": net.multiply_adds(),
            "input": row.layers[0] * row.layers[1],
            "solve": FINITE,
        },
        "cross": dict.fromkeys(ways(row), way),
        **({"spectral_radius": dict.fromkeys(QUANTILES, (-1e-9, 1e300))} if isinstance(net, HAM) else {}),
        **({"omega": (1.0, 2.0)} if row.solver == "over-relaxed" else {}),
        "seconds": {**dict.fromkeys(times, FINITE), "cross_cpu": dict.fromkeys(ways(row), FINITE)},
        "history": [{**training, **looked, "seconds": FINITE, "cpu_seconds": FINITE}] * epoch,
        "config": config.settings(),
        "versions": dict,
        "device": str,
        "fused": bool,
        "threads": (1, 1_000_000),
        "npz_sha256": str,
        "sha256": str,
    }


def _fits(value: Any, form: Any) -> bool:
    """Is the value of this form? Neither NaN nor a bool is a number of any range."""
    if isinstance(form, dict):
        return isinstance(value, dict) and value.keys() == form.keys() and all(_fits(value[k], form[k]) for k in form)
    if isinstance(form, list):
        return isinstance(value, list) and len(value) == len(form) and all(map(_fits, value, form))
    if isinstance(form, tuple):
        return type(value) in (int, float) and bool(form[0] <= value <= form[1])
    return type(value) is form if isinstance(form, type) else type(value) is type(form) and bool(value == form)


def _kinds(config: Config, net: Network) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The arrays of a record: name → type and shape."""
    images = config.test_images
    return {
        "histogram": ("uint16", (paper.max_iter(net, config.row.even_odd) - 1, len(BINS) - 1)),
        "iterations": ("uint16", (images,)),
        "predicted": ("uint8", (images,)),
        "equation_error": ("int8", (images,)),
        "cross_iterations": ("uint16", (len(ways(config.row)), min(images, CROSS))),
        **({"spectral_radius": ("float32", (min(images, RADII),))} if isinstance(net, HAM) else {}),
    }


def _agree(record: Mapping[str, Any], arrays: Arrays, config: Config, net: Network) -> bool:
    """Can the arrays have these values, and do the record's numbers follow from them?

    What did not converge has the largest number of iterations.
    """
    row, iterations, tenths = config.row, arrays["iterations"], arrays["equation_error"]
    last, limit = paper.max_iter(net, row.even_odd) - 1, round(10 * math.log10(FALSE))
    met, radii = iterations < last, arrays.get("spectral_radius")
    least, most = (met & (tenths > limit)).mean(), (met & (tenths >= limit)).mean()  # an error at the limit is rounded
    bounds = [
        (iterations, last),
        (arrays["predicted"], net.layers[-1] - 1),
        (arrays["histogram"].sum(1), config.test_images),
    ]
    means = [
        (record["iterations_mean"], iterations),
        (record["criteria"][f"{paper.TOL:.3g}"], iterations),
        (record["not_converged"], ~met),
    ]
    for (name, (even_odd, _)), found in zip(ways(row).items(), arrays["cross_iterations"], strict=True):
        numbers, end = record["cross"][name], paper.max_iter(net, even_odd) - 1
        bounds.append((found, end))
        means += [(numbers["iterations"], found), (numbers["not_converged"], found == end)]
    return (
        all(array.max() <= bound for array, bound in bounds)
        and all(_close(number, array.mean()) for number, array in means)
        and all(c["not_finite"] <= c["not_converged"] for c in record["cross"].values())
        and bool(least - 1e-9 <= record["false_convergence"] <= most + 1e-9)
        and (radii is None or _close(record["spectral_radius"]["max"], radii.max(), 1e-6))
    )


def _close(a: float, b: float, tolerance: float = 1e-9) -> bool:
    return math.isclose(a, float(b), rel_tol=tolerance, abs_tol=1e-12)
