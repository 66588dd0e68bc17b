"""`make attack`: what can happen to trainings, many times. It prints what was done, and fails if anything was lost.

kills         of a training at random instants, and at every file operation of it
bit flips     in records, checkpoints and data
full disk     files that cannot grow beyond a random size
two batches   `make table` twice at the same time, in one folder
"""

import argparse
import hashlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from test_batch import make_table, records, tiny_plan
from test_train import checkpoint_of, epochs_trained, run, same, small

import hoplib as hop
from hoplib import checks
from hoplib.experiment.files import RunError, read_checkpoint
from hoplib.experiment.records import read_record, why_not

CHANGES = {"epochs": 2, "train_images": 640, "test_images": 10}
FORK = multiprocessing.get_context("fork")  # torch and the data are there already: a run starts at once
OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.truncate"}


def start(folder, before=lambda: None):
    """A training in a process of its own, which first calls `before`."""

    def work():
        warnings.simplefilter("ignore")  # that all records are there already
        before()
        try:
            run(folder, data=DATA, **CHANGES)
        except RunError:
            sys.exit(3)

    process = FORK.Process(target=work)
    process.start()
    return process


def check(folder, trained):
    """Nothing is lost: a record that is there counts, and the checkpoint is no older than before."""
    config, rows = small(**CHANGES)
    for name, epoch in rows.items():
        assert why_not(folder / "runs" / name / "seed-0.json", config, epoch) in ("", "missing")
    now = epochs_trained(checkpoint_of(folder, **CHANGES), **CHANGES)
    assert now >= trained, f"{trained} epochs were saved, now {now}"
    return now


def done(folder):
    config, rows = small(**CHANGES)
    return not any(why_not(folder / "runs" / name / "seed-0.json", config, epoch) for name, epoch in rows.items())


def whole(folder, reference):
    """The record is that of the undisturbed training, and no temporary file is left."""
    (record,) = folder.glob("runs/*/seed-0.json")
    assert same(record, reference)
    assert not [p for p in folder.rglob(".*") if p.is_file()], "orphans"


def kills_at_random(folder, reference, seconds, instants):
    killed = runs = 0
    while killed < instants:
        place, trained = folder / f"random-{runs}", 0
        while not done(place):
            process = start(place)
            process.join(random.uniform(0, seconds))
            if process.is_alive():
                process.kill()
                killed += 1
            process.join()
            trained = check(place, trained)
        start(place).join()  # a kill between the record and the end leaves temporary files: one more command
        whole(place, reference)
        shutil.rmtree(place)
        runs += 1
    return f"{killed} kills at random instants of {runs} trainings"


def suicide(after):
    """Kill the process at the so manyth file operation that may change something."""
    seen = 0

    def hook(event, args):
        nonlocal seen
        reads = event == "open" and (args[1] is None or "r" in args[1]) and not (args[2] or 0) & os.O_CREAT
        if event in OPERATIONS and not reads:
            seen += 1
            if seen == after:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kills_at_files(folder, reference):
    place, killed, trained = folder / "operations", 0, 0
    for after in range(1, 1000):
        shutil.rmtree(place, ignore_errors=True)
        process = start(place, lambda after=after: suicide(after))
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        killed += 1
        trained = check(place, 0)
        again = start(place)
        again.join()
        assert again.exitcode == 0
        whole(place, reference)
    return f"{killed} kills, one at every file operation of a training (at the last {trained} epochs were saved)"


def flip(content):
    where = random.randrange(8 * len(content))
    return content[: where // 8] + bytes([content[where // 8] ^ 1 << where % 8]) + content[where // 8 + 1 :]


def bit_flips(folder, reference, times):
    place = folder / "flips"
    shutil.copytree(reference.parents[2], place)
    (record,) = place.glob("runs/*/seed-0.json")
    config, rows = small(**CHANGES)
    (epoch,) = rows.values()
    seen = harmless = 0
    for path in (record, record.with_suffix(".npz"), checkpoint_of(place, **CHANGES)):
        content, before = path.read_bytes(), read_record(record)[0]
        for _ in range(times):
            path.write_bytes(flip(content))
            if path.suffix == ".pt":
                found = read_checkpoint(path, torch.device("cpu")) is None
            else:
                found = why_not(record, config, epoch) != ""
            if not found:  # a space instead of a line's end, say
                assert path == record
                assert read_record(record)[0] == before
            seen, harmless = seen + found, harmless + (not found)
        path.write_bytes(content)
    source = Path(hop.data.__file__).parent.parent / "data"
    shutil.copytree(source, place / "data", ignore=shutil.ignore_patterns("emnist"))
    for _ in range(max(times // 100, 1)):
        path = random.choice(sorted((place / "data").glob("t10k*.gz")))
        content = path.read_bytes()
        path.write_bytes(flip(content))
        raw = hashlib.md5(content).digest()
        try:
            data = hop.load_data("mnist", root=place / "data", device="cpu")
            assert torch.equal(data.test.x, DATA.test.x)  # in gzip's header
            harmless += 1
        except hop.DataError:
            seen += 1
        path.write_bytes(content)
        assert hashlib.md5(path.read_bytes()).digest() == raw
    return f"{seen + harmless} bit flips: {seen} noticed, {harmless} that changed nothing, none believed"


def full_disk(folder, reference, times):
    """No file may be larger than a random size; then the same command without that limit."""
    sizes = [p.stat().st_size for p in reference.parents[2].rglob("*") if p.is_file()]
    failed = 0
    for i in range(times):
        place, limit = folder / f"full-{i}", random.randrange(max(sizes) + 1000)
        limited = start(place, lambda limit=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        limited.join()
        assert limited.exitcode in (0, 3), "only a RunError may end it"
        failed += limited.exitcode == 3
        check(place, 0)
        start(place).join()
        whole(place, reference)
        shutil.rmtree(place)
    return f"{times} disks that were full: {failed} trainings said so, all were completed afterwards"


def two_batches(folder):
    options = {"rows": "3-HAM-EO 3-HAM", "seeds": "0 1"}
    together, alone = tiny_plan(folder / "together", **options), tiny_plan(folder / "alone", **options)
    processes = [make_table(together), make_table(together)]
    for process in processes:
        output, _ = process.communicate()
        assert process.returncode == 0, output
    output, _ = (process := make_table(alone)).communicate()
    assert process.returncode == 0, output
    for a, b in zip(records(together), records(alone), strict=True):
        assert same(a, b)
    return f"2 batches at once: {len(records(together))} records, each as that of one batch alone"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instants", type=int, default=100, help="kills at random; the other numbers follow")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    names = ("random", "files", "flips", "disk", "batches")
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    options = parser.parse_args()
    random.seed(options.seed)
    print(f"seed {options.seed}", flush=True)
    DATA = hop.load_data("mnist", device="cpu")
    n = checks.integer("instants", options.instants, 1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run(folder / "warm", data=DATA, epochs=1)  # the loops are compiled
        begin = time.perf_counter()
        (reference,) = run(folder / "whole", data=DATA, **CHANGES)
        seconds = time.perf_counter() - begin
        attacks = {
            "random": lambda: kills_at_random(folder, reference, seconds, n),
            "files": lambda: kills_at_files(folder, reference),
            "flips": lambda: bit_flips(folder, reference, 5 * n),
            "disk": lambda: full_disk(folder, reference, max(n // 5, 1)),
            "batches": lambda: two_batches(folder),
        }
        for name in options.only:
            print(attacks[name](), flush=True)
    print("nothing was lost")
