"""The notebooks keep their form, and CLAIMS.md misses nothing.

That the notebooks execute and that their verdicts stand is checked by nbval, on the notebooks themselves.
"""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbconvert.preprocessors import TagRemovePreprocessor

from hoplib.experiment import notebooks

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ITEMS = [
    *(f"Equation {n}" for n in range(1, 17)),
    *("Theorem 1", "Theorem 2", "Definition 1", "Lemma 1", "Lemma 2", "Proposition 1", "Remark 1", "Remark 2"),
    *(f"Example {n}" for n in range(1, 6)),
    *(f"Figure {n}" for n in range(1, 5)),
    *("Table 1", "Table 2"),
]


def read(path):
    return nbformat.reads(path.read_text(), as_version=4)


def code_cells(nb):
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def tagged(nb, tag):
    return [cell for cell in code_cells(nb) if tag in cell.metadata.get("tags", [])]


def number(path):
    """00, 01, … as the title has it; a letter marks the second part of a notebook."""
    return path.name.partition("_")[0]


def test_they_are_ordered():
    numbers = [number(p) for p in NOTEBOOKS]
    assert all(re.fullmatch(r"\d\d[b-z]?", n) for n in numbers)
    assert sorted({int(n[:2]) for n in numbers}) == list(range(int(numbers[-1][:2]) + 1))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
class TestForm:
    def test_it_opens_with_the_claim_and_its_place(self, path):
        first = read(path).cells[0]
        assert first.cell_type == "markdown"
        assert first.source.startswith(f"# {number(path)} · ")
        assert re.search(r"Section|Appendi|Table", first.source)
        assert re.search(r"second|minute|\d s\b", first.source), "the run time"

    def test_it_has_one_cell_of_literal_parameters(self, path):
        (cell,) = tagged(read(path), "parameters")
        statements = ast.parse(cell.source).body
        assert all(isinstance(statement, ast.Assign) for statement in statements)
        values = {statement.targets[0].id: ast.literal_eval(statement.value) for statement in statements}
        assert notebooks.defaults(path) == values, "papermill lists them all"
        assert all(name.islower() for name in values)

    def test_it_ends_with_an_asserted_verdict(self, path):
        nb = read(path)
        last = code_cells(nb)[-1]
        assert "nbval-check-output" in last.metadata.tags
        assert "assert" in last.source
        assert len("".join(o.text for o in last.outputs).strip().splitlines()) == 1

    def test_it_is_committed_executed(self, path):
        cells = code_cells(read(path))
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        assert not [cell for cell in cells if "execution" in cell.metadata], "times of day differ at every execution"
        outputs = [o for cell in cells for o in cell.outputs]
        assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
        assert any("image/png" in o.get("data", {}) for o in outputs)
        assert path.stat().st_size < 3_000_000

    def test_its_paths_work_from_any_folder(self, path):
        nodes = [n for cell in code_cells(read(path)) for n in ast.walk(ast.parse(cell.source))]
        strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        assert not [s for s in strings if s in (".", "..") or s.startswith(("./", "../", "/"))]

    def test_its_cells_are_short(self, path):
        assert max(len(cell.source.splitlines()) for cell in code_cells(read(path))) <= 30

    def test_a_cell_that_only_draws_is_folded(self, path):
        """In JupyterLab and on the site; those that define, compute or assert something are open."""
        for cell in code_cells(read(path)):
            statements = list(ast.walk(ast.parse(cell.source)))
            drawn = any("image/png" in output.get("data", {}) for output in cell.outputs)
            works = any(isinstance(s, ast.Assert | ast.FunctionDef) for s in statements) or "hop." in cell.source
            if drawn and not works:
                assert "hide-input" in cell.metadata.get("tags", []), cell.id
            if "hide-input" in cell.metadata.get("tags", []):
                assert cell.metadata.jupyter.source_hidden, cell.id

    def test_its_code_fits_the_page(self, path):
        ruff = tomllib.loads((ROOT / "notebooks" / "ruff.toml").read_text())
        lines = [line for cell in code_cells(read(path)) for line in cell.source.splitlines()]
        assert max(map(len, lines)) <= ruff["line-length"]


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if "01" <= number(p) <= "06"], ids=lambda p: p.stem)
def test_it_has_three_exercises_with_solutions(path):
    """Three questions, then for each of them the code that answers it and the answer in words, both folded."""
    cells = {cell.id: cell for cell in read(path).cells}
    (questions,) = [c.source.partition("## Exercises")[2] for c in cells.values() if "## Exercises" in c.source]
    assert re.findall(r"^\*\*(\d)\b", questions, re.M) == ["1", "2", "3"]
    assert questions.count("?") >= 3
    order = [id for id in cells if re.fullmatch(r"(exercise|solution)-\d", id)]
    assert order == [f"{part}-{k}" for k in (1, 2, 3) for part in ("exercise", "solution")]
    for k in (1, 2, 3):
        exercise = cells[f"exercise-{k}"]
        assert "assert" in exercise.source
        assert any(o.get("name") == "stdout" for o in exercise.outputs)
        assert "hide-cell" in exercise.metadata.tags
        assert exercise.metadata.jupyter == {"source_hidden": True, "outputs_hidden": True}
        assert f"<summary>Solution of {k}, in words</summary>" in cells[f"solution-{k}"].source


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if "01" <= number(p) <= "06"], ids=lambda p: p.stem)
def test_without_its_solutions_it_is_whole(path):
    """What `make course` leaves has the questions and the verdict, and no name that only a solution gave."""
    remove = TagRemovePreprocessor(enabled=True, remove_cell_tags={"solution"})
    nb, _ = remove.preprocess(read(path), {})
    text = "\n".join(cell.source for cell in nb.cells)
    assert "## Exercises" in text
    assert "## Verdict" in text
    assert "<summary>Solution" not in text
    assert not [cell.id for cell in nb.cells if cell.id.startswith(("exercise-", "solution"))]
    assert "nbval-check-output" in code_cells(nb)[-1].metadata.tags
    assert undefined(nb) <= undefined(read(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_its_links_lead_to_notebooks_beside_it(path):
    """So they lead somewhere in every folder that holds all notebooks: here, in build/notebooks and in build/course."""
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:href|src)=[\"']([^\"']+)", text)
    files = {link for link in links if not link.startswith("https://")}
    assert files <= {p.name for p in NOTEBOOKS}


def test_make_course_writes_every_notebook_without_solutions(tmp_path):
    said = subprocess.run(["make", "-n", "-o", "setup", "course"], cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = said.stdout.replace("\\\n", " ").splitlines()
    _, *words = shlex.split(line)
    given = [str(p) for word in words if "*" in word for p in ROOT.glob(word)]
    assert sorted(given) == sorted(map(str, NOTEBOOKS))
    rest = [str(tmp_path) if word == "build/course" else word for word in words if "*" not in word]
    some = [str(p) for p in NOTEBOOKS if number(p) in ("00", "03")]  # for time
    subprocess.run([sys.executable, "-m", "jupyter", *rest, *some], check=True, capture_output=True)
    for path in map(Path, some):
        tags = [tag for cell in read(tmp_path / path.name).cells for tag in cell.metadata.get("tags", [])]
        assert "solution" not in tags
        assert "parameters" in tags


def undefined(nb):
    """The names that the code cells read and none of them defines."""
    nodes = [node for cell in code_cells(nb) for node in ast.walk(ast.parse(cell.source))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    known |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return {node.id for node in names} - known


def test_the_claims_miss_nothing():
    """Every numbered item of the paper → a notebook and a code cell that asserts it, figures too."""
    table = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| \[[^]]+\]\(notebooks/([^)]+)\) \| `([^`]+)` \|$",
        (ROOT / "CLAIMS.md").read_text(),
        re.M,
    )
    assert [item for item, _, _ in table] == ITEMS
    for item, notebook, cell_id in table:
        (cell,) = [c for c in read(ROOT / "notebooks" / notebook).cells if c.id == cell_id]
        assert cell.cell_type == "code", item
        statements = ast.walk(ast.parse(cell.source))
        assert any(isinstance(s, ast.Assert) for s in statements), item
