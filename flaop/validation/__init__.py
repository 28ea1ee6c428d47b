"""Argument checks, one module per family, called by fake, CPU and CUDA kernels alike."""
