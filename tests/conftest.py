"""Shared tiny problems. Everything is seeded; the CPU runs single-threaded so that repeats are bitwise equal."""

import pytest
import torch

import hoplib as hop

torch.set_num_threads(1)

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
