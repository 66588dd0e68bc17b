"""The batch knows what is missing and why, survives kills, runs on Slurm; and errors are clear."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_train import same, wait_for

from hoplib.experiment import batch, notebooks, rows
from hoplib.experiment.batch import NOTEBOOK, Plan
from hoplib.experiment.files import RunError, write
from hoplib.experiment.run import run as train_to_record

ROOT = Path(__file__).parent.parent
TINY = {"layers": "784 16 10", "train_images": 640, "test_images": 100, "epochs": 1}
NAME = "3-HAM-EO_layers=784-16-10_train_images=640_test_images=100_epochs=1"  # of the tiny run's record


def tiny_plan(tmp_path, **options):
    return Plan.parse({"output": tmp_path, "rows": "3-HAM-EO", "seeds": "0", **TINY, **options})


def records(plan):
    return [plan.record(name, job.seed) for job in plan.jobs() for name in job.rows]


def undisturbed(plan):
    """The records of the same jobs, trained in this process."""
    for job in plan.jobs():
        train_to_record(job.config, job.rows, plan.output / "runs", plan.output / "checkpoints", device="cpu")
    return records(plan)


def make(target, plan, *flags, **popen):
    """`make table` or `make status` with the interpreter that runs the tests."""
    sizes = " ".join(f"{k}='{' '.join(map(str, v)) if isinstance(v, list) else v}'" for k, v in plan.sizes.items())
    command = [
        *("make", "-o", "setup", target, f"BIN={Path(sys.executable).parent}", f"OUTPUT={plan.output}"),
        *(f"ROWS={' '.join(plan.rows)}", f"SEEDS={' '.join(map(str, plan.seeds))}", f"SIZES={sizes}"),
        f"FLAGS={' '.join(flags)}",
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **popen)


def make_table(plan, *flags, **popen):
    return make("table", plan, *flags, **popen)


def said(process):
    """What a process that ends well has printed; never a traceback."""
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "Traceback" not in output
    return output


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "hoplib.experiment.batch", *arguments], capture_output=True, text=True)


class TestPlan:
    def test_it_asks_for_everything_by_default(self):
        plan = Plan.parse({})
        assert len(plan.jobs()) == 90
        assert sum(len(job.rows) for job in plan.jobs()) == 95
        assert plan.output == ROOT / "results"
        assert Plan.parse({"rows": ",", "seeds": " , "}).jobs() == plan.jobs(), "no word is no choice"
        (record,) = Plan.parse({"data": "emnist", "rows": "3-HAM", "seeds": 0}).jobs()[0].rows
        assert record == "3-HAM_data=emnist"

    def test_the_full_size_is_the_tables(self):
        plan = Plan.parse({"rows": "5-HAM-EO", "seeds": 3})
        (job,) = plan.jobs()
        assert plan.parameters(job) == {
            "row": "5-HAM-EO",
            "seed": 3,
            "epochs": 10,
            "data": "mnist",
            "layers": [784, 1280, 510, 200, 10],
            "train_images": 60_000,
            "test_images": 10_000,
            "tol": 1e-6,
            "output": str(ROOT / "results"),
        }

    def test_its_parameters_are_the_notebooks(self):
        (job,) = Plan.parse({"rows": "3-HAM", "seeds": 0}).jobs()
        notebooks.check_parameters(NOTEBOOK, Plan().parameters(job))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"row": "3-HAM"}, "unknown option 'row'; choose from data"),
            ({"rows": "3-HAMM"}, "unknown row '3-HAMM'"),
            ({"seeds": "0 one"}, "must be integers.*'one'"),
            ({"epochs": 0}, "epochs must be an integer from 1 to 10"),
            ({"layers": "784 x 10"}, "must be integers"),
            ({"rows": "5-HAM", "layers": "784 10"}, r"layers=\[784, 10\] contradicts the row '5-HAM'"),
            ({"data": "cifar"}, "unknown data set 'cifar'"),
            ({"output": __file__}, r"output must be a folder; .*test_batch\.py is a file"),
        ],
    )
    def test_wrong_options_are_named(self, options, message):
        with pytest.raises(ValueError, match=message):
            Plan.parse(options)

    def test_what_is_missing_and_why(self, tmp_path, monkeypatch):
        plan = tiny_plan(tmp_path)
        (job,) = plan.jobs()
        assert plan.why(job) == f"{NAME}: missing"
        (path,) = undisturbed(plan)
        assert plan.why(job) == ""
        os.utime(path, (0, 0))  # a fresh clone: file times mean nothing
        assert plan.why(job) == ""
        other = tiny_plan(tmp_path, train_images=704)
        assert other.why(other.jobs()[0]) == f"{NAME.replace('640', '704')}: missing", "it has a record of its own"
        shutil.copytree(path.parent, other.record(*other.jobs()[0].rows, 0).parent)
        assert other.why(other.jobs()[0]) == f"{NAME.replace('640', '704')}: changed: train_images"
        stored = job.config.numerics
        monkeypatch.setattr(rows, "UNTOUCHED", 99)
        assert plan.why(job) == f"{NAME}: numerics {stored}, now 99"
        line = batch.status(tiny_plan(tmp_path, seeds="0 1"), 1).splitlines()[1]
        assert re.split(" {2,}", line) == ["3-HAM-EO", f"numerics {stored}, now 99", "missing"], (
            "no word touches another"
        )

    def test_the_snakefile_trains_nothing_that_is_there(self, tmp_path):
        plan = tiny_plan(tmp_path)
        undisturbed(plan)
        output = said(make_table(plan, "--dry-run"))
        assert "nothing to train" in output
        assert "train 3-HAM-EO" not in output
        output = said(make_table(tiny_plan(tmp_path, seeds="0 1"), "--dry-run"))
        assert f"train 3-HAM-EO, seed 1 ({NAME}: missing)" in output
        assert "seed 0" not in output


def damaged(content):
    """What can happen to a record."""
    lie = json.loads(content)
    lie["test_accuracy"] = "NaN"
    return {
        "empty": b"",
        "cut off": content[:100],
        "one bit": content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
        "a list": b"[]",
        "another number": json.dumps(lie).encode(),
        "no text": b"\xff\x00\xfe" * 100,
        "nested": b"[" * 100_000,
    }


BEAT = {"epoch": 1, "epochs": 2, "step": 5, "steps": 10, "seconds_left": 120.0}
NO_BEATS = [
    *("", "{", "[]", "3", "null", '"text"', "\0\xff", "[" * 100_000),
    *({k: v for k, v in BEAT.items() if k != name} for name in BEAT),
    *({**BEAT, name: value} for name in BEAT for value in (None, "text", [1], {}, float("nan"), float("inf"), -1e9)),
    *({**BEAT, name: 10**400} for name in BEAT),
    *({**BEAT, name: 0} for name in ("epochs", "steps")),
]


class TestStatus:
    def test_it_tells_how_every_job_is(self, tmp_path):
        plan = tiny_plan(tmp_path, rows="3-HAM-EO 3-HAM", seeds="0 1 2")
        undisturbed(tiny_plan(tmp_path))
        name = NAME.removesuffix("_epochs=1")
        write(tmp_path / "checkpoints" / name / "seed-1.progress", {**BEAT, "time": time.time()})
        write(tmp_path / "logs" / NAME.replace("HAM-EO", "HAM") / "seed-2.failed", b"it broke")
        text = batch.status(plan, 2)
        ham, ham_eo = (line.split() for line in text.splitlines()[1:3])
        assert ham == ["3-HAM", "missing", "missing", "failed"]
        assert ham_eo == ["3-HAM-EO", "done", "25%", "missing"]
        assert re.search(r"1 done, 1 running, 1 failed, 3 missing; about \d+ min left on 2 workers", text)
        assert "seed-2.log" in text

    def test_make_status_understands_sizes(self, tmp_path):
        """The same words as `make table`: without them it looks for the table's runs."""
        plan = tiny_plan(tmp_path, tol=0)
        undisturbed(plan)
        assert "1 done" in said(make("status", plan))
        assert "1 missing" in said(make("status", Plan(plan.rows, plan.seeds, output=plan.output)))
        assert batch.main(["status", "epochs=0"]) == 2
        assert batch.main(["status", "epoch=1"]) == 2
        assert batch.main(["status", "layers"]) == 2, "a name without a value is not passed over"

    def test_a_run_that_is_alive_has_a_fresh_heartbeat(self, tmp_path):
        plan = tiny_plan(tmp_path)
        (job,) = plan.jobs()
        heartbeat = tmp_path / "checkpoints" / job.config.name / "seed-0.progress"
        for age, alive in ((0, True), (60, True), (600, False)):
            write(heartbeat, {**BEAT, "time": time.time() - age})
            assert plan.progress(job) == ((0.25, 120.0) if alive else None)

    def test_any_heartbeat(self, tmp_path):
        """Garbage, missing keys, wrong types, numbers that cannot be: as if there were none."""
        plan = tiny_plan(tmp_path)
        (job,) = plan.jobs()
        heartbeat = tmp_path / "checkpoints" / job.config.name / "seed-0.progress"
        for beat in NO_BEATS:
            text = beat if isinstance(beat, str) else json.dumps({**beat, "time": time.time()})
            write(heartbeat, text.encode())
            assert batch.status(plan, 1).splitlines()[1].split() == ["3-HAM-EO", "missing"], text
        heartbeat.unlink()
        heartbeat.mkdir()
        assert "1 missing" in batch.status(plan, 1)

    def test_damaged_records(self, tmp_path):
        """`make status` and `make table` say so, and show no traceback."""
        plan = tiny_plan(tmp_path)
        (path,) = undisturbed(plan)
        cases = damaged(path.read_bytes())
        for name, content in cases.items():
            path.write_bytes(content)
            assert batch.status(plan, 1).splitlines()[1].split() == ["3-HAM-EO", "damaged"], name
        path.write_bytes(cases["one bit"])
        assert "1 damaged" in said(make("status", plan))
        assert f"train 3-HAM-EO, seed 0 ({NAME}: damaged)" in said(make_table(plan, "--dry-run"))


def test_a_folder_of_any_name(tmp_path):
    """Nothing in its name is read: not by make, the shell, Snakemake or papermill."""
    folder = """it's a {dir}; touch owned $HOME "and" `touch owned` {seed} {{x}} #"""
    plan = tiny_plan(tmp_path / folder)
    assert "1 missing" in said(make("status", plan))
    said(make_table(plan))
    assert [p.name for p in tmp_path.iterdir()] == [folder]
    assert plan.why(plan.jobs()[0]) == ""
    assert "1 done" in said(make("status", plan))
    assert not list(ROOT.rglob("owned"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder where nobody can write")
def test_an_output_where_nothing_can_be_written_is_named(capsys):
    plan = tiny_plan("/proc/nowhere")
    assert batch.main(["run", "3-HAM-EO", "0", *plan.arguments()]) == 1
    assert capsys.readouterr().err == "error: cannot write /proc/nowhere: No such file or directory\n"
    output, _ = make_table(plan, "--dry-run").communicate()
    assert "cannot write /proc/nowhere: No such file or directory" in output


def test_files_are_utf_8_whatever_the_locale():
    """Read as Latin-1, say, the README would be written back with other letters. In a locale of ASCII a read fails."""
    code = """if True:
        import front
        from hoplib.experiment import batch, notebooks
        notebooks.check_parameters(batch.NOTEBOOK, {})
        front.load, front.rendered, front.settled = lambda _: [], lambda _: {}, lambda _: None
        front.halve, front.pages = lambda _: None, lambda *_: {"README.md": {}}
        front.write = lambda path, content: print(content == path.read_bytes())
        front.main([])
        """
    ascii_ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT / "site")}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | ascii_)
    assert found.stdout.startswith("True"), found.stderr


class TestRunner:
    def test_one_run(self, tmp_path):
        arguments = tiny_plan(tmp_path / "a").arguments()
        result = command("run", "3-HAM-EO", "0", *arguments)
        assert result.returncode == 0, result.stderr
        assert f"{NAME}, seed 0, mnist:" in result.stdout
        (path,) = undisturbed(tiny_plan(tmp_path / "b"))
        assert same(tmp_path / "a" / "runs" / NAME / "seed-0.json", path)

    def test_without_the_extra_it_says_what_to_install(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "hoplib.experiment.notebooks", None)
        assert batch.main(["run", "3-HAM-EO", "0", *tiny_plan(tmp_path).arguments()]) == 1
        assert "pip install 'hoplib[notebooks]'" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "status", "message"),
        [
            (["3-HAMM", "0"], 2, "error: unknown row '3-HAMM'; choose from 3-CHN, "),
            (["3-HAM", "0", "--epochs=0"], 2, "error: epochs must be an integer from 1 to 10"),
            (["3-HAM", "x"], 2, "invalid int value: 'x'"),
            (["3-HAM", "0", "--learning-rate=1"], 2, "unrecognized arguments: --learning-rate=1"),
        ],
    )
    def test_wrong_arguments_are_named(self, arguments, status, message):
        result = command("run", *arguments)
        assert result.returncode == status
        assert message in result.stderr
        assert "Traceback" not in result.stderr

    def test_the_notebook_refuses_what_contradicts_its_row(self, tmp_path):
        with pytest.raises(notebooks.NotebookError, match="model='CHN' contradicts the row '3-HAM-EO'"):
            notebooks.run(NOTEBOOK, tmp_path / "out.ipynb", {"row": "3-HAM-EO", "model": "CHN"})

    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"seeds": 3}, r"has no parameter 'seeds'. Did you mean 'seed'\? It has: row, layers"),
            ({"seed": "3"}, "seed must be of type int .like 0., not '3'"),
            ({"updates": True}, "updates must be of type str"),
            ({"layers": "784,10"}, "layers must be of type list"),
        ],
    )
    def test_parameters_are_checked_before_anything_starts(self, parameters, message, tmp_path):
        with pytest.raises(notebooks.ParameterError, match=message):
            notebooks.run(NOTEBOOK, tmp_path / "out.ipynb", parameters)
        assert not (tmp_path / "out.ipynb").exists()

    def test_an_error_in_the_notebook_is_its_traceback(self, tmp_path):
        """An unwritable output folder, found by the first cell that writes: exit 1, a short report, a mark."""
        (tmp_path / "runs").write_text("a file where a folder should be")
        result = command("run", "3-HAM-EO", "0", *tiny_plan(tmp_path).arguments())
        assert result.returncode == 1
        assert "RunError: cannot write" in result.stderr
        assert len(result.stderr.splitlines()) < 60
        assert (tmp_path / "logs" / NAME / "seed-0.failed").exists()

    def test_an_executed_notebook_proves_nothing(self, tmp_path, monkeypatch):
        plan = tiny_plan(tmp_path)
        monkeypatch.setattr(notebooks, "run", lambda *_: None)
        with pytest.raises(RunError, match=rf"the record does not count \({NAME}: missing\)"):
            batch.run_job(plan, plan.jobs()[0])


def descendants(process, word):
    """The living descendants of a process whose command line has that word, but for the shells that wait for them."""
    found = []
    for p in psutil.Process(process.pid).children(recursive=True):
        try:
            if word in " ".join(p.cmdline()) and not p.name().endswith("sh"):
                found.append(p)
        except psutil.Error:
            continue
    return found


@pytest.mark.skipif(os.name != "posix", reason="kill -9")
def test_a_batch_whose_parts_are_killed_is_completed_by_one_more_command(tmp_path):
    """Three runs; kill -9 of a kernel, of a runner and of Snakemake itself, each while alive; then `make table` again.

    `make attack` kills at many more instants.
    """
    options = {"rows": "3-HAM-EO", "seeds": "0 1 2", "epochs": 10, "train_images": 4800}
    plan = tiny_plan(tmp_path / "killed", **options)
    reference = undisturbed(tiny_plan(tmp_path / "whole", **options))
    process = make_table(plan, start_new_session=True)
    started = lambda: len(list(plan.output.rglob("*.pt")))  # noqa: E731
    try:
        wait_for(lambda: started() >= 1 and descendants(process, "ipykernel"), process)
        descendants(process, "ipykernel")[0].kill()
        wait_for(lambda: started() >= 2 and descendants(process, "experiment.batch run"), process)
        descendants(process, "experiment.batch run")[0].kill()
        wait_for(lambda: descendants(process, "snakemake"), process)
        for p in descendants(process, "snakemake"):
            p.kill()
    finally:
        process.communicate()
    assert process.returncode != 0
    assert any(plan.why(job) for job in plan.jobs()), "the kills came too late"
    said(make_table(plan))
    for ours, whole in zip(records(plan), reference, strict=True):
        assert same(ours, whole)


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C")
@pytest.mark.parametrize("how", ["Ctrl-C, twice", "SIGTERM to make alone"])
def test_it_stops_with_all_of_its_children_and_one_line(tmp_path, how):
    plan = tiny_plan(tmp_path, epochs=10, train_images=60_000)
    listens = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 (a job in the background ignores it)
    process = make_table(plan, start_new_session=True, preexec_fn=listens)
    try:
        wait_for(lambda: list(plan.output.rglob("*.progress")), process)
        kernels = descendants(process, "ipykernel")
        assert kernels
        if how == "Ctrl-C, twice":
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.5)  # it takes longer to stop
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.terminate()
        output, _ = process.communicate(timeout=120)
        assert process.returncode != 0
        *_, before, line = [line for line in output.splitlines() if not line.startswith("make: ***")]
        assert line.startswith("stopped; the same command goes on")
        assert before.startswith("Job ")
        _, alive = psutil.wait_procs(kernels, timeout=60)
        assert not alive, "a kernel trains on"
    finally:
        for p in descendants(process, "") if process.poll() is None else []:
            p.kill()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="to see what a process has loaded")
@pytest.mark.parametrize("target", ["table", "status", "paper", "own"])
def test_ctrl_c_while_it_is_imported_shows_no_traceback(tmp_path, target):
    listens = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = make(target, tiny_plan(tmp_path), start_new_session=True, preexec_fn=listens)
    torch_is_loaded = lambda p: "libtorch" in Path(f"/proc/{p.pid}/maps").read_text()  # noqa: E731
    wait_for(lambda: any(torch_is_loaded(p) for p in descendants(process, "")), process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert not [line for line in output.splitlines() if not line.startswith("make: ***")], output
    assert not list(tmp_path.rglob("*"))


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="no Slurm here (.ci/slurm sets one up)")
def test_three_trainings_on_slurm(tmp_path):
    if subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("Slurm is installed but does not answer")
    folder = ROOT / "build" / "slurm-test"  # where the nodes of a cluster see it too
    shutil.rmtree(folder, ignore_errors=True)
    plan = tiny_plan(folder, seeds="0 1 2")
    process = make_table(plan, "--profile profiles/slurm")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "slurm" in output.lower()
    for ours, whole in zip(records(plan), undisturbed(tiny_plan(tmp_path, seeds="0 1 2")), strict=True):
        assert same(ours, whole)
        assert json.loads(ours.read_text())["row"] == NAME
