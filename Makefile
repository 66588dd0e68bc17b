# One command does everything: `make test` or `make paper` on a machine with Python 3.11+, git and make.
PYTHON ?= python3
BIN := .venv/bin
# An environment of your own, such as conda's: make test BIN=$CONDA_PREFIX/bin; nothing is installed then.
READY := $(if $(filter .venv/bin,$(BIN)),.venv/ready,own)
# CPU=1: torch without CUDA, from the index of its makers.
CPU ?=
UV_VERSION := 0.13.7
# Two single-threaded workers beat one with two threads.
WORKERS ?= 2
export OMP_NUM_THREADS ?= 1
# Files and messages are UTF-8, whatever the locale.
export PYTHONUTF8 := 1
# Without its cached bytecode torch takes three times as long to import, in every kernel anew.
unexport PYTHONDONTWRITEBYTECODE

# A module as a program that Ctrl-C ends without a word while it is imported; once it runs, it says what there is to say.
PROGRAM := -c 'import runpy, signal as s, sys; s.getsignal(s.SIGINT) is s.default_int_handler and s.signal(s.SIGINT, \
	s.SIG_DFL); del sys.argv[0]; runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)'

.PHONY: help setup own test attack lint paper playground site course results table status lab bench costs lock clean
help:  ## this list
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(READY)  ## the environment in .venv, exactly as locked; CPU=1: without CUDA

own:
	@"$(BIN)/python" -c 'import signal as s; s.signal(s.SIGINT, s.SIG_DFL); import hoplib' || { echo "$(BIN)/python has no hoplib: see the README on conda" >&2; exit 1; }

.venv/ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try make PYTHON=python3.12")'
	@echo "installing into .venv: $(if $(CPU),torch without CUDA,about 6 GB, most of it CUDA (make setup CPU=1: without))"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(if $(CPU),grep -vE '^(cuda|nvidia|triton)' requirements.lock | )$(BIN)/uv pip install --quiet --python $(BIN)/python \
		$(if $(CPU),--torch-backend cpu -r -,-r requirements.lock)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	touch $@

lint: setup  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## everything that can fail, in a few minutes
	$(BIN)/python -m pytest tests notebooks -n $(WORKERS) --dist loadscope --no-loadscope-reorder \
		--nbval-lax --nbval-current-env --nbval-cell-timeout 120 --durations=20 \
		--cov=hoplib --cov-report=term-missing:skip-covered --cov-fail-under=95

attack: setup  ## what takes too long for test: kills, bit flips, a full disk, two batches at once, any input; some minutes
	$(BIN)/python tests/attack.py $(FLAGS)
	$(BIN)/python -m pytest tests/test_api.py --hypothesis-profile attack

# After Ctrl-C the program says what there is to say; make and the shell add nothing.
paper: setup  ## execute all notebooks, draw the table and the figures, make the site: build/index.html
	@trap : INT; $(BIN)/python site/assemble.py || test $$? -eq 130

site: playground  ## the notebooks, the table and the library as web pages: build/site/index.html
	$(BIN)/python site/build.py

course: setup  ## the notebooks without the solutions of their exercises: build/course/
	$(BIN)/jupyter nbconvert --log-level WARN --to notebook --output-dir build/course notebooks/[0-9]*.ipynb \
		--TagRemovePreprocessor.enabled=True --TagRemovePreprocessor.remove_cell_tags solution

results: setup  ## the table and the figures of the records, in results/ and the README
	$(BIN)/python site/front.py

# What is asked of the table: ROWS="3-HAM 5-*" SEEDS="0 1" DATA=emnist; all by default. OUTPUT is the folder of the
# results. SIZES="epochs=2 layers='784 16 10' tol=0" makes other runs of the rows. FLAGS go to snakemake.
# OUTPUT reaches the programs as it was typed: neither make nor the shell looks into it.
table status: override export OUTPUT := $(value OUTPUT)
table status: export ROWS ?=
table status: export SEEDS ?=
table status: export DATA ?=

table: setup  ## train what the table lacks; stop with Ctrl-C, go on with the same command
	@exec "$(BIN)/python" $(PROGRAM) hoplib.experiment.batch table --cores all $(FLAGS) --config rows="$$ROWS" seeds="$$SEEDS" data="$$DATA" $(SIZES)

status: setup  ## what of the table is done, running, missing, failed
	@exec "$(BIN)/python" $(PROGRAM) hoplib.experiment.batch status --rows="$$ROWS" --seeds="$$SEEDS" --data="$$DATA" \
		--output="$$OUTPUT" $(SIZES)

playground: setup  ## the network to play with, one page: build/playground.html
	$(BIN)/python -m playground.build

bench: setup  ## a solve against plain matrix products, a training step against the straightforward formulation: results/bench.json
	$(BIN)/python benchmarks/forward.py --json results/bench.json
	$(BIN)/python benchmarks/training.py --json results/bench.json

costs:  ## what make paper and make test cost, each in a new clone: results/costs.json
	$(PYTHON) benchmarks/costs.py

lab: setup  ## the notebooks in JupyterLab; FLAGS go to it
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(FLAGS) notebooks

lock: setup  ## resolve the newest versions into requirements.lock
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --no-annotate --upgrade -o requirements.lock

clean:  ## remove what can be made again
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage hoplib.egg-info
