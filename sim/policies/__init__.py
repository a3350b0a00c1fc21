"""Policies to compare, each a small implementation of its published description."""
