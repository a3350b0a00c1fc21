"""The admin port: health and metrics for machines, a live page and its JSON for people.

It shows the fleet and its load, never a prompt, nor a session's id in clear; and nothing here changes anything.
"""
