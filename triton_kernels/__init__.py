"""Triton device code, one pipeline stage a file. Installed as `flaop.triton_kernels`."""
