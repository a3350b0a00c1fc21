# Faults under load, with figures (docs/reliability.md).
.PHONY: test-chaos
test-chaos: $(READY) ## faults of every part on real Envoy under load (some minutes)
	$(RUN)/python -m pytest -m "chaos or e2e" tests/chaos $(ARGS)
