"""Changed inputs and weighted gradients, for comparisons to the last bit."""

from collections.abc import Callable

import torch
from torch import Tensor

# Inputs with one row a token; others are shared by all of them.
PER_TOKEN = ("q", "k", "v", "g", "gv", "beta")
GATES = ("g", "gv")


def per_token(inputs: dict) -> list[str]:
    return [name for name in PER_TOKEN if inputs.get(name) is not None]


def with_other_tokens(inputs: dict, start: int, end: int) -> dict:
    """The same call with other finite, and larger, values in the tokens [start, end)."""
    changed = dict(inputs)
    for name in per_token(inputs):
        x = inputs[name].detach().clone()
        generator = torch.Generator().manual_seed(7)
        noise = torch.randn(x[:, start:end].shape, generator=generator).to(x.device, x.dtype)
        x[:, start:end] = -10 * noise.abs() if name in GATES else 10 * noise
        changed[name] = x.requires_grad_(inputs[name].requires_grad)
    return changed


def gradients(fn: Callable, inputs: dict) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Outputs and the gradients of every input through both, by name."""
    names = [n for n, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad]
    outputs = fn(**inputs)
    weights = [torch.linspace(-1, 1, x.numel(), device=x.device).view_as(x) for x in outputs]
    weights = [w.to(x.dtype) for w, x in zip(weights, outputs, strict=True)]
    found = torch.autograd.grad(outputs, [inputs[name] for name in names], weights)
    return outputs, dict(zip(names, found, strict=True))
