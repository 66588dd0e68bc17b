"""Laws of every rule: its slopes are those of autograd, and settling lowers the energy of a neuron in its field."""

from dataclasses import dataclass

import pytest
import torch
from conftest import assert_slope, random_state, tiny

import hoplib as hop
from hoplib.rules import Affine, ChnRule, ExactRule, HamRule, Rule
from hoplib.sweep import clip

RHO = {"shifted-sigmoid": hop.ShiftedSigmoid(), "tanh": hop.Tanh()}
SHAPE = (4, 7)


def draw(seed, scale=1.0):
    return scale * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rules(rho):
    return {
        "HAM": HamRule(rho),
        "CHN, one step": ChnRule(rho),
        "CHN, ten damped steps": ChnRule(rho, 10, 0.5),
        "CHN through ς⁻¹": ExactRule(rho),
        "HAM, damped": HamRule(rho).relaxed(0.5),
        "HAM, over-relaxed and clipped": HamRule(rho).relaxed(1.5, 0.8),
        "CHN, one damped step": ChnRule(rho).relaxed(0.5),
        "CHN, ten damped steps, over-relaxed": ChnRule(rho, 10, 0.5).relaxed(1.2),
        "affine": Affine(rho, draw(1), draw(2), draw(3), draw(4)),
        "affine, no memory": Affine(rho, None, None, draw(3), draw(4)),
    }


@pytest.fixture(params=RHO)
def rho(request):
    return RHO[request.param]


@pytest.fixture(params=rules(RHO["tanh"]))
def rule(request, rho):
    return rules(rho)[request.param]


class TestEveryRule:
    def test_its_slopes_are_those_of_autograd(self, rule):
        s, h = draw(5), draw(6)
        (A, C), expected = rule.slopes(s, h), Rule.slopes(rule, s, h)
        ours = torch.zeros_like(s) if A is None else A, torch.ones_like(s) if C is None else C
        for found, autograd in zip(ours, expected, strict=True):
            torch.testing.assert_close(found.expand_as(s), autograd, rtol=1e-9, atol=1e-12)

    def test_settling_into_a_tensor_is_settling(self, rule):
        s, h = draw(5), draw(6)
        found = rule.settle(s, h)
        with torch.no_grad():
            torch.testing.assert_close(rule.settle(s, h.clone(), torch.full_like(s, torch.nan)), found)

    def test_a_rule_without_memory_forgets(self, rule):
        h = draw(6)
        one, other = rule.settle(draw(7), h), rule.settle(draw(8), h)
        assert torch.equal(one, other) == (not rule.memory)

    def test_the_samples_are_on_their_own(self, rule):
        s, h, keep = draw(5), draw(6), torch.tensor([2, 0])
        torch.testing.assert_close(rule.restrict(keep).settle(s[keep], h[keep]), rule.settle(s, h)[keep])


class TestEnergy:
    """Of a neuron in its field: what couples nothing, less h ρ(s)."""

    @staticmethod
    def energy(rule, s, h):
        return rule.energy(s) - h * rule.rho.rho(s)

    @pytest.mark.parametrize("name", ["HAM", "CHN through ς⁻¹"])
    def test_settling_finds_the_minimum(self, rho, name):
        rule, h = rules(rho)[name], draw(6, 2.0)
        least = self.energy(rule, rule.settle(h, h), h)
        for seed in range(20):
            assert (self.energy(rule, draw(seed, 3.0), h) >= least - 1e-12).all()

    @pytest.mark.parametrize("omega", [0.3, 1.0, 1.5, 1.9])
    def test_relaxed_and_clipped_settling_lowers_it(self, rho, omega):
        rule, h = HamRule(rho), draw(6, 2.0)
        relaxed = rule.relaxed(omega, clip(omega, rule))
        for seed in range(20):
            s = draw(seed, 3.0)
            assert (self.energy(relaxed, relaxed.settle(s, h), h) <= self.energy(rule, s, h) + 1e-12).all()

    def test_damped_local_steps_lower_it_in_moderate_fields(self, rho):
        """In a large field they may not: then they fall into a 2-cycle, which test_gradients has."""
        rule, h = rules(rho)["CHN, ten damped steps"], draw(6).clamp(-1, 1)
        for seed in range(20):
            s = draw(seed)
            assert (self.energy(rule, rule.settle(s, h), h) <= self.energy(rule, s, h) + 1e-9).all()


@dataclass(frozen=True)
class Slow(ChnRule):
    """A rule that says no more than where a neuron goes: half of the way, from wherever it was."""

    def settle(self, s, h, out=None, r=None):
        new = s + 0.5 * (self.rho.varsigma_inv(h) - s)
        return new if out is None else out.copy_(new)


class Memoryless(HamRule):
    """A rule that does not mention its memory."""

    def settle(self, s, h, out=None, r=None):
        new = 0.5 * s + 0.5 * h
        return new if out is None else out.copy_(new)


@pytest.mark.parametrize("rule_class", [Slow, Memoryless])
@pytest.mark.parametrize("even_odd", [False, True])
def test_a_rule_that_overrides_settle_alone_has_the_right_equilibrium_and_gradient(rule_class, even_odd):
    kind, other = (hop.CHN, ExactRule) if rule_class is Slow else (hop.HAM, HamRule)
    found = []
    for cls in (rule_class, other):

        class Own(kind):
            def rule(self, rho, sole, cls=cls):
                return cls(rho)

        net, x = tiny(Own, [7, 6, 5], scale=0.5)
        sol = hop.solve(
            net, x, hop.Picard(1.0), even_odd=even_odd, tol=1e-14, max_iter=3000, backward=hop.Adjoint(tol=1e-14)
        )
        assert sol.converged.all()
        gradients = torch.autograd.grad(sol.state.square().sum(), list(net.parameters()))
        found.append(torch.cat([sol.state.flatten(), *(g.flatten() for g in gradients)]))
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


RELAXED = {"damped": (False, 0.5), "even-odd, damped": (True, 0.5), "over-relaxed": (True, 1.3)}


@pytest.fixture(params=[ChnRule, Slow, Memoryless])
def own(request):
    """A network with just this rule, and inputs."""

    class Own(hop.CHN):
        def rule(self, rho, sole):
            return request.param(rho)

    return tiny(Own, [7, 6, 5, 4], scale=0.5)


def relaxed(net, s, x, even_odd, omega):
    """By hand: block by block s ← (1 − ω) s + ω · (what the rule settles to in the field)."""
    for block in net.blocks(even_odd):
        i = torch.cat([torch.arange(net.N)[net.slices[l]] for l in block])
        settled = net.rule(net.rho, False).settle(s[:, i], net.field(s, x)[:, i])
        s = s.index_copy(1, i, (1 - omega) * s[:, i] + omega * settled)
    return s


@pytest.mark.parametrize("how", RELAXED)
def test_every_rule_is_relaxed_whoever_does_it(own, how):
    (net, x), (even_odd, omega) = own, RELAXED[how]
    s = random_state(net, len(x))
    f, expected = net.sweep(x, net.blocks(even_odd), omega), relaxed(net, s, x, even_odd, omega)
    with torch.no_grad():
        for out in (None, torch.full_like(s, torch.nan)):
            torch.testing.assert_close(f.join(f(f.cut(s), out)), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backward", [hop.RecurrentBackprop(3), hop.Adjoint(3), hop.Adjoint(tol=1e-14)], ids=repr)
@pytest.mark.parametrize("how", RELAXED)
def test_the_gradient_of_a_relaxed_rule_is_that_of_finite_differences(own, how, backward):
    """Of the equilibrium; or of three relaxed sweeps from it, whose gradient the truncated ones are."""
    (net, x), (even_odd, omega) = own, RELAXED[how]
    leaves, target = [x.requires_grad_(), *net.parameters()], random_state(net, len(x), seed=3)
    options = {"even_odd": even_odd, "tol": 1e-14, "max_iter": 3000}
    sol = hop.solve(net, x, hop.Picard(omega), backward=backward, **options)
    assert sol.converged.all()
    gradients, s_star = torch.autograd.grad((sol.state * target).sum(), leaves), sol.state.detach()

    def value():
        s = s_star
        for _ in range(300 if backward == hop.Adjoint(tol=1e-14) else 3):
            s = relaxed(net, s, x, even_odd, omega)
        return (s * target).sum()

    assert_slope(value, leaves, gradients)
