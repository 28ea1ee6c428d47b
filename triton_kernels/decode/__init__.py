"""Kernels on a pool of states: decode steps, verify and commit, prefill into slots."""
