"""The table is the paper's, a training step is what it claims to be, and a run survives what can happen to it."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import tiny
from filelock import FileLock

import hoplib as hop
from hoplib import paper
from hoplib.experiment import rows as rows_module
from hoplib.experiment import train
from hoplib.experiment.config import Config, configure
from hoplib.experiment.files import RunError, load_network, write_checkpoint
from hoplib.experiment.measure import readout
from hoplib.experiment.rows import BEYOND, MODELS, ROWS, SOLVERS, TRAININGS, Row, choose, get_row, select
from hoplib.experiment.run import can_compile, load_checkpoint
from hoplib.experiment.run import run as train_to_record

SMALL = {"layers": (784, 16, 10), "train_images": 640, "test_images": 200}
WEIGHTS = Path(__file__).parent.parent / "results" / "weights"
DEEP = [(784, 16, 10), (784, 20, 12, 8, 10)]


@pytest.fixture(scope="module")
def data():
    return hop.load_data("mnist", device="cpu")


def small(row="3-HAM-EO", epochs=2, **changes):
    return configure(row, epochs=epochs, **{**SMALL, **changes})


def run(folder, row="3-HAM-EO", epochs=2, data=None, report=lambda _: None, **changes):
    config, rows = small(row, epochs, **changes)
    return train_to_record(
        config, rows, folder / "runs", folder / "checkpoints", device="cpu", data=data, report=report
    )


def timeless(path):
    """A record's content but for its times, and the digest that covers them."""
    record = json.loads(Path(path).read_text())
    times = ("seconds", "cpu_seconds", "sha256")
    history = [{k: v for k, v in epoch.items() if k not in times} for epoch in record["history"]]
    return {**{k: v for k, v in record.items() if k not in times}, "history": history}


def same(a, b):
    """Equal but for the times; with equal arrays, whose digest the records hold."""
    return timeless(a) == timeless(b)


def checkpoint_of(folder, **changes):
    """Where a run of that kind keeps its checkpoint."""
    config, _ = small(**changes)
    return folder / "checkpoints" / config.name / f"seed-{config.seed}.pt"


class TestTable:
    def test_it_has_the_papers_rows(self):
        assert len([r for r in ROWS.values() if r.readout == "output"]) == 17
        assert len(ROWS) == 19
        assert len(TRAININGS) == 18 + len(BEYOND)
        assert not {*BEYOND} & {*ROWS}
        assert TRAININGS["3-CHN"] == ["3-CHN-3-epochs", "3-CHN"]
        assert {r.epoch for r in ROWS.values()} == {3, 4, 10}

    def test_the_networks_have_the_papers_size(self):
        """2000 neurons of state in every network, 10 of them the output."""
        assert {sum(layers[1:]) for layers in paper.LAYERS.values()} == {2000}
        assert {layers[-1] for layers in paper.LAYERS.values()} == {10}

    def test_its_speedups_follow_from_its_iterations(self):
        """Base iterations / iterations, an even-odd CHN iteration counting 20: the data are typed in right."""
        base = {"3-CHN": "3-CHN-3-epochs", "3-HAM": "3-HAM", "5-HAM": "5-HAM", "7-HAM": "7-HAM"}
        for row in ROWS.values():
            reference = ROWS[base[f"{len(row.layers)}-{row.model}"]].published
            weight = 20 if row.model == "CHN" and row.even_odd else 1
            ours = reference.iterations / (row.published.iterations * weight)
            assert ours == pytest.approx(row.published.speedup, abs=0.06)

    def test_the_schedule_is_kept_by_rows_that_stop_early(self, data):
        config, _ = small("3-CHN-DEQ")
        training = train.Training(config, torch.device("cpu"))
        rates = []
        for _ in range(4):
            rates.append(training.optimizer.param_groups[0]["lr"])
            training.optimizer.step()
            training.schedule.step()
        assert rates == pytest.approx([0.01 * (1 - 0.9 * e / 9) for e in range(4)])

    @pytest.mark.parametrize(
        ("names", "count"),
        [([], 18), (["3-HAM*"], 5), (["3-CHN-3-epochs", "3-CHN"], 1), (["5-HAM", "7-HAM*"], 6), (["*-OR"], 6)],
    )
    def test_a_selection_is_a_set_of_trainings(self, names, count):
        assert len(select(names)) == count

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: get_row("3-HAMM"), "unknown row '3-HAMM'; choose from 3-CHN"),
            (lambda: Row("RBM", (784, 10)), "unknown model 'RBM'; choose from CHN, HAM"),
            (lambda: Row("HAM", (784, 10), "newton"), "unknown solver 'newton'"),
            (lambda: small(epochs=0), "epochs must be an integer from 1 to 10"),
            (lambda: small(epochs=11), "epochs must be an integer from 1 to 10"),
            (lambda: small(layers=(100, 16, 10)), "784 input and 10 output"),
            (lambda: small("5-HAM-EO", layers=(784, 10)), r"layers=\[784, 10\] contradicts the row '5-HAM-EO'"),
            (lambda: small(data="cifar"), "unknown data set 'cifar'"),
            (lambda: small(train_images=60_001), "train_images must be an integer from 64 to 60000"),
            (lambda: small(seed=-1), "seed must be"),
            (lambda: small(tol=0.1), "tol must be a number from 0"),
        ],
    )
    def test_wrong_values_are_named(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()


class TestChoice:
    """What is asked for is trained, or an error says why not and what to do; nothing is ignored."""

    @pytest.mark.parametrize("row", ROWS)
    def test_a_row_is_itself_with_whatever_agrees_with_it(self, row):
        r = get_row(row)
        updates = "even-odd" if r.even_odd else "synchronous"
        assert choose(row) == row
        assert choose(row, model=r.model, solver=r.solver, updates=updates, layers=r.layers) == row
        assert choose(row, layers=[784, *[16] * (len(r.layers) - 2), 10]) == row

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"model": "CHN"}, "model='CHN' contradicts the row '3-HAM-EO', which has model='HAM': leave model empty"),
            ({"solver": "anderson"}, "solver='anderson' contradicts .* or leave row empty and give layers"),
            ({"updates": "synchronous"}, "updates='synchronous' contradicts .* which has updates='even-odd'"),
            (
                {"layers": [784, 20, 20, 10]},
                r"layers=\[784, 20, 20, 10\] contradicts .* has 3 layers",
            ),
            ({"updates": "odd-even"}, "unknown updates 'odd-even'; choose from synchronous, even-odd"),
        ],
    )
    def test_what_contradicts_a_row_is_an_error(self, wrong, message):
        with pytest.raises(ValueError, match=message):
            choose("3-HAM-EO", **wrong)

    def test_a_network_of_ones_own(self):
        assert choose(layers=[784, 20, 20, 10]) == Row("HAM", (784, 20, 20, 10), even_odd=True)
        own = choose(model="CHN", solver="anderson", updates="synchronous", layers=[784, 20, 10])
        assert own == Row("CHN", (784, 20, 10), "anderson", lr=0.01)
        _, records = configure(choose(layers=[784, 20, 20, 10]), epochs=2)
        assert records == {"4-HAM-EO_layers=784-20-20-10_epochs=2": 2}
        with pytest.raises(ValueError, match="a network of your own needs its layers"):
            choose(model="HAM")
        with pytest.raises(ValueError, match="unknown model 'RBM'"):
            choose(model="RBM", layers=[784, 10])

    def test_no_two_configurations_share_a_name(self):
        """The seed apart, which is the name of the file."""
        changes = [{}, {"tol": 0}, {"tol": 1e-7}, {"layers": (784, 17, 10)}, {"train_images": 641}, {"batch_size": 32}]
        names = {tuple(small(**c)[1]) for c in changes} | {tuple(configure(row)[1]) for row in ROWS}
        assert len(names) == len(changes) + len(ROWS)
        assert small(tol=0)[0] == small(tol=0.0)[0]
        assert small(tol=0)[0].name == small(tol=0.0)[0].name

    def test_the_rows_as_published_are_trained_to_the_letter(self):
        for name, row in ROWS.items():
            config, records = configure(name)
            assert config.tol == row.tol == (0 if name.endswith("-published") else 1e-6)
            assert name in records
        config, records = configure("3-CHN-EO-published", tol=1e-6)
        assert config.tol == 1e-6
        assert list(records) == ["3-CHN-EO-published_tol=1e-06"]

    def test_the_tables_runs_have_the_tables_names(self):
        assert {name for row in ROWS for name in configure(row)[1]} == set(ROWS)


SIZES = {3: (784, 14, 10), 5: (784, 14, 9, 8, 10), 7: (784, 14, 12, 9, 8, 7, 10)}


class TestStep:
    @pytest.mark.parametrize("layers", DEEP)
    def test_half_of_a_synchronous_ham_gives_its_output_and_gradient(self, layers):
        """The output after n synchronous Picard steps, to rounding; and the paper's gradient, where they converge."""
        net, x = tiny(hop.HAM, layers, scale=0.3, batch=6)
        row = replace(get_row("3-HAM"), layers=layers)
        y = torch.nn.functional.one_hot(torch.arange(6), 10).double()
        gradients = []
        for solve in (
            lambda: train.equilibrium(net, x, row, 1e-30),
            lambda: hop.solve(net, x, even_odd=False, early_stop=False, backward=hop.RecurrentBackprop()),
        ):
            net.zero_grad()
            sol = solve()
            hop.loss(sol.output, y).backward()
            gradients.append([p.grad.clone() for p in net.parameters()])
        for ours, papers in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, papers, rtol=1e-6, atol=1e-9)
        with torch.no_grad():
            ours = train.equilibrium(net, x, row, 1e-30).output
            torch.testing.assert_close(
                ours, hop.solve(net, x, even_odd=False, early_stop=False).output, rtol=1e-12, atol=1e-14
            )

    @pytest.mark.parametrize("row", [t for t in TRAININGS if not t.endswith("-OR")])
    def test_the_gradient_of_every_row_is_the_papers(self, row):
        """The early end, the closed-form adjoint and the half HAM against k more steps with autograd on. Rows with
        over-relaxation have sweeps of their own: see below."""
        row = replace(get_row(row), layers=SIZES[len(get_row(row).layers)])
        net, x = tiny(MODELS[row.model], row.layers, scale=0.4, batch=6)
        y = torch.nn.functional.one_hot(torch.arange(6), 10).double()
        gradients = []
        for how in ("ours", "paper"):
            net.zero_grad()
            if how == "ours":
                sol = train.equilibrium(net, x, row, 1e-13)
            else:
                solver = hop.Anderson(relative=True, mu=1e-12) if row.solver == "anderson" else hop.Picard()
                sol = hop.solve(net, x, solver, even_odd=row.even_odd, max_iter=400, early_stop=False)
                sol = hop.solve(net, x, even_odd=row.even_odd, s0=sol.state, backward=hop.RecurrentBackprop())
            hop.loss(readout(net, sol.state, row), y).backward()
            gradients.append([p.grad.clone() for p in net.parameters()])
        for ours, papers in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, papers, rtol=1e-4, atol=1e-7)

    @pytest.mark.parametrize("row", [r for r in BEYOND if r.endswith("-OR")])
    def test_an_over_relaxed_row_has_the_gradient_of_its_sweeps(self, row):
        """Half of the paper's terms: autograd through as many clipped sweeps from the equilibrium."""
        row = replace(get_row(row), layers=SIZES[len(get_row(row).layers)])
        net, x = tiny(MODELS[row.model], row.layers, scale=0.4, batch=6)
        y = torch.nn.functional.one_hot(torch.arange(6), 10).double()
        k = paper.backward_steps(net, True) // 2
        sol = train.equilibrium(net, x, row, 1e-14, omega=1.2)
        hop.loss(sol.output, y).backward()
        ours = [p.grad.clone() for p in net.parameters()]
        f = hop.EvenOdd(net, x, 1.2, clipped=True)
        z = f.cut(sol.state.detach())
        for _ in range(k):
            z = f(z)
        net.zero_grad()
        hop.loss(net.output(f.join(z)), y).backward()
        for a, p in zip(ours, net.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, rtol=1e-6, atol=1e-10)

    def test_over_relaxation_chooses_its_omega_as_training_goes_on(self, monkeypatch):
        """At every RETUNE-th step it is the best one of the weights and the batch at hand; in between it stays."""
        training = train.Training(Config(replace(get_row("3-HAM-OR"), layers=(784, 20, 10))), torch.device("cpu"))
        x, y = torch.rand(8, 784), torch.eye(10)[:8]
        monkeypatch.setattr(train, "RETUNE", 3)
        for step in range(5):
            before = training.omega
            wanted = hop.best_omega(training.net, x) if step % 3 == 0 else before
            training.step(x, y)
            assert training.omega == wanted

    @pytest.mark.parametrize("row", ["3-CHN", "3-HAM-DEQ", "3-HAM-EO"])
    def test_tol_0_is_the_paper_to_the_letter(self, row):
        row = replace(get_row(row), layers=(784, 14, 10))
        net, x = tiny(MODELS[row.model], row.layers, batch=6)
        ours = train.equilibrium(net, x, row, 0.0)
        solver = SOLVERS[row.solver]
        with torch.no_grad():
            end = hop.solve(net, x, solver, even_odd=row.even_odd, early_stop=False)
        assert ours.evaluations == 6 * paper.max_iter(net, row.even_odd)
        assert torch.equal(ours.state, end.state)

    @pytest.mark.parametrize("row", ["3-CHN", "3-HAM", "3-HAM-DEQ", "3-CHN-EO"])
    @pytest.mark.parametrize("scale", [1.0, 40.0])
    def test_whether_all_some_or_none_converge(self, row, scale):
        """Those that did meet tol, or stay where a finish that leads elsewhere was refused; those that did not are the
        paper's, after n iterations."""
        row = replace(get_row(row), layers=(784, 30, 10))
        net, x = tiny(MODELS[row.model], row.layers, scale=scale, batch=12)
        ours, papers = (train.equilibrium(net, x, row, tol) for tol in (1e-9, 0.0))
        far = ours.residual >= paper.TOL
        refused = ~far & (ours.residual >= 1e-8)
        alone = hop.solve(net, x, SOLVERS[row.solver], even_odd=row.even_odd, tol=paper.TOL)
        torch.testing.assert_close(ours.output[refused], alone.output[refused], rtol=1e-9, atol=1e-9)
        assert int(refused.sum()) <= 2
        if row.solver == "picard":
            torch.testing.assert_close(ours.output[far], papers.output[far], rtol=1e-6, atol=1e-6)
        assert bool(ours.state.isfinite().all())

    @pytest.mark.parametrize("row", ["3-HAM-EO", "3-CHN-EO", "5-HAM-EO", "7-HAM-EO"])
    def test_the_finish_changes_no_equilibrium(self, row, data):
        """Going on from where the finish began, and from where it ended, leads to the same place; in trained networks
        with every image (of 5,312, in nine rows). In untrained ones, with many equilibria, 1 of 1,918 goes elsewhere,
        unless answers that lie backwards are refused; in trained ones there are none to refuse."""
        trained = load_network(WEIGHTS / f"{row}-seed-0-half.safetensors", "cpu")
        row, x = get_row(row), data.test.x[:64]
        untrained = MODELS[row.model](row.layers, seed=3, device="cpu")
        for net, most in ((trained, 0), (untrained, 1)):
            start = hop.solve(net, x, SOLVERS[row.solver], even_odd=True, tol=paper.TOL)
            training = train.equilibrium(net, x, row, 1e-6)
            wary = hop.solve(net, x, hop.Then(SOLVERS[row.solver], train.FINISH), even_odd=True, tol=1e-6)
            met = start.converged
            options = {"even_odd": True, "tol": 1e-6, "max_iter": 5000}
            there = hop.solve(net, x[met], s0=start.state[met], **options).state
            for sol, allowed in ((training, most), (wary, 0)):
                assert torch.equal(met, sol.converged)
                went = hop.solve(net, x[met], s0=sol.state[met].detach(), **options).state
                assert int((hop.residual(there, went) > 0.01).sum()) <= allowed
            if net is trained:
                assert torch.equal(training.state, wary.state)

    def test_the_published_readout_is_ten_hidden_neurons(self):
        net = hop.CHN([784, 30, 10], seed=0, device="cpu")
        s = torch.arange(40.0)[None]
        row = get_row("3-CHN-EO-published")
        assert readout(net, s, row).tolist() == [list(range(20, 30))]
        assert readout(net, s, replace(row, readout="output")).tolist() == [list(range(30, 40))]
        flat = hop.EvenOdd(net, torch.zeros(1, 784)).cut(s)  # [s_even; s_odd]
        assert torch.equal(flat[:, -10:], readout(net, s, row))

    def test_golden(self):
        """Three steps of every training, in float64. If this fails, trained networks change: raise NUMERICS in
        hoplib/experiment/rows.py, and write the file anew with `python tests/test_train.py`."""
        stored = json.loads(GOLDEN.read_text())
        assert stored["numerics"] == rows_module.NUMERICS
        found = golden()
        assert found.keys() == stored["values"].keys()
        for name, values in found.items():
            assert values == pytest.approx(stored["values"][name], rel=1e-7), name


GOLDEN = Path(__file__).with_name("golden.json")


def golden():
    """Losses and weights after three steps of each training, on a fixed batch."""
    x = torch.rand(8, 784, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.nn.functional.one_hot(torch.arange(8), 10).double()
    values = {}
    for name in TRAININGS:
        row = get_row(name)
        row = replace(row, layers=(784, *[24, 20, 18, 16, 14][: len(row.layers) - 2], 10))
        training = train.Training(Config(row), torch.device("cpu"))
        training.net.double()
        training.optimizer = hop.Madam(training.net.parameters(), lr=row.lr)
        losses = [training.step(x, y)[2].item() for _ in range(3)]
        values[name] = [*losses, *(p.abs().sum().item() for p in training.net.parameters())]
    return values


class TestRun:
    def test_a_record_has_what_it_must_have(self, tmp_path, data):
        (path,) = run(tmp_path, data=data)
        record = json.loads(path.read_text())
        name = "3-HAM-EO_layers=784-16-10_train_images=640_test_images=200_epochs=2"
        assert path == tmp_path / "runs" / name / "seed-0.json"
        assert record["row"] == name
        assert record["epoch"] == len(record["history"]) == 2
        assert record["config"]["layers"] == [784, 16, 10]
        assert record["config"]["numerics"] == rows_module.UNTOUCHED
        assert record["versions"]["torch"] == torch.__version__
        assert path.with_suffix(".npz").stat().st_size < 20_000
        assert len(list(tmp_path.rglob(".*"))) == 0, "no leftovers"

    def test_its_weights_are_kept(self, tmp_path, data):
        """The network of the file weights/<name>/seed-<n>.safetensors is the one of the last checkpoint."""
        (path,) = run(tmp_path, data=data)
        net = load_network(tmp_path / "weights" / path.parent.name / "seed-0.safetensors", "cpu")
        config, _ = small()
        training = train.Training(config, torch.device("cpu"))
        assert load_checkpoint(training, checkpoint_of(tmp_path))
        for a, b in zip(net.parameters(), training.net.parameters(), strict=True):
            assert torch.equal(a, b)

    def test_what_a_killed_run_left_behind_is_swept_up(self, tmp_path, data):
        """Its own temporary files, not those of another seed, which may be alive."""
        (path,) = run(tmp_path, data=data)
        config, _ = small()
        kept = tmp_path / "weights" / config.name
        orphans = [path.with_name(".seed-0.json.0a1b2c3d"), path.with_name(".seed-0.npz.0a1b2c3d")]
        orphans += [checkpoint_of(tmp_path).with_name(f".seed-0.{kind}.0a1b2c3d") for kind in ("pt", "progress")]
        orphans += [kept / ".seed-0-epoch-1.safetensors.0a1b2c3d"]
        others = [path.with_name(".seed-1.json.0a1b2c3d"), path.with_name(".seed-01.json.0a1b2c3d")]
        for part in orphans + others:
            part.touch()
        with pytest.warns(UserWarning, match="nothing was trained"):
            run(tmp_path, data=data)
        assert not any(part.exists() for part in orphans)
        assert all(part.exists() for part in others)

    def test_two_rows_of_one_training(self, tmp_path, data):
        early, late = run(tmp_path, "3-CHN", 4, data)
        assert [json.loads(p.read_text())["epoch"] for p in (early, late)] == [3, 4]
        (alone,) = run(tmp_path / "alone", "3-CHN-3-epochs", None, data)
        assert alone.relative_to(tmp_path / "alone") == early.relative_to(tmp_path)
        assert same(alone, early)

    def test_repeats_are_bitwise_equal_and_seeds_are_not(self, tmp_path, data):
        a, b, c = (run(tmp_path / d, data=data, seed=s)[0] for d, s in (("a", 0), ("b", 0), ("c", 1)))
        assert same(a, b)
        assert not same(a, c)
        assert Path(a).with_suffix(".npz").read_bytes() == Path(b).with_suffix(".npz").read_bytes()

    def test_a_finished_run_trains_nothing(self, tmp_path, data):
        (path,) = run(tmp_path, data=data)
        before = path.read_bytes()
        with pytest.warns(UserWarning, match="nothing was trained"):
            run(tmp_path, data=data)
        assert path.read_bytes() == before

    @pytest.mark.parametrize("row", ["3-HAM-EO", "3-CHN-EO-DEQ-published"])
    def test_a_run_cut_off_between_epochs_resumes_bitwise(self, tmp_path, data, row):
        config, _ = small(row, 3)
        whole = train.Training(config, torch.device("cpu"))
        part = train.Training(config, torch.device("cpu"))
        for _ in range(3):
            whole.train_epoch(data, 3, lambda _: None)
        part.train_epoch(data, 3, lambda _: None)
        write_checkpoint(tmp_path / "c.pt", part.state_dict())
        resumed = train.Training(config, torch.device("cpu"))
        assert load_checkpoint(resumed, tmp_path / "c.pt")
        for _ in range(2):
            resumed.train_epoch(data, 3, lambda _: None)
        for a, b in zip(whole.net.parameters(), resumed.net.parameters(), strict=True):
            assert torch.equal(a, b)

    def test_a_run_killed_at_any_instant_resumes_to_the_same_record(self, tmp_path, data):
        """kill -9 three times: before the first checkpoint, in the middle of an epoch, just after a checkpoint.

        Each kill is proven: the process was alive, it leaves no record, and the last run has less to train.
        """
        changes = {"epochs": 4, "train_images": 12_800}
        (undisturbed,) = run(tmp_path / "whole", data=data, **changes)
        folder = tmp_path / "killed"
        checkpoint = checkpoint_of(folder, **changes)
        heartbeat = checkpoint.with_suffix(".progress")
        epochs = []
        for moment in (
            lambda before: heartbeat.exists(),
            lambda before: in_an_epoch(heartbeat, 2),
            lambda before: stamp(checkpoint) != before,
        ):
            process, before = start_run(folder, **changes), stamp(checkpoint)
            wait_for(partial(moment, before), process)
            process.kill()
            assert process.wait() == -signal.SIGKILL
            assert not list(folder.rglob("seed-0.json"))
            epochs.append(epochs_trained(checkpoint, **changes))
        assert epochs[0] <= 1 <= epochs[1] < epochs[2] < 4
        seen = set()
        (resumed,) = run(folder, data=data, report=lambda p: seen.add(p.epoch), **changes)
        assert seen == set(range(epochs[2] + 1, 5))
        assert same(undisturbed, resumed)

    def test_a_second_run_waits_for_the_first(self, tmp_path, data):
        """It trains nothing while another holds the lock, and ends with the record when that is released."""
        lock = checkpoint_of(tmp_path).with_suffix(".lock")
        lock.parent.mkdir(parents=True)
        with FileLock(lock):
            process = start_run(tmp_path, epochs=2)
            wait_for((tmp_path / "runs").exists, process)  # what it makes just before it asks for the lock
            time.sleep(1)
            assert process.poll() is None
            assert not list(tmp_path.rglob("*.pt"))
        assert process.wait(300) == 0
        assert len(list(tmp_path.rglob("seed-0.json"))) == 1


def start_run(folder, **changes):
    """The same as `run`, in a process of its own."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from test_train import run\n"
        "run(Path(sys.argv[2]), **eval(sys.argv[3]))"
    )
    return subprocess.Popen([sys.executable, "-c", script, str(Path(__file__).parent), str(folder), repr(changes)])


def stamp(path):
    """Another number for every file that takes its place."""
    return path.stat().st_mtime_ns if path.exists() else None


def in_an_epoch(heartbeat, epoch):
    """Is the run in the middle of this epoch or of a later one?"""
    if not heartbeat.exists():
        return False
    progress = json.loads(heartbeat.read_text())
    return progress["epoch"] >= epoch and progress["step"] < progress["steps"]


def epochs_trained(checkpoint, **changes):
    training = train.Training(small(**changes)[0], torch.device("cpu"))
    load_checkpoint(training, checkpoint)
    return training.epoch


def wait_for(condition, process=None, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        assert process is None or process.poll() is None, "the process ended first"
        time.sleep(0.01)


class TestTrouble:
    @pytest.mark.parametrize("name", ["runs", "checkpoints", "weights"])
    def test_an_unwritable_folder_is_named_before_anything_is_trained(self, tmp_path, name):
        (tmp_path / name).write_text("a file where a folder should be")
        with pytest.raises(RunError, match=rf"cannot write .*{name}"):
            run(tmp_path)
        assert not list(tmp_path.rglob("*.progress"))

    def test_a_full_disk_loses_nothing(self, tmp_path, data):
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("mounting a tmpfs needs root")
        try:
            (path,) = run(disk, data=data, epochs=1)
            before = path.read_bytes()
            (disk / "fill").write_bytes(bytes(shutil.disk_usage(disk).free - 8192))
            with pytest.raises(RunError, match=r"cannot write .*No space left on device"):
                run(disk, data=data, epochs=2)
            assert path.read_bytes() == before
            assert epochs_trained(checkpoint_of(disk)) == 1
            (disk / "fill").unlink()
            (resumed,) = run(disk, data=data, epochs=2)
            (undisturbed,) = run(tmp_path / "whole", data=data, epochs=2)
            assert same(undisturbed, resumed)
        finally:
            subprocess.run(["umount", str(disk)], check=True)

    def test_a_loss_that_is_not_finite_stops_the_run(self, data):
        config, _ = small()
        training = train.Training(config, torch.device("cpu"))
        with torch.no_grad():
            training.net.b[-1].fill_(torch.inf)
        with pytest.raises(RunError, match="no longer finite in epoch 1"):
            training.train_epoch(data, 1, lambda _: None)

    def test_no_gpu_is_said(self, tmp_path):
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        config, rows = small()
        with pytest.raises(RunError, match="torch sees no GPU"):
            train_to_record(config, rows, tmp_path, tmp_path, device="cuda")


@pytest.mark.skipif(not can_compile(), reason="torch.compile needs a C++ compiler")
def test_the_fused_optimizer_gives_the_same_numbers_to_rounding():
    nets = [hop.HAM([784, 16, 10], seed=0, device="cpu") for _ in range(2)]
    optimizers = [hop.Madam(net.parameters(), lr=0.01, fused=f) for net, f in zip(nets, (False, True), strict=True)]
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=g)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-8)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({"numerics": rows_module.NUMERICS, "values": golden()}, indent=1) + "\n")
