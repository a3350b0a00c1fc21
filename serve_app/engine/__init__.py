"""A simulated engine: the HTTP face, the prefix cache and the timing of a vLLM replica, without a model.

It stands in for a replica of several GPUs where there are none, so that routing can be shown and
measured on a laptop. What it does as vLLM does: whole 16-token blocks of the prompt hit a block-wise LRU
cache, the rest is prefilled one request after another, output tokens follow at a steady pace, and `usage`,
/metrics and the response headers tell the truth about all of it. What it doesn't do: the text means nothing,
and time is a model (`timing.py`), not work.

Read in this order: `prompt` (a request becomes tokens), `cache` (what is remembered), `timing` (how long
things take), `core` (one request through all three), `metrics`, `http` (the OpenAI face).

`python -m serve_app.engine --port 8001` serves one without Ray.
"""
