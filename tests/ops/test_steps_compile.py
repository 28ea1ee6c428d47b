"""opcheck and torch.compile of the decode ops: what is mutated, how often it compiles, copies."""

import math
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

import flaop
from flaop.testing import (
    STEP_FAMILIES,
    relative_error,
    slot_indices,
    step_pool,
    step_tokens,
)
from flaop.testing.compilation import Compiled

OPS = torch.ops.flaop
SIZES = {"H": 1, "HV": 2, "K": 32, "V": 24}
STATE = {name: SIZES[name] for name in ("HV", "K", "V")}
# Gates of the model below are given: one function serves every family.
GIVEN = {
    "kda": "kda given", "gated_delta_rule": "gated_delta_rule given",
    "simple_gla": "simple_gla", "gla": "gla",
}  # fmt: skip
# Each family and each layout; which tokens belong together is not the family's business.
FEWER = [(f, "packed" if i % 2 else "batched") for i, f in enumerate(STEP_FAMILIES)]
TENSORS = ("q", "k", "v", "g", "g_gamma", "beta")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def positional(op, inputs):
    """Arguments of an op, in the order of its schema, up to the last one that is given."""
    names = [argument.name for argument in op._schema.arguments]
    last = max(i for i, name in enumerate(names) if inputs.get(name) is not None)
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    return tuple(inputs.get(name, defaults.get(name)) for name in names[: last + 1])


def call_arguments(family, device, *, layout="batched", T=2, N=3, **options):
    shape = {"lengths": [2, 0, 1]} if layout == "packed" else {"B": N, "T": T}
    inputs = step_tokens(family, **shape, **SIZES, device=device, **options)
    slots = [[5, 1], [0, -1], [-1, 2]] if layout == "per token" else [4, -1, 7]
    inputs["state_indices"] = slot_indices(slots, device)
    inputs["state"], _ = step_pool(8, **STATE, device=device, padding=3)
    inputs["has_initial_state"] = torch.tensor([True, True, False], device=device)
    if layout == "per token":
        inputs["num_accepted_tokens"] = slot_indices([2, 1, 1], device)
        inputs["write_indices"] = inputs["state_indices"].clone()
    return inputs


@pytest.mark.parametrize("family, layout", [*FEWER, *((f, "per token") for f in STEP_FAMILIES)])
def test_opcheck_step(step_device, family, layout):
    op = getattr(OPS, f"{family}_step_").default
    opcheck(op, positional(op, call_arguments(family, step_device, layout=layout)))


@pytest.mark.parametrize("family, layout", FEWER)
def test_opcheck_chunk_pool(step_device, family, layout):
    op = getattr(OPS, f"chunk_{family}_pool_").default
    inputs = call_arguments(family, step_device, layout=layout, T=70)
    if layout == "batched":
        inputs["checkpoint_interval"] = 64
        inputs["checkpoint_indices"] = slot_indices([[1], [2], [3]], step_device)
    opcheck(op, positional(op, inputs))


@pytest.mark.parametrize("family, layout", FEWER)
def test_opcheck_verify_and_commit(step_device, family, layout):
    op = getattr(OPS, f"{family}_verify").default
    inputs = call_arguments(family, step_device, layout=layout)
    opcheck(op, positional(op, inputs))
    _, k, u, g = op(*positional(op, inputs))
    inputs |= {"k": k, "u": u, "g": g, "num_accepted_tokens": slot_indices([1, 2, 0], step_device)}
    op = getattr(OPS, f"{family}_commit_").default
    opcheck(op, positional(op, inputs))


def model(family):
    """A decode step between other operations, as a layer has it; tokens in the order of TENSORS."""
    step = getattr(flaop, f"{family}_step_")
    names = [a.name for a in getattr(OPS, f"{family}_step_").default._schema.arguments]
    taken = [i for i, name in enumerate(TENSORS) if name in names]

    def decode(state, state_indices, *tokens):
        tokens = [tokens[i] if i != 2 else tokens[i] * 2 for i in taken]
        o = step(*tokens, state, state_indices)
        # Reads the state after the op.
        return o + 1, state[0].float().sum()

    return decode


def tokens_of(family, device, B, **options):
    inputs = step_tokens(GIVEN[family], B=B, T=1, **SIZES, device=device, **options)
    return [inputs.get(name) for name in TENSORS]


def assert_equal_to_eager(family, compiled, arguments):
    state, *others = arguments
    states = [state.clone(), state.clone()]
    results = [fn(s, *others) for fn, s in zip((compiled, model(family)), states, strict=True)]
    assert torch.equal(*states)
    assert not torch.equal(states[0], state)
    for x, y in zip(*results, strict=True):
        assert x.stride() == y.stride()
        assert relative_error(x, y) < 1e-5


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_few_graphs_for_all_sizes(step_device, family, dynamic):
    """Batches and pools of several sizes: static, then dynamic; a single row has its own graph."""
    compiled = Compiled(model(family), dynamic=dynamic)
    for slots, B in ((8, 3), (64, 4), (8, 7), (64, 3), (9, 5)):
        state, _ = step_pool(slots, **STATE, device=step_device)
        indices = slot_indices([slots - 1 - i for i in range(B)], step_device)
        indices[-1] = 0
        arguments = (state, indices, *tokens_of(family, step_device, B))
        assert_equal_to_eager(family, compiled.call, arguments)
    assert compiled.compilations <= (1 if dynamic else 2)
    state, _ = step_pool(8, **STATE, device=step_device)
    arguments = (state, slot_indices([0], step_device), *tokens_of(family, step_device, 1))
    assert_equal_to_eager(family, compiled.call, arguments)
    assert compiled.compilations <= (2 if dynamic else 3)
    assert all(graph == [f"{family}_step_"] for graph in compiled.graphs)


def test_pool_of_a_layer_is_not_copied(step_device):
    """The pool is a view of a graph input; the node behind the op sees what it wrote."""
    layers = torch.randn(4, 8, *STATE.values(), device=step_device)
    indices = slot_indices([3, 0, -1], step_device)
    tokens = tokens_of("kda", step_device, 3)

    step = model("kda")

    def decode(layers, *arguments):
        return step(layers[2], *arguments)

    compiled, eager = layers.clone(), layers.clone()
    results, code = run_and_get_code(
        torch.compile(decode, fullgraph=True), compiled, indices, *tokens
    )
    expected = decode(eager, indices, *tokens)
    assert torch.equal(compiled, eager) and not torch.equal(compiled, layers)
    for x, y in zip(results, expected, strict=True):
        assert relative_error(x, y) < 1e-5
    text = "\n".join(code)
    assert text.count("torch.ops.flaop.kda_step_.default(") == 1
    # Nothing as large as a layer of the pool is allocated.
    allocated = [eval(shape) for shape in re.findall(r"empty_strided_\w+\((\(.*?\)),", text)]
    assert all(math.prod(shape) < layers[2].numel() for shape in allocated)


def test_verify_and_commit_in_one_graph(step_device):
    state, _ = step_pool(8, **STATE, device=step_device)
    indices = slot_indices([3, -1, 0], step_device)
    accepted = slot_indices([1, 1, 0], step_device)
    inputs = step_tokens("gated_delta_rule", B=3, T=2, **SIZES, device=step_device)

    def speculate(state, accepted):
        o, *written = flaop.gated_delta_rule_verify(**inputs, state=state, state_indices=indices)
        flaop.gated_delta_rule_commit_(state, indices, accepted, *written)
        return o, state[3].clone()

    compiled = Compiled(speculate, dynamic=None)
    states = [state.clone(), state.clone()]
    results = [fn(s, accepted) for fn, s in zip((compiled.call, speculate), states, strict=True)]
    assert torch.equal(*states) and not torch.equal(states[0], state)
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    assert compiled.graphs == [["gated_delta_rule_verify", "gated_delta_rule_commit_"]]


@pytest.mark.gpu
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_reduce_overhead_replays_graphs(family):
    """With the pool as a buffer of a module graphs are not skipped: 32 steps as in eager mode."""
    from torch._dynamo.utils import counters

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", step_pool(8, **STATE, device="cuda")[0].contiguous())
            self.decode = model(family)

        def forward(self, *arguments):
            return self.decode(self.state, *arguments)

    eager, layer = Layer(), Layer()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    counters.clear()
    with torch.no_grad():
        for seed in range(32):
            rows = [seed % 8, -1, (seed + 3) % 8]
            arguments = (slot_indices(rows, "cuda"), *tokens_of(family, "cuda", 3, seed=seed))
            torch.compiler.cudagraph_mark_step_begin()
            results = [x.clone() for x in compiled(*arguments)]
            for x, y in zip(results, eager(*arguments), strict=True):
                assert relative_error(x, y) < 1e-5
    assert torch.equal(layer.state, eager.state)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
def test_large_pools_are_not_copied():
    """The peak of memory of a compiled step grows by the active rows, not by the pool."""
    layers = torch.zeros(4, 128, 8, 128, 128, dtype=torch.bfloat16, device="cuda")
    inputs = step_tokens("kda given", B=8, T=1, H=8, K=128, V=128, device="cuda",
                         dtype=torch.bfloat16)  # fmt: skip
    indices = slot_indices(range(8), "cuda")

    @torch.compile(fullgraph=True)
    def decode(layers, layer_indices, q, k, v, g, beta):
        return flaop.kda_step_(q, k, v, g, beta, layers[2], layer_indices)

    arguments = (layers, indices, *(inputs[n] for n in ("q", "k", "v", "g", "beta")))
    decode(*arguments)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decode(*arguments)
    torch.cuda.synchronize()
    rows = 8 * layers[0, 0].numel() * layers.element_size()
    assert torch.cuda.max_memory_allocated() - before < rows
    assert layers[2, :8].any() and not layers[1].any() and not layers[2, 8:].any()
