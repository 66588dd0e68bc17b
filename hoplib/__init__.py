"""Hopfield networks as deep equilibrium models.

>>> import hoplib as hop
>>> net = hop.HAM(layers=[784, 1280, 510, 200, 10], seed=0)
>>> x = hop.load_data("mnist").test.x[:64]
>>> sol = hop.solve(net, x, hop.Anderson(m=4), even_odd=True, tol=1e-4)
>>> sol.state, sol.iterations, sol.status, net.energy(sol.state, x)
"""

from .activations import Activation, HardSigmoid, ReLU, ShiftedSigmoid, Tanh
from .data import Data, DataError, Split, load_data
from .equilibrium import Adjoint, RecurrentBackprop, ThroughTime, solve
from .madam import Madam, linear_decay, loss
from .maps import EvenOdd, Synchronous
from .network import CHN, HAM, Network, default_device
from .oracle import Dense, dense
from .solvers import Anderson, Picard, Solution, Status, iterate, residual, trajectory

__version__ = "0.1.0"
__all__ = [
    "CHN",
    "HAM",
    "Activation",
    "Adjoint",
    "Anderson",
    "Data",
    "DataError",
    "Dense",
    "EvenOdd",
    "HardSigmoid",
    "Madam",
    "Network",
    "Picard",
    "ReLU",
    "RecurrentBackprop",
    "ShiftedSigmoid",
    "Solution",
    "Split",
    "Status",
    "Synchronous",
    "Tanh",
    "ThroughTime",
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
