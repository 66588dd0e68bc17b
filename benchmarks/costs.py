"""What the README's commands cost on this machine: time, disk and memory, each in a new clone, installation included.

    python benchmarks/costs.py            writes results/costs.json; `make results` brings it to the README

It measures what is committed. Leave the machine alone meanwhile.
"""

import argparse
import json
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = "make paper", "make test"


def measure(command: str, source: Path) -> dict[str, float]:
    """Run the command in a new clone: minutes, gigabytes on the disk and in memory, and the cores it had."""
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "clone"
        subprocess.run(["git", "clone", "-q", source, clone], check=True)
        start = time.perf_counter()
        subprocess.run(command.split(), cwd=clone, check=True)
        minutes = (time.perf_counter() - start) / 60
        used = sum(f.stat().st_size for f in clone.rglob("*") if f.is_file() and not f.is_symlink())
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # of the largest process
    return {
        "minutes": round(minutes, 1),
        "disk_gb": round(used / 1e9, 1),
        "memory_gb": round(memory / 1e9, 1),
        "cores": os.cpu_count() or 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commands", nargs="*", default=COMMANDS, help="default: make paper, make test")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "costs.json")
    args = parser.parse_args()
    known = json.loads(args.output.read_text()) if args.output.exists() else {}
    for command in args.commands:
        known[command] = measure(command, ROOT)
        args.output.write_text(json.dumps(known, indent=1) + "\n")
        print(command, known[command])


if __name__ == "__main__":
    main()
