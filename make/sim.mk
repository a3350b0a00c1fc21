# docs/results.md, with all its tables and pictures (some minutes).
.PHONY: results
results: compiled ## simulate everything that docs/results.md says: TRACE=conversation_trace.jsonl
	@test -n "$(TRACE)" || { echo "make results TRACE=FILE: Mooncake's conversation trace, from" \
	  "https://github.com/kvcache-ai/Mooncake (FAST25-release/traces)"; exit 2; }
	$(COMPILED) $(RUN)/python -m sim.results --trace "$(TRACE)"
