"""What every CPU kernel runs under."""

import functools
from collections.abc import Callable

import torch


def as_kernel(function: Callable) -> Callable:
    """Nothing is recorded for autograd, and autocast has had its say above the kernel."""

    @functools.wraps(function)
    def kernel(*args, **options):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return function(*args, **options)

    return kernel
