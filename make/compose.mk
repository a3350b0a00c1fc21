.PHONY: compose-check
compose-check: $(READY) ## docker-compose.yml by compose's own reading
	@PYTHON=$(RUN)/python make/compose.sh config --quiet
