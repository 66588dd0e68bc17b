"""pyproject, the lock, environment.yml and the code agree, and the repository speaks of the project alone."""

import ast
import doctest
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import hoplib as hop

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = [Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines() if line[0] not in "# "]
WANTED = [
    Requirement(r) for group in [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()] for r in group
]


def locked(name):
    found = [r for r in LOCK if r.name == name and (r.marker is None or r.marker.evaluate())]
    assert len(found) == 1, f"{name} must be locked once for this Python"
    (pin,) = found[0].specifier
    assert pin.operator == "=="
    return pin.version


@pytest.mark.parametrize("wanted", WANTED, ids=lambda r: r.name)
def test_the_lock_satisfies_pyproject_and_is_what_runs(wanted):
    assert locked(wanted.name) in wanted.specifier
    assert Version(version(wanted.name)).public == locked(wanted.name)


def test_the_lock_names_no_index():
    assert "://" not in (ROOT / "requirements.lock").read_text()


def test_environment_yml_takes_its_versions_from_the_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert pip == {"pip": ["-r requirements.lock", "-e ."]}
    python = next(d for d in conda if d.startswith("python="))
    assert Version(python.removeprefix("python=")) in Requirement("x" + PROJECT["requires-python"]).specifier
    assert environment["name"] == PROJECT["name"]


def test_the_pip_section_installs_in_a_fresh_environment(tmp_path):
    """Resolved and checked as `pip` would, from the section itself; nothing is downloaded that is not cached."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv is not installed beside this Python")
    lines = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"][-1]["pip"]
    section = tmp_path / "section.txt"
    section.write_text("\n".join(line.replace("-r ", f"-r {ROOT}/").replace("-e .", f"-e {ROOT}") for line in lines))
    subprocess.run([uv, "venv", "-q", tmp_path / "fresh"], check=True)
    command = [uv, "pip", "install", "--dry-run", "--python", tmp_path / "fresh", "-r", section]
    done = subprocess.run(command, capture_output=True, text=True)
    if "error sending request" in done.stderr or "dns error" in done.stderr.lower():
        pytest.skip("no package index within reach")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"\+ torch=={re.escape(locked('torch'))}\b", done.stderr)
    assert "+ hoplib" in done.stderr


def test_torch_and_torchvision_are_a_pair():
    code = "import torch, torchvision; torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)"
    subprocess.run([sys.executable, "-c", code], check=True)


def code_of(path):
    """The Python in a module, a Snakefile or a notebook."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def test_every_import_is_declared():
    """What any file imports is in pyproject, not only there by the way of something else."""
    folders = ("hoplib", "tests", "benchmarks", "playground", "site", "notebooks")
    files = [p for f in folders for e in ("py", "ipynb") for p in ROOT.glob(f"{f}/**/[!.]*.{e}")]
    assert len(files) > 60
    nodes = [n for p in files for n in ast.walk(ast.parse(code_of(p)))]
    found = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    found |= {n.module for n in nodes if isinstance(n, ast.ImportFrom) and not n.level}
    own = {p.stem for p in files} | {*folders}
    dists = packages_distributions()
    declared = {canonicalize_name(r.name) for r in WANTED}
    names = {full.partition(".")[0] for full in found} - own - sys.stdlib_module_names
    assert not [n for n in names if not {canonicalize_name(d) for d in dists[n]} & declared]


def test_an_environment_of_ones_own_is_left_alone():
    """`make … BIN=…` neither makes a .venv nor installs anything; without, `make` says what it is going to do."""
    own, usual, cpu = (
        subprocess.run(
            ["make", "-n", "-B", "status", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for words in ([f"BIN={Path(sys.executable).parent}"], [], ["CPU=1"])
    )
    assert "venv .venv" not in own
    assert "pip" not in own
    assert "about 6 GB" in usual
    assert "torch without CUDA" in cpu
    assert "--torch-backend cpu" in cpu
    kept = [line for line in LOCK if not re.match("cuda|nvidia|triton", line.name)]
    assert {"torch", "numba", "snakemake"} <= {r.name for r in kept}


def test_make_without_hoplib_says_so(tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(["make", "setup", f"BIN={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode
    assert "has no hoplib" in done.stderr


def test_make_lab_passes_its_flags():
    words = ["make", "-n", "-o", "setup", "lab", "FLAGS=--no-browser --port 9"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--no-browser --port 9 notebooks" in said
    assert ("--allow-root" in said) == (os.getuid() == 0)


def test_what_pip_installs_has_the_data(tmp_path):
    """The wheel's data folder is what `load_data` looks into where there is no repository."""
    command = [sys.executable, "-c", "from setuptools import build_meta as b; import sys; b.build_wheel(sys.argv[1])"]
    shutil.copytree(ROOT / "hoplib", tmp_path / "hoplib", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "data", tmp_path / "data", ignore=shutil.ignore_patterns("emnist"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run([*command, str(tmp_path)], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "site")
    (data,) = (tmp_path / "site").glob("*.data/data")
    code = (
        f"import sysconfig; sysconfig.get_path = lambda *_: {str(data)!r}\n"
        "import hoplib as hop; print(hop.__file__, len(hop.load_data('mnist').test))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "site",
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "HOPLIB_DATA"},
    )
    assert done.stdout.split() == [str(tmp_path / "site" / "hoplib" / "__init__.py"), "10000"], done.stderr


def test_versions_and_exports():
    assert hop.__version__ == PROJECT["version"]
    assert f"version: {PROJECT['version']}" in (ROOT / "CITATION.cff").read_text()
    assert sorted(hop.__all__) == sorted(set(hop.__all__))
    assert all(hasattr(hop, name) for name in hop.__all__)


def test_importing_hoplib_is_light():
    """matplotlib, torchvision and the notebook tools are extras: the core does not import them."""
    extras = {"matplotlib", "torchvision", "papermill", "pandas"}
    code = f"import sys, hoplib; print(sorted({extras} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_readme_shows_the_two_commands_and_its_code_runs():
    text = (ROOT / "README.md").read_text()
    assert "make test" in text
    assert "make paper" in text
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert blocks
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M)
    assert max(len(line) for block in fenced for line in block.splitlines()) <= 88, "wider than the site's page"
    for block in blocks:
        done = subprocess.run([sys.executable, "-W", "error", "-c", block], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr


def test_the_examples_of_docstrings_run():
    found = [
        module
        for path in sorted((ROOT / "hoplib").glob("*.py"))
        if ">>>" in path.read_text()
        for module in [import_module("hoplib" if path.stem == "__init__" else f"hoplib.{path.stem}")]
    ]
    assert found
    for module in found:
        assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_no_path_of_one_machine_is_committed():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pattern = re.compile(r"(?<![\w.~$])/(?:root|home/\w+|work|Users/\w+)/|index[-]url|//[\w.-]+/simple\b")
    for name in filter(None, files.split("\0")):
        path = ROOT / name
        if (
            path.suffix in {".gz", ".png", ".npz", ".pdf", ".safetensors"}
            or path == Path(__file__)
            or not path.exists()
        ):
            continue
        found = pattern.search(path.read_text())
        assert not found, f"{name}: {found.group(0)}"


def imports(path):
    """The modules of hoplib that a module imports when it runs, by their names below hoplib."""
    package = path.relative_to(ROOT / "hoplib").parent.parts
    body = ast.parse(path.read_text()).body
    running = [n for n in body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    for node in (n for top in running for n in ast.walk(top)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            yield from (
                [".".join([*base, node.module])] if node.module else (".".join([*base, a.name]) for a in node.names)
            )


def test_the_picture_of_the_modules_is_true():
    paths = {".".join(p.relative_to(ROOT / "hoplib").with_suffix("").parts): p for p in ROOT.glob("hoplib/**/*.py")}
    direct = {name: {i for i in imports(p) if i in paths} for name, p in paths.items() if "__init__" not in name}

    def reached(name):
        return direct[name] | {far for near in direct[name] for far in reached(near)}

    needed = {
        (name, near)
        for name, found in direct.items()
        for near in found
        if not any(near in reached(other) for other in found - {near})
    }
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert set(re.findall(r"^    (\S+) --> (\S+)$", text, re.M)) == needed
    table = re.findall(r"`\.?([a-z.]+)`", text[text.index("| module |") : text.index("## A digit")])
    assert {name.removeprefix("experiment.") for name in direct} <= {name.removeprefix("experiment.") for name in table}


def test_github_does_what_ci_run_does():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = {name: [step.get("run") for step in job["steps"]] for name, job in jobs.items()}
    assert ".ci/run" in commands["test"]
    assert "make paper" in commands["paper"]
    for python in jobs["test"]["strategy"]["matrix"]["python"]:
        assert Version(python) in Requirement("x" + PROJECT["requires-python"]).specifier


def test_the_hooks_are_the_tools_of_the_environment():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local", "nothing is fetched"
    tools = [hook["entry"].split()[0] for hook in repo["hooks"]]
    assert tools == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"$(BIN)/{Path(tool).name}" in makefile for tool in tools)


def test_binder_takes_its_versions_from_the_lock():
    lines = (ROOT / "binder" / "requirements.txt").read_text().splitlines()
    assert "-c ../requirements.lock" in lines
    (extras,) = [re.fullmatch(r"-e \.\[(.+)\]", line)[1] for line in lines if line.startswith("-e")]
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    python = (ROOT / "binder" / "runtime.txt").read_text().strip().removeprefix("python-")
    assert Version(python) in Requirement("x" + PROJECT["requires-python"]).specifier


def test_the_changelog_knows_this_version():
    assert re.search(rf"^## {re.escape(PROJECT['version'])}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)
