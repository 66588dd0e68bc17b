"""What the benchmark compares is the same computation: both routes of every row, and all of a step's products."""

import json
from copy import deepcopy
from dataclasses import replace

import automatic  # benchmarks/automatic.py, and so on
import descent
import forward
import peer
import published
import pytest
import torch
import training as bench
import weights
from tqdm import tqdm

import hoplib as hop
from hoplib.experiment.config import Config
from hoplib.experiment.files import load_network
from hoplib.experiment.rows import ROWS, TRAININGS, get_row, select
from hoplib.experiment.train import Training
from hoplib.teaching import thresholds


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


def test_the_weights_are_those_of_the_epoch_or_of_the_end(tmp_path):
    """Of the row's own training first, of any seed; of another solver's only for a HAM; the committed ones last."""
    kept, committed = tmp_path / "kept", tmp_path / "committed"
    names = "5-HAM/seed-2-epoch-5", "5-HAM-EO/seed-1", "3-CHN-DEQ/seed-0", "3-CHN/seed-0-epoch-1"
    half = "3-CHN-EO-seed-0-half", "5-HAM-EO-seed-0-half", "7-HAM-EO-seed-0-half"
    for path in [*(kept / f"{n}.safetensors" for n in names), *(committed / f"{n}.safetensors" for n in half)]:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()

    def found(name, epoch, **options):
        path = weights.find(get_row(name), epoch, kept, committed=committed, **options)
        return path and str(path.relative_to(tmp_path)).removesuffix(".safetensors")

    assert found("5-HAM", 5) == "kept/5-HAM/seed-2-epoch-5"
    assert found("5-HAM", 10) == found("5-HAM-OR", 10) == "kept/5-HAM-EO/seed-1"
    assert found("3-CHN-DEQ", 10) == found("3-CHN-DEQ", 5) == "kept/3-CHN-DEQ/seed-0"  # it ends after 4
    assert found("3-CHN", 1) == "kept/3-CHN/seed-0-epoch-1"
    assert found("3-CHN", 10) is None
    assert found("3-CHN", 10, any_solver=True) == "kept/3-CHN-DEQ/seed-0"
    assert found("3-CHN-EO", 10) == "committed/3-CHN-EO-seed-0-half"
    assert found("3-CHN-EO-published", 10) is None
    assert found("7-HAM-OR", 10) == "committed/7-HAM-EO-seed-0-half"
    assert found("7-HAM-OR", 5) is None
    assert found("3-ExactCHN-OR", 10) is None
    smaller = replace(get_row("5-HAM-EO"), layers=(784, 320, 127, 50, 10))  # a row of the same name, other sizes
    assert weights.find(smaller, 10, kept, committed=committed) is None


def test_the_committed_weights_are_found_where_no_training_has_left_any(tmp_path):
    for name in ("3-HAM-OR", "5-HAM-DEQ", "7-HAM", "3-CHN-EO"):
        assert load_network(weights.find(get_row(name), folder=tmp_path), "cpu").layers == get_row(name).layers


def test_the_whole_table_counts_every_row_by_its_steps():
    steps = {
        "a": {"fast": 1.0, "straightforward": 4.0, "epochs": 10},
        "b": {"fast": 2.0, "straightforward": 2.0, "epochs": 4},
    }
    table = bench.whole_table(steps)
    assert table["ratio"] == pytest.approx((10 * 4 + 4 * 2) / (10 * 1 + 4 * 2))
    assert table["fast_hours"] == pytest.approx(18 * bench.STEPS / 3600)


def test_every_over_relaxed_depth_and_the_chn_stand_against_the_paper_s_base():
    assert {"3-HAM-OR", "5-HAM-OR", "7-HAM-OR", "3-ExactCHN-OR"} == bench.BASES.keys()
    for name, base in bench.BASES.items():
        row, paper = get_row(name), get_row(base)
        assert row.solver == "over-relaxed"
        assert row.layers == paper.layers
        assert (paper.solver, paper.even_odd) == ("picard", False)


def test_inference_to_a_true_error_of_both_routes():
    """Both are within the error, and neither would be with a coarser tolerance or with an iteration less."""
    data = hop.load_data("mnist", device="cpu")
    here = bench.Bench(data, 0, 0.0, 8, False, weights.WEIGHTS, 10, tqdm(disable=True))
    found = here.to_true_error(get_row("3-HAM-OR"), get_row("3-HAM"), 8)
    net, x = load_network(weights.find(get_row("3-HAM")), "cpu").requires_grad_(False), data.test.x[:8]
    exact, way = deepcopy(net).double(), peer.ours(net, hop.OverRelaxed(), True)
    coarser = peer.TOLERANCES[peer.TOLERANCES.index(found["tolerance"]) - 1]
    assert peer.within(exact, way(x, found["tolerance"])[0], x)
    assert not peer.within(exact, way(x, coarser)[0], x)
    for n, enough in ((found["iterations"], True), (found["iterations"] - 1, False)):
        state = hop.solve(net, x, hop.Picard(), even_odd=False, max_iter=n, early_stop=False).state
        assert peer.within(exact, state, x) == enough
    assert found["ratio"] == pytest.approx(found["straightforward"] / found["fast"])


def test_one_file_keeps_the_numbers_of_both_benchmarks(tmp_path):
    path = tmp_path / "bench.json"
    forward.save(path, {"forward": 1}, keep=forward.BESIDE)
    forward.save(path, {"epochs": 2, "true_error": 3}, keep=["forward"])
    forward.save(path, {"forward": 4}, keep=forward.BESIDE)
    assert json.loads(path.read_text()) == {"epochs": 2, "true_error": 3, "forward": 4}


def test_the_way_chosen_by_itself_against_plain_even_odd_updates():
    net, x = (
        load_network(weights.find(get_row("7-HAM")), "cpu").requires_grad_(False),
        hop.load_data("mnist").test.x[:4],
    )
    found = automatic.measure(net, [x], 0.0)
    assert found["rounds"] == 2
    assert found["iterations_automatic"] < 0.7 * found["iterations_plain"]
    assert found["time_ratio"] > 0


def test_random_networks_cannot_raise_the_energy():
    found = descent.measure(8)
    assert found["networks_that_rise"] == 0 < found["networks_that_rise_without_the_clip"]
    assert found["largest_rise_in_roundings"] < 1
    assert 0 < sum(found["elsewhere"]) < sum(found["settled_both_ways"]) <= 8 * descent.SAMPLES


def test_the_first_steps_as_published_are_those_of_the_training():
    data = hop.load_data("mnist", device="cpu")
    found = published.first_epoch("3-CHN-EO-published", 0, 2, data, 1e-6)
    assert found["steps"] == 2
    assert 0.1 < found["longest gradient"] < published.LONG
    assert found["first long gradient"] is None
    assert found["largest field"] < thresholds(hop.ShiftedSigmoid())[1]
    assert found["fields beyond"] == 0
