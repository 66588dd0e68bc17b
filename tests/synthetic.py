"""Records that no training made: valid in form, with invented numbers, to test what reads all of them."""

import numpy as np

from hoplib import paper
from hoplib.experiment.config import configure
from hoplib.experiment.measure import BINS, CRITERIA, CROSS, RADII, ways
from hoplib.experiment.records import record_path, write_record
from hoplib.experiment.rows import MODELS, ROWS
from hoplib.network import HAM


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
    net = MODELS[row.model](row.layers, device="meta")
    most, work, first_layer = paper.max_iter(net, row.even_odd) - 1, net.multiply_adds(), row.layers[0] * row.layers[1]
    limits = [paper.max_iter(net, even_odd) for even_odd, _ in ways(row).values()]
    mean = row.published.iterations if row.published else 10
    mean /= 2 if row.model == "CHN" and row.even_odd and row.readout == "output" else 1
    hardness = 3 * np.random.default_rng(99).normal(size=images) + g.normal(size=images)  # the image's own first
    iterations = np.clip((mean + hardness).round(), 1, most).astype(np.uint16)
    predicted = g.integers(0, 10, images).astype(np.uint8)
    rate = np.log(1e-4) / np.maximum(iterations, 1)
    logs = np.minimum(np.arange(most)[:, None] * rate / np.log(10), 0)
    arrays = {
        "histogram": np.stack([np.histogram(v, BINS)[0] for v in logs]).astype(np.uint16),
        "iterations": iterations,
        "predicted": predicted,
        "equation_error": np.full(images, -60, np.int8),
        "cross_iterations": np.stack([np.minimum(iterations[:CROSS], n - 1) for n in limits]),
    }
    if isinstance(net, HAM):
        arrays["spectral_radius"] = np.exp(rate[: min(images, RADII)]).astype(np.float32)
    cross = {
        way: {
            "iterations": float(found.mean()),
            "not_converged": float((found == n - 1).mean()),
            "not_finite": 0.0,
            "false_convergence": 0.0,
            "accuracy": 0.9,
        }
        for way, found, n in zip(ways(row), arrays["cross_iterations"], limits, strict=True)
    }
    first = float(iterations[:1000].mean())
    test = {"test_accuracy": 0.9, "test_iterations": first, "test_not_converged": 0.0, "test_false_convergence": 0.0}
    history = [
        {"loss": 0.1, "accuracy": 0.9, "iterations": mean, "not_converged": 0.0, **test, "seconds": 1, "cpu_seconds": 1}
    ]
    numbers = {
        "test_accuracy": 0.9 + 0.001 * config.seed,
        "iterations_mean": float(iterations.mean()),
        "iterations_std": float(iterations.std()),
        "not_converged": float((iterations == most).mean()),
        "false_convergence": 0.0,
        "criteria": {f"{c:.3g}": min(float(np.log(c) / np.log(1e-4) * iterations.mean()), most) for c in CRITERIA},
        "equation_error": {"median": 1e-6, "95 %": 1e-6, "max": 1e-6},
        "multiply_adds": {
            "iteration": work,
            "input": first_layer,
            "solve": first_layer + work * float(iterations.mean()),
        },
        "cross": cross,
        "history": history * epoch,
        "seconds": {
            "training": epoch,
            "training_cpu": epoch,
            "evaluation": 1,
            "evaluation_cpu": 1,
            "cross_cpu": dict.fromkeys(ways(row), 1.0),
        },
    }
    numbers["criteria"]["0.0001"] = numbers["iterations_mean"]
    if isinstance(net, HAM):
        numbers["spectral_radius"] = {"median": 0.5, "95 %": 0.8, "max": float(arrays["spectral_radius"].max())}
    if row.solver == "over-relaxed":
        numbers["omega"] = 1.4
    facts = {"row": name, "seed": config.seed, "data": config.data, "epoch": epoch, "config": config.settings()}
    facts |= {"versions": {}, "device": "none", "fused": False, "threads": 1}
    return {**facts, **numbers}, arrays
