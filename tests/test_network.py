"""The energies, their gradients, and the initialisation."""

import pytest
import torch
from conftest import DEPTHS, random_state, tiny

import hoplib as hop
from hoplib import paper


def dense_energy(net, s, x):
    """Eqs. (1) and (3) on the full state [x; s], with the terms of x alone taken off."""
    d, rho = hop.dense(net), net.rho
    n, N = net.layers[0], net.N
    W = torch.zeros(n + N, n + N, dtype=s.dtype)
    W[n:, n:], W[n:, :n], W[:n, n:] = d.W, d.U, d.U.T
    b = torch.cat([torch.zeros(n, dtype=s.dtype), d.b])

    def E(full):
        r = rho.rho(full)
        own = full.square() / 2 if isinstance(net, hop.CHN) else full * r - rho.lagrangian(full)
        return own.sum(1) - (r @ W * r).sum(1) / 2 - r @ b

    own_x = x.square() / 2 if isinstance(net, hop.CHN) else x * rho.rho(x) - rho.lagrangian(x)
    return E(torch.cat([x, s], 1)) - own_x.sum(1)


@pytest.mark.parametrize("rho", ["shifted-sigmoid", "tanh", "relu", "hard-sigmoid"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_energy_is_the_printed_one(model, depth, rho):
    net, x = tiny(model, DEPTHS[depth], rho=rho)
    s = random_state(net, len(x))
    torch.testing.assert_close(net.energy(s, x), dense_energy(net, s, x), atol=1e-12, rtol=1e-12)


def test_flow_is_the_descent_of_the_energy(model, layers):
    """CHN: ds/dt = −∂E/∂s (Eq. 2). HAM: ds/dt = −∂E/∂ρ(s), so −∂E/∂s = ρ' ⊙ ds/dt (Eq. 4)."""
    net, x = tiny(model, layers)
    s = random_state(net, len(x)).requires_grad_()
    (gradient,) = torch.autograd.grad(net.energy(s, x).sum(), s)
    flow = net.flow(s, x)
    expected = flow if model is hop.CHN else net.rho.drho(s) * flow
    torch.testing.assert_close(-gradient, expected, atol=1e-12, rtol=1e-12)


def test_weights_are_xavier_and_the_same_for_both_models():
    layers = [784, 300, 100, 10]
    a, b = hop.HAM(layers, seed=3, device="cpu"), hop.CHN(layers, seed=3, device="cpu", dtype=torch.float64)
    for w, v in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(w, v.float())
    for i, w in enumerate(a.W):
        n, m = layers[i], layers[i + 1]
        assert w.shape == (m, n)
        bound = (6 / (n + m)) ** 0.5
        assert 0.97 * bound < w.abs().max() <= bound
        assert abs(w.std() / (bound / 3**0.5) - 1) < 0.05
    assert abs(torch.cat(list(a.b)).std() - 0.01) < 0.001


def test_seed_or_generator():
    a = hop.HAM([5, 4, 3], seed=7, device="cpu")
    b = hop.HAM([5, 4, 3], seed=torch.Generator().manual_seed(7), device="cpu")
    c = hop.HAM([5, 4, 3], seed=8, device="cpu")
    assert torch.equal(a.W[0], b.W[0])
    assert not torch.equal(a.W[0], c.W[0])


def test_dense_matrices_have_the_printed_form():
    """The 5-layer W̃, U, W_P and U_odd of Examples 1, 2 and 4, block by block."""
    net = hop.HAM([6, 5, 4, 3, 2], dtype=torch.float64, device="cpu")
    d, (W0, W1, W2, W3) = hop.dense(net), [w.detach() for w in net.W]

    def zero(n, m):
        return torch.zeros(n, m, dtype=torch.float64)

    rows = [
        [zero(5, 5), W1.T, zero(5, 3), zero(5, 2)],
        [W1, zero(4, 4), W2.T, zero(4, 2)],
        [zero(3, 5), W2, zero(3, 3), W3.T],
        [zero(2, 5), zero(2, 4), W3, zero(2, 2)],
    ]
    assert torch.equal(d.W, torch.cat([torch.cat(r, 1) for r in rows]))
    assert torch.equal(d.W, d.W.T)
    assert torch.equal(d.U, torch.cat([W0, zero(9, 6)]))
    assert torch.equal(d.W_P, torch.cat([torch.cat([W1.T, zero(5, 2)], 1), torch.cat([W2, W3.T], 1)]))
    assert torch.equal(d.U_odd, torch.cat([W0, zero(3, 6)]))
    assert torch.equal(d.P @ d.P.T, torch.eye(14, dtype=torch.float64))
    s = random_state(net, 1)
    parts = net.split(s)
    assert torch.equal(s @ d.P.T, torch.cat([parts[2], parts[4], parts[1], parts[3]], 1))
    torch.testing.assert_close(torch.cat([d.b_even, d.b_odd]), d.P @ d.b)


def test_layers_are_addressed_by_number():
    net = hop.HAM([6, 5, 4, 3], device="cpu")
    s = torch.arange(12.0)[None]
    assert net.layer(s, 1).tolist() == [[0, 1, 2, 3, 4]]
    assert net.layer(s, -1).tolist() == net.layer(s, 3).tolist() == [[9, 10, 11]]
    for l in (0, 4, -4):
        with pytest.raises(IndexError, match=r"layers 1…3"):
            net.layer(s, l)


@pytest.mark.parametrize(
    ("depth", "iterations", "steps"), [(2, 40, 8), (3, 40, 8), (4, 80, 16), (5, 80, 16), (7, 120, 24)]
)
def test_the_papers_iteration_counts(depth, iterations, steps):
    ham, chn = (m(DEPTHS[depth], device="cpu") for m in (hop.HAM, hop.CHN))
    assert [paper.max_iter(ham, False), paper.max_iter(ham, True), paper.max_iter(chn, True)] == [iterations] * 3
    assert paper.max_iter(chn, False) == 2 * iterations
    assert [paper.backward_steps(ham, False), paper.backward_steps(chn, True)] == [steps] * 2
    assert paper.backward_steps(chn, False) == 2 * steps


def test_multiply_adds_of_the_papers_networks():
    cost = [hop.HAM(l, device="meta").multiply_adds() for l in ([784, 1990, 10], [784, 1280, 510, 200, 10])]
    assert cost == [2 * 1990 * 10, 2 * (1280 * 510 + 510 * 200 + 200 * 10)]


def test_repr_says_what_it_is():
    assert "layers=[6, 5, 4]" in repr(hop.CHN([6, 5, 4], device="cpu", rho="tanh"))
    assert "Tanh()" in repr(hop.CHN([6, 5, 4], device="cpu", rho="tanh"))


@pytest.mark.parametrize("rho", ["shifted-sigmoid", "tanh"])
def test_an_exact_chn_is_a_chn_at_its_equilibria(rho):
    """h = ς(s) satisfies the one's equation, s the other's; the outputs and the energies are the same."""
    chn, exact = (
        model([6, 9, 7, 4], rho=rho, seed=3, dtype=torch.float64, device="cpu") for model in (hop.CHN, hop.ExactCHN)
    )
    x = torch.rand(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        sol = hop.solve(exact, x, even_odd=True, tol=1e-14, max_iter=2000)
        s = exact.base.varsigma_inv(sol.state)
        torch.testing.assert_close(chn.step(s, x), s, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(chn.layer(s, -1), sol.output)
        torch.testing.assert_close(chn.energy(s, x), exact.energy(sol.state, x))
