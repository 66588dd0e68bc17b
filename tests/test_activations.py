"""∇L = ρ, ∇ρ = ρ', ∇ρ' = ρ'', ς⁻¹∘ς = id: the laws of an activation."""

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hoplib import activations

EVERY = list(activations.ALL.values())
SMOOTH = [a for a in EVERY if a.bijective]
# kinks lie at 0 and 1: these points avoid them
POINTS = torch.cat([torch.linspace(-9.95, 9.95, 200), torch.tensor([-60.0, 60.0])]).double()


def derivative(function, s):
    s = s.clone().requires_grad_()
    return torch.autograd.grad(function(s).sum(), s)[0]


@pytest.mark.parametrize("a", EVERY, ids=lambda a: a.name)
def test_each_function_is_the_derivative_of_the_one_before(a):
    torch.testing.assert_close(derivative(a.lagrangian, POINTS), a.rho(POINTS), atol=1e-14, rtol=1e-13)
    torch.testing.assert_close(derivative(a.rho, POINTS), a.drho(POINTS), atol=1e-14, rtol=1e-12)
    if a.bijective:
        torch.testing.assert_close(derivative(a.drho, POINTS), a.d2rho(POINTS), atol=1e-14, rtol=1e-12)
        torch.testing.assert_close(a.drho(POINTS).log(), a.log_drho(POINTS), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(derivative(a.log_drho, POINTS), a.dlog_drho(POINTS), atol=1e-14, rtol=1e-12)
    else:
        assert not a.d2rho(POINTS).any()


@pytest.mark.parametrize("a", EVERY, ids=lambda a: a.name)
def test_rho_writes_where_it_is_told(a):
    out = torch.empty_like(POINTS)
    assert a.rho(POINTS, out=out) is out
    assert torch.equal(out, a.rho(POINTS))


def test_values_by_hand():
    s = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    sigmoid2 = 0.8807970779778823
    expected = torch.tensor([1 - sigmoid2, 0.5, sigmoid2], dtype=torch.float64)
    torch.testing.assert_close(activations.get("shifted-sigmoid").rho(s), expected)
    assert activations.get("shifted-sigmoid").drho(s)[1] == 1
    assert activations.get("relu").drho(s).tolist() == [1, 1, 1]
    assert activations.get("hard-sigmoid").rho(torch.tensor([-1.0, 0.25, 3.0])).tolist() == [0, 0.25, 1]
    assert activations.get("hard-sigmoid").drho(torch.tensor([-1.0, 0.0, 1.0, 1.5])).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("a", SMOOTH, ids=lambda a: a.name)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-6), (torch.float64, 2e-15)], ids=["fp32", "fp64"])
def test_varsigma_inv_undoes_varsigma_over_the_whole_range(a, dtype, tol):
    ends = torch.logspace(-30, 0, 500, dtype=dtype)
    s = torch.cat([torch.linspace(-400, 400, 200_001, dtype=dtype), ends, -ends])
    h = a.varsigma(s)
    inside = h.isfinite() & (a.drho(s) > torch.finfo(dtype).tiny)
    s, h = s[inside], h[inside]
    assert h.max() > 1e30, "the range reaches the ends of the dtype"
    error = (a.varsigma_inv(h) - s).abs() / s.abs().clamp_min(1e-30)
    assert error.max() < tol


@pytest.mark.parametrize("a", SMOOTH, ids=lambda a: a.name)
def test_varsigma_inv_at_the_largest_number(a):
    for dtype in (torch.float32, torch.float64):
        big = torch.finfo(dtype).max
        s = a.varsigma_inv(torch.tensor([big, -big], dtype=dtype))
        assert s.isfinite().all()
        assert (s.sign() == torch.tensor([1, -1])).all()


def test_varsigma_inv_against_many_digits():
    mpmath.mp.dps = 40
    a = activations.get("shifted-sigmoid")
    for h in (-1e9, -37.0, -2.3, -1e-6, 1e-9, 0.4, 2.0, 55.5, 1e12):

        def f(s, h=h):
            u = 4 * s - 2
            return s - h / mpmath.cosh(u / 2) ** 2

        s = float(a.varsigma_inv(torch.tensor([h], dtype=torch.float64)))
        exact = mpmath.findroot(f, s, tol=1e-30)
        assert abs(s - exact) <= 1e-14 * abs(exact)


@pytest.mark.parametrize("a", SMOOTH, ids=lambda a: a.name)
def test_varsigma_is_increasing_and_its_inverse_has_a_closed_derivative(a):
    s = torch.linspace(-30, 30, 100_001, dtype=torch.float64)
    slope = 1 - s * a.dlog_drho(s)  # ς' ρ'
    assert slope.min() > 0.5
    h = torch.linspace(-50, 50, 101, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(a.varsigma_inv, (h,))


@given(h=st.floats(-1e30, 1e30))
def test_varsigma_inv_solves_its_equation(h):
    a = activations.get("shifted-sigmoid")
    s = a.varsigma_inv(torch.tensor([h], dtype=torch.float64))
    torch.testing.assert_close(h * a.drho(s), s, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("name", ["relu", "hard-sigmoid"])
def test_no_inverse_where_there_is_none(name):
    with pytest.raises(ValueError, match=r"no bijection.*shifted-sigmoid, tanh"):
        activations.get(name).varsigma_inv(torch.zeros(1))


def test_errors_name_the_choices():
    with pytest.raises(ValueError, match=r"unknown activation 'sigmoid'.*shifted-sigmoid, tanh, relu, hard-sigmoid"):
        activations.get("sigmoid")
    with pytest.raises(TypeError, match="float32 or float64"):
        activations.get("tanh").varsigma_inv(torch.zeros(1, dtype=torch.float16))
    assert activations.get(activations.Tanh()).name == "tanh"


class Hot(activations.ShiftedSigmoid):
    """σ(12s − 6), and its slope."""

    def rho(self, s, out=None):
        return torch.sigmoid(12 * s - 6, out=out)

    def drho(self, s):
        return 12 * self.rho(s) * (1 - self.rho(s))


class Hotter(activations.Tanh):
    def rho(self, s, out=None):
        return torch.tanh(3 * s, out=out)


def test_another_rho_inherits_nothing_of_the_one_that_it_derives_from():
    """Its ρ'', its κ and its ς⁻¹ would be wrong: so would a CHN's gradient, and the law of over-relaxation."""
    hot = activations.get(Hot())
    assert hot.kappa is None
    assert not hot.bijective
    for missing in (hot.d2rho, hot.slopes, hot.lagrangian):
        with pytest.raises(NotImplementedError):
            missing(POINTS)
    with pytest.raises(TypeError, match="Hotter must have a method drho"):
        activations.get(Hotter())
    assert activations.HardSigmoid().drho(torch.ones(1)) == 1, "where ρ is the same, the rest is inherited"
