"""What is measured is what is said: the paper's counts, every way of solving, and the rate of convergence."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import DEPTHS, tiny
from test_train import run, small

import hoplib as hop
from hoplib import paper
from hoplib.experiment import measure
from hoplib.experiment.measure import FALSE, LOOK, RADII, WAYS
from hoplib.experiment.rows import MODELS, SOLVERS, get_row


@pytest.fixture(scope="module")
def data():
    return hop.load_data("mnist", device="cpu")


def double(data):
    return replace(data, test=replace(data.test, x=data.test.x.double()))


def cycling():
    """A CHN whose local steps fall into cycles of length 2, and its row."""
    row = replace(get_row("3-CHN-EO"), layers=(784, 12, 10))
    net = hop.CHN(row.layers, seed=0, device="cpu")
    with torch.no_grad():
        net.W[0].mul_(3)
    return net, row


class TestEvaluate:
    @pytest.mark.parametrize("row", ["3-HAM", "3-HAM-EO-DEQ", "3-CHN", "3-CHN-EO"])
    def test_it_counts_as_the_paper_does(self, row, data):
        """Against a loop over samples and iterations that follows the protocol word by word."""
        row = replace(get_row(row), layers=(784, 12, 10))
        net = MODELS[row.model](row.layers, seed=0, device="cpu", dtype=torch.float64)
        data = double(data)
        numbers, arrays = measure.evaluate(net, row, data, images=40, batch=25)
        x, n = data.test.x[:40], paper.max_iter(net, row.even_odd)
        with torch.no_grad():
            f = (hop.EvenOdd if row.even_odd else hop.Synchronous)(net, x, paper.relaxation(net, row.even_odd))
            values = hop.trajectory(f, f.start(), SOLVERS[row.solver], iterations=n)
            last = f.join(values[-1])
        residuals = torch.stack([(b - a).norm(dim=1) / b.norm(dim=1) for a, b in pairwise(values)])
        counts = []
        for sample in residuals.T.tolist():
            below = [i for i, r in enumerate(sample) if r < 1e-4]
            counts.append(below[0] if below else n - 1)
        assert arrays["iterations"].tolist() == counts
        assert numbers["iterations_mean"] == pytest.approx(np.mean(counts))
        assert numbers["iterations_std"] == pytest.approx(np.std(counts))
        assert numbers["not_converged"] == np.mean([c == n - 1 for c in counts])
        predicted = net.layer(last, -1).argmax(1)
        assert arrays["predicted"].tolist() == predicted.tolist()
        assert numbers["test_accuracy"] == (predicted == data.test.label[:40]).double().mean()
        assert numbers["criteria"]["0.0001"] == numbers["iterations_mean"]
        assert list(numbers["criteria"]) == [f"{c:.3g}" for c in measure.CRITERIA]
        for k, values in enumerate(residuals.log10().numpy()):
            assert arrays["histogram"][k].tolist() == np.histogram(values, measure.BINS)[0].tolist()

    def test_the_error_of_the_equation_is_kept_to_a_tenth_of_a_decade(self, data):
        net, row = cycling()
        numbers, arrays = measure.evaluate(net, row, data, images=40)
        x = data.test.x[:40]
        state = hop.solve(net, x, even_odd=True, early_stop=False).state
        error = hop.residual(net.step(state, x), state).detach()
        assert np.abs(arrays["equation_error"] - 10 * error.log10().numpy()).max() <= 0.5 + 1e-3
        assert numbers["equation_error"]["max"] == pytest.approx(error.max().item(), rel=1e-4)

    def test_convergence_to_no_equilibrium_is_counted(self, data):
        """An even number of local steps leads once around a cycle of length 2: a sweep rests where no neuron does."""
        net, row = cycling()
        numbers, arrays = measure.evaluate(net, row, data, images=40)
        met = arrays["iterations"] < paper.max_iter(net, True) - 1
        false = met & (arrays["equation_error"] > 10 * np.log10(FALSE))
        assert 0 < numbers["false_convergence"] == false.mean()

    def test_a_contraction_converges_to_its_equilibrium(self, data):
        row = replace(get_row("3-HAM-EO"), layers=(784, 12, 10))
        net, _ = tiny(hop.HAM, row.layers, scale=0.1)
        numbers, _ = measure.evaluate(net, row, double(data), images=40)
        assert numbers["not_converged"] == numbers["false_convergence"] == 0


class TestCross:
    @pytest.mark.parametrize("name", WAYS)
    def test_each_way_is_a_solve(self, name, data):
        """An early end changes no count: each way gives what `solve` counts in all its iterations."""
        net = hop.HAM([784, 12, 10], seed=0, device="cpu", dtype=torch.float64)
        data = double(data)
        row = replace(get_row("3-HAM"), layers=(784, 12, 10))
        numbers, arrays, seconds = measure.cross(net, row, data, images=30)
        (even_odd, solver), x = WAYS[name], data.test.x[:30]
        with torch.no_grad():
            sol = hop.solve(net, x, solver, even_odd=even_odd, early_stop=False, trace=True)
            early = hop.solve(net, x, solver, even_odd=even_odd).state
        below = sol.residuals < paper.TOL
        counts = torch.where(below.any(0), below.int().argmax(0), paper.max_iter(net, even_odd) - 1)
        error = hop.residual(net.step(early, x), early)
        assert arrays["cross_iterations"][list(WAYS).index(name)].tolist() == counts.tolist()
        assert numbers[name] == {
            "iterations": counts.double().mean(),
            "not_converged": (~below.any(0)).double().mean(),
            "not_finite": 0,
            "false_convergence": (below.any(0) & (error > FALSE)).double().mean(),
            "accuracy": (net.layer(early, -1).argmax(1) == data.test.label[:30]).double().mean(),
        }
        assert seconds[name] >= 0

    @pytest.mark.parametrize("name", ["3-HAM", "3-HAM-EO", "3-HAM-DEQ", "3-HAM-EO-DEQ"])
    def test_the_rows_own_way_is_its_measurement(self, name, data):
        row = replace(get_row(name), layers=(784, 12, 10))
        net = hop.HAM(row.layers, seed=0, device="cpu")
        way = ("even-odd" if row.even_odd else "synchronous") + ", Anderson" * (row.solver == "anderson")
        _, arrays = measure.evaluate(net, row, data, images=60)
        _, crossed, _ = measure.cross(net, row, data, images=60)
        assert crossed["cross_iterations"][list(WAYS).index(way)].tolist() == arrays["iterations"].tolist()


class TestSpectralRadius:
    @pytest.mark.parametrize("depth", [3, 4, 5])
    @pytest.mark.parametrize("scale", [0.5, 1.0])
    def test_it_is_the_largest_eigenvalue_of_autograds_jacobian(self, depth, scale):
        net, x = tiny(hop.HAM, DEPTHS[depth], scale=scale)
        radii = measure.spectral_radius(net, x)
        for i in range(len(x)):
            f = hop.EvenOdd(net, x[i : i + 1])
            z = f.cut(hop.solve(net, x[i : i + 1], even_odd=True, tol=1e-12, max_iter=2000).state.detach())
            jacobian = torch.autograd.functional.jacobian(f, z)[0, :, 0]
            assert radii[i].item() == pytest.approx(torch.linalg.eigvals(jacobian).abs().max().item(), rel=1e-7)

    def test_more_steps_change_nothing(self):
        """Lanczos' method has found the largest eigenvalue of a network much larger than its number of steps."""
        net, x = tiny(hop.HAM, [784, 120, 100, 90, 10])
        radii = measure.spectral_radius(net, x)
        torch.testing.assert_close(radii, measure.spectral_radius(net, x, steps=100), rtol=1e-9, atol=0)

    def test_the_network_is_left_as_it_was(self):
        net, x = tiny(hop.HAM, DEPTHS[3], dtype=torch.float32)
        before = [p.clone() for p in net.parameters()]
        measure.spectral_radius(net, x)
        for a, b in zip(before, net.parameters(), strict=True):
            assert a.dtype == b.dtype == torch.float32
            assert torch.equal(a, b)


class TestRecord:
    """The numbers of a record agree with each other and with its arrays."""

    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, tmp_path_factory, data):
        (path,) = run(tmp_path_factory.mktemp("run"), data=data, epochs=1, test_images=1200)
        with np.load(path.with_suffix(".npz")) as arrays:
            return json.loads(path.read_text()), {k: arrays[k] for k in arrays.files}

    def test_the_last_epoch_was_looked_at_as_the_record_was_measured(self, found, data):
        record, arrays = found
        config, _ = small(epochs=1, test_images=1200)
        last = paper.max_iter(MODELS[config.row.model](config.row.layers, device="meta"), True) - 1
        first = {k: arrays[k][:LOOK] for k in ("iterations", "predicted", "equation_error")}
        met = first["iterations"] < last
        history = record["history"][-1]
        assert len(first["iterations"]) == LOOK < len(arrays["iterations"])
        assert history["test_accuracy"] == (first["predicted"] == data.test.label[:LOOK].numpy()).mean()
        assert history["test_iterations"] == first["iterations"].mean()
        assert history["test_not_converged"] == (~met).mean()
        assert history["test_false_convergence"] == (met & (first["equation_error"] > 10 * np.log10(FALSE))).mean()

    def test_its_numbers_follow_from_its_arrays(self, found, data):
        record, arrays = found
        assert record["test_accuracy"] == (arrays["predicted"] == data.test.label[:1200].numpy()).mean()
        assert record["iterations_mean"] == pytest.approx(arrays["iterations"].mean())
        assert record["cross"]["even-odd"]["iterations"] == pytest.approx(arrays["iterations"][:LOOK].mean())
        assert arrays["spectral_radius"].shape == (RADII,)
        assert record["spectral_radius"]["median"] == pytest.approx(np.median(arrays["spectral_radius"]), rel=1e-6)
        assert arrays["histogram"][0].sum() == 1200
