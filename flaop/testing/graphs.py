"""Capturing a call in a CUDA graph and replaying it with other values."""

import subprocess
import sys
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


def compiled_variants() -> int:
    """How many compiled variants the kernels of this process have."""
    from flaop.launch.kernel import Kernel

    modules = [m for name, m in sys.modules.items() if name.startswith("flaop.launch.")]
    kernels = {id(x): x for m in modules for x in vars(m).values() if isinstance(x, Kernel)}
    return sum(len(kernel.variants) for kernel in kernels.values())


_UNWARMED = """
import sys
import torch
import flaop
import flaop.testing

op, family, grad = sys.argv[1:]
fn = getattr(flaop, op)
inputs, oracle = (getattr(flaop.testing, f"{family}_{x}") for x in ("inputs", "oracle"))
inputs = inputs(
    T=130, H=1, K=16, V=16, dtype=torch.float16, device="cuda", requires_grad=grad == "grad"
)
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        fn(**inputs)
except RuntimeError as error:
    message = str(error)
assert "flaop.warmup" in message and message.count("\\n") == 0, message
flaop.warmup(fn, **inputs)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    outputs = fn(**inputs)
with torch.no_grad():
    inputs["v"].mul_(-3)
    graph.replay()
for got, expected in zip(outputs, oracle(**inputs)):
    error = flaop.testing.relative_error(got, expected)
    assert error < 1e-2, error
"""


def assert_unwarmed_capture_is_refused(op: str, family: str, folder, grad: bool = False) -> None:
    """In a process of its own, whose first call is captured: that raises one sentence, and after
    flaop.warmup the process can capture and replay.

    Args:
        op: a function of flaop. family: of flaop.testing, such as "kda": its inputs and oracle.
        folder: a working folder outside the source tree.
    """
    command = [sys.executable, "-c", _UNWARMED, op, family, "grad" if grad else "no_grad"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
