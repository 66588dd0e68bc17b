"""The solvers against their plain oracles, the paper's count of iterations, and the account per sample."""

import numpy as np
import pytest
import torch
from conftest import random_state, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import hoplib as hop
from hoplib import kernels, paper
from hoplib.solvers import AndersonSteps, Values

SOLVERS = {"picard": hop.Picard(), "anderson": hop.Anderson(m=4)}


@pytest.fixture(params=["torch", "compiled"], autouse=True, scope="module")
def route(request):
    """Everything here holds by torch's operations and by the compiled loops."""
    if request.param == "compiled" and kernels.numba is None:
        pytest.skip("the compiled loops need Numba")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(kernels, "numba", None)
        yield request.param


@pytest.fixture(params=SOLVERS)
def solver(request):
    return SOLVERS[request.param]


def counted(values, tol):
    """The paper's count, from the map values (n, size) of one sample: first i with ‖fⁱ⁺² − fⁱ⁺¹‖/‖fⁱ⁺²‖ < tol."""
    for i in range(len(values) - 1):
        if np.linalg.norm(values[i + 1] - values[i]) / np.linalg.norm(values[i + 1]) < tol:
            return i
    return len(values) - 1


def naive_anderson(f, x, m, mu, iterations):
    """One sample: the map values of Anderson acceleration with everything computed anew in every step."""
    xs, gs, values = [], [], []
    for k in range(iterations):
        g = f(x)
        values.append(g)
        xs, gs = [*xs, x][-m:], [*gs, g][-m:]
        mixed = g
        if k >= 1:
            F = np.stack([b - a for a, b in zip(xs, gs, strict=True)], 1)
            alpha = np.linalg.solve(F.T @ F + mu * np.eye(F.shape[1]), np.ones(F.shape[1]))
            candidate = np.stack(gs, 1) @ (alpha / alpha.sum())
            norm = np.linalg.norm
            if norm(g - candidate) / norm(candidate) < norm(g - x) / norm(x):
                mixed = candidate
        x = mixed
    return np.stack(values)


@pytest.mark.parametrize("m", [1, 2, 4, 7])
def test_anderson_is_the_textbook_algorithm(model, layers, even_odd, m):
    net, x = tiny(model, layers, scale=1.5)
    f = (hop.EvenOdd if even_odd else hop.Synchronous)(net, x, paper.relaxation(net, even_odd))
    ours = hop.trajectory(f, f.start(), hop.Anderson(m=m), iterations=15)
    for i in range(len(x)):
        one = f.restrict(torch.tensor([i]))
        with torch.no_grad():
            naive = naive_anderson(
                lambda z, one=one: one(torch.from_numpy(z)[None])[0].numpy(), np.zeros(f.size), m, 1e-10, 15
            )
        np.testing.assert_allclose(ours[:, i], naive, rtol=1e-5, atol=1e-7)


def test_anderson_keeps_its_gram_matrix():
    g = torch.Generator().manual_seed(0)
    z = torch.randn(2, 6, generator=g)
    steps, values = AndersonSteps(z, hop.Anderson(m=3)), Values(z)
    for n in (1, 2, 3, 3, 3, 3):
        values.evaluate(lambda z, out: out.copy_(torch.randn(2, 6, generator=g)), z)
        z = steps.step(z, values)
        F = steps.F[:n].transpose(0, 1)
        torch.testing.assert_close(steps.gram[:, :n, :n], F @ F.mT)


class Affine:
    """z ↦ A z + b on 10 numbers, A symmetric with two given eigenvalues and otherwise 0."""

    def __init__(self, *eigenvalues):
        g = torch.Generator().manual_seed(1)
        Q = torch.linalg.qr(torch.randn(10, 10, generator=g, dtype=torch.float64))[0][:, :2]
        self.A = Q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ Q.T
        self.b = torch.randn(10, generator=g, dtype=torch.float64)
        self.exact = torch.linalg.solve(torch.eye(10, dtype=torch.float64) - self.A, self.b)

    def __call__(self, z, out=None):
        z = z @ self.A.T + self.b
        return z if out is None else out.copy_(z)

    def restrict(self, keep):
        return self


def test_anderson_is_exact_on_a_linear_map_of_low_rank():
    """On an affine map of rank 2 a window of 4 ends in a few steps, where Picard crawls."""
    f, z = Affine(-0.9, 0.4), torch.zeros(1, 10, dtype=torch.float64)
    fast = hop.iterate(f, z, hop.Anderson(m=4, mu=1e-14, relative=True), max_iter=20, tol=1e-12)
    slow = hop.iterate(f, z, hop.Picard(), max_iter=20, tol=1e-12)
    torch.testing.assert_close(fast.state[0], f.exact, rtol=1e-9, atol=1e-9)
    assert bool(fast.converged)
    assert not bool(slow.converged)


def test_the_safeguard_refuses_long_jumps():
    """With an eigenvalue near 1 the fixed point is far off, so ‖g − z̃‖ is large and the safeguard prefers Picard."""
    f, z = Affine(0.95, 0.4), torch.zeros(1, 10, dtype=torch.float64)
    guarded, free = (hop.Anderson(mu=1e-14, relative=True, safeguard=s) for s in (True, False))
    assert (hop.iterate(f, z, guarded, max_iter=20, tol=1e-12).state[0] - f.exact).norm() > 0.1
    assert (hop.iterate(f, z, free, max_iter=20, tol=1e-12).state[0] - f.exact).norm() < 1e-9


def test_a_relative_regulariser_goes_on_where_an_absolute_one_stalls():
    """An absolute 1e-10 drowns FᵀF once ‖f‖ is below 1e-5: from there on it is slower than no acceleration at all."""
    net, x = tiny(hop.HAM, [7, 20, 20, 5], scale=0.5, dtype=torch.float64, batch=20)
    relative, absolute = (hop.Anderson(mu=mu, relative=mu == 1e-8, safeguard=False) for mu in (1e-8, 1e-10))
    fast, plain, slow = (
        hop.solve(net, x, solver, tol=1e-12, max_iter=400).iterations.double().mean()
        for solver in (relative, hop.Picard(), absolute)
    )
    assert fast < 0.8 * plain < plain < 0.8 * slow


def test_iterations_are_counted_as_the_paper_does(model, layers, even_odd, solver):
    net, x = tiny(model, layers, scale=1.5)
    n, tol = 30, 1e-4
    f = (hop.EvenOdd if even_odd else hop.Synchronous)(net, x, paper.relaxation(net, even_odd))
    values = hop.trajectory(f, f.start(), solver, iterations=n).numpy()
    expected = [counted(values[:, i], tol) for i in range(len(x))]
    fixed = hop.solve(net, x, solver, even_odd=even_odd, tol=tol, max_iter=n, early_stop=False, trace=True)
    early = hop.solve(net, x, solver, even_odd=even_odd, tol=tol, max_iter=n, trace=True)
    assert fixed.iterations.tolist() == early.iterations.tolist() == expected
    norm = np.linalg.norm
    expected_residuals = norm(values[1:] - values[:-1], axis=2) / norm(values[1:], axis=2)
    np.testing.assert_allclose(fixed.residuals, expected_residuals, rtol=1e-6, atol=1e-14)
    for i, count in enumerate(expected):
        end = count + 1 if count < n - 1 else n - 1
        assert early.residuals[:end, i].isfinite().all()
        assert early.residuals[end:, i].isnan().all()
        torch.testing.assert_close(early.residuals[:end, i], fixed.residuals[:end, i])
        # the answer is the map value at which the count stopped
        torch.testing.assert_close(f.cut(early.state)[i], torch.from_numpy(values[min(count + 1, n - 1), i]))
        assert (fixed.status[i] == hop.Status.CONVERGED) == (count < n - 1)
    torch.testing.assert_close(f.cut(fixed.state), torch.from_numpy(values[-1]))
    torch.testing.assert_close(fixed.residual, fixed.residuals[-1])


def test_a_converged_state_is_a_fixed_point(model, layers, even_odd, solver):
    net, x = tiny(model, layers, scale=0.7)
    sol = hop.solve(net, x, solver, even_odd=even_odd, tol=1e-12, max_iter=2000)
    assert bool(sol.converged.all())
    torch.testing.assert_close(net.step(sol.state, x), sol.state, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("even_odd", "layers"), [(False, [12, 10, 8, 6]), (True, [20, 16, 12, 8, 5])])
def test_what_meets_the_criterion_by_chance_goes_on(even_odd, layers):
    """Under Anderson two map values may be near each other by chance. To stop there would be to answer with no
    equilibrium, and with a gradient that may explode; no sample that ended early is such a one."""
    net, _ = tiny(hop.HAM, layers, scale=3)
    x = torch.rand(2000, layers[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    f = (hop.EvenOdd if even_odd else hop.Synchronous)(net, x)
    values = hop.trajectory(f, f.start(), hop.Anderson(), iterations=paper.max_iter(net, even_odd))
    first = hop.solve(net, x, hop.Anderson(), even_odd=even_odd, early_stop=False).iterations
    there = f.join(values[first.clamp_max(len(values) - 2) + 1, torch.arange(len(x))])
    assert int((hop.residual(net.step(there, x), there) > 0.01).sum()) > 0, "some met it by chance"
    sol = hop.solve(net, x, hop.Anderson(), even_odd=even_odd)
    met = sol.converged
    assert met.double().mean() > 0.9
    assert bool((hop.residual(net.step(sol.state, x), sol.state)[met] < 1e-3).all())
    assert bool((sol.iterations >= first).all())


@pytest.mark.parametrize("waits", [False, True])
def test_who_meets_the_criterion_by_chance_in_the_last_iteration_does_not_look_converged(monkeypatch, waits):
    """The gradient asks the residual: in closed form such a sample's may explode."""
    monkeypatch.setattr(kernels, "waits", lambda _: waits)
    net, _ = tiny(hop.HAM, [12, 10, 8, 6], scale=10)
    x = torch.rand(200, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    free = hop.Anderson(m=5, mu=1e-8, relative=True, safeguard=False)
    late = 0
    for n in range(20, 40):
        sol = hop.solve(net, x, free, even_odd=True, max_iter=n, trace=True)
        assert torch.equal(sol.residual < 1e-4, sol.converged)
        late += int(((sol.residuals[-1] < 1e-4) & (sol.status != hop.Status.CONVERGED)).sum())
    assert late > 0, "there were such samples"


class Elsewhere:
    """A solver that says nothing of itself: its iterate is twice the map value."""

    relaxation, depth = None, 1

    def init(self, z):
        return self

    def step(self, z, values):
        return 2 * values[0]

    def restrict(self, keep):
        pass


class ElsewherePicard(hop.Picard):
    def step(self, z, values):
        return 2 * values[0]


class Constant:
    def __call__(self, z, out=None):
        return torch.ones_like(z) if out is None else out.fill_(1)

    def restrict(self, keep):
        return self


@pytest.mark.parametrize("solver", [Elsewhere(), ElsewherePicard(), hop.Picard(), hop.Anderson(), hop.OverRelaxed()])
def test_a_solver_that_does_not_say_what_its_iterate_is_is_looked_into(solver):
    """All map values are the same, but 2 is no fixed point of the map to 1."""
    z = torch.zeros(3, 4, dtype=torch.float64)
    sol = hop.iterate(Constant(), z, solver, max_iter=9, tol=1e-4)
    assert sol.converged.all() == (type(solver).__module__ != __name__)
    assert torch.equal(sol.residual < 1e-4, sol.converged)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**31), chn=st.booleans(), even_odd=st.booleans(), name=st.sampled_from(sorted(SOLVERS)))
def test_the_answer_does_not_depend_on_the_company(seed, chn, even_odd, name):
    net, x = tiny(hop.CHN if chn else hop.HAM, [6, 9, 8, 5], seed=seed, scale=1.5, batch=12)
    options = {"even_odd": even_odd, "tol": 1e-6, "max_iter": 60}
    together = hop.solve(net, x, SOLVERS[name], **options)
    for i in (0, 5, 11):
        alone = hop.solve(net, x[i : i + 1], SOLVERS[name], **options)
        assert alone.iterations[0] == together.iterations[i]
        assert alone.status[0] == together.status[i]
        torch.testing.assert_close(alone.state[0], together.state[i], atol=1e-10, rtol=1e-10)


FINISH = hop.Anderson(m=5, mu=1e-8, relative=True, safeguard=False)


@pytest.mark.parametrize(
    ("solver", "scale"), [(hop.Picard(), 1), (hop.Picard(), 3), (hop.Anderson(), 1), (FINISH, 1)], ids=repr
)
def test_what_the_company_can_change_in_single_precision(solver, scale):
    """Products of other batch sizes round otherwise. Picard's answers, and those of an Anderson with safeguard on an
    ordinary network, are equilibria that differ by no more than the tolerance explains. Without safeguard some samples
    end elsewhere, in another equilibrium or in none."""
    net, x = tiny(hop.HAM, [20, 40, 30, 20, 10], scale=scale, batch=64, dtype=torch.float32)
    options = {"even_odd": True, "tol": 1e-5, "max_iter": 300}
    together = hop.solve(net, x, solver, **options)
    parts = [hop.solve(net, part, solver, **options) for part in x.split(7)]
    state, converged = (torch.cat([getattr(p, name) for p in parts]) for name in ("state", "converged"))
    other = hop.residual(state, together.state) > 1e-4
    if solver is FINISH:
        assert other.any()
        return
    assert not other.any()
    assert torch.equal(converged, together.converged)
    for s, met in ((together.state, together.converged), (state, converged)):
        assert (hop.residual(net.step(s, x), s)[met] < 1e-4).all()


class Mirror(hop.Picard):
    """Picard from −z instead of z."""

    def init(self, z):
        return Mirror()

    def step(self, z, values):
        return -values[0] if values.k == 0 else values[0]


def test_a_finish_that_leads_to_another_equilibrium_is_refused():
    """Of a tanh network without drive s and −s are equilibria. The mirror's answer is as good, but another one."""
    net, x = tiny(hop.HAM, [6, 8, 7, 5], scale=3.0, rho="tanh", batch=16)
    with torch.no_grad():
        for b in net.b:
            b.zero_()
    x.zero_()
    s0 = torch.randn(16, net.N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options = {"even_odd": True, "tol": 1e-12, "max_iter": 200, "s0": s0}
    first = hop.solve(net, x, **{**options, "tol": 1e-4})
    assert first.converged.all()
    for backwards in (False, True):  # too long a way, wherever it leads
        finish = hop.Then(hop.Picard(), Mirror(), steps=300, backwards=backwards)
        jumped = hop.solve(net, x, finish, **options)
        assert torch.equal(jumped.state, first.state)
        assert torch.equal(jumped.residual, first.residual)
    went_on = hop.solve(net, x, hop.Then(hop.Picard(), hop.Picard(), steps=300), **options)
    assert (went_on.residual < 1e-12).all()
    assert (hop.residual(went_on.state, first.state) < 0.01).all()


def test_a_finish_that_lies_backwards_is_refused():
    """As above, but near enough: small steps outwards meet the criterion early, at states of which −s is not far."""
    net, x = tiny(hop.HAM, [6, 8, 7, 5], scale=3.0, rho="tanh", batch=16)
    with torch.no_grad():
        for b in net.b:
            b.zero_()
    x.zero_()
    s0 = 0.01 * torch.randn(16, net.N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    small, options = hop.Picard(0.2), {"even_odd": True, "max_iter": 200, "s0": s0}
    first = hop.solve(net, x, small, tol=0.01, **options)
    assert first.converged.all()
    refused, jumped = (
        hop.solve(net, x, hop.Then(small, Mirror(), at=0.01, steps=300, backwards=b), tol=1e-12, **options)
        for b in (False, True)
    )
    assert torch.equal(refused.state, first.state)
    assert torch.equal(refused.residual, first.residual)
    assert refused.converged.all()
    assert (hop.residual(jumped.state, first.state) > 1).all()


def test_finished_samples_leave_the_batch():
    net, x = tiny(hop.HAM, [7, 20, 10], scale=1.5, batch=40)
    early = hop.solve(net, x, even_odd=True, max_iter=100)
    fixed = hop.solve(net, x, even_odd=True, max_iter=100, early_stop=False)
    assert fixed.evaluations == 100 * 40
    assert (early.iterations + 2).sum() <= early.evaluations < fixed.evaluations / 2


def test_relaxation_defaults_to_the_papers(model, layers, even_odd):
    net, x = tiny(model, layers)
    omega = 0.5 if model is hop.CHN and not even_odd else 1.0
    assert paper.relaxation(net, even_odd) == omega
    a = hop.solve(net, x, even_odd=even_odd, max_iter=7, early_stop=False)
    b = hop.solve(net, x, hop.Picard(relaxation=omega), even_odd=even_odd, max_iter=7, early_stop=False)
    c = hop.solve(net, x, hop.Picard(relaxation=0.4), even_odd=even_odd, max_iter=7, early_stop=False)
    assert torch.equal(a.state, b.state)
    assert not torch.allclose(a.state, c.state)


def test_over_relaxation_can_beat_the_plain_sweep():
    net, x = tiny(hop.HAM, [7, 10, 10, 10, 5], seed=1, scale=1.2)
    count = {
        w: hop.solve(net, x, hop.Picard(w), even_odd=True, tol=1e-8, max_iter=500).iterations.sum() for w in (1, 1.2)
    }
    assert count[1.2] < count[1]


def two_cycle():
    """Two neurons that excite each other strongly: from opposite signs a synchronous HAM swaps them for ever."""
    net = hop.HAM([1, 1, 1], rho="tanh", dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net.W[1].fill_(4.0)
    return net, torch.zeros(1, 1, dtype=torch.float64), torch.tensor([[2.0, -2.0]], dtype=torch.float64)


def test_a_cycle_is_called_a_cycle():
    net, x, s0 = two_cycle()
    for early_stop in (False, True):
        sol = hop.solve(net, x, even_odd=False, s0=s0, max_iter=60, early_stop=early_stop)
        assert sol.status.tolist() == [hop.Status.CYCLING]
    assert hop.solve(net, x, s0=s0, even_odd=True).status.tolist() == [hop.Status.CONVERGED]
    slow = hop.solve(net, x, even_odd=False, s0=s0, max_iter=3)
    assert slow.status.tolist() == [hop.Status.MAX_ITER], "three iterations in, it has not settled into the cycle"


def test_a_slow_alternation_is_no_cycle():
    net, x, _ = two_cycle()
    with torch.no_grad():
        net.W[1].fill_(-0.99)
    sol = hop.solve(net, x, s0=torch.tensor([[0.01, 0.01]], dtype=torch.float64), max_iter=50)
    assert sol.status.tolist() == [hop.Status.MAX_ITER]


def test_a_nan_stays_in_its_sample(model, even_odd, solver):
    net, x = tiny(model, [7, 6, 5], scale=0.8)
    s0 = net.zeros(len(x))
    s0[2] = torch.nan
    clean = hop.solve(net, x, solver, even_odd=even_odd)
    for early_stop in (False, True):
        sol = hop.solve(net, x, solver, even_odd=even_odd, s0=s0, early_stop=early_stop)
        assert sol.status[2] == hop.Status.NOT_FINITE
        others = torch.tensor([0, 1, 3, 4])
        assert torch.equal(sol.status[others], clean.status[others])
        assert torch.equal(sol.iterations[others], clean.iterations[others])
        assert sol.state[others].isfinite().all()


def test_divergence_is_reported():
    net, x = tiny(hop.HAM, [7, 6, 5], scale=20.0, rho="relu", dtype=torch.float32)
    sol = hop.solve(net, x, even_odd=True, max_iter=200)
    assert (sol.status == hop.Status.NOT_FINITE).any()


def test_a_slow_divergence_is_no_convergence():
    """Where ‖g‖ overflows before ‖g − before‖ does, their ratio is 0; the run has diverged all the same."""
    f, z = Affine(1.001, 0.4), torch.full((1, 10), 1e150, dtype=torch.float64)
    f.b = 0 * f.b
    sol = hop.iterate(f, z, hop.Picard(), max_iter=20_000, tol=1e-4)
    assert sol.status.tolist() == [hop.Status.NOT_FINITE]


def test_a_state_that_is_zero_has_converged():
    net, x, _ = two_cycle()
    sol = hop.solve(net, x)
    assert sol.status.tolist() == [hop.Status.CONVERGED]
    assert sol.residual.tolist() == [0]


def test_two_layers_need_one_step():
    net, x = tiny(hop.HAM, [7, 5])
    for even_odd in (False, True):
        sol = hop.solve(net, x, even_odd=even_odd)
        assert sol.iterations.tolist() == [0] * 5
        torch.testing.assert_close(sol.state, net.rho.rho(x) @ net.W[0].T + net.b[0])


def test_repeats_are_bitwise_equal(model, even_odd, solver):
    results = []
    for _ in range(2):
        net, x = tiny(model, [7, 30, 20, 5], dtype=torch.float32, batch=33)
        results.append(hop.solve(net, x, solver, even_odd=even_odd))
    assert torch.equal(results[0].state, results[1].state)
    assert torch.equal(results[0].iterations, results[1].iterations)


def test_a_start_of_ones_choice(model, layers, even_odd):
    """Any start leads a contraction to the same equilibrium."""
    net, x = tiny(model, layers, scale=0.5)
    options = {"even_odd": even_odd, "tol": 1e-13, "max_iter": 500}
    a = hop.solve(net, x, **options)
    b = hop.solve(net, x, s0=random_state(net, len(x), scale=0.3), **options)
    torch.testing.assert_close(a.state, b.state, atol=1e-10, rtol=1e-10)


def test_a_solution_speaks_for_itself():
    net, x = tiny(hop.HAM, [7, 6, 5], scale=0.5)
    sol = hop.solve(net, x)
    assert repr(sol).startswith("Solution(5 samples: 5 converged; ")
    assert torch.equal(sol.output, net.layer(sol.state, 2))


def test_an_empty_batch_is_no_error():
    net, _ = tiny(hop.HAM, [7, 6, 5])
    sol = hop.solve(net, torch.zeros(0, 7, dtype=torch.float64))
    assert sol.state.shape == (0, 11)
    assert repr(sol).startswith("Solution(0 samples")
