"""MNIST from the repository, and the paper's EMNIST 'mnist' split on request, as tensors on the device."""

from __future__ import annotations

import gzip
import hashlib
import os
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import checks
from .network import default_device


@dataclass(frozen=True)
class Split:
    """Images x (n, 784) in [0, 1], one-hot targets y (n, 10), labels (n,)."""

    x: Tensor
    y: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def batches(self, size: int = 64, *, generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches (x, y) of equal size, the last incomplete one dropped: shuffled by `generator`, else in order.

        The generator is a CPU generator whatever the device, so that a seed means the same order everywhere.
        """
        checks.integer("the batch size", size, 1, len(self))
        n, order = len(self), torch.arange(len(self), device="cpu")
        if generator is not None:
            order = torch.randperm(n, generator=generator, device="cpu")
        for i in order[: n // size * size].to(self.x.device).view(-1, size):
            yield self.x[i], self.y[i]


@dataclass(frozen=True)
class Data:
    """A data set: its name, and the splits `train` and `test`."""

    name: str
    train: Split
    test: Split


@dataclass(frozen=True)
class Source:
    """Where a data set's four IDX files are and how they are recognised."""

    folder: str
    files: dict[str, str]  # role → file name
    digest: str  # hashlib name, over the raw IDX bytes (`gz=False`) or the gzip file (`gz=True`)
    sums: dict[str, str]  # role → digest
    gz: bool
    counts: tuple[int, int] = (60_000, 10_000)  # images in train and test
    transposed: bool = False
    url: str = ""
    archive: str = ""  # the folder of the files inside the archive at the url
    md5: str = ""  # of the archive


MNIST = Source(
    folder="",
    files={
        "train images": "train-images-idx3-ubyte.gz",
        "train labels": "train-labels-idx1-ubyte.gz",
        "test images": "t10k-images-idx3-ubyte.gz",
        "test labels": "t10k-labels-idx1-ubyte.gz",
    },
    digest="md5",
    sums={
        "train images": "6bbc9ace898e44ae57da46a324031adb",
        "train labels": "a25bea736e30d166cdddb491f175f624",
        "test images": "2646ac647ad5339dbf082846283269ea",
        "test labels": "27ae3e4e09519cfbb04c329615203637",
    },
    gz=False,
)

EMNIST = Source(
    folder="emnist",
    files={
        f"{split} {kind}": f"emnist-mnist-{split}-{kind}-idx{rank}-ubyte.gz"
        for split in ("train", "test")
        for kind, rank in (("images", 3), ("labels", 1))
    },
    digest="sha256",
    sums={
        "train images": "5f9942f441031c0f1f2e4d162059fd6e19ea808b34c328b6d16cab0ed24c78f2",
        "test images": "b25640fa9e356c618132f5df347c95ef5bae6d9c2596be1de40f7e0ae1c3eac6",
    },
    gz=True,
    transposed=True,
    url="https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
    archive="gzip",
    md5="58c8d27c78d21e728a6bc7b3cc06412e",
)

SOURCES = {"mnist": MNIST, "emnist": EMNIST}


class DataError(RuntimeError):
    """A data file is missing or damaged; the message says which one and how to get it back."""


def load_data(
    name: str = "mnist",
    *,
    root: str | os.PathLike[str] | None = None,
    download: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Data:
    """The data set `name`, "mnist" (embedded) or "emnist" (the paper's), whole and on the device.

    `root` is the folder of the files: by default $HOPLIB_DATA, else the repository's data/ or what pip
    installed. `download=True` fetches EMNIST (560 MB) once; nothing else in hoplib uses the network.
    """
    checks.precision(dtype)
    checks.flag("download", download)
    source = SOURCES[checks.choice("data set", name, SOURCES)]
    folder = _root(root) / source.folder
    if download and source.url and not all((folder / f).exists() for f in source.files.values()):
        fetch(source, folder)
    device = default_device() if device is None else checks.device(device)
    splits = []
    for split, count in zip(("train", "test"), source.counts, strict=True):
        images = _read(source, folder, f"{split} images", (count, 28, 28))
        label = torch.from_numpy(_read(source, folder, f"{split} labels", (count,)).astype(np.int64)).to(device)
        if source.transposed:
            images = images.transpose(0, 2, 1)
        x = torch.from_numpy(images.reshape(count, 784).copy()).to(device).to(dtype).div_(255)
        splits.append(Split(x, torch.nn.functional.one_hot(label, 10).to(dtype), label))
    return Data(name, *splits)


def _root(root: str | os.PathLike[str] | None) -> Path:
    if root is not None:
        if not isinstance(root, (str, os.PathLike)):
            raise TypeError(f"root must be the path of a folder, not {root!r}")
        return Path(root)
    if os.environ.get("HOPLIB_DATA"):
        return Path(os.environ["HOPLIB_DATA"])
    here, user = Path(__file__).resolve().parent.parent / "data", sysconfig.get_preferred_scheme("user")
    installed = [Path(sysconfig.get_path("data", scheme)) for scheme in (sysconfig.get_default_scheme(), user)]
    places = [here, *(place / "share" / "hoplib" for place in installed)]
    return next((place for place in places if place.is_dir()), here)


def _restore(source: Source, path: Path) -> str:
    if source.url:
        return (
            'load_data("emnist", download=True) fetches it (delete a damaged file first). '
            'Without a network use the embedded data set, load_data("mnist").'
        )
    return f"Restore it with `git checkout -- data/{path.name}`, or set $HOPLIB_DATA to a folder that has it."


def _read(source: Source, folder: Path, role: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array of one gzipped IDX file, after its checksum and its header have been compared."""
    path = folder / source.files[role]
    if not path.exists():
        raise DataError(f"{path} is missing. {_restore(source, path)}")
    try:
        packed = path.read_bytes()
        raw = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"{path} is damaged or cut short ({e}). {_restore(source, path)}") from e
    found = hashlib.new(source.digest, packed if source.gz else raw).hexdigest()
    if source.sums.get(role, found) != found:
        raise DataError(f"{path} is not the published file: its {source.digest} is {found}. {_restore(source, path)}")
    header = np.array([0x0800 + len(shape), *shape], dtype=">u4").tobytes()
    if raw[: len(header)] != header or len(raw) != len(header) + int(np.prod(shape)):
        raise DataError(
            f"{path} does not hold {'×'.join(map(str, shape))} bytes in IDX format. {_restore(source, path)}"
        )
    return np.frombuffer(raw, np.uint8, offset=len(header)).reshape(shape)


def fetch(source: Source, folder: Path) -> None:
    """Download the archive with torchvision's downloader and keep the four files of the split."""
    try:
        from torchvision.datasets.utils import download_url  # type: ignore[import-untyped]
    except ImportError as e:
        raise DataError(f"downloading needs torchvision (pip install 'hoplib[data]'): {e}") from e
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        try:
            download_url(source.url, scratch, "archive.zip", md5=source.md5 or None)
        except Exception as e:  # the downloader raises whatever the network does
            raise DataError(
                f"could not download {source.url} ({type(e).__name__}: {e}). "
                'Without a network use the embedded data set, load_data("mnist").'
            ) from e
        with zipfile.ZipFile(Path(scratch) / "archive.zip") as archive:
            for name in source.files.values():
                part = Path(scratch) / name
                part.write_bytes(archive.read(f"{source.archive}/{name}"))
                os.replace(part, folder / name)
