"""Launchers of the decay families."""
