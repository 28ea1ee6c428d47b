"""Launchers of the delta families."""
