"""Assemble build/: `python site/assemble.py` is what `make paper` runs.

A part is an executed notebook with its figures, the table, the playground or the site. It is made anew only if what it
is made of has changed, or if its files have: build/made.json keeps the digests of both. Times of files play no role.
"""

import argparse
import base64
import csv
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the rest is imported, Ctrl-C ends it without a word

import nbformat
from jinja2 import Environment
from tqdm import tqdm

from hoplib.experiment import notebooks
from hoplib.experiment.files import imported, write

ROOT = Path(__file__).resolve().parent.parent
INTERRUPTED = 130  # the status of a program that Ctrl-C ended
VARIES = {"checkpoints", "logs", "__pycache__"}  # folders that no part is made of


class Failed(RuntimeError):
    """A part could not be made; the message says why."""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files(*paths: Path) -> dict[str, Path]:
    """All files of these folders, by their names below the repository; hidden ones and what varies left out."""
    found = [f for p in paths for f in ([p] if p.is_file() else sorted(p.rglob("*"))) if f.is_file()]
    named = {os.path.relpath(f, ROOT): f for f in found}
    return {n: f for n, f in named.items() if not any(s in VARIES or s[0] == "." for s in Path(n).parts if s != "..")}


def digest(*paths: Path) -> str:
    """Of the names and the contents of all files there."""
    return sha256(json.dumps({name: sha256(f.read_bytes()) for name, f in files(*paths).items()}).encode())


CODE = ROOT / "hoplib", ROOT / "requirements.lock"  # what every part depends on
RECORDS = ROOT / "results" / "runs", ROOT / "results" / "extra"


def slug(text: str) -> str:
    """A heading as a file name: letters and digits with hyphens between, without the number in front."""
    plain = unicodedata.normalize("NFKD", re.sub(r"^[\d. ·]+", "", text))
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"['’`$\\]|[^\x00-\x7f·—–-]", "", plain.lower())).strip("-")


def figures(nb: nbformat.NotebookNode, folder: Path, prefix: str) -> dict[Path, str]:
    """Write every figure of an executed notebook to a file named by the heading above it. Returns file → heading."""
    folder.mkdir(parents=True, exist_ok=True)
    heading, found = "", []
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            heading = (re.findall(r"^#+ (.+)$", cell.source, re.M) or [heading])[-1]
        for output in cell.get("outputs", []):
            for kind in ("png", "gif"):
                if image := output.get("data", {}).get(f"image/{kind}"):
                    found.append((heading, kind, base64.b64decode(image)))
    headings, written = [heading for heading, _, _ in found], dict[Path, str]()
    for i, (heading, kind, image) in enumerate(found):
        number = f"-{headings[:i].count(heading) + 1}" if headings.count(heading) > 1 else ""
        path = folder / f"{prefix}-{slug(heading)}{number}.{kind}"
        path.write_bytes(image)
        written[path] = heading
    return written


# -- the parts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Notebook:
    """An executed notebook and its figures."""

    path: Path
    build: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def output(self) -> Path:
        return self.build / "notebooks" / self.path.name

    def read(self, path: Path) -> nbformat.NotebookNode:
        return nbformat.reads(path.read_text(), as_version=4)

    def steps(self) -> int:
        return sum(cell.cell_type == "code" for cell in self.read(self.path).cells)

    def sources(self) -> str:
        """Its cells without their outputs, the library, and the folders that its code names."""
        cells = [(cell.cell_type, cell.source, cell.metadata) for cell in self.read(self.path).cells]
        code = "\n".join(source for kind, source, _ in cells if kind == "code")
        read = [ROOT / "playground"] if re.search(r"\bplayground\b", code) else []
        if re.search(r"""["'/]results\b""", code):
            results = ROOT / "results"
            read += [*RECORDS, *sorted(results.glob("*.json")), *(results / "weights").glob("*.safetensors")]
        return sha256(json.dumps([cells, digest(*CODE, *read)]).encode())

    def make(self, step: Callable[[], object]) -> dict[Path, str]:
        nb = notebooks.run(self.path, self.output, on_cell=step)
        number = self.name.partition("_")[0]
        return {self.output: "", **figures(nb, self.build / "figures", number)}

    def verdict(self) -> str:
        return notebooks.verdict(self.read(self.output))

    def title(self) -> str:
        return str(self.read(self.path).cells[0].source.partition("\n")[0].lstrip("# "))


@dataclass(frozen=True)
class Program:
    """What a program of the repository leaves behind; what it prints last is its verdict."""

    name: str
    command: tuple[str, ...]
    made_of: tuple[Path, ...]
    leaves: Callable[[], Iterable[Path]]
    says: str

    def steps(self) -> int:
        return 1

    def sources(self) -> str:
        return digest(*CODE, *self.made_of)

    def make(self, step: Callable[[], object]) -> dict[Path, str]:
        done = subprocess.run([sys.executable, *self.command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"{' '.join(self.command)} failed:\n{done.stdout}{done.stderr}")
        step()
        return dict.fromkeys(sorted(self.leaves()), "")

    def verdict(self) -> str:
        return self.says


Part = Notebook | Program


def programs(build: Path) -> list[Program]:
    """The parts beside the notebooks, in the order in which they need each other."""
    page, site = build / "playground.html", build / "site"

    def tables() -> list[Path]:
        return [*build.glob("table.*"), *build.glob("summary.*"), *build.glob("figures/[a-z]*")]

    shown = [ROOT / name for name in ("README.md", "CLAIMS.md", "CHANGELOG.md", "CONTRIBUTING.md", "site", "results")]
    return [
        Program(
            "table",
            ("site/front.py", "--output", str(build)),
            (ROOT / "results",),
            tables,
            "Table 2 of the records, beside the paper's",
        ),
        Program(
            "playground",
            ("-m", "playground.build", str(page)),
            (ROOT / "playground",),
            lambda: [page],
            "one page that needs nothing else",
        ),
        Program(
            "site",
            (
                *("site/build.py", "--output", str(site)),
                *("--notebooks", str(build / "notebooks"), "--playground", str(page)),
            ),
            (*shown, ROOT / "playground", build / "notebooks"),
            lambda: files(site).values(),
            "the notebooks, the table and the library as web pages",
        ),
    ]


# -- what is made already ---------------------------------------------------------------------------------------


class Made:
    """What build/ holds: part → the digest of its sources, its seconds, its files with their digests and captions."""

    def __init__(self, build: Path):
        self.build, self.path = build, build / "made.json"
        try:
            self.parts: dict[str, dict[str, Any]] = json.loads(self.path.read_text())
        except (OSError, ValueError):
            self.parts = {}

    def holds(self, part: Part) -> bool:
        """Whether the part is there, as it was made, of what it would be made of now."""
        known = self.parts.get(part.name, {})
        return known.get("sources") == part.sources() and all(
            (self.build / f).is_file() and sha256((self.build / f).read_bytes()) == found
            for f, (found, _) in known["files"].items()
        )

    def note(self, part: Part, sources: str, made: dict[Path, str], seconds: float) -> None:
        """After the part was made: its files, in the place of those of before."""
        now = {f.relative_to(self.build).as_posix(): (sha256(f.read_bytes()), caption) for f, caption in made.items()}
        self.forget(part.name, keep=now)
        self.parts[part.name] = {"sources": sources, "seconds": round(seconds, 1), "files": now}
        write(self.path, self.parts)

    def forget(self, name: str, keep: Iterable[str] = ()) -> None:
        """Remove a part's files: of a notebook that is gone, of a figure that has another name now."""
        for f in set(self.parts.pop(name, {}).get("files", ())) - set(keep):
            (self.build / f).unlink(missing_ok=True)


def assemble(parts: list[Part], made: Made) -> int:
    """Make what is not there, with one progress bar and a line for every part; how many were made."""
    pending = {part.name for part in parts if not made.holds(part)}
    total = sum(part.steps() for part in parts if part.name in pending)
    count = 0
    # disable=None: no bar in a log
    with tqdm(total=total, unit="cell", file=sys.stdout, dynamic_ncols=True, leave=False, disable=None) as bar:
        for part in parts:
            bar.set_description(part.name)
            start, took = time.perf_counter(), "   as it was"
            if part.name in pending or not made.holds(part):  # what came before may have changed it
                sources = part.sources()  # as they are now: they may change meanwhile
                files = part.make(bar.update)
                seconds = time.perf_counter() - start
                made.note(part, sources, files, seconds)
                count, took = count + 1, f"{seconds:10.1f} s"
            bar.write(f"{part.name:24}{took}  {part.verdict()}", file=sys.stdout)
    return count


# -- what people see --------------------------------------------------------------------------------------------


def cells(markdown: str) -> list[list[str]]:
    """Those of a Markdown table, without the line below its head."""
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in markdown.strip().splitlines()]
    return [lines[0], *lines[2:]]


def aligned(lines: list[list[str]]) -> str:
    """A table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def facts(made: Made, parts: list[Part]) -> dict[str, Any]:
    """What the index page and the last lines tell."""
    with (made.build / "table.csv").open(newline="") as file:
        records = [int(float(line["records"])) for line in csv.DictReader(file)]
    executed = [part for part in parts if isinstance(part, Notebook)]
    return {
        "table": cells((made.build / "summary.md").read_text()),
        "records": f"{sum(records)} of {5 * len(records)}",
        "statements": len(re.findall(r"` \|$", (ROOT / "CLAIMS.md").read_text(), re.M)),
        "notebooks": executed,
        "seconds": {part.name: made.parts[part.name]["seconds"] for part in parts},
        "figures": {
            part: {f: caption for f, (_, caption) in made.parts[part.name]["files"].items() if caption}
            for part in executed
        },
        "settling": re.search(r"<!-- settling -->(.*?)<!-- end", (ROOT / "README.md").read_text(), re.S)[1],
        "dynamics": sorted(f.name for f in (made.build / "figures").glob("figure-*.png")),
    }


def page(known: dict[str, Any]) -> str:
    """The index page, whole."""
    template = (ROOT / "site" / "overview.html").read_text()
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template).render(known)


def main(argv: list[str] | None = None) -> int:
    """Assemble everything, or execute the notebooks named; 1 if something fails."""
    parser = argparse.ArgumentParser(prog="site/assemble.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="only these, and nothing else")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="where everything goes (default: build/)")
    args = parser.parse_args(argv)
    if missing := [str(n) for n in args.notebooks if not n.exists()]:
        print(f"no such notebook: {', '.join(missing)}", file=sys.stderr)
        return 1
    logging.getLogger("papermill").setLevel(logging.ERROR)
    build, start = args.build.resolve(), time.perf_counter()
    made, here = Made(build), os.path.relpath(build)
    chosen = args.notebooks or sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    parts: list[Part] = [Notebook(path.resolve(), build) for path in chosen]
    if not args.notebooks:
        parts += programs(build)
        for gone in set(made.parts) - {part.name for part in parts}:
            made.forget(gone)
    try:
        imported()
        count = assemble(parts, made)
    except (notebooks.NotebookError, Failed) as e:
        print(e, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped; what is made stays in {here}/, and the same command makes the rest")
        return INTERRUPTED
    if args.notebooks:
        return 0
    known = facts(made, parts)
    write(build / "index.html", page(known).encode())
    others = "" if count == len(parts) else "; nothing else had changed"
    print(
        f"""
{aligned(known["table"])}

Verified: {len(known["notebooks"])} notebooks ran without an error, and each asserted its verdict; in them
{known["statements"]} numbered statements of the paper, each by a cell of its own (CLAIMS.md).
Read: {known["records"]} trainings. Made: {count} of {len(parts)} parts in {time.perf_counter() - start:.0f} s{others}.

Look at  {here}/index.html       everything, on one page
         {here}/site/index.html  the notebooks as web pages
         {here}/playground.html  a network to play with"""
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
