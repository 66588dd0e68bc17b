"""Over-relaxation: even-odd sweeps that go beyond the field, as far as the energy allows, and how far is best.

Even-odd updates are red-black Gauss–Seidel. Over-relaxed by ω > 1 they converge much faster near an equilibrium (Young
1954), but far from it they may raise the energy. Clipped (`sweep.clip`) they never do. Notebook 11 has the proofs.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from . import checks, paper
from .network import EvenOdd, Network, check_network
from .solvers import Picard, Solver, iterate
from .sweep import Blocks, Sweep, check_omega

FIRST_OMEGA = 1.05  # before the best ω is known
FIRST_CHOICE = 3  # the sweep after which it is chosen; again after twice as many, four times, and so on
SLOWEST = 0.98  # a larger radius counts as this: one sample near a bifurcation must not choose for all
CANDIDATES = torch.arange(100, 190, dtype=torch.float64, device="cpu") / 100  # to choose from


@dataclass(frozen=True)
class OverRelaxed:
    """Even-odd sweeps whose half-steps overshoot: s ← h + (ω − 1)·clamp(h − s, −c, c), c = −2 ln(ω − 1)/(κω).

    For a HAM with |ρ''| ≤ κρ' and any 0 < ω < 2 no half-step raises the energy, whatever the weights. Near a strict
    minimum the clip is idle and the sweeps converge linearly (Ostrowski–Reich), at best at the rate ω* − 1 (Young).
    None chooses one ω for the batch while the sweeps go on (`Pace`), which costs nothing; a sample's way to its
    equilibrium, and the last digits of the answer, then depend on the others. For the same map in many batches, or
    answers that do not, call `best_omega` once and pass its value.
    Caveat: both blocks are iterated, so the residual is that of the whole state. Where convergence is fast without
    it (a spectral radius below about 0.3), there is nothing to gain.
    """

    relaxation: float | None = None

    def __post_init__(self) -> None:
        if self.relaxation is not None:
            check_omega(self.relaxation)

    def init(self, z: Tensor) -> Picard:
        return Picard()

    def sweep(self, net: Network, x: Tensor, blocks: Blocks, like: Sweep | None = None) -> Sweep:
        """The clipped map; where no ω is given, it finds its pace."""
        omega = FIRST_OMEGA if self.relaxation is None else self.relaxation
        f = net.sweep(x, blocks, omega, like=like, clipped=True)
        f.pace = Pace() if self.relaxation is None else None
        return f


def automatic(net: Network) -> tuple[Solver, bool]:
    """The way to settle this network when none is asked for: solver, even-odd or not.

    Even-odd updates, over-relaxed where no half-step can raise the energy (a HAM, ρ with a κ) and the state has more
    than two layers: with a sole hidden layer plain even-odd updates iterate the few outputs alone, and an over-relaxed
    sweep, which keeps the hidden layer too, costs more than it saves. A graph that is not bipartite is updated at once.
    """
    try:
        blocks = net.blocks(even_odd=True)
    except ValueError:
        return Picard(), False
    clips = all(net.rule(net.rho.of(block), False).kappa is not None for block in blocks if block)
    return (OverRelaxed() if clips and len(net.hidden) > 2 else Picard()), True


def rate(omega: Tensor, radius: Tensor) -> Tensor:
    """Young's rate of over-relaxed even-odd sweeps: the largest |λ| with (λ + ω − 1)² = ω² μ² λ.

    `radius` is μ², the spectral radius of the even-odd Jacobian. It is least at ω* = 2/(1 + √(1 − μ²)): ω* − 1.
    """
    half = (omega * omega * radius) / 2 - (omega - 1)  # λ² − 2·half·λ + (ω − 1)² = 0
    real = half.abs() > (omega - 1).abs()
    return torch.where(real, half + (half.square() - (omega - 1).square()).clamp_min(0).sqrt(), (omega - 1).abs())


def fewest(radii: Tensor) -> float:
    """The ω with the fewest iterations on average over samples of these radii: each takes about −1/log rate(ω)."""
    iterations = -1 / rate(CANDIDATES[:, None], radii.double().cpu().clamp(0, SLOWEST)).clamp_min(1e-6).log()
    return float(CANDIDATES[int(iterations.mean(1).argmin())])


class Pace:
    """Chooses the ω of over-relaxed sweeps while they go on, from how fast they converge; after Hageman and Young.

    After 3, 6, 12, … sweeps: how much shorter a sample's steps have become since the last choice is its rate λ, and
    (λ + ω − 1)² = ω² μ² λ has its μ². Where λ ≤ ω − 1 the sample is past its best ω, and votes for the present one.
    The first sweeps may be slow for another reason, leaving a saddle: after n of them no μ² above 1 − 2/n is believed.
    """

    def __init__(self) -> None:
        self.sweeps, self.first = 0, 2
        self.before = torch.empty(0)  # the lengths of the steps in sweep `first`

    @torch.no_grad()
    def __call__(self, f: Sweep, z: Tensor, new: Tensor) -> None:
        self.sweeps += 1
        looks = self.sweeps // FIRST_CHOICE
        due = self.sweeps == looks * FIRST_CHOICE and looks.bit_count() == 1
        if due or self.sweeps == self.first:
            length = torch.linalg.vector_norm(new - z, dim=1)
        if due and len(length):
            w, slope = f.omega, (length / self.before).double().pow(1 / (self.sweeps - self.first)).clamp(1e-6, 0.999)
            present = slope.new_tensor(1 - (2 / w - 1) ** 2)
            squares = torch.where(slope > w - 1, (slope + w - 1).square() / (w * w * slope), present)
            f.relax(fewest(squares.clamp_max(1 - 2 / self.sweeps)))
            self.first = self.sweeps + 1
        elif self.sweeps == self.first:
            self.before = length

    def restrict(self, keep: Tensor) -> Pace:
        part = copy(self)
        part.before = self.before[keep] if len(self.before) else self.before
        return part


@torch.no_grad()
def radius(net: Network, x: Tensor, s: Tensor, steps: int = 10) -> Tensor:
    """The spectral radius of a HAM's even-odd Jacobian at the equilibrium s, for each input: the rate of convergence.

    J = W_Pᵀ D_odd W_P D_even, D = diag ρ'(s), is similar to GᵀG with G = D_odd^½ W_P D_even^½, so it is the largest
    eigenvalue of a symmetric matrix: by Lanczos' method, one run for each sample. It comes from below: ten steps give a
    few per cent, forty all digits.
    """
    f = EvenOdd(net, x)
    d_first, d_last = (f.rules[k].rho.drho(part) for k, part in f.every(s).items())
    root = d_last.sqrt()

    def gram(v: Tensor) -> Tensor:
        up = f.transposed(0, f.layers({1: root * v}))
        return root * f.transposed(1, f.layers({0: d_first * up}))

    v, steps, eps = root, min(steps, root.shape[1]), torch.finfo(root.dtype).eps
    basis, T = v.new_zeros(steps, *v.shape), v.new_zeros(len(v), steps, steps)
    for k in range(steps):
        length = v.norm(dim=1)
        if k:
            T[:, k, k - 1] = T[:, k - 1, k] = length
        basis[k] = v / length.clamp_min(torch.finfo(v.dtype).tiny)[:, None]
        w = gram(basis[k])
        T[:, k, k] = (w * basis[k]).sum(1)
        for _ in range(2):  # against all before, twice: rounding would let them come back
            w = w - torch.einsum("kb,kbn->bn", torch.einsum("kbn,bn->kb", basis[: k + 1], w), basis[: k + 1])
        v = torch.where(w.norm(dim=1, keepdim=True) > 450 * eps, w, torch.zeros_like(w))  # else the space is exhausted
    largest: Tensor = torch.linalg.eigvalsh(T)[:, -1]
    return largest


@torch.no_grad()
def best_omega(net: Network, x: Tensor, samples: int = 8) -> float:
    """The ω with which the over-relaxed sweeps of this HAM need the fewest iterations on average, in theory.

    From the spectral radius at the equilibria of a few samples of x. It costs as much as solving about twice as many
    samples. One ω serves the whole network: one for every sample, from its own measured rate, was tried and does worse.
    """
    check_network(net)
    net.check_input(x)
    checks.integer("samples", samples, 1)
    chosen = torch.linspace(0, len(x) - 1, min(samples, len(x)), dtype=torch.float32, device="cpu")
    x = x[chosen.round().long()]
    f = EvenOdd(net, x, 1.4, clipped=True)
    sol = iterate(f, f.start(), Picard(), max_iter=paper.max_iter(net, True), tol=paper.TOL)
    with checks.full_precision(x):
        return fewest(radius(net, x, f.join(sol.state)))
