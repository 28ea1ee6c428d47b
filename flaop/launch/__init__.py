"""Launchers: allocate, choose a configuration, launch the device code of `flaop.triton_kernels`."""
