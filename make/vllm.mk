# Real vLLM, in an environment of its own that is built on demand and shared by all checkouts.
.PHONY: test-vllm
test-vllm: ## the suite on real vLLM (CPU; builds its environment first, some minutes)
	@venv=$$(make/vllm_venv.sh) && PYTHONPATH=. "$$venv/bin/python" -m pytest -m vllm tests/vllm $(ARGS)
