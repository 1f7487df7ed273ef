# Every target that needs it makes .venv first; ENGINE=cpu or gpu overrides the engine that deploy/install.sh chooses.
VENV ?= .venv
JOBS ?= 4
MODEL ?= runs/models/demo
DEMO ?= deploy/runs/demo.toml
AGENT_MODEL ?= runs/models/calculator
export VENV
# Tests and runs start hundreds of interpreters; each would compile torch and vLLM anew if no bytecode may be kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-real agent-demo test test-all chaos compose-check recipes-check lint bench bench-peers gpu-check study venv venv-dev venv-peers clean clean-venv

demo: venv
	$(VENV)/bin/python -m penstock.deploy.cli make-model $(MODEL)
	$(VENV)/bin/python -m penstock.deploy.cli run $(DEMO) --name demo-$$(date +%Y%m%d-%H%M%S) --set model.path=$(MODEL)

# A language model of 135M parameters learns sums: docs/recipes.md. LORA=1 trains an adapter of it.
demo-real:
	@deploy/install.sh gguf reasoning-gym
	@$(VENV)/bin/python -m penstock.deploy.cli fetch-model smollm2 runs/models/smollm2
	@run=real-$$(date +%Y%m%d-%H%M%S) && \
	$(VENV)/bin/python -m penstock.deploy.cli run recipe:reasoning-gym --name $$run \
		$(if $(LORA),--set lora.rank=16 --set lora.alpha=32 --set trainer.learning_rate=2e-4) && \
	for model in runs/models/smollm2 $$run; do \
		$(VENV)/bin/python -m penstock.deploy.cli evaluate $$model recipe:reasoning-gym --show 3 || exit; \
	done

# A small agent that mostly guesses learns to call a calculator.
agent-demo: venv
	$(VENV)/bin/python -m penstock.deploy.cli make-model $(AGENT_MODEL) --task calculator
	$(VENV)/bin/python -m penstock.deploy.cli run deploy/runs/calculator.toml --name calculator-$$(date +%Y%m%d-%H%M%S) \
		--set model.path=$(AGENT_MODEL)

# Tests of one group share a worker, with its engines.
test: venv-dev
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup

# On both servers, with the whole fuzz and every other test marked `exhaustive`.
test-all: venv-dev
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup --exhaustive

# Some ten minutes; the results and the page made of them (docs/faults.md is a copy) are in runs/chaos.
# SEED=3 replays one seed.
chaos: venv-dev
	$(VENV)/bin/python -m tests.chaos --out runs/chaos $(if $(SEED),--seed $(SEED))

# Brings compose.yaml up with podman and podman-compose; CONTRIBUTING.md lists the requirements.
compose-check: venv-dev
	$(VENV)/bin/python -m bench.compose_check

# Every recipe, small, on this machine's processors: some twenty minutes. RECIPES="tools judge" runs these alone.
recipes-check: venv-dev
	$(VENV)/bin/python -m bench.recipes_check $(RECIPES)

lint: venv-dev
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	mkdir -p .mypy_cache/roof/penstock
	for name in schemas producers consumers deploy; do ln -sfn ../../../$$name .mypy_cache/roof/penstock/$$name; done
	ln -sfn ../../../deploy/roof/__init__.py .mypy_cache/roof/penstock/__init__.py
	$(VENV)/bin/python -m mypy

bench: venv venv-peers
	$(VENV)/bin/python -m bench

# TRL on the demo's task: a row of `make bench`.
bench-peers: venv venv-peers
	$(VENV)/bin/python -m bench trainer --only peers

# On a machine with an NVIDIA GPU: some twenty minutes; docs/benchmarks.md says what, and how without a network.
gpu-check: venv-dev
	$(VENV)/bin/python -m bench gpu --check

# Continues where it was stopped; finished cells are kept in bench/results/study.jsonl.
study: venv
	$(VENV)/bin/python -m bench.study

venv:
	@deploy/install.sh

venv-dev:
	@deploy/install.sh dev

# A separate environment: the peers' requirements conflict with the engine's.
venv-peers:
	@VENV=$(VENV)-peers REQUIREMENTS=bench/peers-requirements.txt deploy/install.sh

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-venv:
	rm -rf $(VENV) $(VENV)-peers
