"""Stages of the decay families."""
