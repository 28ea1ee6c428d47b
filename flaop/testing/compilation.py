"""How often a function compiles, and which ops its graphs hold."""

from collections.abc import Callable

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


class Compiled:
    """A function compiled with AOTAutograd: counts compilations, records the ops of each graph."""

    def __init__(self, fn: Callable, dynamic: bool | None):
        self.compilations = 0
        self.graphs: list[list[str]] = []
        self._below = aot_autograd(fw_compiler=self._record, bw_compiler=self._record)
        self.call = torch.compile(fn, fullgraph=True, dynamic=dynamic, backend=self.backend)

    def backend(self, graph, inputs):
        self.compilations += 1
        return self._below(graph, inputs)

    def _record(self, graph, _):
        # an op that mutates is an argument of a functional wrapper
        called = [
            n.args[0] if str(n.target).startswith("auto_functionalized") else n.target
            for n in graph.graph.nodes
        ]
        ops = [op for op in called if getattr(op, "namespace", "") == "flaop"]
        self.graphs.append([op._schema.name.removeprefix("flaop::") for op in ops])
        return make_boxed_func(graph.forward)
