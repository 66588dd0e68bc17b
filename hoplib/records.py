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
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from . import table
from .measure import BINS, CROSS, RADII, WAYS, Arrays
from .network import Network, default_device
from .table import MODELS, Config


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
    except (OSError, KeyError, TypeError, AttributeError, RecursionError, zipfile.BadZipFile, zlib.error) as e:
        raise ValueError(f"{path} is damaged: {e}") from e


def why_not(path: Path, config: Config, epoch: int) -> str:
    """Why the record at `path` does not count: missing, damaged, of other numerics, changed; "" if it does."""
    if not path.exists():
        return "missing"
    try:
        numerics = json.loads(path.read_bytes())["config"]["numerics"]
        if type(numerics) is int and numerics != table.NUMERICS:
            return f"numerics {numerics}, now {table.NUMERICS}"
        record, arrays = read_record(path)
        expected, found = config.settings(), record["config"]
        changed = [k for k in expected if found[k] != expected[k]]
        if changed or record["epoch"] != epoch:
            return "changed: " + ", ".join(changed or ["epoch"])
        _check(record, arrays, config, epoch)
    except (ValueError, OSError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return "damaged"
    return ""


def _check(record: dict[str, Any], arrays: Arrays, config: Config, epoch: int) -> None:
    """Raise an error unless every number is one, and where it can be, and the arrays agree with the numbers."""
    row, images = config.row, config.test_images
    net = MODELS[row.model](row.layers, device="meta")
    most = net.max_iter(row.even_odd) - 1
    shapes = {
        "histogram": (most, len(BINS) - 1),
        "iterations": (images,),
        "predicted": (images,),
        "equation_error": (images,),
        "cross_iterations": (len(WAYS), min(images, CROSS)),
        **({"spectral_radius": (min(images, RADII),)} if row.model == "HAM" else {}),
    }
    ok = {name: a.shape for name, a in arrays.items()} == shapes
    ok &= (record["seed"], record["data"], record["epoch"]) == (config.seed, config.data, epoch)
    shares = [record, *record["cross"].values()]
    for numbers in shares:
        ok &= all(0 <= numbers[k] <= 1 for k in ("not_converged", "false_convergence"))
    ok &= 0 <= record["test_accuracy"] <= 1 and all(0 <= c["accuracy"] <= 1 for c in record["cross"].values())
    ok &= list(record["cross"]) == list(WAYS) and len(record["history"]) == epoch
    ok &= math.isclose(record["iterations_mean"], float(arrays["iterations"].mean()), rel_tol=1e-9)
    ok &= record["iterations_std"] >= 0 and int(arrays["iterations"].max()) <= most
    ok &= math.isclose(record["not_converged"], float((arrays["iterations"] == most).mean()), abs_tol=1e-12)
    ok &= int(arrays["predicted"].max()) < 10 and int(arrays["histogram"].sum(1).max()) <= images
    for numbers in record["history"]:
        ok &= math.isfinite(numbers["loss"]) and 0 <= numbers["accuracy"] <= 1 and 0 <= numbers["test_accuracy"] <= 1
    if not ok:
        raise ValueError("impossible values")


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
            state = {k: f.get_tensor(k).float() for k in f.keys()}  # noqa: SIM118 (no mapping)
        net = MODELS[kind["model"]](kind["layers"], rho=kind["rho"], device=device or default_device())
        net.load_state_dict(state)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as e:
        raise RunError(f"{path} holds no network that can be read: {e}") from e
    return net
