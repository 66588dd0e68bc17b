"""A record that is there is right: whatever happens to its files, it is seen, and it never counts as done."""

import hashlib
import io
import json
import os
import random
import shutil
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_train import checkpoint_of, run, same, small

import hoplib as hop
from hoplib.experiment import rows, train
from hoplib.experiment.files import RunError, load_network, read_checkpoint, save_network, write_checkpoint
from hoplib.experiment.records import digest, read_record, why_not
from hoplib.experiment.run import load_checkpoint

FLIPS = 400


@pytest.fixture(scope="module")
def data():
    return hop.load_data("mnist", device="cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """A finished run; tests take copies."""
    folder = tmp_path_factory.mktemp("finished")
    run(folder, data=data)
    return folder


@pytest.fixture
def path(finished, tmp_path):
    """The record of a copy of the finished run."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return next(tmp_path.rglob("seed-0.json"))


def why(path, epoch=2, **changes):
    return why_not(path, small(**changes)[0], epoch)


def flips(content, count=FLIPS):
    """The content with one bit changed, at so many places."""
    draw = random.Random(0)
    for _ in range(count):
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        yield bytes(changed)


def cuts(content, count=FLIPS):
    """The content up to so many places, the first and the last ones among them."""
    draw = random.Random(1)
    yield from (content[:n] for n in {0, 1, len(content) - 1, *(draw.randrange(len(content)) for _ in range(count))})


def rewrite(path, change, arrays=None):
    """Change the record, then give it the digests of what it holds now."""
    record, found = read_record(path)
    packed = io.BytesIO()
    np.savez_compressed(packed, **{**found, **(arrays or {})})
    path.with_suffix(".npz").write_bytes(packed.getvalue())
    record["npz_sha256"] = hashlib.sha256(packed.getvalue()).hexdigest()
    change(record)
    path.write_text(json.dumps({**record, "sha256": digest(record)}))


def put(*place, value):
    """A change of a record: that value at that place."""

    def change(record):
        for key in place[:-1]:
            record = record[key]
        record[place[-1]] = value

    return change


def drop(*place):
    def change(record):
        for key in place[:-1]:
            record = record[key]
        del record[place[-1]]

    return change


class TestDamage:
    """By chance: single bits and missing ends, hundreds of each."""

    @pytest.mark.parametrize("damage", [flips, cuts])
    def test_of_a_record(self, path, damage):
        """It is "damaged", unless it says the same in other letters (1E-05 for 1e-05, a space for a line's end)."""
        before, content = path.read_bytes(), read_record(path)[0]
        seen = 0
        for damaged in damage(before):
            path.write_bytes(damaged)
            if damaged == before or why(path) == "":
                assert json.loads(damaged) == content
            else:
                assert why(path) == "damaged"
                seen += 1
        assert seen > 0.9 * FLIPS

    @pytest.mark.parametrize("damage", [flips, cuts])
    def test_of_its_arrays(self, path, damage):
        packed = path.with_suffix(".npz")
        for damaged in damage(packed.read_bytes()):
            packed.write_bytes(damaged)
            assert why(path) == "damaged"
        packed.unlink()
        assert why(path) == "damaged"

    @pytest.mark.parametrize("damage", [flips, cuts])
    def test_of_a_checkpoint(self, path, damage):
        (checkpoint,) = path.parents[2].rglob("*.pt")
        for damaged in damage(checkpoint.read_bytes()):
            checkpoint.write_bytes(damaged)
            assert read_checkpoint(checkpoint, torch.device("cpu")) is None

    def test_of_weights(self, path):
        """A missing end is an error that names the file, a damaged header no other error. Numbers have no digest."""
        (weights,) = path.parents[2].rglob("seed-0.safetensors")
        content = weights.read_bytes()
        for damaged in cuts(content, 200):
            weights.write_bytes(damaged)
            with pytest.raises(RunError, match=r"seed-0.safetensors holds no network"):
                load_network(weights, "cpu")
        header, seen = 8 + int.from_bytes(content[:8], "little"), 0
        for damaged in flips(content[:header], 200):
            weights.write_bytes(damaged + content[header:])
            try:
                load_network(weights, "cpu")
            except RunError:
                seen += 1
        assert seen > 50

    def test_a_damaged_record_is_measured_anew(self, path, data):
        before = path.read_bytes()
        path.write_bytes(before[:-100])
        kept = path.with_name("kept.json")
        kept.write_bytes(before)
        (again,) = run(path.parents[2], data=data)
        assert again == path
        assert why(path) == ""
        assert same(path, kept)

    @pytest.mark.parametrize("damage", [lambda b: b[:-2000], lambda b: b"", lambda b: b[:50] + b"?" + b[51:]])
    def test_a_damaged_checkpoint_is_not_used(self, path, data, damage):
        """Training starts anew, says so, and ends with the same record."""
        checkpoint = checkpoint_of(path.parents[2])
        checkpoint.write_bytes(damage(checkpoint.read_bytes()))
        kept = path.with_name("kept.json")
        path.rename(kept)
        epochs = set()
        with pytest.warns(UserWarning, match=r"checkpoint .*seed-0.pt is damaged and not used: training starts anew"):
            (again,) = run(path.parents[2], data=data, report=lambda p: epochs.add(p.epoch))
        assert epochs == {1, 2}
        assert same(again, kept)


IMPOSSIBLE = {
    "NaN": put("test_accuracy", value=float("nan")),
    "a share above 1": put("not_converged", value=1.5),
    "a negative number": put("iterations_std", value=-1.0),
    "a mean that is not the mean": put("iterations_mean", value=1.0),
    "an infinite loss": put("history", 0, "loss", value=float("inf")),
    "NaN in the history": put("history", 1, "test_accuracy", value=float("nan")),
    "a text for a number": put("test_accuracy", value="0.9"),
    "a bool for a number": put("test_accuracy", value=True),
    "a list for a number": put("false_convergence", value=[0.0]),
    "another row": put("row", value="3-HAM"),
    "another seed": put("seed", value=1),
    "a seed that is no integer": put("seed", value=0.0),
    "another data set": put("data", value="emnist"),
    "an epoch that is no integer": put("epoch", value=2.0),
    "a missing number": drop("test_accuracy"),
    "a missing way of solving": drop("cross", "even-odd"),
    "a missing number in a way": drop("cross", "even-odd", "iterations"),
    "another mean in a way": put("cross", "even-odd", "iterations", value=0.5),
    "a missing epoch": drop("history", 0),
    "no history": put("history", value=None),
    "a history that is an object": put("history", value={"0": {}, "1": {}}),
    "no configuration": drop("config"),
    "a configuration that is a list": put("config", value=[]),
    "numerics as a text": put("config", "numerics", value="3"),
    "no numerics": drop("config", "numerics"),
    "another number of products": put("multiply_adds", "iteration", value=1),
    "a missing criterion": drop("criteria", "0.0001"),
    "no radius": drop("spectral_radius"),
    "another radius": put("spectral_radius", "max", value=0.123),
    "no times": drop("seconds"),
    "a negative time": put("seconds", "training", value=-1.0),
    "no digest of the arrays": drop("npz_sha256"),
    "an unknown number": put("extra", value=1),
}
WRONG_ARRAYS = {
    "too few images": {"iterations": np.zeros(199, np.uint16)},
    "too many dimensions": {"predicted": np.zeros((200, 1), np.uint8)},
    "another type": {"predicted": np.zeros(200)},
    "an impossible class": {"predicted": np.full(200, 10, np.uint8)},
    "impossible iterations": {"iterations": np.full(200, 999, np.uint16)},
    "iterations that the mean is not of": {"iterations": np.zeros(200, np.uint16)},
    "too many images in the histogram": {"histogram": np.full((39, 400), 9, np.uint16)},
    "an unknown array": {"extra": np.zeros(3)},
    "convergence to nothing": {"equation_error": np.zeros(200, np.int8)},
}


class TestMeaning:
    """On purpose: files whose digests match, but which cannot be what a run has written."""

    @pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
    def test_impossible_values(self, path, change):
        rewrite(path, lambda record: None)
        assert why(path) == ""
        rewrite(path, change)
        assert why(path) == "damaged"

    @pytest.mark.parametrize("arrays", WRONG_ARRAYS.values(), ids=WRONG_ARRAYS)
    def test_wrong_arrays(self, path, arrays):
        rewrite(path, lambda record: None, arrays)
        assert why(path) == "damaged"

    @pytest.mark.parametrize("content", ["", "[]", "3", "null", '"text"', "{}", '{"config": {}}', "[" * 100_000])
    def test_other_json(self, path, content):
        path.write_text(content)
        assert why(path) == "damaged"
        with pytest.raises(ValueError, match="is damaged"):
            read_record(path)

    def test_an_array_that_claims_to_fill_the_memory(self, path):
        header, packed = io.BytesIO(), io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<u2", "fortran_order": False, "shape": (10**15,)})
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("iterations.npy", header.getvalue())
        path.with_suffix(".npz").write_bytes(packed.getvalue())
        record = {**json.loads(path.read_text()), "npz_sha256": hashlib.sha256(packed.getvalue()).hexdigest()}
        path.write_text(json.dumps({**record, "sha256": digest(record)}))
        assert why(path) == "damaged"

    def test_a_record_in_another_folder(self, path):
        other = path.parents[1] / "3-HAM-EO"
        shutil.copytree(path.parent, other)
        assert why(other / "seed-0.json") == "damaged"

    def test_a_folder_or_nothing_in_its_place(self, path):
        path.unlink()
        assert why(path) == "missing"
        path.mkdir()
        assert why(path) == "damaged"
        assert why(path.with_suffix(".npz") / "seed-0.json") == "missing"

    def test_a_changed_configuration(self, path):
        config, _ = small()
        assert why_not(path, config, 2) == ""
        assert why_not(path, replace(config, tol=1e-7), 2) == "changed: tol"
        assert why_not(path, replace(config, tol=1e-7, batch_size=32), 2) == "changed: batch_size, tol"
        assert why_not(path, config, 3) == "changed: epoch"

    def test_other_numerics(self, path, monkeypatch, data):
        record = json.loads(path.read_text())
        config = small()[0]
        now = config.numerics
        monkeypatch.setattr(rows, "UNTOUCHED", 99)
        assert why(path) == f"numerics {now}, now 99"
        training = train.Training(config, torch.device("cpu"))
        assert not load_checkpoint(training, checkpoint_of(path.parents[2]))
        monkeypatch.undo()
        path.write_text(json.dumps({k: v for k, v in record.items() if k not in ("sha256", "npz_sha256")}))
        assert why(path) == "damaged", "a record has a digest"


def test_a_checkpoint_runs_no_code(tmp_path):
    """Neither a foreign file nor one with the right digest."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    training = train.Training(small()[0], torch.device("cpu"))
    for save in (write_checkpoint, lambda path, state: torch.save(state, path)):
        save(tmp_path / "evil.pt", {"fingerprint": Evil()})
        with pytest.warns(UserWarning, match="damaged"):
            assert not load_checkpoint(training, tmp_path / "evil.pt")
        assert not (tmp_path / "owned").exists()


def test_a_folder_in_the_place_of_a_checkpoint_is_none(tmp_path):
    training = train.Training(small()[0], torch.device("cpu"))
    (tmp_path / "folder.pt").mkdir()
    with pytest.warns(UserWarning, match=r"folder\.pt is damaged and not used"):
        assert not load_checkpoint(training, tmp_path / "folder.pt")


class TestWeights:
    @pytest.mark.parametrize("model", [hop.CHN, hop.HAM])
    @pytest.mark.parametrize("half", [False, True])
    def test_they_come_back(self, tmp_path, model, half):
        net = model([784, 14, 9, 10], seed=0, device="cpu", rho="tanh")
        save_network(net, tmp_path / "net.safetensors", half=half, epoch=3)
        again = load_network(tmp_path / "net.safetensors", "cpu")
        assert (type(again), list(again.layers), again.rho.name) == (model, [784, 14, 9, 10], "tanh")
        for a, b in zip(net.parameters(), again.parameters(), strict=True):
            assert b.dtype == torch.float32
            assert torch.equal(a.half().float() if half else a, b)

    def test_half_precision_is_half_the_size(self, tmp_path):
        net = hop.HAM([784, 100, 10], seed=0, device="cpu")
        for half in (False, True):
            save_network(net, tmp_path / f"{half}", half=half)
        sizes = [(tmp_path / f"{half}").stat().st_size for half in (False, True)]
        assert sizes[0] == pytest.approx(2 * sizes[1], rel=0.01)

    def test_a_network_that_would_come_back_as_another_is_not_written(self, tmp_path):
        """Of a file with links or activations of one's own, a chain with hoplib's would be read."""

        class Own(hop.Tanh):
            pass

        links = {(0, b): hop.Dense(torch.ones(3, 3)) for b in (1, 2)}
        for net in (
            hop.HAM([3, 3, 3], links=links, device="cpu"),
            hop.HAM([3, 3], rho=Own(), device="cpu"),
            hop.HAM([3, 3], rho=["tanh", "relu"], device="cpu"),
            type("Mine", (hop.HAM,), {})([3, 3], device="cpu"),
        ):
            with pytest.raises(RunError, match="no file can name the links, the class or the activation of"):
                save_network(net, tmp_path / "net.safetensors")
        save_network(hop.ExactCHN([3, 3], device="cpu"), tmp_path / "net.safetensors")
        assert isinstance(load_network(tmp_path / "net.safetensors", "cpu"), hop.ExactCHN)

    @pytest.mark.parametrize("content", [b"", b"no safetensors", b"\xff" * 100])
    def test_another_file_is_named(self, tmp_path, content):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(RunError, match=r"x.safetensors holds no network that can be read"):
            load_network(tmp_path / "x.safetensors")
        with pytest.raises(RunError, match=r"missing.safetensors holds no network"):
            load_network(tmp_path / "missing.safetensors")
