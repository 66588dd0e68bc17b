"""The playground as a widget of a notebook; `image`, `depth`, `gain` and `omega` follow what is done in it."""

from __future__ import annotations

import anywidget
import traitlets

from . import build, ways


class Playground(anywidget.AnyWidget):
    """The same component as the page. `image` is what the network sees, noise included."""

    _esm = build.module()
    _css = build.css()
    networks = traitlets.Bytes(ways.FILE.read_bytes()).tag(sync=True)
    sample = traitlets.Int(0).tag(sync=True)  # the digit to begin with
    depth = traitlets.Int(7).tag(sync=True)
    gain = traitlets.Float(1.0).tag(sync=True)
    omega = traitlets.Float(None, allow_none=True).tag(sync=True)  # None: the network's best
    image = traitlets.List(traitlets.Float()).tag(sync=True)
