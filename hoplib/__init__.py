"""Hopfield networks as deep equilibrium models.

>>> import hoplib as hop
>>> net = hop.HAM(layers=[784, 1280, 510, 200, 10], seed=0)
>>> x = hop.load_data("mnist").test.x[:64]
>>> sol = hop.solve(net, x, hop.Anderson(m=4), even_odd=True, tol=1e-4)
>>> sol
Solution(64 samples: ... converged, ...; ... iterations on average)
>>> sol.state.shape, sol.iterations.shape, sol.status.shape, net.energy(sol.state, x).shape
(torch.Size([64, 2000]), torch.Size([64]), torch.Size([64]), torch.Size([64]))
"""

from .activations import Activation, Effective, HardSigmoid, ReLU, ShiftedSigmoid, Tanh
from .data import Data, DataError, Split, load_data
from .equilibrium import Adjoint, Layer, RecurrentBackprop, ThroughTime, solve
from .links import Conv, Dense, Link
from .madam import Madam, linear_decay, loss
from .network import CHN, HAM, EvenOdd, ExactCHN, Network, Synchronous, default_device
from .oracle import dense
from .relaxation import OverRelaxed, best_omega
from .rules import ChnRule, ExactRule, HamRule
from .solvers import Anderson, Picard, Solution, Solver, Status, Then, iterate, residual, trajectory
from .sweep import Block, Sweep, Turn

__version__ = "0.1.0"
__all__ = [
    "CHN",
    "HAM",
    "Activation",
    "Adjoint",
    "Anderson",
    "Block",
    "ChnRule",
    "Conv",
    "Data",
    "DataError",
    "Dense",
    "Effective",
    "EvenOdd",
    "ExactCHN",
    "ExactRule",
    "HamRule",
    "HardSigmoid",
    "Layer",
    "Link",
    "Madam",
    "Network",
    "OverRelaxed",
    "Picard",
    "ReLU",
    "RecurrentBackprop",
    "ShiftedSigmoid",
    "Solution",
    "Solver",
    "Split",
    "Status",
    "Sweep",
    "Synchronous",
    "Tanh",
    "Then",
    "ThroughTime",
    "Turn",
    "best_omega",
    "default_device",
    "dense",
    "iterate",
    "linear_decay",
    "load_data",
    "loss",
    "residual",
    "solve",
    "trajectory",
]
