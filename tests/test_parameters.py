"""Every notebook holds at other parameters than its own: two sets each, small, so that all of them take little time.

A set names some of the parameters; the others keep their defaults. The notebook's assertions are the test. Where a
change is not reasonable, the notebook says so: `REFUSED` has such sets, with the sentence that they end in.
"""

from pathlib import Path

import pytest

from hoplib.experiment import notebooks

FOLDER = Path(__file__).parent.parent / "notebooks"
OTHER = {
    "00_start_here": [],
    "01_energies_and_flows": [],
    "02_hopfield_as_deq": [],
    "02b_the_gradient": [],
    #
    "03_theorem_1": [],
    "04_theorem_2": [],
    "05_even_odd_deq": [],
    "06_synchronous_waste": [],
    #
    "11_over_relaxation": [],
}
REFUSED = []  # (notebook, parameters, the sentence)


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
