"""Build the site: `python site/build.py` is what `make site` runs, in seconds.

The notebooks are those that `make paper` has executed into build/notebooks, else the committed ones, which are executed
too. Everything that the pages need is inside the site: it works from a folder, without a server, and without a network.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).resolve().parent.parent
MATHJAX = ("tex-chtml.js", "output/chtml/", "input/tex/extensions/")  # what a page asks for, of 24 MB


def lay_out(notebooks: Path, source: Path) -> None:
    """Put all pages side by side in `source`, with the paths of the repository, so that its links lead on."""
    for page in (ROOT / "site").glob("*.md"):
        shutil.copy(page, source)
    shutil.copy(ROOT / "README.md", source)
    shutil.copytree(ROOT / "results", source / "results", ignore=shutil.ignore_patterns("[!tf]*", "*.pdf"))
    coverage = (ROOT / "COVERAGE.md").read_text()
    (source / "COVERAGE.md").write_text(re.sub(r"`([\w-]+)` \|$", r"[`\1`](#cell-\1) |", coverage, flags=re.M))
    (source / "notebooks").mkdir()
    for path in sorted(notebooks.glob("[0-9]*.ipynb")):
        text = path.read_text().replace("](../hoplib)", "](../api.md)")
        (source / "notebooks" / path.name).write_text(text)


def trim(mathjax: Path) -> None:
    """Leave of MathJax what the pages can ask for."""
    for path in sorted(mathjax.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif not path.relative_to(mathjax).as_posix().startswith(MATHJAX):
            path.unlink()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="site/build.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site", help="default: build/site")
    parser.add_argument("--notebooks", type=Path, help="default: build/notebooks if it is there, else notebooks")
    parser.add_argument("--playground", type=Path, default=ROOT / "build" / "playground.html", help="a page to link to")
    args = parser.parse_args(argv)
    executed = ROOT / "build" / "notebooks"
    notebooks = args.notebooks or (executed if executed.exists() else ROOT / "notebooks")
    start = time.process_time()
    shutil.rmtree(args.output, ignore_errors=True)
    with tempfile.TemporaryDirectory() as source:
        lay_out(notebooks, Path(source))
        options = ["-q", "-W", "--keep-going", "-c", str(ROOT / "site"), "-d", os.path.join(source, ".doctrees")]
        if args.playground.exists():
            options += ["-D", f"html_extra_path={args.playground.resolve()}"]
        if failed := sphinx([*options, source, str(args.output)]):
            return failed
    trim(args.output / "_static" / "mathjax")
    pages = len(list(args.output.rglob("*.html")))
    seconds = time.process_time() - start
    print(f"{pages} pages in {seconds:.0f} s of CPU time: open {os.path.relpath(args.output / 'index.html')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
