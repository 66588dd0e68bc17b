"""Shared tiny problems. Everything is seeded; the CPU runs single-threaded so that repeats are bitwise equal."""

import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, settings

import hoplib as hop

torch.set_num_threads(1)
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # a make that a test starts is no child of `make test`
    os.environ.pop(name, None)
for name, examples in {"test": 100, "attack": 2000}.items():
    settings.register_profile(name, deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("test")

MODELS = {"HAM": hop.HAM, "CHN": hop.CHN}
DEPTHS = {n: [7, 6, 5, 4, 6, 3, 5, 4, 2][:n] for n in range(2, 10)}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


@pytest.fixture(params=[False, True], ids=["sync", "even-odd"])
def even_odd(request):
    return request.param


@pytest.fixture(params=[3, 4, 5], ids=lambda n: f"{n} layers")
def layers(request):
    return DEPTHS[request.param]


def tiny(model, layers, *, seed=0, scale=1.0, batch=5, dtype=torch.float64, rho="shifted-sigmoid"):
    """A small network and a batch of inputs; `scale` < 1 makes it a contraction."""
    net = model(layers, seed=seed, dtype=dtype, device="cpu", rho=rho)
    with torch.no_grad():
        for w in net.W:
            w *= scale
    x = torch.rand(batch, layers[0], generator=torch.Generator().manual_seed(seed + 100), dtype=torch.float64)
    return net, x.to(dtype)


def random_state(net, batch, seed=0, scale=1.0):
    s = torch.randn(batch, net.N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scale * s.to(net.W[0].dtype)


def assert_slope(value, leaves, gradients):
    """The gradients give, along a random direction, the slope of finite differences. Moves the leaves a little."""
    along = [torch.randn(p.shape, generator=torch.Generator().manual_seed(2), dtype=p.dtype) for p in leaves]
    slope = sum(float((g * v).sum()) for g, v in zip(gradients, along, strict=True))
    sides = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            for p, v in zip(leaves, along, strict=True):
                p.add_(v, alpha=step)
            sides.append(float(value()))
    assert slope == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-5, abs=1e-8)


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium, driven by Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()
