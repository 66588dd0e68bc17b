"""Train what the table lacks: `make table`, or snakemake with --config rows=… seeds=… (names as in hoplib.table).

What is missing is decided by the records themselves (their configuration and version of the numerics), not by file
times: a fresh clone, a re-executed notebook or a changed plot trains nothing; a changed row or numerics does.
"""

import shlex
import sys

import torch
from hoplib.batch import Plan
from snakemake.exceptions import WorkflowError

try:
    plan = Plan.parse(config)
except ValueError as e:
    raise WorkflowError(str(e)) from None
missing = {f"{job.training}/seed-{job.seed}": job for job in plan.jobs() if plan.why(job)}
if not missing:
    print("every record that is asked for is there: nothing to train", file=sys.stderr)
gpus = torch.cuda.device_count()
if gpus:
    workflow.global_resources.setdefault("gpu", gpus)
for name in missing:  # a marker without its record means nothing
    (plan.output / ".done" / name).unlink(missing_ok=True)


rule all:
    input:
        [plan.output / ".done" / name for name in missing],


rule train:
    output:
        temp(touch(plan.output / ".done" / "{training}" / "seed-{seed}")),
    log:
        plan.output / "logs" / "{training}" / "seed-{seed}.log",
    params:
        because=lambda w: plan.why(plan.job(w.training, int(w.seed))),
        options=shlex.join(plan.arguments()),
    message:
        "train {wildcards.training}, seed {wildcards.seed} ({params.because})"
    threads: 1
    retries: 2
    resources:
        mem_mb=3000,
        runtime=24 * 60,
        **({"gpu": 1} if gpus else {}),
    shell:
        "{sys.executable} -m hoplib.batch run {wildcards.training} {wildcards.seed} {params.options} > {log} 2>&1"
