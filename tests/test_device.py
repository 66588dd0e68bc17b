"""Everything runs on the tensors' device and dtype: checked without a GPU.

On the `meta` device any tensor that was made on the CPU by mistake cannot be combined with the others, and any look at
a value (a wait for the device) is an error. Where the values decide the flow, as in early stopping, the stand-in is a
default device of `meta`: a tensor made without a device then lands there and cannot be combined with the CPU's.
"""

import pytest
import torch
from conftest import tiny

import hoplib as hop

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
    finally:
        torch.set_default_device("cpu")
    assert sol.converged.all()
    tensors = [sol.state, sol.residuals, inverse, dense.P, dense.W_P, *(p.grad for p in net.parameters())]
    assert {t.device.type for t in tensors} == {"cpu"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_the_dtype_is_kept(model, even_odd, dtype):
    net, x = tiny(model, [7, 6, 5], scale=0.6, dtype=dtype)
    sol = hop.solve(net, x, hop.Anderson(), even_odd=even_odd, trace=True, backward=hop.Adjoint())
    sol.output.sum().backward()
    tensors = [sol.state, sol.residual, sol.residuals, net.energy(sol.state, x), *(p.grad for p in net.parameters())]
    assert {t.dtype for t in tensors} == {dtype}


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
