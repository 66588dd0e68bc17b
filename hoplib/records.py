"""The files of a run: records that prove themselves, checkpoints, weights. Every write is atomic; no load runs code.

A record is a JSON file of numbers beside an .npz of small arrays. It carries the SHA-256 of both, so that one that is
there and counts is right; whatever is wrong with it, `why_not` says "damaged", and the training is done again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from . import table
from .measure import BINS, CRITERIA, CROSS, FALSE, RADII, WAYS, Arrays
from .network import Network, default_device
from .table import MODELS, TOL, Config


class RunError(RuntimeError):
    """A run cannot go on; the message names the problem and the way out."""


# -- writing ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of `path` when all went well, and is removed otherwise."""
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        part.touch()
        yield part
        with part.open("rb") as f:
            os.fsync(f.fileno())
        os.replace(part, path)
    except OSError as e:
        raise RunError(f"cannot write {path}: {e.strerror or e}") from e
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def write(path: Path, content: bytes | Mapping[str, Any]) -> None:
    """Put bytes, or plain data as JSON, in a file, atomically."""
    with atomic(path) as part:
        part.write_bytes(content if isinstance(content, bytes) else (json.dumps(content, indent=1) + "\n").encode())


# -- records ----------------------------------------------------------------------------------------------------


def record_path(runs: Path, name: str, seed: int) -> Path:
    return runs / name / f"seed-{seed}.json"


def digest(record: Mapping[str, Any]) -> str:
    """The SHA-256 of a record's content, whatever its layout."""
    content = {k: v for k, v in record.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_record(path: Path, record: Mapping[str, Any], arrays: Arrays) -> None:
    """The arrays as .npz, then the record: its presence means that the run is complete."""
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    write(path.with_suffix(".npz"), packed.getvalue())
    record = {**record, "npz_sha256": hashlib.sha256(packed.getvalue()).hexdigest()}
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
    try:
        numerics = _numerics(path)
        if numerics != table.NUMERICS:
            return f"numerics {numerics}, now {table.NUMERICS}"
        record, arrays = read_record(path)
        if changed := _changed(record, config, epoch):
            return "changed: " + ", ".join(changed)
        _check(record, arrays, config, path.parent.name, epoch)
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except Exception:  # whatever a foreign file makes the checks raise
        return "damaged"
    return ""


def _numerics(path: Path) -> int:
    """The version that wrote the record; an error if the record is not as it was written."""
    record = json.loads(path.read_bytes())
    numerics = record["config"]["numerics"]
    if ("sha256" in record or numerics >= FIRST_DIGEST) and record["sha256"] != digest(record):
        raise ValueError("a digest does not match")
    if type(numerics) is not int:
        raise ValueError("numerics must be an integer")
    return numerics


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
    if not (_possible(arrays, config, net) and _agree(record, arrays, config, net)):
        raise ValueError("the arrays do not agree with the numbers")


SHARE, FINITE = (0.0, 1.0), (0.0, 1e300)
QUANTILES = ("median", "95 %", "max")
FIRST_DIGEST = 3  # numerics: older records have none
UNKNOWN_ERROR = 127  # in the array of equation errors: not finite, or beyond its range


def _form(config: Config, net: Network, name: str, epoch: int, arrays: Arrays) -> dict[str, Any]:
    """What a record looks like: at each place a range (least, most), a type, or the one value that is right."""
    row = config.row
    iterations = (0, net.max_iter(row.even_odd))
    whole = arrays["equation_error"].max() < UNKNOWN_ERROR
    shares = dict.fromkeys(("not_converged", "false_convergence"), SHARE)
    way = {"iterations": (0, net.max_iter(False)), **shares, "not_finite": SHARE, "accuracy": SHARE}
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
        "cross": dict.fromkeys(WAYS, way),
        **({"spectral_radius": dict.fromkeys(QUANTILES, (-1e-9, 1e300))} if row.model == "HAM" else {}),
        "seconds": {**dict.fromkeys(times, FINITE), "cross_cpu": dict.fromkeys(WAYS, FINITE)},
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
        "histogram": ("uint16", (net.max_iter(config.row.even_odd) - 1, len(BINS) - 1)),
        "iterations": ("uint16", (images,)),
        "predicted": ("uint8", (images,)),
        "equation_error": ("int8", (images,)),
        "cross_iterations": ("uint16", (len(WAYS), min(images, CROSS))),
        **({"spectral_radius": ("float32", (min(images, RADII),))} if config.row.model == "HAM" else {}),
    }


def _possible(arrays: Arrays, config: Config, net: Network) -> bool:
    """Can the arrays have these values?"""
    most = {"iterations": net.max_iter(config.row.even_odd) - 1, "predicted": net.layers[-1] - 1}
    last = np.array([net.max_iter(even_odd) - 1 for even_odd, _ in WAYS.values()])
    return (
        all(arrays[name].max() <= value for name, value in most.items())
        and bool((arrays["cross_iterations"].max(1) <= last).all())
        and bool(arrays["histogram"].sum(1).max() <= config.test_images)
    )


def _agree(record: Mapping[str, Any], arrays: Arrays, config: Config, net: Network) -> bool:
    """Do the record's numbers follow from the arrays? What did not converge has the largest number of iterations."""
    iterations, tenths = arrays["iterations"], arrays["equation_error"]
    met, limit = iterations < net.max_iter(config.row.even_odd) - 1, round(10 * math.log10(FALSE))
    least, most = (met & (tenths > limit)).mean(), (met & (tenths >= limit)).mean()  # an error at the limit is rounded
    means = [
        (record["iterations_mean"], iterations),
        (record["criteria"][f"{TOL:.3g}"], iterations),
        (record["not_converged"], ~met),
    ]
    for (name, (even_odd, _)), found in zip(WAYS.items(), arrays["cross_iterations"], strict=True):
        numbers = record["cross"][name]
        means.append((numbers["iterations"], found))
        means.append((numbers["not_converged"], found == net.max_iter(even_odd) - 1))
    radii = arrays.get("spectral_radius")
    return (
        all(_close(number, array.mean()) for number, array in means)
        and all(c["not_finite"] <= c["not_converged"] for c in record["cross"].values())
        and bool(least - 1e-9 <= record["false_convergence"] <= most + 1e-9)
        and (radii is None or _close(record["spectral_radius"]["max"], radii.max(), 1e-6))
    )


def _close(a: float, b: float, tolerance: float = 1e-9) -> bool:
    return math.isclose(a, float(b), rel_tol=tolerance, abs_tol=1e-12)


# -- checkpoints ------------------------------------------------------------------------------------------------


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """The digest, then what torch saves."""
    memory = io.BytesIO()  # torch.save straight to a full disk raises no OSError
    torch.save(dict(state), memory)
    write(path, hashlib.sha256(memory.getbuffer()).digest() + memory.getvalue())


def read_checkpoint(path: Path, device: torch.device) -> dict[str, Any] | None:
    """What was saved, or None if the file is not exactly as it was written. Runs no code."""
    content = path.read_bytes()
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        return None
    try:
        state = torch.load(io.BytesIO(content[32:]), map_location=device, weights_only=True)
    except Exception:  # whatever a foreign file makes the reader raise
        return None
    return state if isinstance(state, dict) else None


# -- weights ----------------------------------------------------------------------------------------------------


def save_network(net: Network, path: Path, *, half: bool = False, **facts: Any) -> None:
    """The network's weights as safetensors, in half precision if asked, with its kind and any facts about it."""
    dtype = torch.float16 if half else None
    tensors = {k: t.detach().to("cpu", dtype).contiguous() for k, t in net.state_dict().items()}
    kind = {"model": type(net).__name__, "layers": list(net.layers), "rho": net.rho.name, **facts}
    write(path, save(tensors, {k: json.dumps(v) for k, v in kind.items()}))


def load_network(path: Path, device: torch.device | str | None = None) -> Network:
    """The network of a file that `save_network` wrote, in float32. Runs no code."""
    try:
        with safe_open(path, framework="pt") as f:
            kind = {k: json.loads(v) for k, v in (f.metadata() or {}).items()}
            state = {_key(k): f.get_tensor(k).float() for k in f.keys()}  # noqa: SIM118 (no mapping)
        net = MODELS[kind["model"]](kind["layers"], rho=kind["rho"], device=device or default_device())
        net.load_state_dict(state)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as e:
        raise RunError(f"{path} holds no network that can be read: {e}") from e
    return net


def _key(name: str) -> str:
    """Where a parameter is now: files of version 0.1 call the weights W.0, W.1, …"""
    kind, _, number = name.partition(".")
    return f"links.{number}.W" if kind == "W" else name
