"""Whatever is given to the public API: a clear error that hoplib raises itself, or an answer that is no garbage.

100 examples of each kind here, 2,000 in `make attack`.
"""

import json
import math
import re
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from conftest import tiny
from hypothesis import given
from hypothesis import strategies as st

import hoplib as hop
from hoplib.experiment.batch import Plan
from hoplib.experiment.config import Config, configure
from hoplib.experiment.files import RunError
from hoplib.experiment.rows import ROWS, Row, choose

OURS = {Path(hop.__file__).parent, Path(hop.__file__).parent / "experiment", Path(__file__).parent}
OBSCURE = re.compile(
    "unhashable|unsupported operand|is not (iterable|subscriptable|callable)|has no attribute|not support"
)
SMALL, NUMBER = st.integers(1, 6), st.floats(1e-12, 2)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.lists(st.integers(-3, 9), max_size=4),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.builds(object),
    st.builds(torch.zeros, st.integers(0, 3)),
    st.complex_numbers(),
)
NO_COUNT = JUNK.filter(lambda v: not isinstance(v, int) or v < 1)  # a huge one is valid, and takes for ever
RHO = st.sampled_from(["shifted-sigmoid", "tanh", "relu", "hard-sigmoid"])


def perhaps(good, bad=JUNK):
    """A good value, three times of four."""
    return st.one_of(good, good, good, bad)


def some(**options):
    """Some of these options."""
    return st.fixed_dictionaries({}, optional=options)


def answer(call, *args, **options):
    """What it returns; None where it raises an error that names the problem, hoplib's own."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return call(*args, **options)
    except (ValueError, TypeError, RunError, hop.DataError) as e:
        error = e
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    assert where == "<string>" or Path(where).parent in OURS, f"raised in {where}: {error!r}"
    assert str(error)
    assert not OBSCURE.search(str(error)), repr(error)
    return None


@given(
    layers=perhaps(st.lists(SMALL, min_size=2, max_size=6)) | st.lists(perhaps(SMALL), max_size=5),
    options=some(
        rho=perhaps(
            st.one_of(
                RHO,
                st.builds(lambda name: answer(hop.Effective, name), perhaps(RHO)),
                st.lists(RHO, min_size=2, max_size=6),
            )
        ),
        seed=perhaps(st.integers(0, 2**63 - 1)),
        dtype=perhaps(st.sampled_from([torch.float32, torch.float64]), st.sampled_from([torch.int8, torch.float16])),
        links=perhaps(st.none(), st.dictionaries(st.tuples(SMALL, SMALL), st.builds(object), max_size=2) | JUNK),
    ),
    model=st.sampled_from([hop.HAM, hop.CHN]),
)
def test_networks(model, layers, options):
    net = answer(model, layers, **options)
    if net is not None:
        assert net.layers == tuple(layers)
        assert all(p.isfinite().all() for p in net.parameters())
        x = torch.ones(2, layers[0], dtype=net.b[0].dtype)
        assert net.step(net.zeros(2), x).shape == (2, sum(layers[1:]))


NET, X = tiny(hop.HAM, [3, 4, 2], batch=2, dtype=torch.float32)
OMEGA = perhaps(st.none() | NUMBER)
PICARD = st.builds(lambda w: answer(hop.Picard, w), OMEGA)
ANDERSON = st.builds(
    lambda options: answer(hop.Anderson, **options),
    some(
        relaxation=OMEGA,
        m=perhaps(SMALL),
        mu=perhaps(st.floats(0, 1)),
        relative=perhaps(st.booleans()),
        safeguard=perhaps(st.booleans()),
    ),
)
OVER = st.builds(lambda w: answer(hop.OverRelaxed, w), OMEGA)
PLAIN = PICARD | ANDERSON | OVER
THEN = st.builds(
    lambda a, b, options: answer(hop.Then, a, b, **options),
    PLAIN,
    PLAIN,
    some(at=perhaps(NUMBER), steps=perhaps(SMALL, NO_COUNT), even_odd=perhaps(st.none() | st.booleans())),
)
BACKWARD = st.one_of(
    st.just(hop.ThroughTime()),
    st.builds(
        lambda options: answer(hop.Adjoint, **options),
        some(
            steps=perhaps(st.none() | SMALL, NO_COUNT),
            solver=perhaps(PLAIN),
            tol=perhaps(NUMBER),
            max_iter=perhaps(SMALL, NO_COUNT),
        ),
    ),
    st.builds(
        lambda options: answer(hop.RecurrentBackprop, **options),
        some(steps=perhaps(st.none() | SMALL, NO_COUNT), closed_form=perhaps(NUMBER)),
    ),
)


@st.composite
def problems(draw):
    """A network with weights of any size, and what is asked of it."""
    layers = draw(st.lists(SMALL, min_size=2, max_size=5))
    scale, batch = 10 ** draw(st.floats(-3, 6)), draw(st.integers(0, 4))
    net, x = tiny(
        draw(st.sampled_from([hop.HAM, hop.CHN])), layers, scale=scale, batch=batch, dtype=torch.float32, rho=draw(RHO)
    )
    x = draw(
        perhaps(
            st.floats(-1e30, 1e30).map(lambda a: a * x),
            st.sampled_from([x[:, :0], x.double(), x[None], x / 0, x.half(), x.to_sparse(), x.tolist(), x.numpy()])
            | JUNK,
        )
    )
    s0 = torch.full((batch, net.N), draw(st.floats(width=32)))
    options = draw(
        some(
            even_odd=perhaps(st.booleans()),
            tol=perhaps(NUMBER | st.just(0)),
            max_iter=perhaps(st.integers(1, 12), NO_COUNT),
            early_stop=perhaps(st.booleans()),
            trace=perhaps(st.booleans()),
            s0=perhaps(st.none() | st.just(s0)),
            backward=perhaps(BACKWARD),
        )
    )
    return net, x, draw(perhaps(PLAIN | THEN)), options


@given(problems())
def test_solutions(problem):
    net, x, solver, options = problem
    sol = answer(hop.solve, net, x, solver, **options)
    if sol is None:
        return
    tol = max(options.get("tol", 1e-4), solver.at if isinstance(solver, hop.Then) else 0)
    even_odd = options.get("even_odd", hop.relaxation.automatic(net)[1] if solver is None else False)
    most = options.get("max_iter") or hop.paper.max_iter(net, even_odd)
    batch, met = len(x), sol.converged
    assert sol.state.shape == (batch, net.N)
    assert sol.iterations.shape == sol.status.shape == sol.residual.shape == (batch,)
    assert set(sol.status.tolist()) <= set(hop.Status)
    assert ((sol.iterations >= 0) & (sol.iterations < most)).all()
    if options.get("early_stop", True):
        assert (sol.residual[met] < tol).all(), "converged to no less than the criterion"
        assert sol.state[met].isfinite().all(), "converged to something that is not finite"
    if options.get("trace"):
        assert sol.residuals.shape == (most - 1, batch)
    assert "Solution" in repr(sol)
    if options.get("backward") is not None and batch:
        answer(sol.output.sum().backward)
        assert all(p.grad is None or p.grad.shape == p.shape for p in net.parameters())


@given(
    options=some(
        lr=perhaps(NUMBER),
        beta=perhaps(st.floats(0, 0.999)),
        g_bound=perhaps(NUMBER),
        p_scale=perhaps(st.floats(1, 100)),
        fused=perhaps(st.just(False), JUNK.filter(lambda v: v is not True)),
    ),
    epochs=perhaps(SMALL),
    gradient=st.floats(-1e15, 1e15),
)
def test_the_optimizer(options, epochs, gradient):
    net = hop.HAM([3, 2], seed=0, device="cpu")
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = answer(hop.Madam, net.parameters(), **options)
    schedule = optimizer and answer(hop.linear_decay, optimizer, epochs)
    if schedule:
        for p in net.parameters():
            p.grad = torch.full_like(p, gradient)
        optimizer.step()
        schedule.step()
        for p, old in zip(net.parameters(), before, strict=True):
            assert p.isfinite().all()
            assert (p.sign() * old.sign() >= 0).all()


CALLS = {
    "updates of no network": lambda v: hop.EvenOdd(v, X),
    "updates on any input": lambda v: hop.Synchronous(NET, v),
    "relaxed updates": lambda v: hop.EvenOdd(NET, X, v),
    "a step from any state": lambda v: NET.step(v, X),
    "a step on any input": lambda v: NET.flow(NET.zeros(2), v),
    "an energy": lambda v: NET.energy(v, v),
    "a trajectory": lambda v: hop.trajectory(hop.EvenOdd(NET, X), NET.zeros(2)[:, :2], v, iterations=2),
    "an iteration": lambda v: hop.iterate(hop.EvenOdd(NET, X), NET.zeros(2)[:, :2], v, max_iter=2, tol=0.1),
    "an omega of no network": lambda v: hop.best_omega(v, X),
    "an omega on any input": lambda v: hop.best_omega(NET, v),
    "matrices": lambda v: hop.dense(v),
    "a dense link": lambda v: hop.Dense(v),
    "a convolution": lambda v: hop.Conv(v, (2, 2)),
    "a layer": lambda v: hop.Layer(v),
    "a layer on any input": lambda v: hop.Layer(NET)(v),
    "a solver": lambda v: hop.Layer(NET, v)(X),
    "a gradient": lambda v: hop.Layer(NET, backward=v)(X),
    "batches": lambda v: next(hop.Split(X, X, X).batches(v)),
    "an activation": lambda v: hop.ExactCHN([3, 2], rho=v),
    "an output": lambda v: NET.output(v),
    "a residual": lambda v: hop.residual(X, v),
    "zeros": lambda v: NET.zeros(min(v, 9) if isinstance(v, int) and v is not True else v),
    "blocks": lambda v: NET.sweep(X, v),
    "any map": lambda v: hop.iterate(v, NET.zeros(2)[:, :2], hop.Picard(), max_iter=2, tol=0.1),
    "from anywhere": lambda v: hop.iterate(hop.EvenOdd(NET, X), v, hop.Picard(), max_iter=2, tol=0.1),
    "a layer's options": lambda v: hop.Layer(NET, max_iter=v, tol=v),
    "an image": lambda v: hop.Conv(torch.zeros(1, 1, 2, 2), v),
    "a device": lambda v: hop.HAM([2, 2], device="cpu" if isinstance(v, int) else v),
    "a folder": lambda v: hop.load_data("mnist", root=v, download=v),
    "parameters that come later": lambda v: hop.Madam([NET.W[0]]).add_param_group({"params": [NET.W[1]], "lr": v}),
}


@given(JUNK | st.sampled_from([hop.HAM, hop.Picard, hop.Anderson, hop.Adjoint, hop.Then, hop.Tanh]))
@pytest.mark.parametrize("name", CALLS)
def test_the_rest(name, value):
    found = answer(CALLS[name], value)
    if isinstance(found, torch.Tensor):
        assert found.isfinite().all()


@given(
    *(perhaps(st.builds(torch.zeros, st.integers(0, 2), st.integers(1, 2)), JUNK) for _ in range(2)),
    perhaps(st.sampled_from(["mnist", "emnist"]).filter(lambda name: name == "emnist")),
)
def test_the_loss_and_the_data(y_hat, y, name):
    value = answer(hop.loss, y_hat, y)
    assert value is None or value.isfinite()
    assert answer(hop.load_data, name, root="/nowhere") is None


LAYERS = perhaps(st.lists(SMALL, max_size=3).map(lambda hidden: [784, *hidden, 10]), st.lists(perhaps(SMALL)) | JUNK)


@given(
    fields=st.fixed_dictionaries(
        {"model": perhaps(st.sampled_from(["HAM", "CHN"])), "layers": LAYERS},
        optional={
            "solver": perhaps(st.sampled_from(["picard", "anderson"])),
            "even_odd": perhaps(st.booleans()),
            "lr": perhaps(NUMBER),
            "epoch": perhaps(st.integers(1, 10)),
            "readout": perhaps(st.sampled_from(["output", "published"])),
        },
    ),
    sizes=some(
        seed=perhaps(st.integers(0, 9)),
        data=perhaps(st.sampled_from(["mnist", "emnist"])),
        train_images=perhaps(st.integers(64, 60_000)),
        test_images=perhaps(st.integers(1, 10_000)),
        batch_size=perhaps(st.integers(1, 64)),
        tol=perhaps(st.floats(0, 9e-5)),
    ),
    name=perhaps(st.sampled_from([*ROWS])),
    layers=LAYERS,
    epochs=perhaps(st.integers(1, 10)),
)
def test_rows_and_configurations(fields, sizes, name, layers, epochs):
    row = answer(Row, **fields)
    config = row and answer(Config, row, **sizes)
    if config:
        assert Config(row, **sizes).fingerprint == config.fingerprint
        assert "/" not in config.name
        assert len(config.name) < 200
        assert all(math.isfinite(v) for v in config.settings().values() if isinstance(v, float))
    found = answer(configure, name, layers=layers, epochs=epochs, **sizes)
    if found:
        assert all(1 <= epoch <= 10 for epoch in found[1].values())
    answer(choose, name, layers=layers)


WORD = st.text(max_size=8) | st.sampled_from(["3-HAM", "3-*", "0 1", "784 16 10", "1e-6", "2", "mnist"]) | JUNK


@given(
    st.dictionaries(st.sampled_from(["rows", "seeds", "data", "layers", "epochs", "tol", "train_images", "x"]), WORD)
)
def test_plans(options):
    plan = answer(Plan.parse, options)
    if plan:
        assert all(job.rows for job in plan.jobs())
        assert Plan.parse(dict(word[2:].split("=", 1) for word in plan.arguments() if "images" not in word))


def test_an_obscure_error_would_be_seen():
    """The stand-ins fail: an error from elsewhere, one without words, one that no reader understands."""

    def silent():
        raise ValueError

    for call in (lambda: json.loads("x"), silent, lambda: {}[[]], lambda: 1 / 0):
        with pytest.raises((AssertionError, ZeroDivisionError)):
            answer(call)
