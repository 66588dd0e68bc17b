"""Products by oneDNN, where that is the faster library: the same numbers, and torch's own wherever it does not suit."""

import pytest
import torch
from torch.backends import mkldnn

from hoplib import links
from hoplib.experiment.config import configure
from hoplib.experiment.train import Training

pytestmark = pytest.mark.skipif(not mkldnn.is_available(), reason="this torch has no oneDNN")
LIBRARIES = {"torch": False, "oneDNN": True}


@pytest.fixture
def take(monkeypatch):
    """take(name): large products are that library's from now on, whatever the processor."""

    def take(name, full_width=True):
        monkeypatch.setattr(links, "onednn", lambda: LIBRARIES[name])
        monkeypatch.setattr(links, "full_width", lambda: full_width)

    return take


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LAYOUTS = {
    "rows": lambda n, m: draw(n, m),
    "columns": lambda n, m: draw(m, n).T,
    "a part of a block": lambda n, m: draw(n, m + 70)[:, 40 : 40 + m],
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("shape", [(64, 256, 128), (64, 1990, 10), (2, 1024, 512), (512, 64, 256), (3, 5, 4)], ids=str)
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_h_plus_a_b(take, library, shape, left, right):
    take(library)
    n, k, m = shape
    a, b, out = LAYOUTS[left](n, k), LAYOUTS[right](k, m), draw(n, m + 9)[:, 3 : 3 + m]
    for h in (None, draw(m, seed=1), draw(n, m, seed=2), draw(n, m + 5, seed=3)[:, :m]):
        exact = a.double() @ b.double() + (0 if h is None else h.double())
        with torch.no_grad():
            found, kept = links.multiply(a, b, h), links.multiply(a, b, h, out)
        assert kept is out
        for t in (found, out):
            assert (t - exact).abs().max() < 2e-6 * k * exact.abs().max()
    with torch.no_grad():  # h may be the place of the result
        before = out.clone()
        assert torch.allclose(links.multiply(a, b, out, out), before + a @ b, atol=1e-2)


def test_only_large_products_of_float32_without_a_gradient_go_there(take):
    take("oneDNN")
    a, b = draw(64, 256), draw(256, 128)
    with torch.no_grad():
        assert links.suits_onednn(64, b)
        assert not links.suits_onednn(64, b.double())
        assert not links.suits_onednn(4, b)
        assert not links.suits_onednn(64, b.to("meta"))
    assert not links.suits_onednn(64, b)
    take("oneDNN", full_width=False)  # of 256 × 128 weights MKL is faster, of 1,024 × 512 it is not
    with torch.no_grad():
        assert not links.suits_onednn(64, b)
        assert links.suits_onednn(8, draw(1024, 512))
        assert links.suits_onednn(64, draw(64, 1280)) is False
        assert links.suits_onednn(510, draw(64, 1280))
    take("oneDNN")
    W = b.clone().requires_grad_()
    links.multiply(a, W).sum().backward()
    assert torch.allclose(W.grad, a.sum(0)[:, None].expand_as(W), atol=1e-4)


@pytest.mark.parametrize(
    ("capability", "processor", "operator", "expected"),
    [
        ("AVX512", "vendor_id : AuthenticAMD", None, True),
        ("AVX2", "vendor_id : AuthenticAMD", None, False),
        ("AVX512", "vendor_id : GenuineIntel", None, False),
        ("AVX512", "vendor_id : AuthenticAMD", lambda a, W, h=None: a @ W.to_dense().T, False),
        ("AVX512", "vendor_id : AuthenticAMD", lambda a, W: a @ W.T, False),
    ],
    ids=["AMD with AVX-512", "AMD without", "Intel", "an operator that forgets h", "an operator of another form"],
)
def test_it_is_taken_where_it_is_faster_and_right(monkeypatch, capability, processor, operator, expected):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(links, "_processor", lambda: processor)
    if operator is not None:
        monkeypatch.setattr(links, "by_onednn", operator)
    assert links.onednn.__wrapped__() is expected


def test_an_order_that_cannot_be_had_leaves_the_products_to_mkl(monkeypatch):
    def fails(W):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(links, "_processor", lambda: "vendor_id : AuthenticAMD")
    monkeypatch.setattr(links, "pack", fails)
    assert links.onednn.__wrapped__() is False


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ("vendor_id : AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17", False),
        ("vendor_id : AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2", True),
        ("AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD", False),
        ("AMD64 Family 26 Model 36 Stepping 0, AuthenticAMD", True),
        ("", False),
    ],
)
def test_the_width_is_that_of_the_family(monkeypatch, processor, expected):
    monkeypatch.setattr(links, "_processor", lambda: processor)
    assert links.full_width.__wrapped__() is expected


def test_a_large_matrix_stays_in_onednns_order(take, monkeypatch):
    """It is packed once, by the first batch that repays it; small batches, and derivatives, do without it."""
    take("oneDNN")
    times, M, packings = links.pack, draw(300, 200), []
    monkeypatch.setattr(links, "pack", lambda W: packings.append(W.shape) or times(W))
    by = links.product(M)
    for rows, expected in ((1, 0), (links.ROWS - 1, 0), (64, 1), (64, 1), (2, 1), (0, 1)):
        r, h, out = draw(rows, 300), draw(rows, 200, seed=1), torch.empty(rows, 200)
        with torch.no_grad():
            for found in (by(r), by(r, h[:1].expand_as(h)) - h[:1], by(r, h) - h, by(r, None, out)):
                assert (found - r @ M).abs().max() < 1e-3 if rows else found.shape == (0, 200)
        assert len(packings) == expected
    r = draw(64, 300).requires_grad_()
    by(r).sum().backward()
    assert torch.allclose(r.grad, M.sum(1).expand_as(r), atol=1e-4)
    assert len(packings) == 1


@pytest.mark.parametrize("row", ["5-HAM-EO", "7-HAM-DEQ"])
def test_a_training_step_is_the_same_to_rounding(take, row):
    """Loss and gradients of a whole batch at the paper's size, contracting so that every sample has one equilibrium."""
    training = Training(configure(row, 0)[0], device=torch.device("cpu"))
    with torch.no_grad():
        for w in training.net.W:
            w *= 0.5
    x, y, found = torch.rand(64, 784, generator=torch.Generator().manual_seed(0)), torch.eye(10).repeat(7, 1)[:64], {}
    for library in LIBRARIES:
        take(library)
        sol, _, loss = training.gradients(x, y)
        assert bool(sol.converged.all())
        found[library] = torch.cat([loss[None], *(p.grad.flatten() for p in training.net.parameters())])
    off = (found["oneDNN"] - found["torch"]).norm() / found["torch"].norm()
    assert 0 < off < 1e-4  # another library, other rounding


def test_the_benchmark_counts_them(take):
    import training as bench  # benchmarks/training.py

    a, b, h = draw(64, 256), draw(256, 128), draw(64, 128)
    counted = {}
    for library in LIBRARIES:
        take(library)
        with torch.no_grad(), bench.Recorder() as recorder:
            links.multiply(a, b)
            links.multiply(a, b, h)
            links.multiply(a, b, h[0])
            links.product(b)(a, h)
        counted[library] = recorder.log
    assert counted["oneDNN"][:3] == counted["torch"][:3]
    assert counted["oneDNN"][3][1].packed
    for log in counted.values():
        assert bench.multiply_adds(log) == 4 * 64 * 256 * 128
        bench.Products(torch.device("cpu")).run(log)
