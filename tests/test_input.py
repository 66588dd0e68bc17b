"""Bad input gets an error that says what is wrong and what is valid."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import hoplib as hop
from hoplib.experiment.config import Config, configure
from hoplib.experiment.rows import Row


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ([784], ValueError, r"at least 2 layers.*layers=\[784\]"),
        ([], ValueError, "at least 2 layers"),
        ([784, 0, 10], ValueError, "every size in layers=.* must be an integer"),
        ([784, -3, 10], ValueError, "every size in layers=.* must be an integer"),
        ([784, 2.5, 10], ValueError, "every size in layers=.* must be an integer"),
        ([784, True], ValueError, "every size in layers=.* must be an integer"),
        ([784, 10**11, 10], ValueError, "from 1 to 1000000, not 100000000000"),
        ([784, "30", 10], ValueError, "integer from 1"),
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
        (X.tolist(), TypeError, "dense torch tensor of shape .batch, 7., not list"),
        (X.numpy(), TypeError, "not ndarray"),
        (X.to_sparse(), TypeError, r"not a tensor of layout torch\.sparse_coo"),
        (torch.where(X > 0.9, torch.nan, X), ValueError, "non-finite values in . of 5 samples"),
        (torch.where(X > 0.9, torch.inf, X), ValueError, "non-finite values"),
    ],
)
def test_inputs(x, error, message):
    with pytest.raises(error, match=message):
        hop.solve(NET, x)
    with pytest.raises(error, match=message):
        NET.energy(NET.zeros(5), x)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_a_nested_tensor_is_refused():
    with pytest.raises(TypeError, match=r"x must be a dense torch tensor of shape .* not a nested tensor"):
        hop.solve(NET, torch.nested.as_nested_tensor([*X]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tol": -1e-4}, ValueError, "tol must be a relative residual of at least 0, not -0.0001"),
        ({"tol": float("nan")}, ValueError, "tol must be"),
        ({"max_iter": 0}, ValueError, "max_iter must be an integer of at least 1, not 0"),
        ({"max_iter": 2.5}, ValueError, "max_iter must be an integer"),
        ({"s0": torch.zeros(5, 10)}, ValueError, r"shape \(5, 11\) for layers=.*, not \(5, 10\)"),
        ({"s0": torch.zeros(5, 11).double()}, TypeError, "the state has dtype"),
        ({"s0": torch.zeros(5, 11).numpy()}, TypeError, "the state must be a dense torch tensor .* not ndarray"),
        ({"s0": torch.zeros(5, 11).to_sparse()}, TypeError, "the state must be a dense torch tensor"),
        ({"tol": True}, ValueError, "tol must be a relative residual of at least 0, not True"),
        ({"tol": "1e-4"}, ValueError, "tol must be a relative residual of at least 0, not '1e-4'"),
        ({"tol": None}, ValueError, "tol must be a relative residual"),
        ({"tol": 10**400}, ValueError, "tol must be a relative residual"),
        ({"tol": Fraction(1, 9)}, ValueError, r"tol must be a relative residual of at least 0, not Fraction\(1, 9\)"),
        ({"max_iter": True}, ValueError, "max_iter must be an integer of at least 1, not True"),
        ({"even_odd": "no"}, ValueError, "even_odd must be True or False, not 'no'"),
        ({"early_stop": 1}, ValueError, "early_stop must be True or False"),
        ({"backward": "adjoint"}, TypeError, "backward must be .* not 'adjoint'"),
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
        (lambda: hop.Picard(1e308), "relaxation must be positive, from 1e-6 to 1e6 .* not 1e.308"),
        (lambda: hop.Picard(Fraction(1, 2)), "relaxation must be positive"),
        (lambda: hop.OverRelaxed(1e-320), "ω must be a number with 0 < ω < 2, at least 1e-6"),
        (lambda: hop.Anderson(m=0), "window m must be an integer from 1 to 1000, not 0"),
        (lambda: hop.Anderson(m=10**9), "window m must be an integer from 1 to 1000, not 1000000000"),
        (lambda: hop.Anderson(mu=-1.0), "mu must be a number of at least 0, not -1.0"),
        (lambda: hop.Anderson(mu=float("nan")), "mu must be a number of at least 0, not nan"),
        (lambda: hop.Anderson(m=True), "window m must be an integer"),
        (lambda: hop.Anderson(safeguard="yes"), "safeguard must be True or False"),
        (lambda: hop.Picard("fast"), "relaxation must be positive"),
        (lambda: hop.Then(hop.Picard(), hop.Anderson(), at=0), "a relative residual above 0"),
        (lambda: hop.Adjoint(tol=-1.0), "tol must be"),
        (lambda: hop.Then(hop.Picard(), hop.Anderson(), even_odd="no"), "even_odd must be True or False, not 'no'"),
        (lambda: hop.Then(hop.Picard(), hop.Anderson(), backwards=1), "backwards must be True or False, not 1"),
        (lambda: hop.Adjoint(max_iter=0), "max_iter must be"),
        (lambda: hop.Adjoint(tol="exact"), "tol must be"),
        (lambda: hop.Adjoint(steps=8, tol=1e-6), "a number of steps, or a tol .* not both"),
        (lambda: hop.RecurrentBackprop(closed_form=None), "closed_form must be a relative residual"),
        (lambda: hop.HAM([3, 2], seed=1.7), "seed must be an integer from 0 .* not 1.7"),
        (lambda: hop.HAM([3, 2], seed=None), "seed must be an integer"),
        (lambda: hop.Madam(NET.parameters(), lr=float("inf")), "lr must be a positive number up to 1e6, not inf"),
        (lambda: hop.Madam(NET.parameters(), lr="0.01"), "lr must be a positive number up to 1e6, not '0.01'"),
        (lambda: hop.Madam(NET.parameters(), lr=1e40), "lr must be a positive number up to 1e6"),
        (lambda: hop.Madam(NET.parameters(), beta=1), "beta must be a number from 0 to less than 1"),
        (lambda: hop.linear_decay(hop.Madam(NET.parameters()), epochs=-1), "epochs must be an integer of at least 1"),
        (lambda: hop.loss(torch.zeros(0, 10), torch.zeros(0, 10)), "the loss of an empty batch is not defined"),
        (lambda: Row("HAM", (784, 10), lr=-1), "lr must be a positive number"),
        (lambda: Row("HAM", (784, -5, 10)), "must be an integer from 1"),
        (lambda: Row("HAM", (784, 10), even_odd="no"), "even_odd must be True or False"),
        (lambda: Row("CHN", (784, 9, 10), even_odd=True, readout="published"), "needs ten neurons in the last odd"),
        (lambda: configure("3-HAM", train_images=32), "train_images must be an integer from 64 to 60000, not 32"),
        (lambda: configure("3-HAM", batch_size=torch.zeros(0)), "batch_size must be an integer from 1 to 60000"),
        (lambda: configure("3-HAM", layers=[784, 10**11, 10]), "from 1 to 1000000"),
        (lambda: configure("5-HAM", layers=[784, 10**6, 10**6, 10**6, 10]), "2e.12 weights; at most 1e.09"),
        (lambda: configure("3-HAM", tol="0"), "tol must be a number from 0"),
        (lambda: configure("3-HAM", data=None), "unknown data set None"),
        (lambda: hop.EvenOdd(NET, X, float("nan")), "relaxation must be positive"),
        (lambda: hop.Synchronous(NET, X, "fast"), "relaxation must be positive"),
        (lambda: next(hop.Split(X, X, X).batches(True)), "the batch size must be an integer from 1 to 5, not True"),
        (lambda: hop.Conv(torch.zeros(2, 1, 2, 2), (4, 4), stride=-1), "stride must be an integer of at least 1"),
        (lambda: hop.dense(hop.HAM([3, 2, 2], links={(0, 2): hop.Dense(torch.zeros(2, 3))})), "a chain of dense links"),
        (lambda: hop.iterate(None, torch.zeros(1, 1), hop.Picard(), max_iter=0, tol=1e-4), "max_iter must be"),
        (lambda: hop.iterate(None, torch.zeros(1, 1), hop.Picard(), max_iter=5, tol=None), "tol must be"),
        (lambda: hop.trajectory(None, torch.zeros(1, 1), iterations="5"), "iterations must be an integer"),
        (
            lambda: hop.iterate(F, Z, hop.Picard(), max_iter=2, tol=0, early_stop="no"),
            "early_stop must be True or False",
        ),
        (
            lambda: hop.iterate(F, NET.zeros(5), hop.Picard(), max_iter=2, tol=0),
            r"of .5, 5. tensors, not \(5, 11\)",
        ),
        (lambda: hop.trajectory(F, Z[:4], iterations=2), r"of .5, 5. tensors, not \(4, 5\); it starts at f\.start"),
        (lambda: hop.solve(NET, X, max_iter=10**30), "max_iter must be an integer from 1 to 9223372036854775807"),
        (lambda: hop.Layer(NET, max_iter=0), "max_iter must be an integer of at least 1"),
        (lambda: hop.Layer(NET, hop.OverRelaxed()), r"update them in turns \(even_odd=True\)"),
        (lambda: NET.output(NET.zeros(5)[:, :3]), r"a state must be a tensor of shape \(batch, 11\), not \(5, 3\)"),
        (lambda: NET.layer(None, 1), "a state must be a tensor of shape .* not NoneType"),
        (lambda: hop.iterate(F, Z, hop.Picard(), max_iter=2, tol=0).output, "only solve.. knows the network"),
        (lambda: hop.residual(X, X[:2]), r"g has shape \(5, 7\), the value before it \(2, 7\)"),
        (lambda: NET.zeros(-1), "the batch size must be an integer of at least 0"),
        (lambda: NET.sweep(X, [[1], [1]]), r"blocks must have each of the layers \[1, 2\] once"),
        (lambda: NET.sweep(X, [1, 2]), r"blocks must have each of the layers \[1, 2\] once"),
        (lambda: NET.sweep(X, [[1.0], [2]]), r"blocks must have each of the layers \[1, 2\] once, not \[\[1\.0\]"),
        (lambda: NET.sweep(X, [["1"], [2]]), r"blocks must have each of the layers \[1, 2\] once"),
        (lambda: hop.HAM([3, 2], device="cpux"), "device must be one of torch's, .* not 'cpux'"),
        (lambda: hop.load_data("mnist", device=1.5), "device must be one of torch's"),
        (lambda: hop.load_data("mnist", download="yes"), "download must be True or False"),
        (lambda: hop.Conv(torch.zeros(2, 1, 3, 3), (2, 4)), "the image's height must be an integer from 3"),
        (lambda: hop.Conv(torch.zeros(2, 1, 0, 3), (4, 4)), "the kernel's height must be an integer of at least 1"),
        (lambda: hop.Madam([torch.full((2,), float("nan"))]), "the root mean square of a parameter must be finite"),
    ],
)
def test_numbers_and_choices(make, message):
    with pytest.raises(ValueError, match=message):
        make()


F, Z = hop.EvenOdd(NET, X), NET.zeros(5)[:, :5]


class NoSlope(hop.Activation):
    """ρ alone."""

    def rho(self, s, out=None):
        return torch.tanh(s, out=out)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hop.HAM([3, 2], rho=NoSlope()), "NoSlope must have a method drho"),
        (lambda: hop.HAM([3, 2], rho=["tanh", NoSlope()]), "NoSlope must have a method drho"),
        (lambda: hop.HAM([3, 2], rho=hop.Activation()), "Activation must have a method rho"),
        (lambda: hop.HAM([3, 2], links={(0, 1): torch.zeros(2, 3)}), r"the link \(0, 1\) must be a Link .* not Tensor"),
        (lambda: hop.solve("net", X), "net must be a network such as .* not str"),
        (lambda: hop.Layer(None), "net must be a network such as .* not NoneType"),
        (lambda: hop.Adjoint(solver="anderson"), "Adjoint's solver must be a solver such as .* not 'anderson'"),
        (lambda: hop.Then(hop.Picard(), "anderson"), "Then's second must be a solver"),
        (lambda: hop.solve(NET, X, hop.Anderson), r"solver must be .* Anderson\(\), not <class .*Anderson'>"),
        (lambda: hop.solve(NET, X, backward=hop.Adjoint), r"backward must be Adjoint\(\), .* not <class .*Adjoint'>"),
        (lambda: hop.iterate(None, torch.zeros(1, 1), None, max_iter=5, tol=0), "solver must be a solver .* not None"),
        (lambda: hop.trajectory(None, torch.zeros(1, 1), hop.Picard, iterations=2), "solver must be a solver"),
        (lambda: hop.EvenOdd(None, X), "net must be a network such as"),
        (lambda: hop.best_omega("net", X), "net must be a network such as"),
        (lambda: hop.dense(X), "net must be a network such as"),
        (lambda: hop.Synchronous(NET, X.tolist()), "x must be a dense torch tensor"),
        (lambda: NET.step(NET.zeros(5), X.long()), r"x has dtype torch\.int64"),
        (lambda: NET.flow(None, X), "the state must be a dense torch tensor"),
        (lambda: hop.residual(None, X), r"g must be a tensor \(batch, n\), not None"),
        (lambda: hop.Dense([[1.0]]), r"W must be a matrix \(n_b × n_a\), not \[\[1.0\]\]"),
        (lambda: hop.Dense(torch.zeros(2)), r"not a tensor \(2,\) of torch\.float32"),
        (lambda: hop.Conv(torch.zeros(2, 2), (4, 4)), "W must be of shape .channels of b"),
        (lambda: hop.Conv(torch.zeros(2, 1, 2, 2), 4), r"image must be a pair \(height, width\), not 4"),
        (lambda: hop.Dense(torch.eye(2).to_sparse()), r"of torch\.float32 and layout torch\.sparse_coo"),
        (lambda: hop.iterate(None, Z, hop.Picard(), max_iter=5, tol=0), "the map must be one such as EvenOdd"),
        (lambda: hop.iterate(F, Z[0], hop.Picard(), max_iter=5, tol=0), r"z must be a tensor \(batch, n\)"),
        (lambda: hop.Layer(NET, "anderson"), "solver must be a solver such as"),
        (lambda: hop.Layer(NET, evenodd=True), "unexpected keyword argument 'evenodd'"),
        (lambda: hop.Madam(NET), r"params must be parameters such as net\.parameters\(\)"),
        (lambda: hop.Madam([torch.arange(3)]), "a parameter must be a dense tensor of real numbers"),
        (lambda: hop.loss(X > 0, X > 0), "must be real numbers"),
        (lambda: hop.load_data("mnist", root=3), "root must be the path of a folder, not 3"),
        (lambda: Config("3-HAM"), r"row must be a Row, not '3-HAM'; configure\(\) finds one"),
        (lambda: hop.load_data("mnist", dtype=1.5), r"dtype must be torch\.float32 or torch\.float64, not 1\.5"),
        (lambda: NET.energy(torch.zeros(5, 11).numpy(), X), "the state must be a dense torch tensor .* not ndarray"),
        (lambda: NET.energy(torch.zeros(5, 11).to_sparse(), X), "the state must be a dense torch tensor"),
    ],
)
def test_objects(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("l", [0, 3, -3, True, 1.0, "1", None, [1], np.array([1, 2]), torch.tensor([1, 2])], ids=str)
def test_a_state_has_no_such_layer(l):
    with pytest.raises(IndexError, match=r"the state has layers 1…2 .* layer 0 is the input x"):
        NET.layer(NET.zeros(5), l)


def test_a_network_of_mixed_precision_is_refused():
    net, x = tiny(hop.HAM, [7, 6, 5], dtype=torch.float32)
    net.links[1].half()
    with pytest.raises(TypeError, match=r"a weight has dtype torch\.float16, the network torch\.float32"):
        hop.solve(net, x)


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("local_iterations", v) for v in (0, 2.5, True)), *(("local_damping", v) for v in (0, -1, float("nan"), None))],
)
def test_local_steps_that_lead_nowhere_are_refused(name, value):
    """Without a step, or with steps of no length, every state would look converged."""
    net, x = tiny(hop.CHN, [7, 6, 5])
    setattr(net, name, value)
    with pytest.raises(ValueError, match=f"{name} must be a.* not {value}"):
        hop.solve(net, x, even_odd=True)


def test_numbers_of_numpy_are_numbers():
    ours = configure("3-HAM", 1, layers=[784, 16, 10], epochs=2, train_images=640, tol=0.0)
    size, one, two, none = np.int64([16, 1, 2, 0])
    theirs = configure("3-HAM", one, layers=[784, size, 10], epochs=two, train_images=40 * size, tol=np.float32(none))
    assert theirs == ours
    assert theirs[0].fingerprint == ours[0].fingerprint
    assert json.dumps(hop.HAM([size, two]).layers) == "[16, 2]"


def test_an_empty_batch_takes_no_iterations():
    sol = hop.solve(NET, X[:0], max_iter=10**15)
    assert sol.evaluations == 0
    assert hop.solve(NET, X[:0], hop.Anderson(), max_iter=9, trace=True, early_stop=False).residuals.shape == (8, 0)


def test_andersons_options_have_names():
    with pytest.raises(TypeError, match="positional argument"):
        hop.Anderson(4)


def test_parameters_that_come_later_have_their_bound():
    first, second = (torch.nn.Parameter(torch.full((3,), v)) for v in (1.0, 2.0))
    optimizer = hop.Madam([first], p_scale=10.0)
    optimizer.add_param_group({"params": [second], "p_scale": 5.0})
    assert [optimizer.state[p]["bound"] for p in (first, second)] == [10.0, 10.0]
    for name, value in {"lr": float("nan"), "beta": 2, "g_bound": None, "p_scale": "1"}.items():
        with pytest.raises(ValueError, match=f"{name} must be a"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], name: value})
    assert len(optimizer.param_groups) == 2
    (first + second).sum().backward()
    optimizer.step()
    assert second[0] < 2


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
    below = sol.residual < 1e-4
    assert below[sol.converged].all()
    assert anderson or torch.equal(below, sol.converged)  # Anderson's map values may be near each other by chance
    finite = sol.status != hop.Status.NOT_FINITE
    assert sol.state[finite].isfinite().all()
