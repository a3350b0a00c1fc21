# How long each of the two targets is fuzzed.
SECONDS ?= 30
FUZZ    := .run/fuzz

.PHONY: fuzz
fuzz: $(READY) ## coverage-guided fuzzing of features and of ext_proc streams: [SECONDS=30]
	@$(RUN)/python -c 'import atheris' 2>/dev/null || $(RUN)/pip install --quiet --disable-pip-version-check '.[fuzz]'
	@for target in features exchange; do \
	  $(RUN)/python -m tests.hostile.fuzz $$target $(FUZZ) -max_total_time=$(SECONDS) -print_final_stats=1 -verbosity=0 || exit 1; \
	done
