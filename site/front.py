"""The front page: the tables and figures in results/, and what the README tells of them.

`python site/front.py` is what `make results` runs. Everything comes from the records and from other files in results/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Collection
from pathlib import Path

import pandas as pd
import torch
from settling import picture, sentence, settled

from hoplib import plot
from hoplib.experiment.files import ROOT, load_network, save_network, write
from hoplib.experiment.results import Run, beyond, load, markdown, per_run, rendered, source, table, way
from hoplib.experiment.rows import BEYOND, EVERY, ROWS, SEEDS
from hoplib.network import Network

COMMITTED = ("3-HAM-EO", "5-HAM-EO", "7-HAM-EO", "3-CHN-EO")  # the networks that others start from


def halve(weights: Path) -> None:
    """The networks that are committed, in half precision, from the trained ones where these are there and differ."""
    for name in COMMITTED:
        trained, half = weights / name / "seed-0.safetensors", weights / f"{name}-seed-0-half.safetensors"
        if trained.exists():
            net = load_network(trained, "cpu")
            if not (half.exists() and alike(net, load_network(half, "cpu"))):
                save_network(net, half, half=True)


def alike(net: Network, other: Network) -> bool:
    """Whether two networks are the same in half precision."""
    ours, theirs = net.state_dict(), other.state_dict()
    return repr(net) == repr(other) and all(torch.equal(t.half(), theirs[k].half()) for k, t in ours.items())


def there(runs: list[Run], rows: Collection[str] = ROWS) -> str:
    """How many of the records of these rows are there."""
    return f"{sum(r.row in rows for r in runs)} of {len(rows) * len(SEEDS)}"


def pages(runs: list[Run], results: Path) -> dict[str, dict[str, str]]:
    """Page of the repository → place in it → what belongs there."""
    known, found = there(runs), settled(results)
    readme = {"table": rendered(runs)["summary.md"], "records": known, "costs": costs(runs, results / "costs.json")}
    readme |= {"published": longest_gradients(results / "published.json")}
    readme |= {"exact": at_once(runs), "new": there(runs, BEYOND)}
    return {
        "README.md": readme | {"settling": sentence(found) if found else "", "beyond": how_large(runs, results)},
        "CLAIMS.md": {"records": known},
    }


def longest_gradients(path: Path) -> str:
    """How long gradients become where CHN-EO is read as published, in a sentence: by benchmarks/published.py."""
    if not path.exists():
        return ""
    found = pd.DataFrame(json.loads(path.read_bytes())["runs"])
    free, letter = found.training.str.endswith("-published"), found.way == "to the letter"
    most, usual = (found[rows]["longest gradient"].max() for rows in (free & letter, ~free))
    text = f"Longest gradient of a first epoch: {float(f'{most:.1e}'):,.0f} in {(free & letter).sum()} trainings to the"
    return text + f" letter, {usual:.0f} in trainings that read the output layer."


def at_once(runs: list[Run]) -> str:
    """What a CHN of 3 layers needs where its neurons settle through ς⁻¹, and where they settle by local steps."""
    found = table(runs)
    exact, local = (found.loc[[n for n in found.index if n.startswith(kind)]] for kind in ("3-ExactCHN", "3-CHN"))
    local = local.reindex(["3-CHN", "3-CHN-EO", "3-CHN-EO-DEQ"]).dropna(subset=["updates"])
    if not len(exact) or not len(local):
        return ""
    ours, papers = (
        ", ".join(f"{n:.{int(n < 10)}f} ({way(EVERY[name])})" for name, n in t.updates.items()) for t in (exact, local)
    )
    least = [f"{t.test_accuracy.min():.1f}" for t in (exact, local)]
    text = f"Updates of the state: {ours}; of the paper's CHN: {papers}."
    return text + f" Accuracy: {least[0]} % or more; of the paper's CHN {least[1]} % or more."


def costs(runs: list[Run], path: Path) -> str:
    """What the commands cost: as `make costs` has measured the first two, as the records tell of a training."""
    known = json.loads(path.read_bytes()) if path.exists() else {}
    lines = {
        "`make paper`": "executes all notebooks, draws all figures, makes the site",
        "`make test`": "runs all tests and all notebooks",
        "`make table ROWS=… SEEDS=0`": "trains one row",
    }
    found = pd.DataFrame({"what it does": lines, "time": "", "disk": ""}).rename_axis("command")
    for command in found.index:
        if cost := known.get(command.strip("`")):
            found.loc[command, "time"] = f"{cost['minutes']:.0f} minutes on {cost['cores']} cores"
            found.loc[command, "disk"] = f"{cost['disk_gb']:.1f}\u00a0GB"
    if runs:
        minutes = 60 * per_run([r for r in runs if r.numbers["epoch"] > 3]).training_hours
        found.iloc[-1, 1] = f"{minutes.min():.0f} to {minutes.max():.0f} minutes on one core"
    return markdown(found).replace("---:", "---")


def between(text: str, name: str, content: str) -> str:
    """The text with everything between its comments <!-- name --> and <!-- end name --> replaced."""
    pattern = rf"(<!-- {name} -->\n?).*?(<!-- end {name} -->)"
    filled, places = re.subn(pattern, lambda m: m[1] + content + m[2], text, flags=re.S)
    if places != 1:
        raise ValueError(f"the text has no single place <!-- {name} --> … <!-- end {name} -->")
    return filled


def how_large(runs: list[Run], results: Path) -> str:
    """What over-relaxation gains, in a sentence or two: iterations by the records, time by benchmarks/peer.py."""
    said: dict[str, list[str]] = {"HAMs": [], "CHNs through ς⁻¹": []}
    for name, line in beyond(runs).iterrows():
        than = "" if pd.isna(line["even-odd, Anderson"]) else f" instead of {line['even-odd, Anderson']:.1f}"
        where = f"in {len(EVERY[name].layers)} layers (accuracy {line['accuracy %']:.1f} %)"
        said["HAMs" if EVERY[name].model == "HAM" else "CHNs through ς⁻¹"].append(
            f"{line['over-relaxed']:.1f}{than} {where}"
        )
    of = "; ".join(f"of {kind} {', '.join(lines)}" for kind, lines in said.items() if lines)
    text = f"Iterations, against even-odd updates with Anderson: {of}." if of else ""
    if (path := results / "peer.json").exists():
        peer = {name[0]: ways for name, ways in json.loads(path.read_bytes()).items() if name != "settings"}
        ratios = [f"{ways['even-odd']['seconds'] / ways['over-relaxed']['seconds']:.1f}" for ways in peer.values()]
        text += f" In time, to the same true error: {', '.join(ratios)} times as fast as plain even-odd updates"
        text += f" in {', '.join(peer)} layers."
    return text.strip()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python site/front.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="the folder of runs/")
    parser.add_argument("--output", type=Path, help="where the files go, instead of results/ and the README")
    args = parser.parse_args(argv)
    runs, output = load(args.results), args.output or args.results
    if args.output is None:
        halve(args.results / "weights")
    for name, text in rendered(runs).items():
        write(output / name, text.encode())
    plot.use_style()
    for name, rows in plot.FIGURES.items():
        if (figure := plot.dynamics(runs, rows)) is not None:
            plot.save(figure, output / "figures" / name, source(runs, rows))
    if (found := settled(args.results)) is not None:
        plot.save(picture(found), output / "figures" / "settling", f"weights {found['weights']}")
    if args.output is None:
        for page, places in pages(runs, args.results).items():
            text = (ROOT / page).read_text("utf-8")
            for place, content in places.items():
                text = between(text, place, content)
            write(ROOT / page, text.encode())
    print(f"{there(runs)} records: the tables and figures/ are in {os.path.relpath(output)}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
