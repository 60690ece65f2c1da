# Everything runs from a clean clone: Python >= 3.10, make and a package index are enough.
# `make help` lists the targets. Variables: PYTHON (which interpreter makes .venv), PYTEST_ARGS, DEMO_ARGS, BENCH_ARGS, COMPAT_ARGS.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
COMPAT_ARGS ?=

# One stamp per set of extras: pip runs again only when the requirements changed.
RUN_STAMP := $(VENV)/.stamp-run
TEST_STAMP := $(VENV)/.stamp-test
DEV_STAMP := $(VENV)/.stamp-dev
PROMETHEUS := $(VENV)/prometheus/usr/bin/prometheus
REQUIREMENTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint types bench scale faults compat prometheus clean
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s  %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(RUN_STAMP) ## train a small GPT on two ranks, then print the report of that run
	@run_dir="lens-runs/demo-$$(date +%Y%m%d-%H%M%S)-$$$$"; \
	PATH="$(CURDIR)/$(BIN):$$PATH"; export PATH; \
	set -ex; \
	NEMO_LENS_RUN_DIR="$$run_dir" OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}" \
	  opentelemetry-instrument torchrun --nproc-per-node 2 examples/train_gpt_ddp.py $(DEMO_ARGS); \
	lens-auto report "$$run_dir"

test: $(TEST_STAMP) ## run every test
	$(BIN)/python -m pytest tests -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(DEV_STAMP) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_STAMP) ## type-check lens_auto and instrumentors (strict)
	$(BIN)/mypy

bench: $(TEST_STAMP) ## measure the overhead beside its budgets; fails where one is missed
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

scale: $(TEST_STAMP) ## measure agreement and carrier at 2, 8 and 64 processes (store and gloo only)
	$(BIN)/python -m benchmarks.scale

prometheus: $(PROMETHEUS) ## unpack Debian's Prometheus in .venv, for the test that asks a real server

compat: $(TEST_STAMP) ## run real frameworks and PyTorch's own tests with lens-auto and without
	$(BIN)/python -m compat $(COMPAT_ARGS)

faults: $(TEST_STAMP) ## measure what training feels of an endpoint that misbehaves, fault by fault
	$(BIN)/python -m benchmarks.faults $(FAULTS_ARGS)

clean: ## remove .venv, caches, build outputs and the demo's runs
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .compat lens-runs/demo-*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip 21.3 is the first that installs a package without setup.py in editable mode; a newer one is left alone.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet 'pip>=21.3'

# Unpacked and not installed: the package's own service would start.
$(PROMETHEUS): | $(BIN)/python
	mkdir -p $(VENV)/prometheus
	cd $(VENV)/prometheus && { apt-get download prometheus || { apt-get update && apt-get download prometheus; }; }
	dpkg -x $(VENV)/prometheus/prometheus_*.deb $(VENV)/prometheus && rm $(VENV)/prometheus/prometheus_*.deb

$(RUN_STAMP): $(REQUIREMENTS) | $(BIN)/python
	$(PIP_INSTALL) -e '.[instruments]'
	@touch $@

$(TEST_STAMP): $(REQUIREMENTS) | $(BIN)/python
	$(PIP_INSTALL) -e '.[instruments,test]'
	@touch $@ $(RUN_STAMP)

$(DEV_STAMP): $(REQUIREMENTS) | $(BIN)/python
	$(PIP_INSTALL) -e '.[instruments,test,dev]'
	@touch $@ $(RUN_STAMP) $(TEST_STAMP)
