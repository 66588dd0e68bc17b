"""The embedded MNIST, damaged files, and the EMNIST download against a small archive on loopback."""

import dataclasses
import gzip
import hashlib
import shutil
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

import hoplib as hop
from hoplib import data as module

ROOT = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="module")
def mnist():
    return hop.load_data("mnist", device="cpu")


def test_mnist_is_all_there(mnist):
    assert (len(mnist.train), len(mnist.test)) == (60_000, 10_000)
    for split in (mnist.train, mnist.test):
        assert split.x.shape == (len(split), 784)
        assert split.x.min() == 0
        assert split.x.max() == 1
        assert torch.equal(split.y.argmax(1), split.label)
        assert torch.equal(split.y.sum(1), torch.ones(len(split)))
    assert mnist.test.label[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert mnist.train.label.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.train.x.mean().item() == pytest.approx(0.1306604762738429, abs=1e-6)


def test_the_first_test_image_is_an_upright_seven(mnist):
    image = mnist.test.x[0].view(28, 28)
    assert image[7:10].mean() > 3 * image[17:25, :9].mean().clamp_min(0.01), "a bar on top, nothing at the lower left"
    assert image[:, 14:].sum() > image[:, :14].sum() * 0.8


def test_batches_are_shuffled_by_their_generator_and_drop_the_rest(mnist):
    def order(seed):
        g = torch.Generator().manual_seed(seed)
        batches = list(mnist.test.batches(64, generator=g))
        assert {len(x) for x, _ in batches} == {64}
        return len(batches), torch.cat([x.sum(1) for x, _ in batches])

    n, first = order(0)
    assert n == 10_000 // 64
    assert torch.equal(first, order(0)[1])
    assert not torch.equal(first, order(1)[1])
    x, y = next(mnist.test.batches(3))
    assert torch.equal(x, mnist.test.x[:3])
    assert y.argmax(1).tolist() == [7, 2, 1]
    for size in (0, 10_001):
        with pytest.raises(ValueError, match="from 1 to 10000"):
            next(mnist.test.batches(size))


@pytest.fixture
def copied(tmp_path, monkeypatch):
    for path in ROOT.glob("*.gz"):
        shutil.copy(path, tmp_path)
    monkeypatch.setenv("HOPLIB_DATA", str(tmp_path))
    return tmp_path


def test_a_missing_file_is_named_with_its_remedy(copied):
    (copied / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(hop.DataError, match=r"t10k-labels-idx1-ubyte.gz is missing. Restore it with `git checkout"):
        hop.load_data("mnist")


def test_a_truncated_file_is_named(copied):
    path = copied / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(hop.DataError, match=r"t10k-images-idx3-ubyte.gz is damaged or cut short.*git checkout"):
        hop.load_data("mnist", root=copied)


def test_a_folder_in_the_place_of_a_file_is_named(copied):
    path = copied / "t10k-labels-idx1-ubyte.gz"
    path.unlink()
    path.mkdir()
    with pytest.raises(hop.DataError, match=r"t10k-labels-idx1-ubyte.gz is damaged .*Is a directory"):
        hop.load_data("mnist", root=copied)


def test_an_empty_variable_is_none(monkeypatch):
    monkeypatch.setenv("HOPLIB_DATA", "")
    assert module._root(None) == ROOT.resolve()


def test_a_changed_pixel_is_found(copied):
    path = copied / "train-labels-idx1-ubyte.gz"
    raw = bytearray(gzip.decompress(path.read_bytes()))
    raw[-1] ^= 1
    path.write_bytes(gzip.compress(bytes(raw)))
    with pytest.raises(hop.DataError, match=r"train-labels.* is not the published file: its md5 is"):
        hop.load_data("mnist")


def test_unknown_data_set():
    with pytest.raises(ValueError, match="unknown data set 'cifar'; choose from mnist, emnist"):
        hop.load_data("cifar")


def test_emnist_offline_names_the_embedded_alternative(tmp_path, monkeypatch):
    with pytest.raises(hop.DataError, match=r"missing.*download=True.*embedded data set, load_data\(\"mnist\"\)"):
        hop.load_data("emnist", root=tmp_path)
    nowhere = dataclasses.replace(module.EMNIST, url="http://127.0.0.1:9/gzip.zip")
    monkeypatch.setitem(module.SOURCES, "emnist", nowhere)
    with pytest.raises(hop.DataError, match=r"could not download http://127.0.0.1:9.*load_data\(\"mnist\"\)"):
        hop.load_data("emnist", root=tmp_path, download=True)


def idx(array):
    header = np.array([0x0800 + array.ndim, *array.shape], dtype=">u4").tobytes()
    return gzip.compress(header + array.tobytes(), mtime=0)


@pytest.fixture
def small_emnist(tmp_path, monkeypatch):
    """An archive of EMNIST's shape, five images and three, served on loopback."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", 5), ("test", 3)):
        arrays[f"{split} images"] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        arrays[f"{split} labels"] = rng.integers(0, 10, n, dtype=np.uint8)
    served = tmp_path / "served"
    served.mkdir()
    with zipfile.ZipFile(served / "gzip.zip", "w") as archive:
        for role, array in arrays.items():
            archive.writestr(f"gzip/{module.EMNIST.files[role]}", idx(array))
        archive.writestr("gzip/emnist-letters-mapping.txt", "not ours")

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *a):
            super().__init__(*a, directory=str(served))

        def log_message(self, *a):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    source = dataclasses.replace(
        module.EMNIST,
        url=f"http://127.0.0.1:{server.server_port}/gzip.zip",
        md5=hashlib.md5((served / "gzip.zip").read_bytes()).hexdigest(),
        sums={r: hashlib.sha256(idx(a)).hexdigest() for r, a in arrays.items() if "images" in r},
        counts=(5, 3),
    )
    monkeypatch.setitem(module.SOURCES, "emnist", source)
    yield source, arrays, tmp_path / "data"
    server.shutdown()
    server.server_close()


def test_emnist_is_downloaded_once_and_put_upright(small_emnist, monkeypatch):
    _, arrays, root = small_emnist
    data = hop.load_data("emnist", root=root, download=True, device="cpu")
    assert data.name == "emnist"
    expected = arrays["train images"].transpose(0, 2, 1).reshape(5, 784) / 255
    np.testing.assert_allclose(data.train.x, expected, atol=1e-7)
    assert data.test.label.tolist() == arrays["test labels"].tolist()
    assert sorted(p.name for p in (root / "emnist").iterdir()) == sorted(module.EMNIST.files.values())
    monkeypatch.setattr(module, "fetch", lambda *a: pytest.fail("it is there already"))
    again = hop.load_data("emnist", root=root, download=True, device="cpu")
    assert torch.equal(again.test.x, data.test.x)


def test_a_wrong_archive_is_refused(small_emnist, monkeypatch):
    source, _, root = small_emnist
    monkeypatch.setitem(module.SOURCES, "emnist", dataclasses.replace(source, md5="0" * 32))
    with pytest.raises(hop.DataError, match="could not download"):
        hop.load_data("emnist", root=root, download=True)
    assert not list((root / "emnist").iterdir())


def test_a_wrong_image_file_is_refused(small_emnist, monkeypatch):
    source, _, root = small_emnist
    monkeypatch.setitem(module.SOURCES, "emnist", dataclasses.replace(source, sums={"test images": "0" * 64}))
    with pytest.raises(hop.DataError, match=r"test-images.*is not the published file: its sha256"):
        hop.load_data("emnist", root=root, download=True)


def test_a_file_of_the_wrong_shape_is_refused(small_emnist, monkeypatch):
    source, _, root = small_emnist
    monkeypatch.setitem(module.SOURCES, "emnist", dataclasses.replace(source, counts=(5, 4)))
    with pytest.raises(hop.DataError, match="does not hold 4×28×28 bytes in IDX format"):
        hop.load_data("emnist", root=root, download=True)


def test_without_torchvision_it_says_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchvision.datasets.utils", None)
    with pytest.raises(hop.DataError, match=r"torchvision \(pip install 'hoplib\[data\]'\)"):
        hop.load_data("emnist", root=tmp_path, download=True)
