# What every request passes through, compiled by mypyc (hatch_build.py); docs/performance.md has what that gives.
# The package in build/compiled comes before the checkout's, also for programs that are started with `python -m`.
COMPILED := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/compiled

.PHONY: compiled
compiled: $(READY) ## build/compiled: the router with its hot path compiled
	@make/compiled.sh

.PHONY: bench-core
bench-core: compiled ## what a decision costs, compiled: [ARGS=--json]
	@$(COMPILED) $(RUN)/python -m bench.core $(ARGS)

.PHONY: test-compiled
test-compiled: compiled ## decisions, streams and the service on the compiled router
	$(COMPILED) $(RUN)/python -m pytest --import-mode=append tests/compiled tests/core tests/exchange tests/http2 tests/component \
	  tests/workers tests/hostile/test_sequences.py tests/e2e/test_envoy_routing.py $(ARGS)
