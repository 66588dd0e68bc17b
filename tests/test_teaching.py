"""The notebooks' tools, each against the library or a number known by hand."""

import pytest
import torch

import hoplib as hop
from hoplib import teaching


def test_network_scales_what_the_library_draws(model):
    plain = model([4, 3, 2], seed=3, dtype=torch.float64, device="cpu")
    net = teaching.network(model, [4, 3, 2], seed=3, gain=2.0, bias=0.3)
    assert not any(p.requires_grad for p in net.parameters())
    for ours, drawn in zip(net.W, plain.W, strict=True):
        assert torch.equal(ours, 2 * drawn)
    for ours, drawn in zip(net.b, plain.b, strict=True):
        torch.testing.assert_close(ours, 30 * drawn)


def test_sample_is_of_the_seed_and_independent_of_the_weights():
    net = teaching.network(hop.HAM, [4, 3, 2])
    x, s = teaching.sample(net, 5)
    assert x.shape == (5, 4)
    assert s.shape == (5, 5)
    assert 0 <= x.min() < x.max() <= 1
    assert torch.equal(x, teaching.sample(net, 5)[0])
    assert not torch.equal(x, teaching.sample(net, 5, seed=1)[0])
    drawn = torch.rand(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert not torch.equal(x.flatten(), drawn)


def test_pair_is_two_neurons_without_input(model):
    net = teaching.pair(model, 1.5, (0.1, -0.2))
    s = torch.tensor([[0.3, -0.4]], dtype=torch.float64)
    field = net.field(s, torch.ones(1, 1, dtype=torch.float64))
    r = net.rho.rho(s)[0]
    torch.testing.assert_close(field[0], torch.stack([1.5 * r[1] + 0.1, 1.5 * r[0] - 0.2]))


def test_whole_has_the_field_of_the_library(model):
    net = teaching.network(model, [4, 3, 2], bias=0.5)
    x, s = teaching.sample(net, 5)
    W, b = teaching.whole(net)
    assert torch.equal(W, W.T)
    field = net.rho.rho(torch.cat([x, s], 1)) @ W.T + b
    assert teaching.gap(field[:, 4:], net.field(s, x)) < 1e-14


def test_gather_and_path():
    net = teaching.network(hop.HAM, [5, 4, 3, 2])
    x, s = teaching.sample(net, 2)
    assert torch.equal(teaching.gather(net, s, net.odd), torch.cat([s[:, :4], s[:, 7:]], 1))
    states = teaching.path(hop.Synchronous(net, x), s, 3)
    assert torch.equal(states[0], s)
    assert teaching.gap(states[2], net.step(net.step(s, x), x)) < 1e-14
    assert len(states) == 4


def test_gap():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
    assert teaching.gap(a, b) == 2
    assert teaching.gap(a, b, relative=True) == 0.5
    assert teaching.gap(a[:0], b[:0]) == 0


def test_derivatives():
    s = teaching.draw(1, 3)
    with torch.no_grad():  # they work there, too
        assert teaching.gap(teaching.gradient(lambda s, k: k * s.square(), s, 2.0), 4 * s) < 1e-15
        J = teaching.jacobian(lambda v: torch.cat([v[:, :2], v.sum(1, keepdim=True)], 1), s)
    assert J.tolist() == [[1, 0, 0], [0, 1, 0], [1, 1, 1]]


def test_sine_is_its_lagrangians_slope():
    s, rho = teaching.draw(7, seed=1), teaching.Sine()
    assert teaching.gap(teaching.gradient(rho.lagrangian, s), rho.rho(s)) < 1e-15
    assert teaching.gap(teaching.gradient(rho.rho, s), rho.drho(s)) < 1e-15


@pytest.mark.parametrize("even_odd", [False, True])
def test_multiply_adds_are_those_that_the_network_states(even_odd):
    net = teaching.network(hop.HAM, [5, 4, 3, 2])
    f = (hop.EvenOdd if even_odd else hop.Synchronous)(net, teaching.sample(net, 2)[0])
    z = f.start()
    with teaching.MultiplyAdds() as counter:
        f(z)
    assert counter.count == 2 * net.multiply_adds()


def test_half_steps_are_the_blocks_turns_and_their_rises_those_of_the_energy():
    net = teaching.network(hop.HAM, [5, 4, 3, 2])
    x, s = teaching.sample(net, 2)
    f = hop.EvenOdd(net, x)
    states = teaching.half_steps(f, s, 5)
    assert torch.equal(states[0], s)
    assert teaching.gap(f.cut(states[4]), f(f(f.cut(s)))) < 1e-14
    E = torch.stack([net.energy(t, x) for t in states]).detach()
    assert teaching.gap(teaching.rises(f, x, s, 5), E.diff(dim=0)) < teaching.rounding(net, s) < 1e-11


@pytest.mark.parametrize("rho", ["shifted-sigmoid", "tanh"])
@pytest.mark.parametrize("omega", [1.0, 0.5])
def test_within_the_thresholds_a_neuron_comes_to_rest_and_beyond_them_it_does_not(rho, omega):
    rho = hop.activations.get(rho)
    low, high = teaching.thresholds(rho, omega)
    h = torch.tensor([low, high, low, high], **teaching.EXACT) * torch.tensor(
        [0.98, 0.98, 1.02, 1.02], **teaching.EXACT
    )
    rest = rho.varsigma_inv(h)
    s = hop.ChnRule(rho, steps=5000, omega=omega).settle(rest + 1e-3, h)
    assert ((s - rest).abs() < 1e-9).tolist() == [True, True, False, False]


def test_the_thresholds_of_the_papers_local_steps():
    """The notebooks and the table tell them with two decimals."""
    low, high = teaching.thresholds(hop.ShiftedSigmoid())
    assert (round(low, 2), round(high, 2)) == (-29.7, 2.31)
