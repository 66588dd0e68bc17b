"""In JupyterLab, in a browser: the notebooks to start with and to explore run, and a slider changes the picture."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
SMALLER = {  # for time
    "00_start_here": "layers, steps, digits, seed = [784, 64, 32, 16, 10], 150, 200, 1",
    "10_explore": "images = 100",
}
CONTEXT = "window.jupyterapp?.shell.currentWidget?.context"
OPEN = f"name => {CONTEXT}?.path == name && {CONTEXT}.sessionContext?.session?.kernel?.status == 'idle'"
RUN = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }"
CELLS = "window.jupyterapp.shell.currentWidget.content.model.toJSON().cells"
FAILED = "cells.some(cell => cell.outputs?.some(output => output.output_type == 'error'))"
DONE = f"() => {{ const cells = {CELLS}; return cells.at(-1).outputs.length > 0 || {FAILED} }}"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """JupyterLab on copies of the notebooks, for a user who has never used it."""
    pytest.importorskip("jupyterlab")
    folder = tmp_path_factory.mktemp("lab")
    for name, changes in SMALLER.items():
        nb = nbformat.reads((FOLDER / f"{name}.ipynb").read_text(), as_version=4)
        (cell,) = [cell for cell in nb.cells if "parameters" in cell.metadata.get("tags", [])]
        cell.source += f"\n{changes}"
        for cell in nb.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(nb, folder / f"{name}.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
    command += ["--IdentityProvider.token=", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    command += [f"--ServerApp.root_dir={folder}", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    with open(folder / "log.txt", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HOME": str(folder)})
    where = f"http://127.0.0.1:{port}/lab"
    for _ in range(120):
        try:
            urllib.request.urlopen(where)
            break
        except OSError:
            assert server.poll() is None, (folder / "log.txt").read_text()
            time.sleep(0.5)
    yield where
    server.terminate()
    server.wait()
    shutil.rmtree(folder)


@pytest.fixture
def opened(browser, address):
    """Open a notebook, run all of its cells: the page, and the cells with their outputs."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})

    def run(name):
        page = context.new_page()
        page.set_default_timeout(180_000)
        page.goto(f"{address}/tree/{name}.ipynb?reset")  # else JupyterLab opens the notebook before it, too
        page.wait_for_function(OPEN, arg=f"{name}.ipynb")
        page.evaluate(RUN)
        page.wait_for_function(DONE, polling=1000)
        return page, page.evaluate(CELLS)

    yield run
    context.close()


def outputs(cells):
    return [output for cell in cells for output in cell.get("outputs", [])]


def printed(cells):
    return "".join("".join(output["text"]) for output in outputs(cells[-1:]))


def test_the_start_runs(opened):
    _, cells = opened("00_start_here")
    assert not [output for output in outputs(cells) if output["output_type"] == "error"]
    assert "The tour holds" in printed(cells)
    assert sum("image/png" in output.get("data", {}) for output in outputs(cells)) >= 1


def iterations(page, other_than=""):
    """Of the over-relaxed way, at its end; once they are others than these."""
    page.get_by_role("button", name="To end").click()
    card = page.locator(f".playground .card[data-way^='over'][data-iterations]:not([data-iterations='{other_than}'])")
    return int(card.get_attribute("data-iterations", timeout=20_000))


def test_explore_runs_and_a_slider_changes_the_picture(opened):
    page, cells = opened("10_explore")
    assert not [output for output in outputs(cells) if output["output_type"] == "error"]
    assert "The four ways hold" in printed(cells)
    page.evaluate("() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 4 }")
    slider = page.get_by_label("ω, over-relaxation")
    slider.scroll_into_view_if_needed()
    before = iterations(page)
    slider.fill("1.1")
    after = iterations(page, other_than=before)
    assert after > before, "a smaller ω is slower"

    slider.press("ArrowLeft")  # which would move to another cell, and d d would delete it
    slider.press("ArrowDown")
    slider.press("d")
    slider.press("d")
    assert slider.input_value() == "1"
    assert iterations(page, other_than=after) > after
    notebook = "window.jupyterapp.shell.currentWidget.content"
    assert page.evaluate(f"[{notebook}.activeCellIndex, {notebook}.widgets.length]") == [4, len(cells)]
