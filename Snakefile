"""Train what the table lacks: `make table`, or snakemake with --config rows=… seeds=… (names as in hoplib.experiment.rows).

What is missing is decided by the records themselves (their configuration and version of the numerics), not by file
times: a fresh clone, a re-executed notebook or a changed plot trains nothing; a changed row or numerics does.

The folder for the results is the environment's OUTPUT, which may have any name: Snakemake would read a --config
output=… as YAML.
"""

import os
import shlex
import sys

import torch
from hoplib.experiment.batch import Plan
from hoplib.experiment.files import RunError, writable
from snakemake.exceptions import WorkflowError

try:
    plan = Plan.parse({"output": os.environ.get("OUTPUT", ""), **config})
    writable(plan.output)
except (ValueError, RunError) as e:
    raise WorkflowError(str(e)) from None
jobs = {(job.name, job.seed): job for job in plan.jobs()}
missing = [f"{name}/seed-{seed}" for (name, seed), job in jobs.items() if plan.why(job)]
if not missing:
    print("every record that is asked for is there: nothing to train", file=sys.stderr)
gpus = torch.cuda.device_count()
if gpus:
    workflow.global_resources.setdefault("gpu", gpus)
for name in missing:  # a marker without its record means nothing
    (plan.output / ".done" / name).unlink(missing_ok=True)


def job_of(wildcards):
    return jobs[wildcards.name, int(wildcards.seed)]


def command(wildcards):
    """A command line for the shell, with everything quoted."""
    job = job_of(wildcards)
    words = [sys.executable, "-m", "hoplib.experiment.batch", "run", job.training, str(job.seed), *plan.arguments()]
    return shlex.join(words)


workdir: str(plan.output)  # so that no pattern below holds its name, in which braces would mean wildcards


wildcard_constraints:
    name="[^/]+",
    seed="[0-9]+",


rule all:
    input:
        [f".done/{name}" for name in missing],


rule train:
    output:
        temp(touch(".done/{name}/seed-{seed}")),
    log:
        "logs/{name}/seed-{seed}.log",
    params:
        training=lambda w: job_of(w).training,
        because=lambda w: plan.why(job_of(w)),
        command=command,
    message:
        "train {params.training}, seed {wildcards.seed} ({params.because})"
    threads: 1
    retries: 2
    resources:
        mem_mb=3000,
        runtime=24 * 60,
        **({"gpu": 1} if gpus else {}),
    shell:
        "{params.command} > {log:q} 2>&1"
