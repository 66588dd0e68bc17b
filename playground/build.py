"""Put the playground into one file: `python -m playground.build` writes build/playground.html.

The page holds its style, its code and its networks, and needs nothing else. The same sources give the same bytes.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
OUTPUT = HERE.parent / "build" / "playground.html"


def module() -> str:
    """settle.js and playground.js as one ES module: what anywidget takes, and what the page runs."""
    view = (HERE / "playground.js").read_text()
    view, imports = re.subn(r'^import \{[^}]*\} from "\./settle\.js";\n', "", view, flags=re.M)
    assert imports == 1, "playground.js imports settle.js, once, and nothing else"
    return (HERE / "settle.js").read_text() + view


def css() -> str:
    return (HERE / "page.css").read_text()


def page() -> str:
    """The page, whole."""
    networks = base64.b64encode((HERE / "networks.safetensors").read_bytes()).decode()
    parts = {"css": css(), "module": module(), "networks": networks}
    return re.sub(r"\{(css|module|networks)\}", lambda m: parts[m[1]], (HERE / "page.html").read_text())


def build(path: Path = OUTPUT) -> Path:
    """Write the page and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page())
    return path


if __name__ == "__main__":
    written = build(*map(Path, sys.argv[1:2]))
    print(f"{os.path.relpath(written)}: {written.stat().st_size / 1e3:.0f} kB")
