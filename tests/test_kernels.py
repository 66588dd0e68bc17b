"""The compiled loops against torch's operations, and against themselves as plain Python."""

import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny

import hoplib as hop
from hoplib import solvers
from hoplib.solvers import AndersonMemory, Memory

kernels = solvers.kernels()
pytestmark = [
    pytest.mark.skipif(kernels is None, reason="the compiled loops need Numba"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreted loops, where numbers overflow
]

OPTIONS = {
    "default": hop.Anderson(),
    "no memory": hop.Anderson(m=1),
    "window of 2": hop.Anderson(m=2),
    "free": hop.Anderson(m=5, plain_steps=1, safeguard=False, mu=1e-8, relative=True),
    "at once": hop.Anderson(m=7, plain_steps=0),
    "no regulariser": hop.Anderson(mu=0.0),
}


def plain():
    """The loops, interpreted."""
    return SimpleNamespace(residual=kernels.residual.py_func, anderson=kernels.anderson.py_func)


def memories(z, options, **others):
    """The same memory by torch's operations, by the compiled loops, and by others."""
    found = {}
    for name, k in {"torch": None, "compiled": kernels, **others}.items():
        found[name] = options.memory(z)
        found[name].kernels = k
    return found


def values(steps, batch=6, n=19, dtype=torch.float64, seed=0):
    """Map values that come closer to each other."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, n, generator=g, dtype=torch.float64).mul(0.5**k).add(1).to(dtype) for k in range(steps)]


def feed(memory, z, value):
    memory.evaluate(lambda _, out: out.copy_(value), z)
    return memory.next(z)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_anderson_is_the_same_by_torch_by_loops_and_by_interpreted_loops(options):
    given = values(12)
    found = memories(given[0], options, plain=plain())
    z = dict.fromkeys(found, torch.zeros_like(given[0]))
    for value in given:
        z = {name: feed(memory, z[name], value) for name, memory in found.items()}
        for name, memory in found.items():
            torch.testing.assert_close(z[name], z["torch"], rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(memory.gram, found["torch"].gram, rtol=1e-10, atol=1e-12)
    refused = (z["torch"] == given[-1]).all(1)
    assert torch.equal((z["compiled"] == given[-1]).all(1), refused), "a refused step is g itself"


def test_some_steps_are_taken_and_some_refused():
    """The test above would say little otherwise."""
    given = values(12)
    memory, z, taken = hop.Anderson().memory(given[0]), torch.zeros_like(given[0]), []
    for value in given:
        z = feed(memory, z, value)
        taken.append((z != value).any(1))
    assert 0.1 < torch.stack(taken).double().mean() < 0.9


@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("default", "free", "no regulariser")])
def test_what_has_no_solution_is_a_picard_step(options):
    """The same residual in every step (singular without a regulariser), and values that are no numbers."""
    given = torch.ones(4, 7, dtype=torch.float64)
    given[1], given[2, 3] = torch.inf, torch.nan
    for memory in memories(given, options).values():
        z = torch.zeros_like(given)
        for _ in range(5):
            feed(memory, torch.zeros_like(given), given)
            z = feed(memory, torch.zeros_like(given), given)
        torch.testing.assert_close(z[[0, 3]], given[[0, 3]])
        assert not z[[1, 2]].isfinite().all(1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_residual_is_the_same_at_every_scale(dtype):
    given = values(3, dtype=dtype)
    big = torch.finfo(dtype).max ** 0.5
    for value in given:
        value[1] = 0  # no change of nothing
        value[2] *= big  # whose square overflows
        value[3, 4] = torch.nan
        value[4] *= torch.finfo(dtype).tiny ** 0.5 / 1e3  # whose square vanishes
    for back in (1, 2):
        found = {}
        for name, memory in memories(given[0], hop.Picard(), plain=plain()).items():
            for value in given:
                feed(memory, given[0], value)
            found[name] = memory.residual(back)
        assert found["torch"][1] == 0
        assert found["torch"][[2, 3]].isnan().all()
        for r in found.values():
            torch.testing.assert_close(r, found["torch"], rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_weights_solve_their_equation(n):
    F = torch.randn(n, 9, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    expected = torch.linalg.solve(F @ F.T, torch.ones(n, dtype=torch.float64))
    for loop in (kernels.weights, kernels.weights.py_func):
        alpha = torch.empty(n, dtype=torch.float64)
        loop((F @ F.T).numpy(), alpha.numpy())
        torch.testing.assert_close(alpha, expected / expected.sum())


def test_the_loops_are_for_one_thread_of_a_cpu():
    z = torch.zeros(2, 3)
    try:
        torch.set_num_threads(2)
        assert Memory(z).kernels is None
    finally:
        torch.set_num_threads(1)
    assert Memory(z).kernels is kernels
    assert AndersonMemory(z.double(), hop.Anderson()).kernels is kernels
    assert Memory(z.half()).kernels is None
    assert Memory(z.to("meta")).kernels is None


def test_without_numba_all_is_done_by_torch(monkeypatch):
    monkeypatch.delattr(hop, "kernels")
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "hoplib.kernels")
    assert solvers.kernels.__wrapped__() is None


def test_a_start_that_requires_a_gradient_is_no_obstacle():
    net, x = tiny(hop.HAM, [7, 6, 5], scale=0.5)
    s0 = net.zeros(len(x)).requires_grad_()
    assert hop.solve(net, x, hop.Anderson(), s0=s0).converged.all()
