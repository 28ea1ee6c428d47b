"""The mathematics of each family in plain PyTorch, forward and backward: the CPU kernels."""
