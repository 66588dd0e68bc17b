"""The notebooks hold at other parameters than their own: two sets each in CI, the first of them elsewhere, for time.

A set names some of the parameters; the others keep their defaults. The notebook's assertions are the test. Where a
change is not reasonable, the notebook says so: `REFUSED` has such sets, with the sentence that they end in.
"""

import os
from pathlib import Path

import pytest

from hoplib.experiment import notebooks

FOLDER = Path(__file__).parent.parent / "notebooks"
SETS = 2 if os.environ.get("CI") else 1
OTHER = {
    "00_start_here": [
        {"layers": [784, 64, 32, 16, 10], "steps": 150, "digits": 200, "seed": 1},
        {"layers": [784, 64, 48, 32, 16, 10], "steps": 200, "batch": 48, "digits": 150},
    ],
    "01_energies_and_flows": [
        {"memories": 3, "layers": [4, 5, 3], "seeds": [4], "batch": 8, "gain": 1.5, "bias": [0.0, 0.0]},
        {"memories": 7, "beta": 80.0, "layers": [3, 4, 4, 2], "seeds": [1, 2], "batch": 4, "step_sizes": [0.1, 1.0]},
    ],
    "02_hopfield_as_deq": [
        {"widths": [6, 7, 5, 6, 4, 3], "depths": [3, 6], "seeds": [1], "digit_networks": [[48]], "trained_depths": []},
        {
            "widths": [7, 6, 6, 5, 4],
            "depths": [2, 5],
            "seeds": [3],
            "batch": 3,
            "step_sizes": [0.1, 0.25, 0.5],
            "digit_networks": [[48], [64, 48, 32]],
            "trained_depths": [3],
            "train_steps": 40,
            "test_images": 64,
        },
    ],
    "02b_the_gradient": [
        {"depths": [3, 4], "depth": 4, "seeds": [5], "gain": 0.3, "batch": 2, "backward_steps": 60},
        {"widths": [5, 6, 4, 5, 3], "depths": [5], "depth": 3, "seeds": [1], "gain": 0.4, "memory_iterations": [4, 8]},
    ],
    "03_theorem_1": [
        {"five": [3, 2, 5, 1, 2], "depths": [3, 6], "widths": [2], "seeds": [5, 6, 7, 8], "steps": 40, "batch": 2},
        {
            "five": [12, 20, 16, 9, 10],
            "depths": [2, 5],
            "widths": [4],
            "seeds": [11],
            "skip_seeds": 12,
            "skip_gain": 3.0,
        },
    ],
    "04_theorem_2": [
        {
            "depths": [3, 4],
            "n_input": 3,
            "width": 5,
            "n_output": 2,
            "seeds": 2,
            "batch": 3,
            "margin": 0.5,
            "pair_coupling": 2.0,
            "h_max": 20.0,
            "gains": [1.0, 2.0],
            "eo_batch": 12,
            "relu_layers": [4, 4, 3, 2],
            "relu_batch": 10,
        },
        {"depths": [2, 6], "width": 12, "seeds": 1, "margin": 0.9, "pair_coupling": 5.0, "relu_layers": [5, 6, 4]},
    ],
    "05_even_odd_deq": [
        {"depths": [3, 6], "seeds": 2, "architectures": 4, "networks": 30, "sweeps": 3},
        {"depths": [4, 5], "seeds": 1, "architectures": 8, "networks": 20, "sweeps": 6},
    ],
    "06_synchronous_waste": [
        {
            "layers": [5, 7, 6, 5, 4],
            "times": 5,
            "depths": [3, 6],
            "seeds": [7],
            "steps": 12,
            "pair_coupling": 2.0,
            "gains": [1.0, 6.0],
            "cycle_seeds": 2,
            "unrolled": 5,
            "train_networks": 4,
            "train_steps": 80,
        },
        {
            "layers": [4, 6, 6, 6, 6, 6, 3],
            "times": 8,
            "depths": [4],
            "seeds": [1, 2],
            "gains": [3.0],
            "train_networks": 6,
            "train_sizes": [8, 16, 16, 16, 4],
            "train_steps": 120,
        },
    ],
    "10_explore": [
        {"depth": 3, "images": 200, "sample": 2},
        {"depth": 5, "gain": 0.9, "images": 150, "omegas": [1.0, 1.2, 1.4, 1.6]},
    ],
    "11_over_relaxation": [
        {"networks": 100, "images": 32, "omegas": [1.2, 1.4, 1.6], "gains": [1.0, 2.0]},
        {"networks": 60, "adversary_steps": 100, "omegas": [1.1, 1.3, 1.5, 1.7], "gains": [0.5, 4.0]},
    ],
    "12_the_fastest_way_down": [
        {"depths": [5], "images": 32, "starts": 48, "seed": 1},
        {"depths": [3, 7], "images": 24, "layers": [20, 18, 16, 12, 8], "gain": 1.5, "too_large": 1.8, "cap": 250},
    ],
}
REFUSED = [  # notebook, parameters, the sentence
    ("01_energies_and_flows", {"coupling": 0.5}, "two valleys"),
    ("01_energies_and_flows", {"memories": 2}, "two are too easy"),
    ("03_theorem_1", {"five": [4, 4, 4]}, "give five sizes"),
    ("04_theorem_2", {"margin": 1.2}, "only below 1 is uniqueness certified"),
    ("06_synchronous_waste", {"pair_coupling": 0.9}, "two minima only above coupling 1"),
    ("10_explore", {"depth": 4}, "3, 5 and 7 layers"),
    ("11_over_relaxation", {"omegas": [2.1]}, "between 1 and 2"),
    ("12_the_fastest_way_down", {"depths": [4]}, "3, 5 and 7 layers"),
]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [pytest.param(name, p, id=f"{name}-{i}") for name, sets in OTHER.items() for i, p in enumerate(sets[:SETS])],
)
def test_it_holds_at_other_parameters(name, parameters, tmp_path):
    nb = notebooks.run(FOLDER / f"{name}.ipynb", tmp_path / "out.ipynb", parameters)
    assert notebooks.verdict(nb)


@pytest.mark.parametrize(("name", "parameters", "sentence"), REFUSED)
def test_it_says_what_it_cannot_do(name, parameters, sentence, tmp_path):
    with pytest.raises(notebooks.NotebookError, match=sentence):
        notebooks.run(FOLDER / f"{name}.ipynb", tmp_path / "out.ipynb", parameters)
