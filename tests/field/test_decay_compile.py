"""Field reports on torch.compile, checkpointing and scalars (C) for the decay families and the
gated delta rule.
"""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flaop
from flaop.testing import gdn_inputs, gla_inputs, relative_error, simple_gla_inputs

SMALL = dict(H=1, K=16, V=8)
TOKENS = ("q", "k", "v", "g", "beta")
FAMILIES = {
    "simple_gla": simple_gla_inputs,
    "gla": gla_inputs,
    "gated_delta_rule": gdn_inputs,
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=FAMILIES)
def family(request):
    """The name of a family, its inputs."""
    return request.param, FAMILIES[request.param]


def tokens_of(inputs):
    """The tensors of one row a token, by name."""
    return {name: inputs[name] for name in TOKENS if name in inputs}


def compiled(fn, **options):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(fn, backend=counter, fullgraph=True, **options), counter


def test_C04_boundaries_made_inside_the_graph(family, device):
    """By arange: no host read, lengths stay dynamic."""
    name, make = family
    fn = getattr(flaop, f"chunk_{name}")

    def call(q, k, v, *others):
        B, T = q.shape[:2]
        cu_seqlens = torch.arange(0, B * T + 1, T, device=q.device)
        packed = [x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, *others)]
        return fn(*packed, cu_seqlens=cu_seqlens)[0].view(B, T, *v.shape[2:])

    run, counter = compiled(call, dynamic=True)
    for T in (64, 65, 200):
        inputs = make(B=3, T=T, device=device, **SMALL)
        tokens = tokens_of(inputs).values()
        assert relative_error(run(*tokens), fn(*tokens)[0]) < 1e-5
    assert counter.frame_count == 1


def test_C05_packings_do_not_recompile(family, device):
    """20 packings of as many sequences compile once; N = 1 may be a graph of its own."""
    name, make = family
    fn = getattr(flaop, f"chunk_{name}")
    run, counter = compiled(lambda **x: fn(**x)[0])
    inputs = make(lengths=[32] * 4, device=device, **SMALL)
    for i in range(20):
        inputs["cu_seqlens"] = torch.tensor([0, i, 30 + i, 31 + i, 128], device=device)
        assert torch.equal(run(**inputs), fn(**inputs)[0])
    assert counter.frame_count == 1
    for N in range(2, 20):
        inputs["cu_seqlens"] = torch.arange(N, device=device) * 5
        assert torch.equal(run(**inputs), fn(**inputs)[0])
    assert counter.frame_count <= 3


def test_C06_numbers_reach_the_kernels_as_numbers(path, device):
    """Numbers of any kind are one float below the schema, and never part of a key."""
    numpy = pytest.importorskip("numpy")
    inputs = path.inputs(T=3, device=device, **SMALL)
    o, _ = path.fn(**{**inputs, "scale": 0.5})
    for scale in (numpy.float64(0.5), torch.tensor(0.5, device=device)):
        assert torch.equal(path.fn(**{**inputs, "scale": scale})[0], o)


def test_C24_interpreter_mode_leaves_the_cpu_path_alone():
    code = (
        "import flaop; from flaop.testing import *\n"
        "families = {'simple_gla': (simple_gla_inputs, simple_gla_oracle),\n"
        "    'gla': (gla_inputs, gla_oracle), 'gated_delta_rule': (gdn_inputs, gdn_oracle)}\n"
        "for name, (make, oracle) in families.items():\n"
        "    x = make(T=20, H=1, K=16, V=16)\n"
        "    for p in ('', 'chunk_', 'fused_recurrent_'):\n"
        "        assert relative_error(getattr(flaop, p + name)(**x)[0], oracle(**x)[0]) < 1e-4"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def forwards_with(name, make, policy):
    """How often the forward of a train step over packed sequences runs, and its gradients."""
    inputs = make(lengths=[5, 64, 59], requires_grad=True, **SMALL)
    tokens = tokens_of(inputs)
    op, calls = getattr(torch.ops.flaop, f"chunk_{name}_fwd").default, []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    def call(*tensors):
        return getattr(flaop, f"chunk_{name}")(**{**inputs, **dict(zip(tokens, tensors))})

    def select(context, other, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if other is op else CheckpointPolicy.PREFER_RECOMPUTE

    options = {}
    if policy == "save":
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(select)
    leaves = list(tokens.values())
    with Count():
        if policy == "none":
            o, state = call(*leaves)
        else:
            o, state = checkpoint(call, *leaves, use_reentrant=False, **options)
        gradients = torch.autograd.grad(o.sum() + state.sum(), leaves)
    return calls.count(op), gradients


def test_C26_C27_checkpoints_with_packed_sequences(family):
    """Saved by a policy that lists the overload: one forward. Recomputed: two. Equal gradients."""
    (plain, expected), (saved, first), (again, second) = (
        forwards_with(*family, policy) for policy in ("none", "save", "recompute")
    )
    assert (plain, saved, again) == (1, 1, 2)
    for a, b, c in zip(expected, first, second):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_C28_eager_use_compiles_nothing(family, device):
    name, make = family
    counters = torch._dynamo.utils.counters
    counters.clear()
    inputs = make(T=70, device=device, requires_grad=True, **SMALL)
    getattr(flaop, name)(**inputs)[0].sum().backward()
    assert not counters["stats"]


def test_C28_compiled_autograd(family, device):
    name, make = family
    inputs = make(T=70, device=device, **SMALL)
    results = []
    for context in (
        contextlib.nullcontext(),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")),
    ):
        leaves = {n: x.clone().requires_grad_() for n, x in tokens_of(inputs).items()}
        loss = getattr(flaop, f"chunk_{name}")(**{**inputs, **leaves})[0].square().sum()
        with context:
            loss.backward()
        results.append([x.grad for x in leaves.values()])
    for got, ref in zip(*results):
        assert relative_error(got, ref) < 1e-6
