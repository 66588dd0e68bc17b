"""Records that no training made: valid in form, with invented numbers, to test what reads all of them."""

import numpy as np

from hoplib.measure import BINS, CRITERIA, CROSS, RADII, WAYS
from hoplib.records import record_path, write_record
from hoplib.table import MODELS, ROWS, configure


def synthetic(folder, rows=ROWS, seeds=range(5), **options):
    """A record for every row and seed, whose iterations are the paper's."""
    for name in rows:
        for seed in seeds:
            config, names = configure(name, seed, **options)
            record, epoch = list(names.items())[-1]
            write_record(record_path(folder / "runs", record, seed), *invent(record, config, epoch))


def invent(name, config, epoch):
    g = np.random.default_rng(config.seed)
    row, images = config.row, config.test_images
    most = MODELS[row.model](row.layers, device="meta").max_iter(row.even_odd) - 1
    mean = row.published.iterations if row.published else 10
    iterations = np.clip(g.normal(mean, 3, images).round(), 1, most).astype(np.uint16)
    predicted = g.integers(0, 10, images).astype(np.uint8)
    rate = np.log(1e-4) / np.maximum(iterations, 1)
    logs = np.minimum(np.arange(most)[:, None] * rate / np.log(10), 0)
    arrays = {
        "histogram": np.stack([np.histogram(v, BINS)[0] for v in logs]).astype(np.uint16),
        "iterations": iterations,
        "predicted": predicted,
        "equation_error": np.full(images, -60, np.int8),
        "cross_iterations": np.tile(iterations[: min(images, CROSS)], (len(WAYS), 1)),
    }
    if row.model == "HAM":
        arrays["spectral_radius"] = np.exp(rate[: min(images, RADII)]).astype(np.float32)
    one = {"iterations": mean, "not_converged": 0.0, "not_finite": 0.0, "false_convergence": 0.0, "accuracy": 0.9}
    test = {"test_accuracy": 0.9, "test_iterations": mean, "test_not_converged": 0.0, "test_false_convergence": 0.0}
    history = [
        {"loss": 0.1, "accuracy": 0.9, "iterations": mean, "not_converged": 0.0, **test, "seconds": 1, "cpu_seconds": 1}
    ]
    numbers = {
        "test_accuracy": 0.9 + 0.001 * config.seed,
        "iterations_mean": float(iterations.mean()),
        "iterations_std": float(iterations.std()),
        "not_converged": float((iterations == most).mean()),
        "false_convergence": 0.0,
        "criteria": {f"{c:.3g}": float(np.log(c) / np.log(1e-4) * iterations.mean()) for c in CRITERIA},
        "equation_error": {"median": 1e-6, "95 %": 1e-6, "max": 1e-6},
        "multiply_adds": {"iteration": 1, "input": 1, "solve": 1.0 + float(iterations.mean())},
        "cross": dict.fromkeys(WAYS, one),
        "history": history * epoch,
        "seconds": {
            "training": epoch,
            "training_cpu": epoch,
            "evaluation": 1,
            "evaluation_cpu": 1,
            "cross_cpu": dict.fromkeys(WAYS, 1.0),
        },
    }
    numbers["criteria"]["0.0001"] = numbers["iterations_mean"]
    if row.model == "HAM":
        numbers["spectral_radius"] = {"median": 0.5, "95 %": 0.8, "max": 0.9}
    facts = {"row": name, "seed": config.seed, "data": config.data, "epoch": epoch, "config": config.settings()}
    facts |= {"versions": {}, "device": "none", "fused": False, "threads": 1}
    return {**facts, **numbers}, arrays
