"""Stages of the delta families."""
