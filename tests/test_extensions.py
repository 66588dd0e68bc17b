"""What one adds to the structure: each in a few lines, touching nothing else, its gradient checked by differences."""

from dataclasses import dataclass

import pytest
import torch
from conftest import assert_slope

import hoplib as hop
from hoplib import teaching

DOUBLE = {"dtype": torch.float64, "device": "cpu"}


def weights(*shape, seed=0):
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Arctan(hop.Activation):
    """A new activation: ρ = arctan s."""

    name = "arctan"

    def rho(self, s, out=None):
        return torch.atan(s, out=out)

    def drho(self, s):
        return 1 / (1 + s.square())

    def lagrangian(self, s):
        return s * torch.atan(s) - torch.log1p(s.square()) / 2


class Logistic(hop.Activation):
    """ρ = σ(s): the mean activity of a binary neuron in the field s."""

    name = "logistic"

    def rho(self, s, out=None):
        return torch.sigmoid(s, out=out)

    def drho(self, s):
        return torch.sigmoid(s) * torch.sigmoid(-s)

    def lagrangian(self, s):
        return torch.nn.functional.softplus(s)


class Softmax(hop.Activation):
    """ρ = softmax(s) over the layer, whose Lagrangian is log Σ eˢ: a modern Hopfield network's hidden layer."""

    name = "softmax"
    elementwise = False

    def rho(self, s, out=None):
        found = torch.softmax(s, 1)
        return found if out is None else out.copy_(found)

    def slope(self, s):
        return self.rho(s)

    def times(self, D, v):
        return D * (v - (D * v).sum(1, keepdim=True))

    def lagrangian(self, s):
        return torch.logsumexp(s, 1, keepdim=True).expand_as(s) / s.shape[1]


class LowRank(hop.Link):
    """A new link: W = A B, through a few neurons between the layers that keep no state."""

    def __init__(self, A, B):
        super().__init__()
        self.A, self.B = torch.nn.Parameter(A), torch.nn.Parameter(B)
        self.sizes = B.shape[1], A.shape[0]

    def push(self, r, h=None, out=None):
        new = r @ self.B.T @ self.A.T + (0 if h is None else h)
        return new if out is None else out.copy_(new)

    def pull(self, r, h=None, out=None):
        new = r @ self.A @ self.B + (0 if h is None else h)
        return new if out is None else out.copy_(new)

    def gradients(self, r_a, mu_b, r_b, mu_a):
        by_A, by_B = mu_b.T @ (r_a @ self.B.T), (mu_b @ self.A).T @ r_a
        if r_b is None:
            return [by_A, by_B]
        return [by_A + r_b.T @ (mu_a @ self.B.T), by_B + (r_b @ self.A).T @ mu_a]

    @property
    def multiply_adds(self):
        return self.A.numel() + self.B.numel()


class Masked(hop.Dense):
    """A link that derives from another one: some weights are left out."""

    def __init__(self, W, mask):
        super().__init__(W)
        self.register_buffer("mask", mask)

    def push(self, r, h=None, out=None):
        new = r @ (self.W * self.mask).T + (0 if h is None else h)
        return new if out is None else out.copy_(new)

    def pull(self, r, h=None, out=None):
        new = r @ (self.W * self.mask) + (0 if h is None else h)
        return new if out is None else out.copy_(new)

    def gradients(self, *seen):
        return [self.mask * by_W for by_W in super().gradients(*seen)]


class ExactCHN(hop.CHN):
    """The CHN through ς⁻¹."""

    def rule(self, rho, sole):
        return hop.ExactRule(rho)


@dataclass(frozen=True)
class Chebyshev:
    """z_{k+1} = z_{k−1} + ω_k (g_k − z_{k−1}), for a map whose Jacobian has real eigenvalues within ±radius."""

    radius: float
    relaxation: float | None = None

    def init(self, z):
        return ChebyshevSteps(self.radius)


class ChebyshevSteps:
    depth = 1

    def __init__(self, radius):
        self.radius, self.omega, self.before = radius, 2.0, None

    def step(self, z, values):
        before, self.before = self.before, z
        if before is None:
            return values[0]
        self.omega = 1 / (1 - self.radius**2 * self.omega / 4)
        return before + self.omega * (values[0] - before)

    def restrict(self, keep):
        self.before = None if self.before is None else self.before[keep]


@dataclass(frozen=True)
class GuardedRule(hop.HamRule):
    """s ← h + η (h − s) for those neurons whose energy does not rise by it, s ← h for the others."""

    eta: float = 0.3
    memory = True
    plain = False

    def settle(self, s, h, out=None, r=None):
        new = torch.where(self.taken(s, h), h + self.eta * (h - s), h)
        return new if out is None else out.copy_(new)

    def taken(self, s, h):
        far = h + self.eta * (h - s)
        return self.energy(far) - h * self.rho.rho(far) <= self.energy(s) - h * self.rho.rho(s) + 1e-14

    def slopes(self, s, h):
        eta = self.eta * self.taken(s, h)
        return -eta, 1 + eta


class GuardedHAM(hop.HAM):
    """Over-relaxed wherever the energy allows it."""

    def rule(self, rho, sole):
        return hop.HamRule(rho) if sole else GuardedRule(rho)


def skip():
    sizes = [5, 4, 3, 4, 2]
    ends = [(0, 1), (1, 2), (2, 3), (3, 4), (1, 4), (0, 3)]
    return hop.HAM(sizes, links={(a, b): hop.Dense(weights(sizes[b], sizes[a], seed=a + b)) for a, b in ends}, **DOUBLE)


def convolution():
    links = {
        (0, 1): hop.Conv(weights(2, 1, 3, 3), (6, 6), stride=2, padding=1),
        (1, 2): hop.Conv(weights(3, 2, 2, 2), (3, 3)),
        (2, 3): hop.Dense(weights(4, 12)),
    }
    return hop.HAM([36, 18, 12, 4], links=links, **DOUBLE)


def low_rank():
    sizes = [5, 6, 4, 3]
    links = {(l, l + 1): LowRank(weights(sizes[l + 1], 2), weights(2, sizes[l], seed=1)) for l in range(3)}
    return hop.HAM(sizes, links=links, **DOUBLE)


def masked():
    sizes = [5, 6, 4, 3]
    masks = [weights(sizes[l + 1], sizes[l], seed=l) > -0.1 for l in range(3)]
    links = {(l, l + 1): Masked(weights(*mask.shape, seed=l + 7), mask.double()) for l, mask in enumerate(masks)}
    return hop.HAM(sizes, links=links, **DOUBLE)


def modern():
    links = {(0, 1): hop.Dense(weights(6, 5)), (1, 2): hop.Dense(weights(3, 6))}
    return hop.HAM([5, 6, 3], rho=["tanh", Softmax(), "tanh"], links=links, **DOUBLE)


NETWORKS = {
    "activation": lambda: hop.HAM([5, 4, 3], rho=Arctan(), **DOUBLE),
    "link": low_rank,
    "link from another one": masked,
    "skip link": skip,
    "convolution": convolution,
    "modern Hopfield": modern,
    "guarded over-relaxation": lambda: GuardedHAM([5, 4, 3, 4], **DOUBLE),
    "exact CHN": lambda: ExactCHN([5, 4, 3], **DOUBLE),
    "Boltzmann": lambda: hop.HAM([5, 4, 3], rho=Logistic(), **DOUBLE),
}


HOW = {
    "synchronous": (False, hop.Picard()),
    "even-odd": (True, hop.Picard()),
    "over-relaxed": (True, hop.Picard(1.2)),
    "Chebyshev": (False, Chebyshev(0.5)),
    "Chebyshev, even-odd": (True, Chebyshev(0.5)),
    "Chebyshev, over-relaxed": (True, Chebyshev(0.5, 1.2)),
}


@pytest.fixture(params=NETWORKS)
def problem(request):
    net = NETWORKS[request.param]()
    with torch.no_grad():
        for w in net.W:
            w.mul_(0.5)
    return net, torch.rand(3, net.layers[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    "backward", [hop.Adjoint(tol=1e-14), hop.Adjoint(steps=150), hop.RecurrentBackprop(150)], ids=repr
)
@pytest.mark.parametrize("how", HOW)
def test_the_gradient_is_that_of_finite_differences(problem, how, backward):
    (net, x), (even_odd, solver) = problem, HOW[how]
    x.requires_grad_()
    leaves = [x, *net.parameters()]
    options = {"even_odd": even_odd, "tol": 1e-14, "max_iter": 3000}

    def value(backward=None):
        return hop.solve(net, x, solver, backward=backward, **options).state.square().sum()

    gradients = torch.autograd.grad(value(backward), leaves)
    assert_slope(value, leaves, gradients)


def test_chebyshev_given_the_rate_of_picard_takes_half_its_iterations():
    """The eigenvalues of a synchronous HAM come in pairs ±λ, which is what the method wants; ‖Δ‖ falls like max λ."""
    net = hop.HAM([5, 8, 8, 3], seed=1, **DOUBLE)
    x = torch.rand(9, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = hop.solve(net, x, even_odd=False, tol=1e-12, max_iter=3000, trace=True)
    last = plain.residuals[plain.iterations, range(9)] / plain.residuals[plain.iterations - 40, range(9)]
    fast = hop.solve(net, x, Chebyshev(float(last.max()) ** (1 / 40)), tol=1e-12, max_iter=3000)
    assert plain.converged.all()
    assert fast.converged.all()
    torch.testing.assert_close(fast.state, plain.state, rtol=1e-8, atol=1e-8)
    assert fast.iterations.max() < plain.iterations.max() / 2


@pytest.mark.parametrize("gain", [1, 4, 16])
def test_the_guard_keeps_the_energy_from_rising(gain):
    net = GuardedHAM([5, 8, 8, 3], seed=2, **DOUBLE)
    with torch.no_grad():
        for w in net.W:
            w.mul_(gain)
    x = torch.rand(20, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    s = torch.randn(20, net.N, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert teaching.rises(hop.EvenOdd(net, x), x, s, 40).max() < teaching.rounding(net, s)


def test_no_turn_raises_the_energy(problem):
    net, x = problem
    s = torch.randn(3, net.N, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert teaching.rises(hop.EvenOdd(net, x), x, s, 10).max() < 1e-12


def test_the_energy_of_a_boltzmann_machine_is_its_free_energy():
    """In mean field: −½ mᵀWm − bᵀm − mᵀUρ(x) less the entropy of independent neurons with the means m = σ(s)."""
    net = NETWORKS["Boltzmann"]()
    s, x = weights(3, net.N, seed=4), weights(3, 5, seed=5)
    d, m = hop.dense(net), torch.sigmoid(s)
    entropy = -(m * m.log() + (1 - m) * (1 - m).log()).sum(1)
    free = -(m @ d.W * m).sum(1) / 2 - m @ d.b - (m * (torch.sigmoid(x) @ d.U.T)).sum(1) - entropy
    torch.testing.assert_close(net.energy(s, x), free)


def test_one_softmax_for_all_is_one_for_each_layer():
    """Not one over a block of several layers: other blocks would have other equilibria."""
    x = torch.rand(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, each = (hop.HAM([5, 4, 6, 4, 3], rho=rho, **DOUBLE) for rho in (Softmax(), [Softmax()] * 5))
    states = [
        hop.solve(net, x, even_odd=even_odd, tol=1e-13, max_iter=3000).state
        for net, even_odd in ((one, False), (one, True), (each, True))
    ]
    torch.testing.assert_close(states[1], states[0], rtol=1e-9, atol=1e-11)
    assert torch.equal(states[1], states[2])


def test_an_odd_cycle_is_named():
    links = {ends: hop.Dense(weights(3, 3)) for ends in ((0, 1), (1, 2), (2, 3), (1, 3))}
    net = hop.HAM([3, 3, 3, 3], links=links, **DOUBLE)
    x = torch.rand(2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert hop.solve(net, x, even_odd=False, tol=1e-10, max_iter=500).converged.all()
    with pytest.raises(ValueError, match="the layers 1–2–3–1 are linked in an odd cycle"):
        hop.solve(net, x, even_odd=True)


@pytest.mark.parametrize("blocks", [[[1], [2], [3], [4]], [[4], [2], [1], [3]], [[1, 2], [3, 4]], [[1, 2, 3], [4]]])
def test_blocks_of_ones_own_share_the_fixed_points(blocks):
    """In any order (a block for each layer: the asynchronous update of Remark 1), also with links inside a block."""
    net = NETWORKS["skip link"]()
    x = torch.rand(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    s = hop.solve(net, x, even_odd=False, tol=1e-14, max_iter=3000).state
    f = net.sweep(x, blocks)
    with torch.no_grad():
        z = hop.iterate(f, f.start(), hop.Picard(), max_iter=3000, tol=1e-14).state
        torch.testing.assert_close(f.join(z), s, rtol=1e-10, atol=1e-12)
        series, steps = f.adjoint(s, s).neumann(3), f.along(z, 3, s)
        for l, mu in net.split(series).items():
            torch.testing.assert_close(sum(turn.mu[l] for turn in steps if l in turn.mu), mu, rtol=1e-9, atol=1e-12)


def test_a_masked_weight_is_one_that_is_zero():
    net, plain = masked(), hop.HAM([5, 6, 4, 3], **DOUBLE)
    plain.load_state_dict({k: t for k, t in net.state_dict().items() if not k.endswith("mask")})
    with torch.no_grad():
        for link, other in zip(net.links, plain.links, strict=True):
            other.W *= link.mask
    x = torch.rand(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(hop.solve(net, x).state, hop.solve(plain, x).state, rtol=1e-9, atol=1e-12)


def test_a_link_does_not_inherit_the_gradients_of_another_push():
    class Half(hop.Dense):
        def push(self, r, h=None, out=None):
            return super().push(r / 2, h, out)

    net = hop.HAM([3, 2], links={(0, 1): Half(weights(2, 3))}, **DOUBLE)
    with pytest.raises(NotImplementedError):
        hop.solve(net, weights(4, 3), backward=hop.Adjoint()).output.sum().backward()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hop.HAM([3, 2], links={(1, 0): hop.Dense(weights(2, 3))}), "a link joins layers a < b of 0…1"),
        (
            lambda: hop.HAM([3, 2], links={(0, 1): hop.Dense(weights(3, 2))}),
            "couples .2, 3. neurons, but the layers have 3, 2",
        ),
        (lambda: hop.HAM([3, 2], rho=["tanh"]), "one activation, or 2"),
    ],
)
def test_wrong_graphs_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
