"""`make paper` makes what has changed and nothing else, says what failed, and ends quietly when it is stopped."""

import functools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import assemble
import nbformat
import psutil
import pytest

from hoplib.experiment import notebooks

ROOT = Path(__file__).parent.parent
PLOT = "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);"


def tiny_notebook(path, *sources):
    cells = [nbformat.v4.new_markdown_cell("# 00 · A tiny notebook\n## 1 · Two points, and a line")]
    nb = nbformat.v4.new_notebook(cells=cells + [nbformat.v4.new_code_cell(s) for s in sources])
    nb.cells[1].metadata["tags"] = ["parameters"]
    nb.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nb, path)
    return path


@pytest.fixture
def executions(monkeypatch):
    """The names of the notebooks that are executed, in order; a line of text stands for the execution."""
    names = []

    def run(path, output, on_cell):
        names.append(path.stem)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(path.read_text())
        return nbformat.reads(path.read_text(), as_version=4)

    monkeypatch.setattr(notebooks, "run", run)
    return names


def test_a_notebook_is_executed_and_its_figures_are_named_by_their_headings(tmp_path, capsys):
    notebook = tiny_notebook(tmp_path / "00_x.ipynb", "n = 3", PLOT, "print('n is', n)")
    assert assemble.main([str(notebook), "--build", str(tmp_path / "build")]) == 0
    assert "n is 3" in capsys.readouterr().out
    assert [f.name for f in (tmp_path / "build" / "figures").iterdir()] == ["00-two-points-and-a-line.png"]
    executed = nbformat.read(tmp_path / "build" / "notebooks" / "00_x.ipynb", as_version=4)
    assert executed.cells[-1].execution_count == 3
    nb = notebooks.run(notebook, tmp_path / "out.ipynb", {"n": 5})
    assert notebooks.verdict(nb) == "n is 5"


def test_it_shows_the_failing_cell(tmp_path, capsys):
    notebook = tiny_notebook(tmp_path / "00_x.ipynb", "n = 3", "assert n == 4, 'three is not four'")
    assert assemble.main([str(notebook), "--build", str(tmp_path / "build")]) == 1
    error = capsys.readouterr().err
    assert "00_x.ipynb, cell [2] failed" in error
    assert "AssertionError: three is not four" in error
    assert "\x1b[" not in error
    assert not (tmp_path / "build" / "made.json").exists()


def test_it_names_a_missing_notebook(tmp_path, capsys):
    assert assemble.main([str(tmp_path / "99.ipynb")]) == 1
    assert "no such notebook" in capsys.readouterr().err


def test_only_what_has_changed_is_made_again(tmp_path, executions, monkeypatch):
    code, read, build = tmp_path / "code", tmp_path / "results", tmp_path / "build"
    code.mkdir()
    read.mkdir()
    (code / "module.py").write_text("x = 1")
    (read / "record.json").write_text("{}")
    monkeypatch.setattr(assemble, "CODE", (code,))
    monkeypatch.setattr(assemble, "RECORDS", (read,))
    a = tiny_notebook(tmp_path / "00_a.ipynb", "n = 3")
    b = tiny_notebook(tmp_path / "01_b.ipynb", "n = 3", "open('../results/record.json')")

    def made():
        executions.clear()
        assert assemble.main([str(a), str(b), "--build", str(build)]) == 0
        return list(executions)

    assert made() == ["00_a", "01_b"]
    assert made() == []
    os.utime(a)
    os.utime(code / "module.py")
    assert made() == [], "a time is no change"
    nb = nbformat.read(a, as_version=4)
    nb.cells[-1].outputs = [nbformat.v4.new_output("stream", text="other")]
    nb.cells[-1].execution_count = 7
    nbformat.write(nb, a)
    assert made() == [], "nor is an output"
    tiny_notebook(a, "n = 4")
    assert made() == ["00_a"]
    (read / "record.json").write_text("{ }")
    assert made() == ["01_b"], "only one reads the records"
    (code / "module.py").write_text("x = 2")
    assert made() == ["00_a", "01_b"]
    (build / "notebooks" / "00_a.ipynb").write_text("damaged")
    (build / "notebooks" / "01_b.ipynb").unlink()
    assert made() == ["00_a", "01_b"]
    (build / "made.json").write_text("{")
    assert made() == ["00_a", "01_b"]


def test_a_figure_under_another_name_takes_the_place_of_the_old_one(tmp_path):
    made = assemble.Made(tmp_path)
    part = assemble.Notebook(tmp_path / "00_a.ipynb", tmp_path)
    old, new, other = (tmp_path / name for name in ("old.png", "new.png", "other.png"))
    for path in (old, new, other):
        path.write_text(path.name)
    made.note(part, "sources", {old: "an old heading"}, 1.0)
    made.note(part, "sources", {new: "a new heading"}, 1.0)
    assert [f.name for f in sorted(tmp_path.glob("*.png"))] == ["new.png", "other.png"]


def test_a_message_of_the_kernel_does_not_break_the_bar(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONWARNINGS", "nonsense")  # which every Python complains of when it starts
    notebook = tiny_notebook(tmp_path / "00_x.ipynb", "n = 3", "print(n)")
    notebooks.run(notebook, tmp_path / "out.ipynb")
    assert capfd.readouterr() == ("", "")


def test_what_a_dead_kernel_said_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "nonsense")
    notebook = tiny_notebook(tmp_path / "00_x.ipynb", "n = 3", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(notebooks.NotebookError, match=r"the kernel died \(was it killed, or .*\)\n.*nonsense"):
        notebooks.run(notebook, tmp_path / "out.ipynb")


def test_ctrl_c_prints_one_line_and_leaves_no_kernel(tmp_path):
    """Typed in a terminal, it reaches make, the shell of the recipe, and the program."""
    pexpect = pytest.importorskip("pexpect", reason="no terminals here")
    recipe = re.search(r"^paper:.*\n\t@(.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
    notebook = tiny_notebook(tmp_path / "00_x.ipynb", "n = 3", "import time; open('here', 'w'); time.sleep(600)")
    recipe = recipe.replace("$(BIN)/python", sys.executable)
    recipe = recipe.replace("site/assemble.py", f"{ROOT}/site/assemble.py {notebook} --build {tmp_path}/build")
    (tmp_path / "Makefile").write_text(f"paper:\n\t@{recipe}\n")
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background do not hear it
    make = pexpect.spawn(
        "make paper", cwd=str(tmp_path), encoding="utf-8", timeout=100, dimensions=(24, 120), preexec_fn=heard
    )
    while not (tmp_path / "here").exists():
        assert make.isalive()
        time.sleep(0.05)
    kernels = [p for p in psutil.Process(make.pid).children(recursive=True) if "ipykernel" in str(p.cmdline())]
    assert kernels
    make.sendintr()
    make.expect(pexpect.EOF)
    make.close()
    assert make.signalstatus == signal.SIGINT, "make, too, was interrupted"
    lines = [
        line for line in re.split(r"[\r\n]+", make.before.replace("^C", "")) if "cell" not in line and line.strip()
    ]
    assert len(lines) == 1, make.before
    assert "the same command makes the rest" in lines[0]
    assert not psutil.wait_procs(kernels, timeout=20)[1], "a kernel goes on"


def test_the_page_of_all_parts(tmp_path, executions):
    """Its links lead somewhere; it tells every verdict; nothing comes from elsewhere. Committed notebooks stand in."""
    build = tmp_path / "build"
    build.mkdir()
    made = assemble.Made(build)
    parts = [assemble.Notebook(p, build) for p in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))]
    for part in parts:
        made.note(part, "", part.make(lambda: None), 1.0)
    for name in ("table.csv", "summary.md", "figures/settling.png"):
        (build / name).write_bytes((ROOT / "results" / name).read_bytes())
    page = assemble.page(assemble.facts(made, parts))
    for part in parts:
        assert part.verdict().split(":")[0] in page.replace("&#39;", "'").replace("&lt;", "<").replace("&gt;", ">")
    assert "://" not in page
    links = set(re.findall(r'(?:href|src)="([^"#]+)"', page))
    inside = {link for link in links if not link.startswith(("site/", "playground", "table."))}
    assert len(inside) > 30
    assert not [link for link in inside if not (build / link).exists()]
    assert json.loads((build / "made.json").read_text()).keys() == {part.name for part in parts}
