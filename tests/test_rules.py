"""Laws of every rule: its slopes are those of autograd, and settling lowers the energy of a neuron in its field."""

from dataclasses import dataclass

import pytest
import torch
from conftest import tiny

import hoplib as hop
from hoplib.rules import Affine, ChnRule, ExactRule, HamRule, Rule

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
            torch.testing.assert_close(found, autograd, rtol=1e-9, atol=1e-12)

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
