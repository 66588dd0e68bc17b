"""Four gradients agree: adjoint, recurrent backpropagation, through time, finite differences. In float64."""

import warnings

import pytest
import torch
from conftest import random_state, tiny

import hoplib as hop
from hoplib import paper

RELAXATIONS = [None, 0.6, 1.2]


def gradient(net, x, backward, *, even_odd, relaxation=None, solver=None, target=None, max_iter=1500):
    """The gradient of ½‖s* − target‖² by all parameters and by x, as one vector."""
    x = x.clone().requires_grad_()
    net.zero_grad()
    unrolled = isinstance(backward, hop.ThroughTime)
    sol = hop.solve(
        net,
        x,
        solver or hop.Picard(relaxation),
        even_odd=even_odd,
        tol=1e-15,
        max_iter=150 if unrolled else max_iter,
        early_stop=not unrolled,
        backward=backward,
    )
    loss = (sol.state - target).square().sum() / 2
    loss.backward()
    return torch.cat([*(p.grad.flatten() for p in net.parameters()), x.grad.flatten()])


@pytest.fixture(params=[[6, 5], [6, 5, 4], [6, 5, 4, 3], [5, 4, 3, 4, 3]], ids=lambda l: f"{len(l)} layers")
def shape(request):
    return request.param


@pytest.mark.parametrize("relaxation", RELAXATIONS)
def test_all_gradients_agree(model, shape, even_odd, relaxation):
    if not even_odd and relaxation is not None:
        relaxation = 0.4  # a synchronous CHN needs its damping
    net, x = tiny(model, shape, scale=0.4, batch=3)
    target = random_state(net, 3, seed=9)
    options = {"even_odd": even_odd, "relaxation": relaxation, "target": target}
    oracle = gradient(net, x, hop.ThroughTime(), **options)
    scale = oracle.norm()
    for backward in (
        hop.Adjoint(tol=1e-14),
        hop.Adjoint(solver=hop.Picard()),
        hop.Adjoint(solver=hop.Anderson(relative=True)),
        hop.RecurrentBackprop(steps=150),
        hop.Adjoint(steps=150),
    ):
        assert (gradient(net, x, backward, **options) - oracle).norm() < 1e-9 * scale, backward


def test_truncated_after_k_steps_both_routes_agree(model, shape, even_odd):
    """At an equilibrium the paper's k unrolled steps are k terms of the adjoint's Neumann series, for every k."""
    net, x = tiny(model, shape, scale=0.6, batch=3)
    target = random_state(net, 3, seed=9)
    for k in (1, 2, 5):
        a = gradient(net, x, hop.Adjoint(steps=k), even_odd=even_odd, target=target)
        b = gradient(net, x, hop.RecurrentBackprop(steps=k), even_odd=even_odd, target=target)
        assert (a - b).norm() < 1e-10 * b.norm()


@pytest.mark.parametrize("relaxation", RELAXATIONS)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_away_from_equilibrium_it_is_autograd_along_the_steps(model, shape, even_odd, relaxation, n):
    """The value stays that at s*, after n iterations; the gradient by it is carried back through k more steps."""
    net, x = tiny(model, shape, scale=2.0, batch=3)
    target = random_state(net, 3, seed=9)
    x.requires_grad_()
    sol = hop.solve(
        net,
        x,
        hop.Picard(relaxation),
        even_odd=even_odd,
        max_iter=n,
        early_stop=False,
        backward=hop.RecurrentBackprop(3),
    )
    ours = torch.autograd.grad((sol.state * target).sum(), [x, *net.parameters()], allow_unused=True)
    with torch.no_grad():
        w = paper.relaxation(net, even_odd) if relaxation is None else relaxation
        f = (hop.EvenOdd if even_odd else hop.Synchronous)(net, x, w)
        z = hop.trajectory(f, f.start(), iterations=n)[-1]
    torch.testing.assert_close(sol.state, f.join(z), rtol=1e-12, atol=1e-12)
    f = f.again(x)
    for _ in range(3):
        z = f(z)
    oracle = torch.autograd.grad((f.join(z) * target).sum(), [x, *net.parameters()], allow_unused=True)
    for a, b in zip(ours, oracle, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-10, atol=1e-12)


def test_the_default_is_the_papers_number_of_steps(model, even_odd):
    net, x = tiny(model, [6, 5, 4], scale=0.6, batch=3)
    options = {"even_odd": even_odd, "target": random_state(net, 3)}
    a = gradient(net, x, hop.RecurrentBackprop(), **options)
    b = gradient(net, x, hop.RecurrentBackprop(steps=paper.backward_steps(net, even_odd)), **options)
    assert torch.equal(a, b)


def test_the_forward_solver_does_not_matter(model, even_odd):
    net, x = tiny(model, [6, 5, 4, 3], scale=0.6, batch=3)
    options = {"even_odd": even_odd, "target": random_state(net, 3)}
    a, b = (gradient(net, x, hop.Adjoint(), solver=s, **options) for s in (None, hop.Anderson(relative=True)))
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("rho", ["shifted-sigmoid", "tanh"])
def test_against_finite_differences(model, even_odd, rho):
    layers = [3, 3, 2, 2]
    net, x = tiny(model, layers, scale=0.5, batch=2, rho=rho)
    names = [n for n, _ in net.named_parameters()]

    def state(x, *parameters):
        twin, _ = tiny(model, layers, rho=rho)
        for name, p in zip(names, parameters, strict=True):
            module, _, i = name.rpartition(".")
            twin.get_submodule(module)._parameters[i] = p
        sol = hop.solve(twin, x, even_odd=even_odd, tol=1e-13, max_iter=500, backward=hop.Adjoint(tol=1e-13))
        return sol.state

    leaves = [x.clone().requires_grad_(), *(p.detach().clone().requires_grad_() for p in net.parameters())]
    assert torch.autograd.gradcheck(state, leaves, eps=1e-6, atol=1e-7, rtol=1e-5)


def test_no_graph_without_a_backward_and_no_growth_with_one():
    net, x = tiny(hop.HAM, [6, 5, 4], scale=0.6)
    assert not hop.solve(net, x).state.requires_grad

    def saved(backward, n):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            hop.solve(net, x, even_odd=False, max_iter=n, early_stop=False, backward=backward)
        return sum(sizes)

    assert saved(hop.Adjoint(), 10) == saved(hop.Adjoint(), 40)
    assert saved(hop.ThroughTime(), 40) > 3 * saved(hop.ThroughTime(), 10)


# -- which samples take which way -------------------------------------------------------------------------------


def batch_of_all_kinds(model=hop.HAM, batch=40, scale=3.0):
    """Some samples converge, some end in limit cycles."""
    net, x = tiny(model, [6, 5, 4], scale=scale, batch=batch)
    sol = hop.solve(net, x, even_odd=False, tol=1e-13, max_iter=400)
    assert 0 < int(sol.converged.sum()) < batch
    return net, x, sol


def test_the_default_is_the_papers_gradient_for_all_kinds_of_samples():
    """The series where the criterion is met, steps elsewhere: what training takes, and where all converge the same."""
    net, x, _ = batch_of_all_kinds()
    options = {"even_odd": False, "target": random_state(net, 40), "max_iter": 400}
    default, papers = (gradient(net, x, b, **options) for b in (hop.Adjoint(), hop.RecurrentBackprop()))
    assert (default - papers).norm() < 1e-7 * papers.norm()
    assert torch.equal(default, gradient(net, x, hop.RecurrentBackprop(closed_form=paper.TOL), **options))


def test_a_solution_tells_how_many_samples_took_which_way():
    net, x, sol = batch_of_all_kinds()
    met = int((sol.residual < paper.TOL).sum())
    for backward, way in ((hop.Adjoint(), "series"), (hop.Adjoint(tol=1e-9), "exact")):
        sol = hop.solve(net, x, even_odd=False, tol=1e-13, max_iter=400, backward=backward)
        assert sol.gradients == {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            sol.output.square().sum().backward()
        assert sol.gradients == {way: met, "steps": 40 - met}
    assert f"gradients: {met} exact, {40 - met} steps" in repr(sol)


def test_where_there_is_no_exact_gradient_it_says_so_and_is_bounded():
    """At s = 0, which repels, the exact adjoint of a tanh network has no meaning; it takes the way of Adjoint()."""
    net, x = tiny(hop.HAM, [6, 5, 4], scale=3.0, rho="tanh")
    with torch.no_grad():
        for b in net.b:
            b.zero_()
    x = torch.zeros_like(x)  # then s = 0 is an equilibrium
    options = {"s0": net.zeros(len(x)), "even_odd": True}
    sol = hop.solve(net, x, backward=hop.Adjoint(tol=1e-9, max_iter=200), **options)
    with pytest.warns(RuntimeWarning, match="5 of 5 samples have no exact gradient"):
        exact = torch.autograd.grad(sol.output.sum(), list(net.parameters()))
    assert sol.gradients == {"exact": 0, "series": 5}
    sol = hop.solve(net, x, backward=hop.Adjoint(), **options)
    for a, b in zip(exact, torch.autograd.grad(sol.output.sum(), list(net.parameters())), strict=True):
        assert torch.equal(a, b)


def test_a_gradient_that_overflows_is_left_out():
    """One sample repels so strongly that its series has no number; the gradient is that of the others."""
    net, x = tiny(hop.HAM, [6, 5, 4], scale=1e9, rho="tanh", dtype=torch.float32)
    with torch.no_grad():
        for b in net.b:
            b.zero_()
    x = torch.cat([torch.zeros_like(x[:1]), x[1:] + 1])  # x = 0: its s = 0 is an equilibrium; others are saturated
    sol = hop.solve(net, x, even_odd=True, backward=hop.Adjoint())
    with pytest.warns(UserWarning, match="the gradient of 1 of 5 samples overflows: left out"):
        sol.output.sum().backward()
    assert sol.gradients["left out"] == 1
    assert sum(sol.gradients.values()) == 5
    assert all(p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("backward", [hop.Adjoint(), hop.Adjoint(steps=8), hop.Adjoint(tol=1e-6)], ids=repr)
@pytest.mark.parametrize("rho", ["shifted-sigmoid", "tanh", "hard-sigmoid", "relu"])
def test_no_gradient_is_infinite(model, even_odd, rho, backward):
    """Untrained networks, weights and losses of any size: also where r and μ are numbers, but their product is none."""
    x = torch.rand(7, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for scale in (1.0, 1e3, 1e12):
        for size in (1.0, 1e30, 3e37):
            net, _ = tiny(model, [12, 11, 10, 9], scale=scale, dtype=torch.float32, rho=rho)
            x.grad = None
            sol = hop.solve(net, x, even_odd=even_odd, backward=backward)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (size * sol.output).sum().backward()
            assert all(t.grad.isfinite().all() for t in (x, *net.parameters())), (scale, size)
            assert sum(sol.gradients.values()) == 7


def test_a_nan_that_came_with_the_loss_stays():
    net, x = tiny(hop.HAM, [6, 5, 4], scale=0.6)
    with pytest.warns(UserWarning, match="0 of 5 samples"):
        (hop.solve(net, x, even_odd=False, backward=hop.Adjoint()).output.sum() * torch.nan).backward()
    assert net.b[-1].grad.isnan().all()


@pytest.mark.filterwarnings("error")  # every sample has an exact gradient
@pytest.mark.parametrize("solver", [None, hop.Anderson(relative=True)], ids=["conjugate gradients", "Anderson"])
def test_the_exact_gradient_is_as_exact_as_asked(model, even_odd, solver):
    net, x = tiny(model, [12, 11, 10, 9, 8], scale=0.6, batch=8)
    target = random_state(net, 8, seed=9)
    options = {"even_odd": even_odd, "target": target}
    oracle = gradient(net, x, hop.Adjoint(solver=hop.Picard()), **options)
    for tol in (1e-3, 1e-6, 1e-9):
        found = gradient(net, x, hop.Adjoint(solver=solver, tol=tol), **options)
        assert (found - oracle).norm() < 50 * tol * oracle.norm()


def test_conjugate_gradients_take_half_the_steps_on_half_the_state():
    """Even-odd, one block is eliminated; and both are faster than the series."""
    net, x = tiny(hop.HAM, [12, 11, 10, 9, 8, 7, 6], scale=1.0, batch=16)
    s = hop.solve(net, x, even_odd=True, tol=1e-14, max_iter=5000).state

    def steps(f, solver):
        for n in range(1, 1000):
            if hop.Adjoint(solver=solver, tol=1e-9, max_iter=n).exact(f, s, s)[1].all():
                return n
        raise AssertionError

    both, half = steps(hop.Synchronous(net, x), None), steps(hop.EvenOdd(net, x), None)
    assert half <= 0.6 * both
    assert half < steps(hop.EvenOdd(net, x), hop.Picard())


def test_the_default_gradient_trains_with_adam():
    """At first few samples converge. The adjoint of the others, iterated, explodes: with it this loop stays at 21 %."""
    data = hop.load_data("mnist", device="cpu")
    net = hop.HAM([784, 128, 10], seed=0, device="cpu")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    batches = data.train.batches(64, generator=torch.Generator().manual_seed(0))
    for (x, y), _ in zip(batches, range(200), strict=False):
        optimizer.zero_grad()
        hop.loss(hop.solve(net, x, even_odd=True, backward=hop.Adjoint()).output, y).backward()
        optimizer.step()
    said = hop.solve(net, data.test.x[:500], even_odd=True).output.argmax(1)
    assert (said == data.test.label[:500]).double().mean() > 0.6


def test_frozen_parameters_get_no_gradient():
    net, x = tiny(hop.HAM, [6, 5, 4], scale=0.6)
    net.W[0].requires_grad_(False)
    hop.solve(net, x, even_odd=False, backward=hop.Adjoint()).output.sum().backward()
    assert net.W[0].grad is None
    assert net.W[1].grad is not None


class Doubled(hop.Picard):
    """Another step, and not a word about it."""

    def step(self, z, values):
        return 2 * values[0]


class Own(Doubled):
    """Picard's steps, and says so."""

    mixes = False

    def step(self, z, values):
        return values[0]


def test_through_time_follows_picard_steps_only():
    net, x = tiny(hop.HAM, [6, 5, 4])
    for solver in (hop.Anderson(), Doubled(), hop.Then(hop.Picard(), hop.Anderson())):
        with pytest.raises(ValueError, match="ThroughTime unrolls Picard steps"):
            hop.solve(net, x, solver, backward=hop.ThroughTime())
    ours, plain = (hop.solve(net, x, s, backward=hop.ThroughTime()).state for s in (Own(), hop.Picard()))
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("backward", [hop.Adjoint, hop.RecurrentBackprop])
def test_steps_must_be_positive(backward):
    with pytest.raises(ValueError, match="steps must be an integer of at least 1, not 0"):
        backward(steps=0)


def test_a_small_network_learns(model, even_odd):
    """The gradient is good enough to learn by: 40 Madam steps halve the loss on 40 random patterns."""
    g = torch.Generator().manual_seed(0)
    x = torch.rand(40, 12, generator=g).round()
    y = torch.eye(4)[torch.arange(40) % 4]
    net = model([12, 32, 4], seed=0, device="cpu")
    optimizer = hop.Madam(net.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        sol = hop.solve(net, x, even_odd=even_odd, tol=1e-5, backward=hop.Adjoint(steps=8))
        loss = hop.loss(sol.output, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_an_even_odd_chn_in_a_local_2_cycle_has_the_gradient_of_its_steps():
    """Ten local steps in a large field come back to where they were, which is no equilibrium; the paper's gradient
    goes through them all the same."""
    net, x = tiny(hop.CHN, [30, 20, 6], batch=24)
    with torch.no_grad():
        net.W[0].mul_(2.5)
    sol = hop.solve(net, x, even_odd=True, tol=1e-13, max_iter=2000)
    x = x[sol.converged]
    s = sol.state[sol.converged]
    cycling = ((net.step(s, x) - s).abs() > 1e-3).any(1)
    assert int(cycling.sum()) >= 5
    x = x[cycling]
    gradients = []
    for backward in (hop.Adjoint(steps=8), hop.RecurrentBackprop()):
        net.zero_grad()
        hop.solve(net, x, even_odd=True, tol=1e-13, max_iter=2000, backward=backward).output.square().sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    for ours, papers in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, papers, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("model", "even_odd", "scale"), [(hop.CHN, False, 1.3), (hop.CHN, True, 3.0), (hop.HAM, False, 3.0)]
)
def test_the_closed_form_serves_the_samples_that_converged_only(model, even_odd, scale):
    """In a batch of equilibria and limit cycles it is the paper's gradient; the adjoint of all of them is not."""
    net, x = tiny(model, [6, 5, 4], scale=scale, batch=40)
    sol = hop.solve(net, x, even_odd=even_odd, tol=1e-13, max_iter=400)
    assert 0 < int(sol.converged.sum()) < 40
    options = {"even_odd": even_odd, "target": random_state(net, 40), "max_iter": 400}
    papers = gradient(net, x, hop.RecurrentBackprop(8), **options)
    mixed, closed = (
        gradient(net, x, backward, **options)
        for backward in (hop.RecurrentBackprop(8, closed_form=1e-12), hop.Adjoint(steps=8))
    )
    assert (mixed - papers).norm() < 1e-9 * papers.norm()
    assert (closed - papers).norm() > 0.1 * papers.norm()


def test_closed_form_of_all_or_none():
    net, x = tiny(hop.HAM, [6, 5, 4], scale=0.5)
    options = {"even_odd": True, "target": random_state(net, 5)}
    papers = gradient(net, x, hop.RecurrentBackprop(3), **options)
    assert torch.equal(papers, gradient(net, x, hop.RecurrentBackprop(3, closed_form=1e-300), **options))
    assert torch.equal(
        gradient(net, x, hop.Adjoint(steps=3), **options),
        gradient(net, x, hop.RecurrentBackprop(3, closed_form=1.0), **options),
    )


@pytest.mark.parametrize("backward", [hop.Adjoint(steps=8), hop.RecurrentBackprop(8)], ids=repr)
def test_a_weight_that_changes_before_the_gradient_is_an_error(backward):
    net, x = tiny(hop.HAM, [7, 6, 5], scale=0.5)
    sol = hop.solve(net, x, even_odd=False, backward=backward)
    with torch.no_grad():
        net.W[1].mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sol.output.sum().backward()


@pytest.mark.parametrize("backward", [hop.Adjoint(), hop.RecurrentBackprop()])
def test_an_activation_that_is_replaced_before_the_gradient_is_an_error(backward):
    net, x = tiny(hop.HAM, [7, 6, 5], scale=0.5)
    sol = hop.solve(net, x, backward=backward)
    net.rho = hop.Tanh()
    with pytest.raises(RuntimeError, match="activation has been replaced"):
        sol.output.sum().backward()
