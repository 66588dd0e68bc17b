"""The page's four ways to settle, in hoplib, and the page's networks: what the page is tested against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

import hoplib as hop
from hoplib.paper import TOL

FILE = Path(__file__).with_name("networks.safetensors")
COLOURS = {  # seaborn's "colorblind"
    "synchronous": "#0173b2",
    "even-odd": "#de8f05",
    "even-odd + Anderson": "#029e73",
    "over-relaxed even-odd": "#cc78bc",
}


def ways(net: hop.HAM, x: Tensor, omega: float) -> dict[str, tuple[hop.Sweep, hop.Solver]]:
    """Name → the map and its solver."""
    return {
        "synchronous": (hop.Synchronous(net, x), hop.Picard()),
        "even-odd": (hop.EvenOdd(net, x), hop.Picard()),
        "even-odd + Anderson": (hop.EvenOdd(net, x), hop.Anderson(m=4)),
        "over-relaxed even-odd": (hop.EvenOdd(net, x, omega, clipped=True), hop.Picard()),
    }


@torch.no_grad()
def settle(net: hop.HAM, x: Tensor, omega: float, max_iter: int = 200, tol: float = TOL) -> dict[str, hop.Solution]:
    """Each way from s⁰ = 0 until the criterion, with all residuals; `state` is that of all layers."""
    found = {}
    for name, (f, solver) in ways(net, x, omega).items():
        sol = hop.iterate(f, f.start(), solver, max_iter=max_iter, tol=tol, trace=True)
        sol.state, sol.net = f.join(sol.state), net
        found[name] = sol
    return found


def load(path: Path = FILE, dtype: torch.dtype = torch.float64) -> tuple[dict[int, hop.HAM], dict[str, Any]]:
    """The networks by their depth, and what the file knows about them: facts, sample digits, the mean digit."""
    with safe_open(path, framework="pt") as f:
        facts = {int(depth): known for depth, known in json.loads(f.metadata()["networks"]).items()}
        tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (no mapping)
    nets = {}
    for depth, known in facts.items():
        nets[depth] = hop.HAM(known["layers"], device="cpu", dtype=dtype).requires_grad_(False)
        own = f"{depth}."
        nets[depth].load_state_dict({k.removeprefix(own): t for k, t in tensors.items() if k.startswith(own)})
    digits = {"samples": tensors["samples"].to(dtype) / 255, "labels": tensors["labels"].long()}
    return nets, {"networks": facts, "mean": tensors["mean"].to(dtype) / 255, **digits}


def scaled(net: hop.HAM, gain: float) -> hop.HAM:
    """The network with all its weights, but not its biases, times the gain."""
    twin = hop.HAM(net.layers, device=net.b[0].device, dtype=net.b[0].dtype).requires_grad_(False)
    twin.load_state_dict(net.state_dict())
    for w in twin.W:
        w *= gain
    return twin
