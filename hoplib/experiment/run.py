"""One training, from its start or its last checkpoint to its record.

It may be killed at any instant: after each epoch a checkpoint is put in place atomically, and the record, written last,
is what tells that a run is done.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from .. import kernels
from ..data import Data, load_data
from ..links import onednn
from ..network import default_device
from .config import Config
from .files import RunError, read_checkpoint, save_network, sweep_up, writable, write, write_checkpoint
from .measure import measure
from .records import record_path, why_not, write_record
from .train import Progress, Training

KEPT = (1, 5)  # the epochs after which the weights are kept, besides the last: what a step costs depends on them


def load_checkpoint(training: Training, path: Path) -> bool:
    """Go on from a checkpoint of the same configuration and numerics; False if there is none, or a damaged one."""
    if not path.exists():
        return False
    state = read_checkpoint(path, training.device)
    if state is None:
        warnings.warn(f"the checkpoint {path} is damaged and not used: training starts anew", stacklevel=2)
        return False
    if state.get("fingerprint") != training.config.fingerprint:
        return False
    training.load_state_dict(state)
    return True


def weights(runs: Path) -> Path:
    """The folder of the networks, beside that of the records."""
    return runs.parent / "weights"


def keep(training: Training, path: Path) -> None:
    """The network as it is now, with its configuration."""
    save_network(training.net, path, training=training.config.settings(), epoch=training.epoch)


def record(training: Training, name: str, numbers: dict[str, Any], seconds: dict[str, Any]) -> dict[str, Any]:
    """What is known of a run: its numbers, its history, its configuration, and where and how long it ran."""
    config, history, device = training.config, training.history, training.device
    return {
        "row": name,
        "seed": config.seed,
        "data": config.data,
        "epoch": training.epoch,
        **numbers,
        "seconds": {
            "training": sum(h["seconds"] for h in history),
            "training_cpu": sum(h["cpu_seconds"] for h in history),
            **seconds,
        },
        "history": history,
        "config": config.settings(),
        "versions": versions(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "fused": training.fused,
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    from .. import __version__

    found = {"hoplib": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {**found, **kernels.versions(), "products": "oneDNN" if onednn() else "torch"}


def can_compile() -> bool:
    """Is there the C++ compiler that torch.compile needs?"""
    return any(shutil.which(c) for c in (os.environ.get("CXX") or "g++", "clang++"))


def run(
    config: Config,
    rows: dict[str, int],
    runs: Path,
    checkpoints: Path,
    *,
    device: torch.device | str | None = None,
    fused: bool | None = None,
    report: Callable[[Progress], object] = lambda _: None,
    data: Data | None = None,
) -> list[Path]:
    """Train until every record (name → epoch) is there, from the last checkpoint if there is one.

    The names are those of `configure`: a run other than the table's has records of other names. The networks after some
    epochs and after the last stay in the folder weights/ beside `runs`.
    `fused=None` compiles the optimizer where a compiler is found and the run is long enough to repay it.
    """
    device = default_device() if device is None else torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError("device='cuda' is asked for, but torch sees no GPU; use device='cpu', or None for the default")
    last = max(rows.values())
    if fused is None:
        fused = can_compile() and last * (config.train_images // config.batch_size) >= 2000
    checkpoint = checkpoints / config.name / f"seed-{config.seed}.pt"
    heartbeat = checkpoint.with_suffix(".progress")
    paths = {name: record_path(runs, name, config.seed) for name in rows}
    for folder in (runs, checkpoint.parent, weights(runs)):
        writable(folder)

    def beat(progress: Progress) -> None:
        with contextlib.suppress(RunError):  # a lost heartbeat costs nothing
            write(heartbeat, asdict(progress))
        report(progress)

    with FileLock(checkpoint.with_suffix(".lock")):  # a second run of the same training waits, and finds it done
        named = [place / name for place in (runs, weights(runs)) for name in (config.name, *rows)]
        for folder in (checkpoint.parent, *named):
            sweep_up(folder, checkpoint.stem)
        missing = {name: epoch for name, epoch in rows.items() if why_not(paths[name], config, epoch)}
        training = Training(config, device, fused)
        if missing and load_checkpoint(training, checkpoint) and training.epoch > min(missing.values()):
            training = Training(config, device, fused)  # past the epoch of a missing record: from the start
        while missing:
            data = data or load_data(config.data, device=device)
            for name in [name for name, epoch in missing.items() if epoch == training.epoch]:
                numbers, arrays, seconds = measure(training.net, config.row, data, config.test_images)
                if training.epoch == last:
                    keep(training, weights(runs) / name / f"seed-{config.seed}.safetensors")
                write_record(paths[name], record(training, name, numbers, seconds), arrays)
                del missing[name]
            if missing:
                training.train_epoch(data, max(missing.values()), beat)
                write_checkpoint(checkpoint, training.state_dict())
                if training.epoch in KEPT:
                    part = f"seed-{config.seed}-epoch-{training.epoch}.safetensors"
                    keep(training, weights(runs) / config.name / part)
        heartbeat.unlink(missing_ok=True)
    for name, path in paths.items():
        if reason := why_not(path, config, rows[name]):
            raise RunError(f"the record {path} is not valid after the run ({reason})")
    if training.epoch == 0:
        warnings.warn("all records are there already: nothing was trained", stacklevel=2)
    return list(paths.values())
