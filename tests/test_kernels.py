"""The compiled loops against torch's operations, and against themselves as plain Python."""

import subprocess
import sys

import pytest
import torch
from conftest import tiny

import hoplib as hop
from hoplib import kernels
from hoplib.activations import GRID
from hoplib.rules import ChnRule
from hoplib.solvers import Values

pytestmark = [
    pytest.mark.skipif(kernels.numba is None, reason="the compiled loops need Numba"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of interpreted loops, where numbers overflow
]

ROUTES = ("torch", "compiled", "interpreted")
LOOPS = ("_residual", "judge", "weights", "anderson", "sigma", "_rho", "_local", "_settle")
OPTIONS = {
    "default": hop.Anderson(),
    "no memory": hop.Anderson(m=1),
    "window of 2": hop.Anderson(m=2),
    "free": hop.Anderson(m=5, safeguard=False, mu=1e-8, relative=True),
    "window of 7": hop.Anderson(m=7),
    "no regulariser": hop.Anderson(mu=0.0),
}


def by_each_route(compute):
    """What `compute` gives by torch's operations, by the compiled loops, and by the same loops as plain Python."""
    found = {}
    for route in ROUTES:
        with pytest.MonkeyPatch.context() as patch:
            if route == "torch":
                patch.setattr(kernels, "numba", None)
            if route == "interpreted":
                for name in LOOPS:
                    patch.setattr(kernels, name, getattr(kernels, name).py_func)
            found[route] = compute()
    return found


def values(steps, batch=6, n=19, dtype=torch.float64):
    """Map values that come closer to each other."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(batch, n, generator=g, dtype=torch.float64).mul(0.5**k).add(1).to(dtype) for k in range(steps)]


def feed(solver, given):
    """The iterates that follow the given map values, whatever the iterates before, and the memory at the end."""
    steps, z, iterates = solver.init(given[0]), torch.zeros_like(given[0]), []
    memory = Values(z, steps.depth)
    for value in given:
        memory.evaluate(lambda _, out, value=value: out.copy_(value), z)
        z = steps.step(z, memory).clone()
        iterates.append(z)
    return torch.stack(iterates), memory


class Step:
    """A map that moves every sample by a random vector, of very different lengths: often near g already."""

    def __init__(self):
        self.g = torch.Generator().manual_seed(0)

    def __call__(self, z, out=None):
        move = torch.rand(len(z), 1, generator=self.g, dtype=z.dtype) ** 3 * torch.randn(
            *z.shape, generator=self.g, dtype=z.dtype
        )
        return torch.add(z, move, out=out)


def wander(solver, steps=12, batch=40, n=7):
    """The map values and the iterates of such a map, and the memory at the end."""
    z = torch.ones(batch, n, dtype=torch.float64)
    f, working, path = Step(), solver.init(z), []
    memory = Values(z, working.depth)
    for _ in range(steps):
        g = memory.evaluate(f, z).clone()
        z = working.step(z, memory).clone()
        path.append((g, z))
    return *(torch.stack(p) for p in zip(*path, strict=True)), working


@pytest.mark.parametrize("solver", OPTIONS.values(), ids=OPTIONS)
def test_anderson_is_the_same_by_each_route(solver):
    found = by_each_route(lambda: wander(solver))
    values_, iterates, memory = found["torch"]
    refused = (values_ == iterates).all(2)
    if solver.safeguard and solver.m > 1:
        assert 0.05 < refused[2:].double().mean() < 0.95, "some steps are taken and some refused"
    for g, z, other in found.values():
        torch.testing.assert_close(z, iterates, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(other.gram, memory.gram, rtol=1e-7, atol=1e-7)
        assert torch.equal((g == z).all(2), refused), "a refused step is g itself"


@pytest.mark.parametrize("solver", [OPTIONS[name] for name in ("default", "free", "no regulariser")])
def test_what_has_no_solution_is_a_picard_step(solver):
    """The same residual in every step (singular without a regulariser), and values that are no numbers."""
    value = torch.ones(4, 7, dtype=torch.float64)
    value[1], value[2, 3] = torch.inf, torch.nan
    for z, _ in by_each_route(lambda: feed(solver, [value] * 10)).values():
        torch.testing.assert_close(z[-1, [0, 3]], value[[0, 3]])
        assert not z[-1, [1, 2]].isfinite().all(1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_is_judged_alike_at_every_scale(dtype):
    given = values(3, batch=8, dtype=dtype)
    for value in given:
        value[1] = 0  # no change of nothing
        value[2] *= torch.finfo(dtype).max ** 0.5  # whose square overflows
        value[3, 4] = torch.nan
        value[4] *= torch.finfo(dtype).tiny ** 0.5 / 1e3  # whose square vanishes
    running = torch.tensor([True] * 6 + [False] * 2)
    tol = float(hop.residual(given[-1], given[-2])[5]) * 1.01
    found = by_each_route(lambda: feed(hop.Picard(), given)[1].judge(running, tol))
    r, _, ended, _ = found["torch"]
    assert ended[[1, 2, 3, 5]].all()
    assert not ended[running.logical_not()].any()
    for verdict in found.values():
        torch.testing.assert_close(verdict.residual, r, rtol=1e-5, atol=0, equal_nan=True)
        torch.testing.assert_close(verdict.error, verdict.residual, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(verdict.ended, ended)
        assert verdict.some
    nobody = by_each_route(lambda: feed(hop.Picard(), given)[1].judge(running & False, tol))
    assert [verdict.some for verdict in nobody.values()] == [False] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_who_is_near_the_value_before_but_not_near_z_has_not_ended(dtype):
    given = values(3, batch=6, dtype=dtype)
    given[-1][:4] = given[-2][:4] * (1 + 1e-7)  # the criterion is met
    given[-1][3] = torch.nan
    z = given[-1].clone()
    z[0] *= 1 + 9e-4  # within ten times the criterion
    z[1] *= 1 + 2e-3  # beyond: by chance
    running = torch.tensor([True] * 5 + [False])
    found = by_each_route(lambda: feed(hop.Picard(), given)[1].judge(running, 1e-4, z))
    for verdict in found.values():
        assert verdict.ended.tolist() == [True, False, True, True, False, False]
        assert verdict.error[1].item() == pytest.approx(2e-3, rel=1e-3)
        others = [0, 2, 3, 4, 5]
        assert torch.equal(verdict.error[others].nan_to_num(9), verdict.residual[others].nan_to_num(9))


def test_a_residual_that_is_the_rounded_tolerance_is_not_below_it():
    given = values(2, batch=1, dtype=torch.float32)
    for r, *_ in by_each_route(lambda: feed(hop.Picard(), given)[1].judge(torch.ones(1).bool(), 0.0)).values():
        for tol, below in ((r.item() * (1 + 1e-9), False), (r.item() * (1 + 1e-6), True)):
            found = by_each_route(lambda tol=tol: feed(hop.Picard(), given)[1].judge(torch.ones(1).bool(), tol))
            assert {bool(v.ended) for v in found.values() if v.residual == r} == {below}


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_weights_solve_their_equation(n):
    F = torch.randn(n, 9, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    expected = torch.linalg.solve(F @ F.T, torch.ones(n, dtype=torch.float64))
    for loop in (kernels.weights, kernels.weights.py_func):
        alpha = torch.empty(n, dtype=torch.float64)
        loop((F @ F.T).numpy(), alpha.numpy())
        torch.testing.assert_close(alpha, expected / expected.sum())


def test_the_sigmoid_is_as_near_as_torchs():
    s = torch.cat([torch.linspace(-25, 25, 9_999), torch.linspace(-2, 3, 9_999)])[None]
    rho, exact = hop.activations.get("shifted-sigmoid"), torch.sigmoid(4 * s.double() - 2)
    found = by_each_route(lambda: rho.rho(s, out=torch.empty_like(s)))
    near = s.abs() < 10
    for absolute, name in ((True, "absolute"), (False, "relative")):
        error = {k: ((r - exact) / (1 if absolute else exact)).abs()[near].max() for k, r in found.items()}
        assert error["compiled"] < 1.2 * error["torch"], name
        assert error["interpreted"] < 1.2 * error["torch"], name
    assert (found["compiled"] - exact)[~near].abs().max() < 1e-7
    odd = torch.tensor([[torch.nan, torch.inf, -torch.inf]])
    for r in by_each_route(lambda: rho.rho(odd, out=torch.empty_like(odd))).values():
        torch.testing.assert_close(r, torch.tensor([[torch.nan, 1.0, 0.0]]), equal_nan=True)


@pytest.mark.parametrize("steps", [1, 2, 9, 10])
def test_a_block_of_a_chn_settles_alike(steps):
    """Also in a slice of a wider state, whose rows are apart in memory; in float64, where torch does it all."""
    rule = ChnRule(hop.activations.get("shifted-sigmoid"), steps, 0.5)
    g = torch.Generator().manual_seed(0)
    wide, h = torch.rand(5, 40, generator=g) * 2 - 0.5, torch.rand(5, 30, generator=g) * 1.5
    for dtype, tol in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
        s, field = wide.to(dtype)[:, :30], h.to(dtype)
        expected = rule.settle(s, field)

        def settled(s=s, field=field):
            return rule.settle(s, field.clone(), torch.empty_like(s))

        for found in by_each_route(settled).values():
            torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


class Steep(hop.activations.ShiftedSigmoid):
    """Another sigmoid by the same name."""

    def rho(self, s, out=None):
        return torch.sigmoid(8 * s - 4, out=out)

    def drho(self, s):
        return 8 * self.rho(s) * (1 - self.rho(s))


def test_another_activation_settles_by_its_own_slope():
    rule = ChnRule(Steep(), 10, 0.5)
    s, h = torch.rand(5, 30, generator=torch.Generator().manual_seed(0)), torch.full((5, 30), 0.3)
    found = rule.settle(s, h.clone(), torch.empty_like(h))
    torch.testing.assert_close(found, rule.settle(s, h), rtol=1e-5, atol=1e-5)


def test_the_sigmoid_takes_any_shape_and_minds_that_of_out():
    rho = hop.activations.get("shifted-sigmoid")
    for shape in ((), (5,), (2, 3, 4), (0, 4)):
        s = torch.rand(shape)
        torch.testing.assert_close(rho.rho(s, out=torch.empty(shape)), rho.rho(s))
    with pytest.warns(UserWarning, match="was resized"):
        assert rho.rho(torch.ones(6, 4), out=torch.empty(2, 4)).shape == (6, 4)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        rho.rho(torch.rand(2, 3, requires_grad=True), out=torch.empty(2, 3))


def test_the_loops_are_for_one_thread_of_a_cpu():
    z = torch.zeros(4, 3)
    try:
        torch.set_num_threads(2)
        assert not Values(z).compiled
    finally:
        torch.set_num_threads(1)
    assert Values(z).compiled
    assert Values(z.double()).compiled
    assert not Values(z.half()).compiled
    assert not Values(z.T).compiled
    assert not Values(z.to("meta")).compiled
    assert not kernels.fit(z, z.double(), dtypes=(torch.float32,))


def test_without_numba_all_is_done_by_torch():
    code = """
import sys; sys.modules["numba"] = None  # as if it were not installed
import torch; torch.set_num_threads(1)
import hoplib as hop
net = hop.CHN([784, 30, 10], seed=0, device="cpu")
sol = hop.solve(net, torch.rand(3, 784), hop.Anderson(), even_odd=True)
print(hop.kernels.numba, len(sol.status))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["None", "3"], run.stderr


def test_no_folder_for_compiled_code_is_no_obstacle(monkeypatch):
    njit = kernels.numba.njit

    def read_only(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(kernels.numba, "njit", read_only)
    double = kernels.compiled(lambda a: a + a)
    assert double(2.0) == 4.0


def test_a_start_that_requires_a_gradient_is_no_obstacle():
    net, x = tiny(hop.HAM, [7, 6, 5], scale=0.5, dtype=torch.float32)
    s0 = net.zeros(len(x)).requires_grad_()
    for even_odd in (False, True):
        sol = hop.solve(net, x, hop.Anderson(), even_odd=even_odd, s0=s0)
        assert sol.converged.all()
        assert sol.state.isfinite().all()


@pytest.mark.parametrize("name", ["shifted-sigmoid", "tanh"])
def test_the_effective_activation_by_cubics(name):
    """Between grid points to rounding; beyond the grid, and for a NaN, torch's operations."""
    effective = hop.Effective(name)
    h = torch.cat([torch.linspace(-63.99, 63.99, 50_001), torch.linspace(-2, 2, 50_001)])[None]
    out = torch.empty_like(h)
    with torch.no_grad():
        assert (effective.rho(h, out=out) - effective.rho(h.double())).abs().max() < 2e-7
        far = torch.tensor([[0.5, 64.0, -1e6, torch.nan, torch.inf]])
        torch.testing.assert_close(effective.rho(far, out=torch.empty_like(far)), effective.rho(far), equal_nan=True)


def test_the_effective_activation_of_a_part_of_a_state():
    """A block of an over-relaxed sweep lies in rows of a larger state: the same loop serves it, to the same bits."""
    effective, s = hop.Effective("shifted-sigmoid"), 8 * torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    part = s[:, 7:29]
    with torch.no_grad():
        for here in (torch.empty(5, 22), torch.empty(5, 30)[:, 3:25]):
            assert kernels.interpolate(effective._grid, GRID[1], part, here)
            assert torch.equal(here, effective.rho(part.contiguous(), out=torch.empty(5, 22)))
        part[4, 21] = 100.0  # beyond the grid
        assert not kernels.interpolate(effective._grid, GRID[1], part, torch.empty(5, 22))
