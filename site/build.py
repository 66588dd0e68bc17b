"""Build the site: `python site/build.py` is what `make site` runs, in seconds.

A notebook is taken from build/notebooks where `make paper` has executed it, else as it is committed, which is executed
too. Everything that the pages need is inside the site: it works from a folder, without a server, and without a network.
"""

import argparse
import json
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
WIDGET = "application/vnd.jupyter.widget-view+json"
FRAME = '<iframe class="playground" src="../playground.html" title="The playground" loading="lazy"></iframe>'


def framed(notebook: str) -> str:
    """The notebook with the playground's page where JupyterLab has its widget."""
    nb = json.loads(notebook)
    for output in [output for cell in nb["cells"] for output in cell.get("outputs", [])]:
        if WIDGET in output.get("data", {}):
            output["data"] = {"text/html": FRAME}
    return json.dumps(nb)


def lay_out(notebooks: Path, source: Path, playground: bool) -> None:
    """Put all pages side by side in `source`, with the paths of the repository, so that its links lead on."""
    for page in (ROOT / "site").glob("*.md"):
        shutil.copy(page, source)
    shutil.copy(ROOT / "README.md", source)
    shutil.copytree(ROOT / "results" / "figures", source / "results" / "figures")
    shutil.copy(ROOT / "results" / "table.md", source / "results")
    claims = (ROOT / "CLAIMS.md").read_text()
    (source / "CLAIMS.md").write_text(re.sub(r"`([\w-]+)` \|$", r"[`\1`](#cell-\1) |", claims, flags=re.M))
    (source / "notebooks").mkdir()
    for committed in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        executed = notebooks / committed.name
        text = (executed if executed.exists() else committed).read_text()
        (source / "notebooks" / committed.name).write_text(framed(text) if playground else text)


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
    parser.add_argument("--notebooks", type=Path, default=ROOT / "build" / "notebooks", help="default: build/notebooks")
    parser.add_argument("--playground", type=Path, default=ROOT / "build" / "playground.html", help="a page to link to")
    args = parser.parse_args(argv)
    if args.output.exists() and any(args.output.iterdir()) and not (args.output / "objects.inv").exists():
        parser.error(f"{args.output} holds something else than a site, and is left alone")
    start = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        source, made = Path(scratch) / "source", Path(scratch) / "site"
        source.mkdir()
        lay_out(args.notebooks, source, args.playground.exists())
        options = ["-q", "-W", "--keep-going", "-c", str(ROOT / "site"), "-d", os.path.join(scratch, "doctrees")]
        if args.playground.exists():
            options += ["-D", f"html_extra_path={args.playground.resolve()}"]
        if failed := sphinx([*options, str(source), str(made)]):
            return failed
        trim(made / "_static" / "mathjax")
        shutil.rmtree(args.output, ignore_errors=True)
        shutil.move(made, args.output)
    pages = len(list(args.output.rglob("*.html")))
    seconds = time.process_time() - start
    print(f"{pages} pages in {seconds:.0f} s of CPU time: open {os.path.relpath(args.output / 'index.html')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
