"""Execute the notebooks in order, through papermill: `python -m hoplib.experiment.notebooks` is what `make paper` runs.

The executed notebooks go to build/notebooks/, their figures to build/figures/. Needs the `notebooks` extra.
"""

from __future__ import annotations

import argparse
import ast
import base64
import difflib
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nbformat
import papermill  # type: ignore[import-untyped]
import psutil  # type: ignore[import-untyped]
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError  # type: ignore[import-untyped]
from tqdm import tqdm  # type: ignore[import-untyped]
from traitlets.config import Config

from .files import interrupted


class ParameterError(ValueError):
    """A parameter that the notebook does not have, or of another type."""


class NotebookError(RuntimeError):
    """A cell failed; the message is its place and its traceback."""


def defaults(notebook: Path) -> dict[str, Any]:
    """The names and values of the notebook's `parameters` cell, which holds literals only. Runs nothing."""
    cells = nbformat.reads(notebook.read_text(), as_version=4).cells  # type: ignore[no-untyped-call]
    source = next((c.source for c in cells if "parameters" in c.metadata.get("tags", [])), "")
    assignments = [a for a in ast.parse(source).body if isinstance(a, ast.Assign)]
    return {a.targets[0].id: ast.literal_eval(a.value) for a in assignments if isinstance(a.targets[0], ast.Name)}


def check_parameters(notebook: Path, parameters: Mapping[str, Any]) -> None:
    """Raise an error unless every parameter is one of the notebook's and of the type of its default."""
    known = defaults(notebook)
    for name, value in parameters.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ParameterError(f"{notebook.name} has no parameter {name!r}.{hint} It has: {', '.join(known)}")
        default = known[name]
        kinds = (float, int) if isinstance(default, float) else (type(default),)
        if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
            kind = type(default).__name__
            raise ParameterError(f"{notebook.name}: {name} must be of type {kind} (like {default!r}), not {value!r}")


def run(
    notebook: Path,
    output: Path,
    parameters: Mapping[str, Any] | None = None,
    on_cell: Callable[[], object] = lambda: None,
) -> nbformat.NotebookNode:
    """Execute one notebook with one set of parameters, from its own folder, and write it to `output`.

    Unknown or ill-typed parameters raise a `ParameterError` before anything starts; a failing cell a `NotebookError`
    with its traceback. An executed notebook proves nothing (a killed kernel leaves one too): look for its results.
    Each kernel talks over sockets of its own in a new folder: TCP ports could be taken by a neighbour's kernel.
    """
    check_parameters(notebook, parameters or {})
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as sockets:
        ipc = {"KernelManager": {"transport": "ipc", "ip": os.path.join(sockets, "k")}}
        try:
            return papermill.execute_notebook(  # type: ignore[no-any-return]
                _literal(notebook),
                _literal(output),
                dict(parameters or {}),
                cwd=str(notebook.parent),
                progress_bar=False,
                config=Config(ipc if os.name == "posix" else {}),
                on_cell_executed=lambda **_: on_cell(),
            )
        except PapermillExecutionError as e:
            traceback = "\n".join(e.traceback) or f"{e.ename}: {e.evalue}"
            if not sys.stderr.isatty():
                traceback = re.sub(r"\x1b\[[0-9;]*m", "", traceback)
            raise NotebookError(f"{notebook.name}, cell [{e.exec_count}] failed:\n{traceback}") from None
        except KeyboardInterrupt:
            for kernel in psutil.Process().children():
                kernel.kill()  # else it would notice only later, and say so
            raise
        except DeadKernelError:
            raise NotebookError(f"{notebook.name}: the kernel died (was it killed, or out of memory?)") from None


def _literal(path: Path) -> str:
    """As papermill wants it, which else would take braces in a path for parameters."""
    return str(path.resolve()).replace("{", "{{").replace("}", "}}")


def figures(nb: nbformat.NotebookNode, folder: Path, prefix: str) -> list[Path]:
    """Write every figure of an executed notebook to folder/prefix-<cell id>.png."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for cell in nb.cells:
        images = [o.data["image/png"] for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
        for i, image in enumerate(images):
            path = folder / f"{prefix}-{cell.id}{f'-{i + 1}' if len(images) > 1 else ''}.png"
            path.write_bytes(base64.b64decode(image))
            written.append(path)
    return written


def verdict(nb: nbformat.NotebookNode) -> str:
    """The last line that the notebook's last code cell printed."""
    last = [cell for cell in nb.cells if cell.cell_type == "code"][-1]
    lines = "".join(o.get("text", "") for o in last.outputs).strip().splitlines()
    return lines[-1] if lines else ""


def main(argv: list[str] | None = None) -> int:
    """Execute all notebooks (or those named) with one progress bar; 1 if one of them fails."""
    root = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(
        prog="python -m hoplib.experiment.notebooks", description="Execute the notebooks in order."
    )
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/")
    parser.add_argument("--build", type=Path, default=root / "build", help="where the results go (default: build/)")
    args = parser.parse_args(argv)
    logging.getLogger("papermill").setLevel(logging.ERROR)
    notebooks = args.notebooks or sorted((root / "notebooks").glob("[0-9]*.ipynb"))
    missing = [str(n) for n in notebooks if not n.exists()]
    if missing:
        print(f"no such notebook: {', '.join(missing)}", file=sys.stderr)
        return 1
    cells = sum(c["cell_type"] == "code" for n in notebooks for c in json.loads(n.read_text())["cells"])
    drawn = 0
    pause = 0.1 if sys.stdout.isatty() else 15  # in a log, a line now and then
    with tqdm(total=cells, unit="cell", file=sys.stdout, dynamic_ncols=True, mininterval=pause) as bar:
        for notebook in notebooks:
            bar.set_description(notebook.stem)
            start = time.perf_counter()
            try:
                nb = run(notebook, args.build / "notebooks" / notebook.name, on_cell=bar.update)
            except NotebookError as e:
                bar.close()
                print(e, file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                bar.close()
                print(f"stopped in {notebook.name}", file=sys.stderr)
                return interrupted()
            drawn += len(figures(nb, args.build / "figures", notebook.stem))
            bar.write(f"{notebook.stem:24}{time.perf_counter() - start:5.1f} s  {verdict(nb)}")
    print(f"{len(notebooks)} notebooks and {drawn} figures are in {os.path.relpath(args.build)}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
