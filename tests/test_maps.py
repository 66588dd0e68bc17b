"""The block maps equal the dense oracle; even-odd and synchronous share fixed points; the energy never rises."""

import pytest
import torch
from conftest import DEPTHS, random_state, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import hoplib as hop
from hoplib import oracle, paper
from hoplib.rules import ExactRule

EXACT = {"atol": 1e-12, "rtol": 1e-12}


def by_the_page(net, x, relaxation, even_odd):
    """The oracle's map of a state in the usual order."""
    if not even_odd:
        return oracle.synchronous(net, x, relaxation)
    f, P = oracle.even_odd(net, x, relaxation), hop.dense(net).P
    return lambda s: f(s @ P.T) @ P


@pytest.mark.parametrize("depth", [3, 5, 7])
def test_equation_9_is_a_sweep_of_equations_7_and_8(depth):
    net, x = tiny(hop.HAM, DEPTHS[depth])
    n = sum(net.layers[l] for l in net.even)
    s = random_state(net, len(x), seed=1) @ hop.dense(net).P.T
    torch.testing.assert_close(oracle.reduced(net, x)(s[:, :n]), oracle.even_odd(net, x)(s)[:, :n], **EXACT)


@pytest.mark.parametrize("relaxation", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("depth", DEPTHS)
def test_blocks_equal_the_dense_oracle(model, depth, relaxation, even_odd):
    net, x = tiny(model, DEPTHS[depth], seed=depth)
    f = (hop.EvenOdd if even_odd else hop.Synchronous)(net, x, relaxation)
    reference = by_the_page(net, x, relaxation, even_odd)
    s = random_state(net, len(x), seed=1)
    z = f.start(s)
    assert z.shape == (len(x), f.size)
    for _ in range(3):
        allocated = f(z)
        with torch.no_grad():
            in_place = f(z, out=torch.full_like(z, torch.nan))
        s = reference(s)
        torch.testing.assert_close(allocated, f.cut(s), **EXACT)
        torch.testing.assert_close(in_place, allocated, **EXACT)
        z = allocated
    if f.size == net.N:
        torch.testing.assert_close(f.join(z), s, **EXACT)


@settings(deadline=None, max_examples=60)
@given(
    layers=st.lists(st.integers(1, 9), min_size=2, max_size=9),
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 4),
    chn=st.booleans(),
    even_odd=st.booleans(),
    relaxation=st.floats(0.1, 1.9),
)
def test_blocks_equal_the_oracle_for_any_architecture(layers, seed, batch, chn, even_odd, relaxation):
    net, x = tiny(hop.CHN if chn else hop.HAM, layers, seed=seed, batch=batch)
    s = random_state(net, batch, seed=seed)
    f = (hop.EvenOdd if even_odd else hop.Synchronous)(net, x, relaxation)
    reference = by_the_page(net, x, relaxation, even_odd)(s)
    torch.testing.assert_close(f(f.cut(s)), f.cut(reference), **EXACT)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_ham_iterates_the_outputs_block_alone(depth):
    net, x = tiny(hop.HAM, DEPTHS[depth])
    f = hop.EvenOdd(net, x)
    members = net.odd if depth % 2 == 0 else net.even
    assert f.blocks[-1].members == members
    assert f.size == sum(net.layers[l] for l in members)
    s = random_state(net, len(x))
    joined = f.join(f.cut(s))
    for l in members:
        assert torch.equal(net.layer(joined, l), net.layer(s, l))
    # the other block stands in the field of the first
    again = net.step(joined, x)
    for l in set(net.hidden) - set(members):
        torch.testing.assert_close(net.layer(joined, l), net.layer(again, l), **EXACT)


def test_a_sweep_is_two_synchronous_steps(layers):
    """Eq. (9): s_even^{n+2} from s_even^n, for a HAM, where s_odd plays no part."""
    net, x = tiny(hop.HAM, layers)
    s = random_state(net, len(x))
    f = hop.EvenOdd(net, x)
    torch.testing.assert_close(f(f.cut(s)), f.cut(net.step(net.step(s, x), x)), **EXACT)


def test_step_is_the_synchronous_map(model, layers):
    net, x = tiny(model, layers)
    s = random_state(net, len(x))
    torch.testing.assert_close(hop.Synchronous(net, x)(s), net.step(s, x), **EXACT)
    torch.testing.assert_close(hop.Synchronous(net, x, 0.25)(s), s + 0.25 * net.flow(s, x), **EXACT)


def test_even_odd_and_synchronous_share_their_fixed_points(model, layers):
    net, x = tiny(model, layers, scale=0.7)
    s_star = hop.solve(net, x, even_odd=True, tol=1e-15, max_iter=3000).state
    torch.testing.assert_close(net.step(s_star, x), s_star, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(
        hop.solve(net, x, even_odd=False, tol=1e-15, max_iter=3000).state, s_star, atol=1e-11, rtol=1e-11
    )


@pytest.mark.parametrize("rho", ["shifted-sigmoid", "tanh", "relu", "hard-sigmoid"])
@pytest.mark.parametrize("relaxation", [0.3, 1.0])
@settings(deadline=None, max_examples=25)
@given(layers=st.lists(st.integers(1, 8), min_size=2, max_size=6), seed=st.integers(0, 2**31))
def test_a_half_step_never_raises_the_energy_of_a_ham(rho, relaxation, layers, seed):
    """A half-step minimises E over its block, by the Legendre transform; part of the way there E falls as well."""
    net, x = tiny(hop.HAM, layers, seed=seed, scale=3.0, rho=rho)
    s = random_state(net, len(x), seed=seed, scale=3.0)
    before = net.energy(s, x)
    for block in (net.odd, net.even) * 3:
        h = net.field(s, x)
        for l in block:
            own = net.slices[l]
            s[:, own] = s[:, own] + relaxation * (h[:, own] - s[:, own])
        after = net.energy(s, x)
        assert (after <= before + 1e-9 * (1 + before.abs())).all()
        before = after


def test_the_sweep_descends_where_the_synchronous_step_does_not():
    rises = {False: 0, True: 0}
    for seed in range(30):
        net, x = tiny(hop.HAM, [6, 8, 7, 5], seed=seed, scale=4.0, rho="tanh")
        for even_odd in rises:
            f = (hop.EvenOdd if even_odd else hop.Synchronous)(net, x)
            z = f.start(random_state(net, len(x), seed=seed))
            energies = []
            for _ in range(12):
                energies.append(net.energy(f.join(z), x))
                z = f(z)
            rises[even_odd] += int((torch.stack(energies).diff(dim=0) > 1e-9).sum())
    assert rises[True] == 0
    assert rises[False] > 0


def test_restrict_keeps_the_chosen_samples(model, layers, even_odd):
    net, x = tiny(model, layers)
    f = (hop.EvenOdd if even_odd else hop.Synchronous)(net, x, 0.8)
    z = f.start(random_state(net, len(x)))
    keep = torch.tensor([3, 0])
    torch.testing.assert_close(f.restrict(keep)(z[keep]), f(z)[keep], **EXACT)
    adjoint = f.adjoint(f.join(z), random_state(net, len(x), seed=5))
    back = random_state(net, len(x), seed=6)[:, : adjoint.size]
    torch.testing.assert_close(adjoint.restrict(keep)(back[keep]), adjoint(back)[keep], **EXACT)
    torch.testing.assert_close(adjoint.restrict(keep).neumann(3), adjoint.neumann(3)[keep], **EXACT)


def test_the_adjoint_sums_the_powers_of_the_transposed_jacobian(model, layers, even_odd):
    """Its fixed point is the cotangent (1 − Jᵀ)⁻¹ g, with J of the synchronous map at the fixed point by autograd."""
    for relaxation in (1.0, 0.6):
        net, x = tiny(model, layers, scale=0.5, batch=1)
        f = (hop.EvenOdd if even_odd else hop.Synchronous)(net, x, relaxation * paper.relaxation(net, even_odd))
        with torch.no_grad():
            z = hop.iterate(f, f.start(), hop.Picard(), max_iter=1000, tol=1e-15).state
        s, grad = f.join(z), random_state(net, 1, seed=2)
        J = torch.autograd.functional.jacobian(lambda s, net=net, x=x: net.step(s[None], x)[0], s[0])
        lam = torch.linalg.solve(torch.eye(net.N, dtype=s.dtype) - J.T, grad[0])
        slope = net.rho.drho(s) if model is hop.CHN else 1  # of a neuron by its field
        adjoint = f.adjoint(s, grad)
        found = hop.iterate(adjoint, adjoint.start(), hop.Picard(), max_iter=1000, tol=1e-15).state
        torch.testing.assert_close(adjoint.cotangent(found)[0], (slope * lam).flatten(), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("layer", [1, 2, -1])
def test_layers_that_the_gradient_has_not_reached_can_be_left_out(model, even_odd, layer):
    net, x = tiny(model, [6, 7, 5, 4, 5, 3, 2])
    f = (hop.EvenOdd if even_odd else hop.Synchronous)(net, x)
    s, grad = random_state(net, len(x)), net.zeros(len(x))
    net.layer(grad, layer)[:] = 1
    adjoint, all_lit = f.adjoint(s, grad), f.adjoint(s, grad)
    assert adjoint.lit == {layer % 7}
    all_lit.lit = set(net.hidden)
    for terms in range(1, 6):
        torch.testing.assert_close(adjoint.neumann(terms), all_lit.neumann(terms), **EXACT)


class ExactCHN(hop.CHN):
    """A CHN whose blocks settle exactly."""

    def rule(self, rho, sole):
        return ExactRule(rho)


def test_a_subclass_with_a_rule_of_its_own_is_heard_everywhere(even_odd):
    net, x = tiny(ExactCHN, [7, 6, 5])
    f = (hop.EvenOdd if even_odd else hop.Synchronous)(net, x)
    z = f.start(random_state(net, len(x)))
    with torch.no_grad():
        torch.testing.assert_close(f(z, out=torch.empty_like(z)), f(z), **EXACT)
