"""Capturing a call in a CUDA graph and replaying it with other values."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

import flaop


def leaves(inputs: dict) -> list[Tensor]:
    return [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]


def step(fn: Callable, inputs: dict, grad: bool) -> list[Tensor]:
    """What is captured: outputs, and with `grad` the gradients of every input through both."""
    outputs = [x for x in fn(**inputs) if x is not None]
    if not grad:
        return outputs
    weights = [torch.ones_like(x) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves(inputs), weights)]


def settled_memory() -> int:
    """Bytes allocated on the GPU, once autograd's thread has let go of what it returned."""
    least, since = torch.cuda.memory_allocated(), time.monotonic()
    while time.monotonic() - since < 0.2:
        time.sleep(0.01)
        if torch.cuda.memory_allocated() < least:
            least, since = torch.cuda.memory_allocated(), time.monotonic()
    return least


def capture(fn: Callable, inputs: dict, grad: bool) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """The graph of a step after one warm-up, and the tensors that a replay writes."""
    flaop.warmup(fn, **inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(fn, inputs, grad)
    return graph, results


@torch.no_grad()
def refresh(inputs: dict, values: dict) -> None:
    for name, x in inputs.items():
        if isinstance(x, Tensor):
            x.copy_(values[name])


@torch.no_grad()
def replay(graph: torch.cuda.CUDAGraph, results: list[Tensor]) -> list[Tensor]:
    """Copies of what the graph writes, into memory that held NaN."""
    for x in results:
        x.fill_(torch.nan)
    graph.replay()
    return [x.clone() for x in results]


def assert_all_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)
