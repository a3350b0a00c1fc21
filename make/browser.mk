.PHONY: test-browser
test-browser: $(READY) ## the live page in a real Chromium, which is installed if missing
	@make/chromium.sh
	$(RUN)/python -m pytest -m browser $(ARGS)
