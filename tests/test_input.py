"""Bad input gets an error that says what is wrong and what is valid."""

import pytest
import torch
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import hoplib as hop


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ([784], ValueError, r"at least 2 layers.*layers=\[784\]"),
        ([], ValueError, "at least 2 layers"),
        ([784, 0, 10], ValueError, "positive integer"),
        ([784, -3, 10], ValueError, "positive integer"),
        ([784, 2.5, 10], ValueError, "positive integer"),
        ([784, True], ValueError, "positive integer"),
        ("784-10", TypeError, r"a list of sizes such as \[784, 1990, 10\]"),
        (784, TypeError, "a list of sizes"),
    ],
)
def test_layers(layers, error, message):
    with pytest.raises(error, match=message):
        hop.HAM(layers)


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown activation 'gelu'; choose from"):
        hop.HAM([3, 2], rho="gelu")
    with pytest.raises(TypeError, match=r"float32 or torch\.float64, not torch\.float16"):
        hop.HAM([3, 2], dtype=torch.float16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'activation'"):
        hop.HAM([3, 2], activation="tanh")


NET, X = tiny(hop.HAM, [7, 6, 5], dtype=torch.float32)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (X[:, :6], ValueError, r"shape \(batch, 7\) for layers=\[7, 6, 5\], not \(5, 6\)"),
        (X[0], ValueError, r"not \(7,\)"),
        (X.view(5, 1, 7), ValueError, r"not \(5, 1, 7\)"),
        (X.double(), TypeError, r"dtype torch.float64, the network torch.float32; convert with"),
        ((X * 255).byte(), TypeError, "dtype torch.uint8"),
        (X.to("meta"), ValueError, "x is on meta, the network on cpu; move it"),
        (X.tolist(), TypeError, "torch tensor of shape .batch, 7., not list"),
        (torch.where(X > 0.9, torch.nan, X), ValueError, "non-finite values in . of 5 samples"),
        (torch.where(X > 0.9, torch.inf, X), ValueError, "non-finite values"),
    ],
)
def test_inputs(x, error, message):
    with pytest.raises(error, match=message):
        hop.solve(NET, x)
    with pytest.raises(error, match=message):
        NET.energy(NET.zeros(5), x)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tol": -1e-4}, ValueError, "tol must be a relative residual of at least 0, not -0.0001"),
        ({"tol": float("nan")}, ValueError, "tol must be"),
        ({"max_iter": 0}, ValueError, "max_iter must be an integer of at least 1, not 0"),
        ({"max_iter": 2.5}, ValueError, "max_iter must be an integer"),
        ({"s0": torch.zeros(5, 10)}, ValueError, r"shape \(5, 11\), not \(5, 10\)"),
        ({"s0": torch.zeros(5, 11).double()}, TypeError, "the state has dtype"),
        ({"solver": "anderson"}, TypeError, "solver must be .* not 'anderson'"),
        ({"evenodd": True}, TypeError, "unexpected keyword argument 'evenodd'"),
    ],
)
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        hop.solve(NET, X, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hop.Picard(relaxation=0), "relaxation must be positive"),
        (lambda: hop.Picard(relaxation=float("nan")), "relaxation must be positive"),
        (lambda: hop.Anderson(m=0), "window m must be at least 1, not 0"),
        (lambda: hop.Anderson(mu=-1.0), "mu must not be negative"),
        (lambda: hop.Adjoint(tol=-1.0), "tol must be"),
    ],
)
def test_solvers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@settings(deadline=None, max_examples=40)
@given(
    layers=st.lists(st.integers(1, 12), min_size=2, max_size=7),
    seed=st.integers(0, 2**31),
    batch=st.integers(0, 6),
    chn=st.booleans(),
    even_odd=st.booleans(),
    anderson=st.booleans(),
    rho=st.sampled_from(["shifted-sigmoid", "tanh", "relu", "hard-sigmoid"]),
)
def test_any_network_and_input_gives_an_account_of_every_sample(layers, seed, batch, chn, even_odd, anderson, rho):
    net, x = tiny(hop.CHN if chn else hop.HAM, layers, seed=seed, batch=batch, rho=rho, dtype=torch.float32)
    sol = hop.solve(net, x, hop.Anderson() if anderson else hop.Picard(), even_odd=even_odd, max_iter=25)
    assert sol.state.shape == (batch, net.N)
    assert sol.output.shape == (batch, layers[-1])
    assert set(sol.status.tolist()) <= {s.value for s in hop.Status}
    assert ((sol.iterations >= 0) & (sol.iterations <= 24)).all()
    assert ((sol.residual < 1e-4) == sol.converged).all()
    finite = sol.status != hop.Status.NOT_FINITE
    assert sol.state[finite].isfinite().all()
