"""Routing of LLM requests to the replica that already holds their cache: an Envoy external processor."""
