"""A network in the company of torch: as a layer of a model, copied, saved, and in torch's modes.

What a mode does to a solve is either right or one clear error.
"""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from conftest import tiny
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune

import hoplib as hop

LAYERS = [6, 5, 4, 3]


@pytest.fixture
def layer():
    net, x = tiny(hop.HAM, LAYERS, dtype=torch.float32)
    return hop.Layer(net, even_odd=True), x


def test_a_layer_is_a_solve(layer):
    layer, x = layer
    assert torch.equal(layer(x), hop.solve(layer.net, x, even_odd=True).output)
    assert "even_odd=True" in repr(layer)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_with_a_layer_has_gradients_in_training_and_evaluation(training):
    """All its parameters and its input, by finite differences."""
    net, _ = tiny(hop.HAM, LAYERS, scale=0.6)
    first, last = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64)
    how = {"even_odd": True, "tol": 1e-13, "max_iter": 500, "backward": hop.Adjoint(tol=1e-13)}
    model = nn.Sequential(first, nn.Sigmoid(), hop.Layer(net, **how), last).train(training)
    x = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(model, x)
    model(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_a_model_with_a_layer_learns_with_adam():
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(64, 12, generator=g).round(), torch.arange(64) % 4
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), hop.Layer(hop.HAM([16, 32, 8], device="cpu")), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_equal_and_independent(layer, again):
    layer, x = layer
    twin, before = again(layer), layer(x)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        twin.net.W[0].zero_()
    assert torch.equal(layer(x), before)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), before)


def test_in_inference_mode_it_is_the_same_without_a_graph(layer):
    layer, x = layer
    with torch.inference_mode():
        found = layer(x)
        hop.ExactCHN(LAYERS, device="cpu")
    assert found.is_inference()
    assert torch.equal(found, layer(x))


def test_autocast_changes_nothing(layer):
    """As an ordinary layer that autocast leaves in full precision: forward, backward, and what comes in as bfloat16."""
    layer, x = layer
    x = x.bfloat16().float()
    found = []
    for on in (False, True):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            y = layer(x.bfloat16() if on else x)
            y.sum().backward()
        assert y.dtype == torch.float32
        found.append([y.detach(), *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autocast_changes_nothing_of_the_parts_of_a_solve(layer):
    net, x = layer[0].net, layer[1]
    found = []
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            f = hop.EvenOdd(net, x)
            options = {"max_iter": 20, "tol": 1e-4}
            found.append(
                [
                    hop.iterate(f, f.start(), hop.Anderson(), **options).state,
                    hop.trajectory(f, f.start(), iterations=3),
                    net.energy(net.zeros(5), x).detach(),
                    net.step(net.zeros(5), x).detach(),
                    torch.tensor(hop.best_omega(net, x)),
                ]
            )
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_half_precision_is_refused_and_leaves_the_network_as_it_was(layer):
    layer, x = layer
    before = layer(x)
    for convert in (layer.net.half, layer.bfloat16, lambda: layer.to(torch.float16)):
        with pytest.raises(TypeError, match=r"float32 or torch\.float64, not torch\.b?float16"):
            convert()
        assert torch.equal(layer(x), before)
    layer.net.load_state_dict({k: t.half() for k, t in layer.net.state_dict().items()}, assign=True)
    with pytest.raises(TypeError, match=r"float32 or torch\.float64, not torch\.float16"):
        layer(x.half())
    assert layer.double()(x.double()).dtype == torch.float64


def test_transforms_of_functions_are_refused(layer):
    layer, x = layer
    parameters = dict(layer.named_parameters())
    assert torch.equal(torch.func.functional_call(layer, parameters, (x,)), layer(x))
    for call in (
        lambda: torch.vmap(lambda one: layer(one[None]))(x),
        lambda: torch.func.grad(lambda t: layer(t).sum())(x),
        lambda: torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).sum())(parameters),
    ):
        with pytest.raises(RuntimeError, match=r"does not support torch\.func and vmap: give it a batch"):
            call()


@pytest.mark.parametrize("backward", [hop.Adjoint(), hop.Adjoint(tol=1e-6), hop.RecurrentBackprop()], ids=repr)
def test_a_functional_call_has_the_gradients_of_its_own_weights(layer, backward):
    """After the call the network has its own weights again: the gradient by x must not be taken with those."""
    net, x = layer[0].net, layer[1].requires_grad_()
    layer = hop.Layer(net, even_odd=True, backward=backward)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for p in other.parameters():
            p *= 1.5
    weights = {name: p.detach().requires_grad_() for name, p in other.named_parameters()}
    found = torch.autograd.grad(torch.func.functional_call(layer, weights, (x,)).sum(), [x, *weights.values()])
    expected = torch.autograd.grad(other(x).sum(), [x, *other.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_forward_mode_is_refused(layer):
    layer, x = layer
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="does not support forward-mode"):
        layer(forward_ad.make_dual(x, x))
    s = layer.net.zeros(5)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="does not support forward-mode"):
        hop.solve(layer.net, x, s0=forward_ad.make_dual(s, s))
    with pytest.raises(RuntimeError, match=r"does not support torch\.func"):
        torch.func.grad(lambda s: hop.solve(layer.net, x, s0=s).state.sum())(s)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_it_is_neither_traced_nor_exported(layer):
    layer, x = layer
    for call in (lambda: torch.jit.trace(layer, (x,)), lambda: torch.export.export(layer, (x,))):
        with pytest.raises(RuntimeError, match="a solve cannot be traced or exported"):
            call()


def test_a_network_is_no_layer_by_itself(layer):
    net, x = layer[0].net, layer[1]
    for module in (net, torch.compile(net, backend="eager")):
        with pytest.raises(NotImplementedError, match=r"in a torch model it is hop\.Layer\(net\)"):
            module(x)


def test_second_derivatives_are_those_of_through_time_or_refused():
    net, x = tiny(hop.HAM, [4, 3, 2], scale=0.6, batch=2)
    x.requires_grad_()

    def penalty(backward):
        output = hop.solve(net, x, even_odd=False, tol=1e-13, max_iter=80, backward=backward).output
        (by_x,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return by_x

    torch.testing.assert_close(penalty(hop.Adjoint(tol=1e-13)), penalty(hop.ThroughTime()))
    for backward in (hop.Adjoint(), hop.Adjoint(tol=1e-13), hop.RecurrentBackprop()):
        with pytest.raises(RuntimeError, match=SECOND):
            penalty(backward).sum().backward()
    assert torch.autograd.gradgradcheck(
        lambda x: hop.solve(net, x, even_odd=False, max_iter=80, backward=hop.ThroughTime()).output,
        x.detach().requires_grad_(),
    )


SECOND = r"have no second derivatives; ThroughTime\(\) has them"


def test_a_penalty_is_never_left_out_in_silence(layer):
    """Its gradient by x does not depend on the gradient that comes in, which is constant, but on x and the weights."""
    layer, x = layer
    x.requires_grad_()
    for by in (x, layer.net.W[1]):
        y = layer(x)
        (slope,) = torch.autograd.grad(y.sum(), by, create_graph=True)
        with pytest.raises(RuntimeError, match=SECOND):
            (y.sum() + slope.square().sum()).backward()
    with pytest.raises(RuntimeError, match=SECOND):
        torch.autograd.functional.hessian(lambda x: layer(x).sum(), x)


def test_a_batch_of_gradients_is_refused(layer):
    layer, x = layer
    with pytest.raises(RuntimeError, match=r"does not support torch\.func and vmap"):
        torch.autograd.functional.jacobian(layer, x, vectorize=True)
    assert torch.autograd.functional.jacobian(layer, x).shape == (5, 3, 5, 6)


class Triple(nn.Module):
    def forward(self, W):
        return 3 * W


def test_weights_that_are_made_of_others_have_a_gradient_through_time_or_none(layer):
    """A parametrization, or a hook: the gradient by W would be taken for that by what W is made of."""
    net, x = layer[0].net, layer[1]
    pruned = copy.deepcopy(net)
    prune.l1_unstructured(pruned.links[0], "W", 0.5)
    parametrize.register_parametrization(net.links[1], "W", Triple())
    for made in (net, pruned):
        hop.solve(made, x)
        for backward in (hop.Adjoint(), hop.RecurrentBackprop()):
            with pytest.raises(TypeError, match=r"are made of others: only ThroughTime\(\)"):
                hop.solve(made, x, backward=backward)
    options = {"even_odd": True, "max_iter": 100}
    (found,) = torch.autograd.grad(
        hop.solve(net, x, backward=hop.ThroughTime(), **options).output.sum(), net.links[1].parametrizations.W.original
    )
    parametrize.remove_parametrizations(net.links[1], "W")
    (plain,) = torch.autograd.grad(hop.solve(net, x, backward=hop.Adjoint(), **options).output.sum(), net.links[1].W)
    torch.testing.assert_close(found, 3 * plain, rtol=1e-3, atol=1e-4)


class Steep(hop.Tanh):
    """ρ(s) = tanh(βs), with a β to be learnt."""

    kappa = None

    def __init__(self):
        self.beta = nn.Parameter(torch.tensor(0.5))

    def rho(self, s, out=None):
        return super().rho(self.beta * s, out=out)

    def drho(self, s):
        return self.beta * super().drho(self.beta * s)


class SteepModule(nn.Module, Steep):
    def __init__(self):
        nn.Module.__init__(self)
        Steep.__init__(self)


class SteepInside(Steep):
    """With a module of its own, being none itself."""

    def __init__(self):
        self.inside = nn.ParameterList([torch.tensor(0.5)])

    @property
    def beta(self):
        return self.inside[0]


@pytest.mark.parametrize("kind", [Steep, SteepModule, SteepInside])
def test_a_parameter_of_an_activation_has_a_gradient_through_time_or_none(kind):
    x = torch.rand(3, 6, generator=torch.Generator().manual_seed(0))
    for rho in (lambda steep: steep, lambda steep: ["tanh", steep, "tanh"]):
        steep = kind()
        net = hop.HAM([6, 5, 4], rho=rho(steep), device="cpu")
        for backward in (hop.Adjoint(), hop.RecurrentBackprop()):
            with pytest.raises(TypeError, match=r"Steep\w* has parameters of its own: only ThroughTime\(\)"):
                hop.solve(net, x, backward=backward)
        hop.solve(net, x, even_odd=False, backward=hop.ThroughTime()).output.sum().backward()
        assert steep.beta.grad
        steep.beta.requires_grad_(False)
        hop.solve(net, x, backward=hop.Adjoint()).output.sum().backward()


@dataclass(frozen=True)
class Weak(hop.HamRule):
    """A rule with a parameter: only a part of the way."""

    part: nn.Parameter

    def settle(self, s, h, out=None, r=None):
        return torch.mul(h, self.part, out=out)


class WeakHAM(hop.HAM):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.part = nn.Parameter(torch.tensor(0.5))

    def rule(self, rho, sole):
        return Weak(rho, self.part)


def test_a_parameter_of_a_rule_has_a_gradient_through_time_or_none():
    net = WeakHAM([6, 5, 4], device="cpu")
    x = torch.rand(3, 6, generator=torch.Generator().manual_seed(0))
    with pytest.raises(TypeError, match=r"WeakHAM has parameters of its own: only ThroughTime\(\)"):
        hop.solve(net, x, backward=hop.Adjoint())
    hop.solve(net, x, backward=hop.ThroughTime()).output.sum().backward()
    assert net.part.grad


def test_a_copy_that_data_parallel_makes_has_no_weights_of_its_own(layer):
    net, x = layer[0].net, layer[1]
    W, net.links[0] = net.W[0], net.links[0]._replicate_for_data_parallel()
    net.links[0].W = 1.0 * W
    with pytest.raises(TypeError, match=r"the weights of a Dense are made of others: only ThroughTime\(\)"):
        hop.solve(net, x, backward=hop.Adjoint())
    hop.solve(net, x, even_odd=True, backward=hop.ThroughTime()).output.sum().backward()
    assert W.grad.any()


def test_a_compiled_model_runs_the_layer_as_it_is(layer):
    layer, x = layer
    model = nn.Sequential(nn.Identity(), layer, nn.Linear(3, 2))
    compiled = torch.compile(model, backend="eager")  # the default backend needs a C++ compiler
    found, expected = ([y, *torch.autograd.grad(y.sum(), list(model.parameters()))] for y in (compiled(x), model(x)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
