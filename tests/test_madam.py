"""Madam against its formula in plain Python, the schedule, the loss."""

import copy
import math

import pytest
import torch

import hoplib as hop
from hoplib import madam


def naive(p, gradients, lr, beta=0.999, g_bound=3.0, p_scale=1024.0):
    """One number at a time, as the formula reads."""
    bound = p_scale * math.sqrt(sum(q * q for q in p) / len(p))
    v = [0.0] * len(p)
    for t, g in enumerate(gradients, 1):
        for i in range(len(p)):
            v[i] = beta * v[i] + (1 - beta) * g[i] ** 2
            root = math.sqrt(v[i] / (1 - beta**t))
            ghat = 0.0 if g[i] == 0 else max(-g_bound, min(g_bound, g[i] / root))
            sign = (p[i] > 0) - (p[i] < 0)
            p[i] = max(-bound, min(bound, p[i] * math.exp(-lr * ghat * sign)))
    return p


@pytest.mark.parametrize("chunk", [3, 1 << 15])
def test_it_is_the_formula(monkeypatch, chunk):
    monkeypatch.setattr(madam, "CHUNK", chunk)
    g = torch.Generator().manual_seed(0)
    p = torch.randn(7, generator=g, dtype=torch.float64)
    p[3] = 0
    gradients = torch.randn(20, 7, generator=g, dtype=torch.float64) * torch.logspace(-6, 3, 20)[:, None]
    gradients[:5, 1] = 0  # 0/0 in the first steps
    gradients[:, 0] = -gradients[:, 0].abs()  # p[0] > 0 grows until it is clamped
    parameter = torch.nn.Parameter(p.clone().view(1, 7))
    optimizer = hop.Madam([parameter], lr=0.3, p_scale=1.5)
    for row in gradients:
        parameter.grad = row.view(1, 7)
        optimizer.step()
    expected = torch.tensor(naive(p.tolist(), gradients.tolist(), 0.3, p_scale=1.5), dtype=torch.float64)
    torch.testing.assert_close(parameter.detach()[0], expected, rtol=1e-12, atol=0)
    assert expected.abs().max().item() == pytest.approx(1.5 * p.square().mean().sqrt().item()), "the clamp was reached"


def test_a_weight_keeps_its_sign_and_moves_against_its_gradient():
    g = torch.Generator().manual_seed(1)
    p = torch.nn.Parameter(torch.randn(100, generator=g))
    before = p.detach().clone()
    p.grad = torch.randn(100, generator=g)
    hop.Madam([p], lr=0.1).step()
    assert torch.equal(p.sign(), before.sign())
    assert torch.equal((p - before).sign(), -p.grad.sign())


def test_it_resumes_bitwise():
    def steps(optimizer, p, n, g):
        for _ in range(n):
            p.grad = torch.randn(9, generator=g)
            optimizer.step()

    p, q = (torch.nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(2))
    g = torch.Generator().manual_seed(2)
    a = hop.Madam([p], lr=0.05)
    steps(a, p, 6, g)
    state = copy.deepcopy(a.state_dict())
    rng, middle = g.get_state(), p.detach().clone()
    steps(a, p, 6, g)
    with torch.no_grad():
        q.copy_(middle)
    b = hop.Madam([q], lr=0.7)
    b.load_state_dict(state)
    g.set_state(rng)
    steps(b, q, 6, g)
    assert torch.equal(p, q)


def test_closure_and_missing_gradients():
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = hop.Madam([p, q], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert (p < 1).all()
    assert torch.equal(q, torch.ones(3))


def test_schedule_is_linear_over_the_epochs():
    p = torch.nn.Parameter(torch.ones(1))
    p.grad = torch.zeros(1)
    optimizer = hop.Madam([p], lr=0.01)
    schedule = hop.linear_decay(optimizer, epochs=10)
    for e in range(10):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * (1 - 0.9 * e / 9), rel=1e-12)
        optimizer.step()
        schedule.step()
    one = hop.Madam([p], lr=0.01)
    hop.linear_decay(one, epochs=1)
    assert one.param_groups[0]["lr"] == 0.01


def test_loss_by_hand():
    y_hat = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    y = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    assert hop.loss(y_hat, y) == (1 + 4) / 2 / 2
    with pytest.raises(ValueError, match=r"\(2, 2\).*\(2, 3\)"):
        hop.loss(y_hat, torch.zeros(2, 3))


@pytest.mark.parametrize("bad", [{"lr": 0}, {"lr": -1}, {"beta": 1.0}, {"g_bound": 0}, {"p_scale": -1}])
def test_bad_settings(bad):
    with pytest.raises(ValueError, match="must"):
        hop.Madam([torch.nn.Parameter(torch.ones(1))], **bad)


def test_a_parameter_that_is_not_contiguous_is_updated_too():
    rows = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) - 0.5
    p, q = torch.nn.Parameter(rows.clone()), torch.nn.Parameter(rows.clone().T)
    optimizer = hop.Madam([p, q])
    for _ in range(3):
        p.grad, q.grad = rows.clone(), rows.clone().T
        optimizer.step()
    assert torch.equal(p, q.T)
    assert not torch.equal(p, rows)


def test_a_sparse_gradient_is_refused():
    p = torch.nn.Parameter(torch.ones(2, 2))
    p.grad = torch.eye(2).to_sparse()
    with pytest.raises(TypeError, match=r"a gradient must be a dense tensor, .* layout torch\.sparse_coo"):
        hop.Madam([p]).step()


def test_a_bound_that_no_number_has_is_the_largest_one():
    p = torch.nn.Parameter(torch.full((2,), 1e37))
    optimizer = hop.Madam([p], lr=1e6)
    p.grad = torch.tensor([-1.0, 1.0])
    optimizer.step()
    assert p.isfinite().all()
