"""What the benchmark compares is the same computation: both routes of every row, and all of a step's products."""

from dataclasses import replace

import descent  # benchmarks/descent.py
import published  # benchmarks/published.py
import pytest
import torch
import training as bench  # benchmarks/training.py

import hoplib as hop
from hoplib import paper
from hoplib.experiment.config import Config
from hoplib.experiment.rows import ROWS, TRAININGS, get_row, select
from hoplib.experiment.train import Training


@pytest.mark.parametrize("name", select([]))
def test_both_routes_of_a_row_compute_the_same(name):
    assert bench.check(ROWS[TRAININGS[name][-1]]) < bench.TOLERANCE


def test_every_product_is_counted_those_of_autograd_too():
    a, b, c = torch.rand(2, 3, requires_grad=True), torch.rand(3, 5, requires_grad=True), torch.rand(5)
    with bench.Recorder() as recorder:
        torch.addmm(c, a, b).sum().backward()
    assert sorted((l.shape, r.shape) for l, r in recorder.log) == [((2, 3), (3, 5)), ((2, 5), (5, 3)), ((3, 2), (2, 5))]
    assert bench.multiply_adds(recorder.log) == 3 * 30
    bench.Products(torch.device("cpu")).run(recorder.log)


def test_a_product_is_made_again_as_it_lay_in_memory():
    a, b = torch.rand(3, 2).T, torch.rand(3, 5)
    with bench.Recorder() as recorder:
        a @ b
    ((left, right),) = recorder.log
    assert left.make(a.device).stride() == a.stride()
    assert right.make(b.device).stride() == b.stride()


@pytest.mark.parametrize("gain", [0.5, 2.0])
@pytest.mark.parametrize("name", select([]))
def test_to_the_letter_is_to_the_letter(name, gain):
    """With tol = 0 loss and gradients are those of the paper's equations, also where samples do not converge."""
    row = get_row(name)
    config = Config(replace(row, layers=bench.SMALL[len(row.layers)]), tol=0.0)
    training = Training(config, device=torch.device("cpu"))
    net = training.net.double()
    with torch.no_grad():
        for w in net.W:
            w.mul_(gain)
    x = torch.rand(8, 784, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.eye(10, dtype=torch.float64)[:8]
    value, gradients = bench.straightforward(training).gradients(x, y)
    loss = training.gradients(x, y)[2]
    assert bench.difference([loss, *(p.grad for p in net.parameters())], [value, *gradients]) < 1e-9


def test_the_weights_are_those_of_the_epoch_or_the_last_before(tmp_path):
    """Of the row's own training first, of any seed; of another solver's only for a HAM."""
    bench_of = {e: bench.Bench(None, 0, 0, 64, False, tmp_path, e, None) for e in (1, 5, 10)}
    for name in ("5-HAM/seed-2-epoch-5", "5-HAM-EO/seed-1", "3-CHN-DEQ/seed-0", "3-CHN/seed-0-epoch-1"):
        path = tmp_path / f"{name}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.touch()

    def found(name, epoch):
        path = bench_of[epoch].found(get_row(name))
        return path and f"{path.parent.name}/{path.stem}"

    assert found("5-HAM", 5) == "5-HAM/seed-2-epoch-5"
    assert found("5-HAM", 10) == found("5-HAM-OR", 10) == "5-HAM-EO/seed-1"
    assert found("3-CHN-DEQ", 10) == found("3-CHN-DEQ", 5) == "3-CHN-DEQ/seed-0"  # it ends after 4
    assert found("3-CHN", 1) == "3-CHN/seed-0-epoch-1"
    assert found("3-CHN", 10) is None
    assert found("3-CHN-EO", 10) is None


def test_random_networks_cannot_raise_the_energy():
    found = descent.measure(8)
    assert found["networks_that_rise"] == 0 < found["networks_that_rise_without_the_clip"]
    assert found["largest_rise_in_roundings"] < 1
    assert 0 < sum(found["elsewhere"]) < sum(found["settled_both_ways"]) <= 8 * descent.SAMPLES


def test_beyond_the_threshold_a_neuron_does_not_come_to_rest():
    rho = hop.ShiftedSigmoid()
    h = published.threshold(rho) * torch.tensor([0.98, 1.02], dtype=torch.float64)
    s = torch.full_like(h, 0.5)
    for _ in range(5000):
        before, s = s, torch.lerp(s, rho.drho(s) * h, paper.DAMPING)
    moved = (s - before).abs()
    assert moved[0] < 1e-9 < 1e-2 < moved[1]


def test_the_first_steps_as_published_are_those_of_the_training():
    data = hop.load_data("mnist", device="cpu")
    found = published.first_epoch("3-CHN-EO-published", 0, 2, data, {})
    assert found["steps"] == 2
    assert 0.1 < found["longest gradient"] < published.LONG
    assert found["first long gradient"] is None
    assert found["largest field"] < published.threshold(hop.ShiftedSigmoid())
    assert found["fields beyond"] == 0
