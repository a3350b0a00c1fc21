# Faults under load, with figures (docs/reliability.md).
.PHONY: test-chaos
test-chaos: $(READY) ## faults of every part on real Envoy under load (some minutes)
	$(RUN)/python -m pytest -m "chaos or e2e" tests/chaos $(ARGS)

.PHONY: soak
soak: $(READY) ## 200,000 requests at the router, a tenth given up; what is left of them [REQUESTS=...]
	$(RUN)/python -m tests.chaos.soak --requests $(or $(REQUESTS),200000)
