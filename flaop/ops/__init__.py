"""Registration of the kernels and fakes of each family with torch.ops.flaop."""
