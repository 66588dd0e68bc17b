"""Clipped over-relaxation: its law, its two routes, its gradients, its rate, and what it refuses."""

import math

import pytest
import torch
from conftest import DEPTHS, assert_slope, random_state, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import hoplib as hop
from hoplib import kernels, teaching
from hoplib.relaxation import automatic, radius, rate
from hoplib.sweep import clip

SMOOTH = {a.name: a for a in (hop.ShiftedSigmoid(), hop.Tanh(), *map(hop.Effective, ("shifted-sigmoid", "tanh")))}
KAPPA = {
    "shifted-sigmoid": 4,
    "tanh": 2,
    "effective shifted-sigmoid": 7.66257,
    "effective tanh": 1.72709,
}


@pytest.fixture(params=SMOOTH)
def rho(request):
    return SMOOTH[request.param]


def rises(net, x, s, omega, turns=6, clipped=True):
    """By how much the energy rose in each half-step, (turns, batch)."""
    return teaching.rises(hop.EvenOdd(net, x, omega, clipped=clipped), x, s, turns)


# -- the law ----------------------------------------------------------------------------------------------------


def test_kappa_bounds_the_change_of_the_slope(rho):
    """|(log ρ')'| ≤ κ everywhere, and κ is reached: no smaller one would do."""
    s = torch.linspace(-9, 9, 100_001, dtype=torch.float64)
    change = (rho.drho(s).log().diff() / s.diff()).abs()
    assert change.max() <= rho.kappa + 1e-6
    assert change.max() > (1 - 1e-3) * rho.kappa
    assert rho.kappa == pytest.approx(KAPPA[rho.name], rel=1e-5)


@pytest.mark.parametrize("omega", [1.01, 1.2, 1.4, 1.7, 1.95, 1.999])
def test_no_neuron_gains_energy(rho, omega):
    """D(h‖s') ≤ D(h‖s) for one neuron, at every field and from every state."""
    c = clip(omega, hop.HamRule(rho))
    assert (omega - 1) ** 2 * math.exp(rho.kappa * omega * c) == pytest.approx(1)
    h = torch.linspace(-6, 6, 401, dtype=torch.float64)[:, None]
    s = torch.linspace(-12, 12, 801, dtype=torch.float64)[None, :]

    def divergence(s):
        return rho.lagrangian(h) - rho.lagrangian(s) - rho.rho(s) * (h - s)

    after = divergence(h + (omega - 1) * (h - s).clamp(-c, c))
    assert (after <= divergence(s) + 1e-13).all()


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=3, max_size=7),
    name=st.sampled_from(sorted(SMOOTH)),
    gain=st.floats(0.1, 4),
    omega=st.floats(1.001, 1.95),
    spread=st.floats(0.1, 5),
    seed=st.integers(0, 10_000),
)
def test_no_half_step_raises_the_energy(sizes, name, gain, omega, spread, seed):
    net, x = tiny(hop.HAM, sizes, seed=seed, scale=gain, rho=SMOOTH[name])
    found = rises(net, x, random_state(net, len(x), seed, spread), omega)
    assert found.max() < 1e-11


def test_blocks_of_ones_own_and_mixed_activations_keep_the_law():
    rho = ["tanh", "tanh", hop.Effective("tanh"), "shifted-sigmoid"]
    net = hop.HAM([4, 5, 6, 3], rho=rho, dtype=torch.float64, device="cpu")
    x = torch.rand(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    f = net.sweep(x, [[2], [1], [3]], 1.8, clipped=True)
    assert [rule.clip for rule in f.rules] == [clip(1.8, hop.HamRule(net.rho.at(l))) for l in (2, 1, 3)]
    assert teaching.rises(f, x, random_state(net, 8, scale=3), 12).max() < 1e-12


def test_without_the_clip_the_energy_rises():
    net, x = tiny(hop.HAM, DEPTHS[5], scale=3.0, batch=50)
    s = random_state(net, 50, scale=2)
    assert rises(net, x, s, 1.6, clipped=False).max() > 0.1
    assert rises(net, x, s, 1.6).max() < 1e-12


def test_an_omega_up_to_one_is_what_it_was():
    net, x = tiny(hop.HAM, DEPTHS[5])
    for omega in (0.7, 1.0):
        new, old = (hop.solve(net, x, s(omega), even_odd=True) for s in (hop.OverRelaxed, hop.Picard))
        assert torch.equal(new.state, old.state)


# -- the same answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("omega", [1.3, 1.8, None])
def test_the_equilibria_are_those_of_even_odd(layers, rho, omega):
    net, x = tiny(hop.HAM, layers, scale=0.5, rho=rho)
    plain, over = (
        hop.solve(net, x, solver, even_odd=True, tol=1e-13, max_iter=3000)
        for solver in (hop.Picard(), hop.OverRelaxed(omega))
    )
    assert over.converged.all()
    torch.testing.assert_close(over.state, plain.state, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_the_compiled_loop_is_torch(dtype):
    if kernels.numba is None:
        pytest.skip("the compiled loops need Numba")
    net, x = tiny(hop.HAM, DEPTHS[7], scale=2.0, batch=33, dtype=dtype)
    found = []
    for loop in (kernels.relax, kernels._relax.py_func, None):
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            if loop is None:
                patch.setattr(kernels, "relax", lambda *args: False)
            elif loop is not kernels.relax:
                patch.setattr(kernels, "_relax", loop)
            f = hop.EvenOdd(net, x, 1.5, clipped=True)
            found.append(hop.trajectory(f, f.start(random_state(net, 33, scale=2)), iterations=20))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-13)


def test_the_compiled_loop_refuses_what_it_is_not_for():
    s = torch.zeros(3, 4)
    assert not kernels.relax(s.T, s.T, 0.4, 1.0, torch.empty(4, 3).T.contiguous().T)
    assert not kernels.relax(s[0], s[0], 0.4, 1.0, s[0].clone())
    if kernels.numba is not None:
        out = torch.empty(3, 2)
        s[1, 2], s[2, 3] = math.nan, 7.0
        assert kernels.relax(s[:, 2:], torch.zeros(3, 4)[:, :2], 0.5, 1.0, out)
        assert out[1, 0].isnan()
        assert out[2, 1] == -0.5
        assert kernels.relax(s[:0], s[:0], 0.4, 1.0, s[:0].clone())


def test_an_answer_does_not_depend_on_its_company():
    net, x = tiny(hop.HAM, DEPTHS[5], scale=2.0, batch=20)
    whole = hop.solve(net, x, hop.OverRelaxed(1.5), even_odd=True)
    for i in range(0, 20, 7):
        alone = hop.solve(net, x[[i]], hop.OverRelaxed(1.5), even_odd=True)
        torch.testing.assert_close(alone.state[0], whole.state[i], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_what_the_company_changes_where_the_batch_chooses_the_omega(scale):
    """Other iterations, and an answer within what the tolerance leaves open; the equilibrium is the same."""
    net, x = tiny(hop.HAM, [20, 40, 30, 20, 10], scale=scale, batch=63)
    options = {"tol": 1e-6, "max_iter": 2000}
    together, parts = hop.solve(net, x, **options), [hop.solve(net, part, **options) for part in x.split(7)]
    state, iterations = (torch.cat([getattr(p, name) for p in parts]) for name in ("state", "iterations"))
    assert together.converged.all()
    assert not torch.equal(iterations, together.iterations)
    assert (hop.residual(state, together.state) < 1e-4).all()


def test_it_works_in_two_stages():
    net, x = tiny(hop.HAM, DEPTHS[5], scale=0.7)
    s = hop.solve(net, x, even_odd=True, tol=1e-13, max_iter=2000).state
    for solver in (hop.Then(hop.Picard(), hop.OverRelaxed()), hop.Then(hop.OverRelaxed(), hop.Picard(), steps=200)):
        sol = hop.solve(net, x, solver, even_odd=True, tol=1e-12)
        torch.testing.assert_close(sol.state, s, rtol=0, atol=1e-6)


# -- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backward", [hop.Adjoint(tol=1e-14), hop.Adjoint(steps=80), hop.RecurrentBackprop(80), hop.ThroughTime()], ids=repr
)
def test_the_gradient_is_that_of_finite_differences(layers, rho, backward):
    net, x = tiny(hop.HAM, layers, scale=0.5, rho=rho)
    x.requires_grad_()
    leaves = [x, *net.parameters()]

    def value(backward=None):
        options = {"even_odd": True, "tol": 1e-14, "max_iter": 120, "backward": backward}
        return hop.solve(net, x, hop.OverRelaxed(1.3), **options).state.square().sum()

    gradients = torch.autograd.grad(value(backward), leaves)
    assert_slope(value, leaves, gradients)


def test_the_slopes_away_from_rest_are_those_of_autograd(rho):
    """The derivative along a few sweeps, where some neurons are clipped and some are not."""
    net, x = tiny(hop.HAM, DEPTHS[5], scale=2.0, batch=8, rho=rho)
    f = hop.EvenOdd(net, x, 1.6, clipped=True)
    z = f.start(random_state(net, 8, scale=0.7)).detach()
    grad = random_state(net, 8, seed=1)
    with torch.no_grad():
        h = f.field(0, f.seen(1, f.open(z)[1]))
        clipped = (h - f.open(z)[0]).abs() > f.rules[0].clip
        assert 0.05 < clipped.double().mean() < 0.95
    by_links, by_b, _ = net.pullback(f.along(z, 3, grad), x)
    g = f.again(x)
    s = z
    for _ in range(3):
        s = g(s)
    expected = torch.autograd.grad((g.join(s) * grad).sum(), [*net.W, *net.b])
    for a, b in zip([*by_links, *by_b], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_the_truncated_adjoint_gains_as_much():
    """Half as many terms of the over-relaxed series leave less of an error than the plain one."""
    net, x = tiny(hop.HAM, [12, 11, 10, 9, 8, 7, 6], scale=0.8, batch=16)
    x = x.clone()
    s = hop.solve(net, x, even_odd=True, tol=1e-14, max_iter=5000).state.detach()
    grad = torch.zeros_like(s)
    net.layer(grad, -1).copy_(random_state(net, 16)[:, :6])
    exact, solved = hop.Adjoint(tol=1e-14, max_iter=5000).exact(hop.EvenOdd(net, x), s, grad)
    assert solved.all()
    omega = hop.best_omega(net, x)
    assert omega > 1.1

    def error(omega, terms):
        found = hop.EvenOdd(net, x, omega, clipped=omega > 1).adjoint(s, grad).neumann(terms)
        return ((found - exact).norm() / exact.norm()).item()

    assert error(omega, 12) < error(1.0, 24)
    assert error(omega, 300) < 1e-9


# -- the rate ---------------------------------------------------------------------------------------------------


def test_youngs_rate_is_least_at_his_omega():
    omega = torch.linspace(0.5, 1.99, 1491, dtype=torch.float64)
    for r in (0.0, 0.3, 0.75, 0.98):
        found = rate(omega, torch.tensor(r, dtype=torch.float64))
        best = 2 / (1 + math.sqrt(1 - r))
        assert float(omega[found.argmin()]) == pytest.approx(best, abs=1e-3)
        assert float(found.min()) == pytest.approx(best - 1, abs=5e-3 if r < 0.9 else 0.05)
        assert float(rate(torch.tensor(1.0), torch.tensor(r))) == pytest.approx(r)


@pytest.mark.parametrize("omega", [1.0, 1.2, 1.4, 1.6])
def test_the_measured_rate_is_youngs(layers, omega):
    net, x = tiny(hop.HAM, layers, scale=0.8, batch=1)
    s = hop.solve(net, x, even_odd=True, tol=1e-14, max_iter=5000).state.detach()
    f = hop.EvenOdd(net, x, omega, clipped=True)
    J = torch.autograd.functional.jacobian(lambda v: f(v[None])[0], f.cut(s)[0])
    expected = float(torch.linalg.eigvals(J).abs().max())
    predicted = float(rate(torch.tensor(omega, dtype=torch.float64), radius(net, x, s, steps=40)))
    assert predicted == pytest.approx(expected, abs=1e-5)  # double roots: √ε
    near = f.cut(s) + 1e-4 * f.cut(random_state(net, 1))
    error = (hop.trajectory(f, near, iterations=300) - f.cut(s)).flatten(1).norm(dim=1)
    i, j = (int((error < e).int().argmax()) for e in (1e-6, 1e-12))
    measured = float((error[j] / error[i]) ** (1 / (j - i)))
    assert measured == pytest.approx(predicted, rel=0.15, abs=0.02)


def test_the_best_omega_is_found_and_pays():
    net, x = tiny(hop.HAM, [20, 18, 16, 14, 12, 10, 8], scale=0.9, batch=32)
    omega = hop.best_omega(net, x)
    assert omega == hop.best_omega(net, x)
    s = hop.solve(net, x, even_odd=True, tol=1e-12, max_iter=5000).state
    young = 2 / (1 + (1 - radius(net, x, s)).sqrt())
    assert young.min() - 0.02 < omega < young.max() + 0.02
    plain, found, given = (
        hop.solve(net, x, solver, even_odd=True, tol=1e-8, max_iter=2000).iterations.double().mean()
        for solver in (hop.Picard(), hop.OverRelaxed(), hop.OverRelaxed(omega))
    )
    assert given < 0.6 * plain
    assert found < 0.7 * plain  # its pace, found on the way


@pytest.mark.parametrize("scale", [0.3, 0.6, 0.9, 1.5, 2.0])
def test_it_finds_its_pace(scale):
    """ω is chosen after 3, 6, 12, … sweeps by Young's relation; no sweep raises the energy; a repeat is the same."""
    net, x = tiny(hop.HAM, [20, 18, 16, 14, 12, 10, 8], scale=scale, batch=32)
    f = hop.OverRelaxed().sweep(net, x, net.blocks(even_odd=True))
    s, omegas, steps = f.start(), [f.omega], []
    energies = [net.energy(f.join(s), x)]
    for _ in range(26):
        new = f(s)
        steps.append((new - s).norm(dim=1))
        s = new
        omegas.append(f.omega)
        energies.append(net.energy(f.join(s), x))
    assert {k for k in range(1, 27) if omegas[k] != omegas[k - 1]} <= {3, 6, 12, 24}
    grid = torch.arange(100, 190).double() / 100
    for first, last in ((2, 3), (4, 6), (7, 12), (13, 24)):
        w, slope = omegas[last - 1], (steps[last - 1] / steps[first - 1]) ** (1 / (last - first))
        squares = torch.where(slope > w - 1, (slope + w - 1).square() / (w * w * slope), 1 - (2 / w - 1) ** 2)
        iterations = -1 / rate(grid[:, None], squares.clamp(0, min(0.98, 1 - 2 / last))).clamp_min(1e-6).log()
        assert omegas[last] == float(grid[iterations.mean(1).argmin()])
    assert (torch.stack(energies).diff(dim=0) < 1e-12).all()
    once, again, plain = (
        hop.solve(net, x, solver, even_odd=True, max_iter=400)
        for solver in (hop.OverRelaxed(), hop.OverRelaxed(), hop.Picard())
    )
    assert torch.equal(once.state, again.state)
    assert once.converged.all()
    assert once.iterations.sum() < 1.05 * plain.iterations.sum()


def test_a_network_left_to_itself_takes_the_fast_way():
    """Neither solver nor updates given: over-relaxed where that is lawful and pays, else even-odd, else at once."""
    for model, depth, expected in (
        (hop.HAM, 5, hop.OverRelaxed()),
        (hop.HAM, 3, hop.Picard()),
        (hop.CHN, 5, hop.Picard()),
    ):
        net, x = tiny(model, DEPTHS[depth], scale=0.8)
        assert automatic(net) == (expected, True)
        alone, said = hop.solve(net, x), hop.solve(net, x, expected, even_odd=True)
        assert torch.equal(alone.state, said.state)
        assert torch.equal(alone.iterations, said.iterations)
    assert automatic(tiny(hop.HAM, DEPTHS[5], rho="relu")[0]) == (hop.Picard(), True)
    ends = [(0, 1), (1, 2), (2, 3), (1, 3)]
    triangle = hop.HAM([2, 2, 2, 2], links={end: hop.Dense(torch.eye(2)) for end in ends}, device="cpu")
    assert automatic(triangle) == (hop.Picard(), False)
    net, x = tiny(hop.HAM, DEPTHS[5], scale=0.8)
    at_once = hop.solve(net, x, even_odd=False)
    assert torch.equal(hop.solve(net, x, hop.Picard()).state, at_once.state)  # a solver alone: as it always was
    torch.testing.assert_close(hop.solve(net, x, tol=1e-13, max_iter=900).state, at_once.state, rtol=1e-2, atol=1e-2)


def test_its_gradient_is_that_of_the_equilibrium_whatever_the_pace():
    net, x = tiny(hop.HAM, DEPTHS[5], scale=0.8)
    grads = []
    for how in ({}, {"even_odd": False}):
        sol = hop.solve(net, x, **how, tol=1e-13, max_iter=2000, backward=hop.Adjoint(tol=1e-12))
        grads.append(torch.autograd.grad(sol.output.square().sum(), list(net.parameters())))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    sol = hop.solve(net, x, max_iter=300, backward=hop.ThroughTime())
    for ours, theirs in zip(
        torch.autograd.grad(sol.output.square().sum(), list(net.parameters())), grads[0], strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_no_samples_no_trouble():
    net, x = tiny(hop.HAM, DEPTHS[5])
    assert hop.best_omega(net, x[:0]) == 1.0
    assert hop.best_omega(net, x[:1]) >= 1.0
    assert hop.solve(net, x[:0], hop.OverRelaxed(), even_odd=True).state.shape == (0, net.N)
    two, x2 = tiny(hop.HAM, DEPTHS[2])  # nothing is coupled
    assert hop.solve(two, x2, hop.OverRelaxed(), even_odd=True).converged.all()


# -- ρ ∘ ς⁻¹ ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shifted-sigmoid", "tanh"])
def test_a_chn_is_a_ham_with_the_effective_activation(layers, name):
    chn, x = tiny(hop.CHN, layers, scale=0.8, rho=name)
    effective = hop.Effective(name)
    ham, _ = tiny(hop.HAM, layers, scale=0.8, rho=[name, *[effective] * (len(layers) - 1)])
    s = random_state(chn, len(x))
    torch.testing.assert_close(ham.energy(effective.base.varsigma(s), x), chn.energy(s, x))
    h = hop.solve(ham, x, hop.OverRelaxed(), even_odd=True, tol=1e-13, max_iter=3000).state
    settled = effective.base.varsigma_inv(h)
    torch.testing.assert_close(chn.step(settled, x), settled, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["shifted-sigmoid", "tanh"])
def test_the_effective_activation_has_its_laws(name):
    a = hop.Effective(name)
    s = torch.linspace(-8, 8, 401, dtype=torch.float64, requires_grad=True)
    for function, derivative in ((a.lagrangian, a.rho), (a.rho, a.drho)):
        (found,) = torch.autograd.grad(function(s).sum(), s)
        torch.testing.assert_close(found, derivative(s), atol=1e-12, rtol=1e-10)
    out = torch.empty_like(s.detach())
    assert a.rho(s.detach(), out=out) is out
    assert repr(a) == f"Effective({a.base!r})"


# -- what it refuses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["relu", "hard-sigmoid"])
def test_an_activation_without_kappa_is_named(name):
    net, x = tiny(hop.HAM, DEPTHS[4], rho=name)
    with pytest.raises(ValueError, match="HamRule with " + {"relu": "ReLU", "hard-sigmoid": "HardSigmoid"}[name]):
        hop.solve(net, x, hop.OverRelaxed(1.4), even_odd=True)
    mixed, x = tiny(hop.HAM, DEPTHS[3], rho=["tanh", "tanh", name])
    with pytest.raises(ValueError, match="cannot be clipped"):
        hop.solve(mixed, x, hop.OverRelaxed(), even_odd=True)


def test_a_chn_and_synchronous_updates_are_refused():
    chn, x = tiny(hop.CHN, DEPTHS[3])
    with pytest.raises(ValueError, match=r"ChnRule .* A CHN is a HAM with Effective"):
        hop.solve(chn, x, hop.OverRelaxed(1.4), even_odd=True)
    net, x = tiny(hop.HAM, DEPTHS[3])
    with pytest.raises(ValueError, match=r"in turns \(even_odd=True\)"):
        hop.solve(net, x, hop.OverRelaxed(1.4))
    with pytest.raises(ValueError, match="coupled with each other"):
        net.sweep(x, [net.hidden], 1.4, clipped=True)


@pytest.mark.parametrize("omega", [0.0, -1.0, 2.0, 2.5, math.nan])
def test_an_omega_out_of_range_is_named(omega):
    with pytest.raises(ValueError, match="0 < ω < 2"):
        hop.OverRelaxed(omega)
    net, x = tiny(hop.HAM, DEPTHS[3])
    with pytest.raises(ValueError, match="0 < ω < 2"):
        hop.EvenOdd(net, x, omega, clipped=True)


def test_a_rule_of_ones_own_does_not_inherit_the_bound():
    class Halfway(hop.HamRule):
        def settle(self, s, h, out=None, r=None):
            return torch.lerp(s, h, 0.5, out=out)

    class HalfwayHAM(hop.HAM):
        def rule(self, rho, sole):
            return Halfway(rho)

    net, x = tiny(HalfwayHAM, DEPTHS[3])
    with pytest.raises(ValueError, match="cannot be clipped for Halfway with ShiftedSigmoid"):
        hop.solve(net, x, hop.OverRelaxed(1.4), even_odd=True)
