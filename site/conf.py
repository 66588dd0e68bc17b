"""How Sphinx makes the site. `build.py` lays out the pages and calls it; nothing is executed, nothing is fetched."""

import inspect
import json
import re
from enum import Enum
from pathlib import Path

from docutils import nodes
from jinja2 import Template

import hoplib as hop

ROOT = Path(__file__).resolve().parent.parent

project = "Accelerating Hopfield Network Dynamics"
author = "the executable companion"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx-mathjax-offline"]
exclude_patterns = ["README.md", "results"]  # only parts of them are shown, by other pages

nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = nb_code_prompt_hide = "The code"  # of a cell that is folded
nb_ipywidgets_js = {}  # would come from another host
myst_enable_extensions = ["dollarmath", "amsmath"]
mathjax3_config = {"options": {"enableMenu": False}}  # it would ask for parts of MathJax that are not here

html_theme = "furo"
html_title = "Hopfield dynamics, executable"
html_favicon = "static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["search.js"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_dark_style = "github-dark"

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # a method is explained once, where it is defined first
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!hoplib\.[A-Z]\w*$).*")]  # types of other libraries, and our unexported ones


def api(*asked):
    """The directives that document these names, and what else hoplib exports from these modules, in their order."""
    names = {name: None for one in asked for name in ([one] if one in hop.__all__ else exports(one))}
    lines = [".. currentmodule:: hoplib", ""]
    for name in names:
        obj = getattr(hop, name)
        bases = {base.__name__ for base in getattr(obj, "__bases__", ())}
        lines += [f".. auto{'class' if inspect.isclass(obj) else 'function'}:: {name}"]
        lines += ["   :show-inheritance:"] * bool(bases & set(hop.__all__))
    return "\n".join(lines)


def exports(module):
    own = {name for name in hop.__all__ if getattr(hop, name).__module__ == f"hoplib.{module}"}
    return sorted(own, key=lambda name: inspect.getsourcelines(getattr(hop, name))[1])


def fill(app, docname, source):
    """The index shows files that may be there or not, and short titles of the notebooks, from the README."""
    if docname in ("index", "api"):
        rows = re.findall(r"^\| \[(\d\d[a-z]?) ([^]]+)\]\((\S+)\.ipynb\)", (ROOT / "README.md").read_text(), re.M)
        notebooks = [(f"{number} · {name[0].upper()}{name[1:]}", page) for number, name, page in rows]
        figures = sorted(path.name for path in (ROOT / "results" / "figures").glob("figure-*.png"))
        settling = re.search(r"<!-- settling -->(.*?)<!-- end", (ROOT / "README.md").read_text(), re.S)[1]
        there = {
            "settling": settling,
            "notebooks": notebooks,
            "figures": figures,
            "playground": bool(app.config.html_extra_path),
        }
        source[0] = Template(source[0]).render(api=api, **there)


def name_cells(app, doctree):
    """Every code cell of a notebook gets the anchor `cell-<its id>`, which the list of claims links to."""
    path = Path(app.env.doc2path(app.env.docname))
    if path.suffix != ".ipynb":
        return
    ids = [cell["id"] for cell in json.loads(path.read_text())["cells"]]
    for node in doctree.findall(nodes.container):
        if "cell_index" in node:
            anchor = f"cell-{ids[node['cell_index']]}"
            node["ids"].append(anchor)
            app.env.domains.standard_domain.anonlabels[anchor] = app.env.docname, anchor


def describe(app, doctree):
    """A figure of a notebook is, for who cannot see it, what the next paragraph says first (or the last, after all)."""
    found = list(doctree.findall(lambda node: isinstance(node, nodes.image | nodes.paragraph)))
    texts = [k for k, node in enumerate(found) if isinstance(node, nodes.paragraph)]
    for k, image in enumerate(found):
        if isinstance(image, nodes.image) and "alt" not in image and texts:
            said = found[min((j for j in texts if j > k), default=texts[-1])].astext()
            image["alt"] = "Figure: " + re.split(r"(?<=\.)\s", said)[0]


def as_written(app, doctree):
    """Equations stay as they are: Sphinx would put long ones into a `split`, which allows no \\tag."""
    for node in doctree.findall(nodes.math_block):
        if not node.get("no-wrap", node.get("nowrap", False)):
            node["no-wrap"] = True
            node.children = [nodes.Text(rf"\[{node.astext()}\]")]


def plain(app, what, name, obj, options, lines):
    """Our docstrings are plain text: nothing in them is markup, but for code in backticks and aligned lists.

    The comments behind the fields of a class become a list as well.
    """
    if inspect.isclass(obj):
        fields = dict(re.findall(r"^    (\w+)(?:: .+?)?(?: = .+?)?  # (.+)$", inspect.getsource(obj), re.M))
        if issubclass(obj, Enum):
            fields = {one.name: f"{one.value}, {fields[one.name]}" if one.name in fields else one.value for one in obj}
        lines += [f"{field}  {comment}" for field, comment in fields.items()]
    text = re.sub(r"^(\w+) {2,}(\S.*)$", r"\n`\1`\n    \2", "\n".join(lines), flags=re.M)  # a definition list
    parts = re.split(r"`([^`\n]+)`", text)
    parts[::2] = [re.sub(r"([*|_\\])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"``{code}``" for code in parts[1::2]]
    lines[:] = "".join(parts).split("\n")


def exported(app, env, node, contnode):
    """An exported name is documented as hoplib.Name, wherever it is defined."""
    name = node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in hop.__all__ or not node["reftarget"].startswith("hoplib."):
        return None
    python = env.domains.python_domain
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", f"hoplib.{name}", node, contnode)


def setup(app):
    app.connect("source-read", fill)
    app.connect("doctree-read", name_cells)
    app.connect("doctree-read", describe)
    app.connect("doctree-read", as_written)
    app.connect("autodoc-process-docstring", plain)
    app.connect("missing-reference", exported)
