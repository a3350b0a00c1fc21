# Each target works by itself on a fresh clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
READY  := $(VENV)/ready
RUN    := $(VENV)/bin

# make run: which engine, and what it is given
ENGINE   ?= sim
MODEL    ?=
REPLICAS ?= 4
RUN_ARGS  = --engine $(ENGINE) --replicas $(REPLICAS) $(if $(MODEL),--model $(MODEL)) $(if $(ONCE),--once) $(ARGS)

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

.PHONY: setup
setup: $(READY) ## make .venv and install everything that run and test need

# "ready" is written last, so an interrupted installation is taken up again.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(RUN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

.PHONY: run
run: $(READY) ## bring everything up and show it: [ENGINE=vllm MODEL=...] [REPLICAS=4] [ONCE=1]
	@make/compiled.sh || echo "the router runs interpreted"
ifeq ($(ENGINE),vllm)
	@venv=$${VLLM_VENV:-$$(make/vllm_venv.sh)} && $(COMPILED):$(CURDIR) exec "$$venv/bin/python" -m demo $(RUN_ARGS)
else
	@$(COMPILED) exec $(RUN)/python -m demo $(RUN_ARGS)
endif

.PHONY: lint
lint: $(READY) ## style, types, layers
	$(RUN)/ruff check
	$(RUN)/ruff format --check
	$(RUN)/mypy
	$(RUN)/lint-imports

.PHONY: test
test: lint ## everything but real vLLM, the browser, the long faults and the compiled router
	$(RUN)/python -m pytest -m "not vllm and not browser and not chaos and not compiled" $(ARGS)

.PHONY: test-fast
test-fast: $(READY) ## without Envoy and Ray
	$(RUN)/python -m pytest -m "not vllm and not browser and not e2e and not chaos and not compiled" $(ARGS)

include make/browser.mk
include make/chaos.mk
include make/compiled.mk
include make/alerts.mk
include make/compose.mk
include make/fuzz.mk
include make/sim.mk
include make/supply.mk
include make/vllm.mk
