"""Files that are whole or not there: every write is atomic, a checkpoint carries its digest, no load runs code."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import signal
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..activations import ALL
from ..links import Dense
from ..network import ExactCHN, Network, default_device
from .rows import MODELS

ROOT = Path(__file__).resolve().parents[2]


class RunError(RuntimeError):
    """A run cannot go on; the message names the problem and the way out."""


def imported() -> None:
    """From here on Ctrl-C is an exception. While a program is imported it just ends it (Makefile, site/assemble.py)."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def writable(folder: Path) -> None:
    """Raise an error unless files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # has no name: nothing is left of it
            pass
    except OSError as e:
        raise RunError(f"cannot write {folder}: {e.strerror or e}") from e


def sweep_up(folder: Path, stem: str) -> None:
    """Remove the temporary files of runs that were killed: those of `write` for names that begin with `stem`."""
    for part in folder.glob(f".{glob.escape(stem)}[.-]*"):
        part.unlink(missing_ok=True)


def write(path: Path, content: bytes | Mapping[str, Any]) -> None:
    """Put bytes, or plain data as JSON, in a file: a temporary one that takes its place when all went well."""
    content = content if isinstance(content, bytes) else (json.dumps(content, indent=1) + "\n").encode()
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as e:
        raise RunError(f"cannot write {path}: {e.strerror or e}") from e


def pack(arrays: Mapping[str, Any]) -> bytes:
    """The arrays as .npz."""
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    return packed.getvalue()


# -- checkpoints ------------------------------------------------------------------------------------------------


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """The digest, then what torch saves."""
    memory = io.BytesIO()  # torch.save straight to a full disk raises no OSError
    torch.save(dict(state), memory)
    write(path, hashlib.sha256(memory.getbuffer()).digest() + memory.getvalue())


def read_checkpoint(path: Path, device: torch.device) -> dict[str, Any] | None:
    """What was saved, or None if the file is not exactly as it was written. Runs no code."""
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            return None
        state = torch.load(io.BytesIO(content[32:]), map_location=device, weights_only=True)
    except Exception:  # it is a folder, say, or whatever a foreign file makes the reader raise
        return None
    return state if isinstance(state, dict) else None


# -- weights ----------------------------------------------------------------------------------------------------


def save_network(net: Network, path: Path, *, half: bool = False, **facts: Any) -> None:
    """The network's weights as safetensors, in half precision if asked, with its kind and any facts about it.

    For the networks that a file can name: a HAM, CHN or ExactCHN, a chain of dense links, an activation of hoplib.
    """
    dtype = torch.float16 if half else None
    tensors = {k: t.detach().to("cpu", dtype).contiguous() for k, t in net.state_dict().items()}
    rho = net.base if isinstance(net, ExactCHN) else net.rho
    chain = net.ends == [(l, l + 1) for l in range(len(net.layers) - 1)] and all(type(k) is Dense for k in net.links)
    if not chain or MODELS.get(type(net).__name__) is not type(net) or type(ALL.get(rho.name)) is not type(rho):
        raise RunError(f"cannot write {path}: no file can name the links, the class or the activation of {net!r}")
    kind = {"model": type(net).__name__, "layers": list(net.layers), "rho": rho.name, **facts}
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
