"""Everything runs on the tensors' device and dtype: checked without a GPU.

On the `meta` device any tensor that was made on the CPU by mistake cannot be combined with the others, and any look at
a value (a wait for the device) is an error. Where the values decide the flow, as in early stopping, the stand-in is a
default device of `meta`: a tensor made without a device then lands there and cannot be combined with the CPU's.

What a GPU does otherwise than a CPU (rare looks, masks instead of indices, no compiled loops, the optimizer in one
pass) is one answer of `kernels.waits`. Here the CPU gives it too: the numbers must be the same, and the looks few.
"""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import tiny
from test_train import GOLDEN, SIZES, golden
from torch.utils._python_dispatch import TorchDispatchMode

import hoplib as hop
from hoplib import kernels, solvers
from hoplib.experiment.config import Config
from hoplib.experiment.rows import TRAININGS, get_row
from hoplib.experiment.train import Training

SOLVERS = [hop.Picard(), hop.Picard(0.7), hop.Anderson(), hop.Anderson(relative=True)]
BACKWARDS = [hop.Adjoint(steps=3), hop.RecurrentBackprop(3), hop.ThroughTime()]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_a_fixed_number_of_iterations_never_looks_at_the_device(model, layers, even_odd, solver):
    net = model(layers, device="meta")
    x = torch.empty(8, layers[0], device="meta")
    sol = hop.solve(net, x, solver, even_odd=even_odd, max_iter=6, early_stop=False, trace=True)
    assert sol.state.shape == (8, net.N)
    assert {t.device.type for t in (sol.state, sol.iterations, sol.status, sol.residual, sol.residuals)} == {"meta"}
    assert net.energy(sol.state, x).device.type == "meta"


@pytest.mark.parametrize("backward", BACKWARDS, ids=repr)
def test_the_gradient_never_leaves_the_device(model, layers, even_odd, backward):
    net = model(layers, device="meta")
    x = torch.empty(8, layers[0], device="meta")
    optimizer = hop.Madam(net.parameters())
    sol = hop.solve(net, x, even_odd=even_odd, max_iter=6, early_stop=False, backward=backward)
    hop.loss(sol.output, torch.empty(8, layers[-1], device="meta")).backward()
    optimizer.step()
    assert all(p.grad.shape == p.shape and p.grad.is_meta for p in net.parameters())


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_no_tensor_is_made_on_the_default_device(model, layers, even_odd, solver):
    net, x = tiny(model, layers, scale=0.6, dtype=torch.float32)
    torch.set_default_device("meta")
    try:
        backward = hop.Adjoint(solver=hop.Anderson(relative=True))
        sol = hop.solve(net, x, solver, even_odd=even_odd, max_iter=200, trace=True, backward=backward)
        sol.output.square().sum().backward()
        hop.Madam(net.parameters()).step()
        dense = hop.dense(net)
        inverse = net.rho.varsigma_inv(x)
        batch, _ = next(hop.Split(x, x, x).batches(2, generator=torch.Generator("cpu").manual_seed(0)))
        omega = hop.best_omega(net, x) if model is hop.HAM else None
    finally:
        torch.set_default_device(None)
    assert sol.converged.all()
    assert omega == (hop.best_omega(net, x) if model is hop.HAM else None)
    tensors = [sol.state, sol.residuals, inverse, batch, dense.P, dense.W_P, *(p.grad for p in net.parameters())]
    assert {t.device.type for t in tensors} == {"cpu"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_the_dtype_is_kept(model, even_odd, dtype):
    net, x = tiny(model, [7, 6, 5], scale=0.6, dtype=dtype)
    sol = hop.solve(net, x, hop.Anderson(), even_odd=even_odd, trace=True, backward=hop.Adjoint())
    sol.output.sum().backward()
    tensors = [sol.state, sol.residual, sol.residuals, net.energy(sol.state, x), *(p.grad for p in net.parameters())]
    assert {t.dtype for t in tensors} == {dtype}


# -- the ways of a GPU, on the CPU --------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "waits", lambda _: True)


@pytest.mark.parametrize("solver", [*SOLVERS, hop.Then(hop.Picard(), hop.Anderson(relative=True))], ids=repr)
@pytest.mark.parametrize("scale", [0.6, 3.0], ids=["all converge", "some converge"])
def test_the_ways_of_a_gpu_give_the_same_answers(monkeypatch, model, layers, even_odd, solver, scale):
    """Each sample's answer is that of the moment when it ended, however late the next look comes."""
    net, x = tiny(model, layers, scale=scale, batch=12)
    x = 3 * x * torch.rand(12, 1, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    solutions, gradients = [], []
    for waits in (False, True):
        monkeypatch.setattr(kernels, "waits", lambda _, answer=waits: answer)
        net.zero_grad()
        backward = hop.RecurrentBackprop(4, closed_form=1e-4)
        sol = hop.solve(net, x, solver, even_odd=even_odd, max_iter=60, trace=True, backward=backward)
        sol.output.square().sum().backward()
        hop.Madam(net.parameters(), lr=1e-300).step()
        solutions.append(sol)
        gradients.append([p.grad.clone() for p in net.parameters()])
    here, there = solutions
    assert torch.equal(here.iterations, there.iterations)
    assert torch.equal(here.status, there.status)
    met = here.converged  # the others may be chaotic: rounding decides where they are
    torch.testing.assert_close(here.state[met], there.state[met], rtol=1e-7, atol=1e-9)
    if bool(met.all()):
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_the_ways_of_a_gpu_against_the_plain_loop(as_on_a_gpu, model, layers, even_odd):
    """Every residual of the trace is that of the oracle, the loop without any account."""
    net, x = tiny(model, layers, scale=0.6)
    sol = hop.solve(net, x, even_odd=even_odd, max_iter=40, trace=True)
    f = (hop.EvenOdd if even_odd else hop.Synchronous)(net, x, hop.paper.relaxation(net, even_odd))
    g = hop.trajectory(f, f.start(), iterations=40)
    plain = torch.stack([hop.residual(b, a) for a, b in pairwise(g)])
    ran = ~sol.residuals.isnan()
    torch.testing.assert_close(sol.residuals[ran], plain[ran], rtol=1e-9, atol=1e-15)
    ends = torch.stack([g[min(k + 1, 39), i] for i, k in enumerate(sol.iterations.tolist())])
    with torch.no_grad():
        torch.testing.assert_close(sol.state, f.join(ends), rtol=1e-12, atol=1e-14)


def test_trainings_by_the_ways_of_a_gpu_are_golden(as_on_a_gpu):
    """Three steps of every row, to the numbers that the compiled loops and the frequent looks give."""
    for name, values in golden().items():
        assert values == pytest.approx(json.loads(GOLDEN.read_text())["values"][name], rel=1e-7), name


class Looks(TorchDispatchMode):
    """Counts what makes the host wait for a device: values that it reads, and shapes that depend on values."""

    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2")

    def __init__(self, monkeypatch):
        super().__init__()
        self.seen = Counter()
        for name in ("tolist", "numpy", "cpu"):  # which on the CPU reach no operator
            monkeypatch.setattr(torch.Tensor, name, self.spy(name))

    def spy(self, name):
        method = getattr(torch.Tensor, name)

        def spied(*args, **kwargs):
            self.seen[name] += 1
            return method(*args, **kwargs)

        return spied

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        if name in self.waiting or masks:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def test_what_counts_as_a_look(monkeypatch):
    t = torch.arange(3.0)
    looks = [
        *(lambda: t[0].item(), lambda: bool(t[1]), lambda: float(t[2]), lambda: int(t[2]), lambda: t.nonzero()),
        *(lambda: t[t > 1], lambda: t.tolist(), lambda: t.cpu(), lambda: t.numpy(), lambda: t.masked_select(t > 1)),
        *(lambda: torch.equal(t, t), lambda: [*range(t.argmax())], lambda: 1 if t.any() else 0),
    ]
    with Looks(monkeypatch) as looked:
        for number, look in enumerate(looks, 1):
            look()
            assert looked.seen.total() == number
        torch.where(t > 1, t, 0).index_select(0, torch.tensor([0, 1])).masked_fill_(t[:2] > 1, 0)
        assert looked.seen.total() == len(looks)


@pytest.mark.parametrize("row", TRAININGS)
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_a_training_step_waits_for_the_device_a_few_times(monkeypatch, row, scale, request):
    """Once for the input, 8, 16, 32, … iterations into each of two solves, between them, and for the gradient."""
    usual = get_row(row)
    training = Training(Config(replace(usual, layers=SIZES[len(usual.layers)])), torch.device("cpu"))
    with torch.no_grad():
        for w in training.net.W:
            w *= scale
    x = torch.rand(64, 784, generator=torch.Generator().manual_seed(1))
    y = torch.nn.functional.one_hot(torch.arange(64) % 10, 10).float()
    training.omega, training.taken = 1.2, 1  # over-relaxation chooses its ω now and then, not in this step
    request.getfixturevalue("as_on_a_gpu")
    with Looks(monkeypatch) as looks:
        training.step(x, y)
    most = hop.paper.max_iter(training.net, usual.even_odd)
    assert looks.seen.total() <= sum(solvers.FIRST_LOOK << k < most for k in range(20)) + 2 + 4 <= 10, looks.seen
    assert looks.seen["numpy"] == 0, "no compiled loop has run"


@pytest.mark.parametrize("backward", [hop.Adjoint(), hop.Adjoint(tol=1e-9), hop.RecurrentBackprop()], ids=repr)
@pytest.mark.parametrize("solver", [None, hop.Picard(), hop.Anderson()], ids=repr)
def test_a_step_of_ones_own_waits_a_few_times_too(as_on_a_gpu, monkeypatch, solver, backward):
    """Over-relaxation looks after 3, 6, 12, … sweeps besides, and counts on the host; conjugate gradients after 8, …"""
    net, x = tiny(hop.HAM, [40, 60, 40, 30, 20, 10], batch=64)
    optimizer = hop.Madam(net.parameters())
    with Looks(monkeypatch) as looks:
        sol = hop.solve(net, x, solver, even_odd=None if solver is None else True, backward=backward)
        sol.output.square().sum().backward()
        optimizer.step()
    paces = looks.seen["cpu"]  # then two reads on the host, which wait for nobody
    assert paces <= 6
    assert looks.seen.total() - 2 * paces <= 18, looks.seen


def test_conjugate_gradients_that_look_rarely_find_the_same(monkeypatch):
    net, x = tiny(hop.HAM, [12, 11, 10, 9, 8], batch=8)
    s = hop.solve(net, x, even_odd=True, tol=1e-12, max_iter=500).state
    found = []
    for waits in (False, True):
        monkeypatch.setattr(kernels, "waits", lambda _, answer=waits: answer)
        found.append(hop.Adjoint(tol=1e-9).exact(hop.EvenOdd(net, x), s, s))
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-7, atol=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_agrees_with_the_cpu(model, even_odd):
    net, x = tiny(model, [7, 30, 20, 5], scale=0.6, batch=50)
    here = hop.solve(net, x, hop.Anderson(), even_odd=even_odd)
    there = hop.solve(net.cuda(), x.cuda(), hop.Anderson(), even_odd=even_odd)
    torch.testing.assert_close(here.state, there.state.cpu(), atol=1e-9, rtol=1e-9)
    assert torch.equal(here.iterations, there.iterations.cpu())


def test_the_default_device_is_cuda_where_there_is_one():
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert hop.default_device().type == hop.HAM([3, 2]).W[0].device.type == expected
