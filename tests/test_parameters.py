"""Every notebook holds at other parameters than its own: two sets each, small, so that all of them take little time.

A set names some of the parameters; the others keep their defaults. The notebook's assertions are the test. Where a
change is not reasonable, the notebook says so: `REFUSED` has such sets, with the sentence that they end in.
"""

from pathlib import Path

import pytest

from hoplib.experiment import notebooks

FOLDER = Path(__file__).parent.parent / "notebooks"
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
    ],
    "02b_the_gradient": [
        {"depths": [3, 4], "depth": 4, "seeds": [5], "gain": 0.3, "batch": 2, "backward_steps": 60},
        {"widths": [5, 6, 4, 5, 3], "depths": [5], "depth": 3, "seeds": [1], "gain": 0.4, "memory_iterations": [4, 8]},
    ],
    #
    "03_theorem_1": [],
    "04_theorem_2": [],
    "05_even_odd_deq": [],
    "06_synchronous_waste": [],
    #
    "11_over_relaxation": [],
}
REFUSED = [  # notebook, parameters, the sentence
    ("01_energies_and_flows", {"coupling": 0.5}, "two valleys"),
]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [pytest.param(name, p, id=f"{name}-{i}") for name, sets in OTHER.items() for i, p in enumerate(sets)],
)
def test_it_holds_at_other_parameters(name, parameters, tmp_path):
    nb = notebooks.run(FOLDER / f"{name}.ipynb", tmp_path / "out.ipynb", parameters)
    assert notebooks.verdict(nb)


@pytest.mark.parametrize(("name", "parameters", "sentence"), REFUSED)
def test_it_says_what_it_cannot_do(name, parameters, sentence, tmp_path):
    with pytest.raises(notebooks.NotebookError, match=sentence):
        notebooks.run(FOLDER / f"{name}.ipynb", tmp_path / "out.ipynb", parameters)
