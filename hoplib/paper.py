"""What the paper fixes: the settings of its experiments that no row of its table changes.

Times are those of the flow ds/dt: an undamped step is one unit, a step damped by ω is ω.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .network import Network

TOL = 1e-4  # the criterion: ‖fⁱ⁺² − fⁱ⁺¹‖/‖fⁱ⁺²‖ of a sample that has converged
DAMPING = 0.5  # of a synchronous CHN; also of the local steps in which a block of it settles
LOCAL_STEPS = 10
TIME, BACKWARD_TIME = 40, 8  # of a solve and of recurrent backpropagation, for every two layers

EPOCHS = 10  # the length of the learning-rate schedule, which shorter rows keep
BATCH = 64
LAYERS = {3: (784, 1990, 10), 5: (784, 1280, 510, 200, 10), 7: (784, 1024, 512, 256, 128, 70, 10)}
LR = {3: 0.01, 5: 0.005, 7: 0.005}


def relaxation(net: Network, even_odd: bool) -> float:
    """ω: synchronous updates of neurons that depend on where they were (a CHN's) are damped, others are not."""
    return DAMPING if not even_odd and net.rule(net.rho, True).memory else 1.0


def max_iter(net: Network, even_odd: bool) -> int:
    """The iterations of a solve: 40·⌊layers/2⌋ units of time."""
    return round(TIME * (len(net.layers) // 2) / relaxation(net, even_odd))


def backward_steps(net: Network, even_odd: bool) -> int:
    """The steps of recurrent backpropagation: 8·⌊layers/2⌋ units of time."""
    return round(BACKWARD_TIME * (len(net.layers) // 2) / relaxation(net, even_odd))
