"""Execute a notebook through papermill, with parameters that are checked, and read its verdict.

`make paper` and the trainings of the table run their notebooks with it. Needs the `notebooks` extra.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nbformat
import papermill  # type: ignore[import-untyped]
import psutil  # type: ignore[import-untyped]
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError  # type: ignore[import-untyped]
from traitlets import Unicode
from traitlets.config import Config


class Kernel(AsyncKernelManager):
    """A kernel whose own messages go to a file, so that they do not fall into a progress bar."""

    messages = Unicode(os.devnull, config=True)

    async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
        with open(self.messages, "ab") as file:
            await super().start_kernel(**options, stdout=file, stderr=file)


class ParameterError(ValueError):
    """A parameter that the notebook does not have, or of another type."""


class NotebookError(RuntimeError):
    """A cell failed; the message is its place and its traceback."""


def defaults(notebook: Path) -> dict[str, Any]:
    """The names and values of the notebook's `parameters` cell, which holds literals only. Runs nothing."""
    listed = papermill.inspect_notebook(_literal(notebook))
    return {name: ast.literal_eval(parameter["default"]) for name, parameter in listed.items()}


def check_parameters(notebook: Path, parameters: Mapping[str, Any]) -> None:
    """Raise an error unless every parameter is one of the notebook's and of the type of its default.

    Where that is None, a number is not given.
    """
    known = defaults(notebook)
    for name, value in parameters.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ParameterError(f"{notebook.name} has no parameter {name!r}.{hint} It has: {', '.join(known)}")
        default = known[name]
        numeric = default is None or isinstance(default, float)
        kinds = (float, int, type(default)) if numeric else (type(default),)
        if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
            kind = "float" if numeric else type(default).__name__
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
    with tempfile.TemporaryDirectory() as scratch:
        messages = Path(scratch) / "messages"
        options = {"messages": str(messages)}
        if os.name == "posix":
            options |= {"transport": "ipc", "ip": os.path.join(scratch, "k")}
        try:
            return papermill.execute_notebook(  # type: ignore[no-any-return]
                _literal(notebook),
                _literal(output),
                dict(parameters or {}),
                cwd=str(notebook.parent),
                progress_bar=False,
                kernel_manager_class=Kernel,
                config=Config({"Kernel": options}),
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
            last = "".join(f"\n{line}" for line in messages.read_text("utf-8", errors="replace").splitlines()[-10:])
            raise NotebookError(f"{notebook.name}: the kernel died (was it killed, or out of memory?){last}") from None


def _literal(path: Path) -> str:
    """As papermill wants it, which else would take braces in a path for parameters."""
    return str(path.resolve()).replace("{", "{{").replace("}", "}}")


def verdict(nb: nbformat.NotebookNode) -> str:
    """The last line that the notebook's last code cell printed."""
    last = [cell for cell in nb.cells if cell.cell_type == "code"][-1]
    lines = "".join(o.get("text", "") for o in last.outputs).strip().splitlines()
    return lines[-1] if lines else ""
