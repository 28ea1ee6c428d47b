"""torch.export, AOTInductor packages and selective checkpointing of the decay families."""

import contextlib
import functools

import pytest
import torch
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flaop
from flaop.testing import relative_error

GRAD_MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad}
TENSORS = ("q", "k", "v", "g")
SMALL = {"K": 16, "V": 24, "dtype": "float32", "H": 1}


def is_channel(function):
    return function in ("gla", "chunk_gla")


class Mixer(torch.nn.Module):
    """A module with a parameter of its own around one op."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, q, k, v, g):
        options = {} if "gla" in self.function else {"normalize": True}
        gates = (g * self.weight,) if "gla" in self.function else ()
        q, k = (q, k) if gates else (q.abs(), k.abs() * self.weight)
        o, state = getattr(flaop, self.function)(
            q, k, v, *gates, output_final_state=True, **options
        )
        return o.sigmoid(), state


@pytest.fixture
def tensors(decay_device, arguments):
    def make(function, T):
        changes = {"T": T, **(SMALL if decay_device == "cpu" else {})}
        if is_channel(function):
            inputs = arguments("channel small", **changes, device=decay_device)
        else:
            others = {"lengths": None, "initial_state": False}
            inputs = arguments("simple odd", **changes, **others, device=decay_device)
        return tuple(inputs[name] for name in TENSORS)

    return make


def exported(module, example, **bounds):
    length = Dim("T", **bounds)
    return torch.export.export(module, example, dynamic_shapes=[{1: length}] * len(TENSORS))


def ops_of(program):
    targets = [str(node.target) for node in program.graph.nodes]
    return [name for name in targets if name.startswith("flaop.")]


def assert_equal(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert relative_error(x, y) < 1e-5


@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize(
    "function, bounds, lengths, path",
    [
        ("chunk_simple_gla", {}, (70, 8, 200), "chunk_simple_gla"),
        ("chunk_gla", {}, (70, 8, 200), "chunk_gla"),
        ("simple_gla", {"max": 64}, (33, 2, 64), "fused_recurrent_simple_gla"),
        ("gla", {"min": 65}, (100, 65, 300), "chunk_gla"),
        ("linear_attn", {"min": 65}, (100, 65, 300), "chunk_simple_gla"),
    ],
)
def test_export(decay_device, tensors, mode, function, bounds, lengths, path):
    module = Mixer(function).to(decay_device)
    with GRAD_MODES[mode]():
        program = exported(module, tensors(function, lengths[0]), **bounds)
        assert ops_of(program) == [f"flaop.{function}.default"]
        for T in lengths:
            arguments = tensors(function, T)
            assert_equal(program.module()(*arguments), module(*arguments))
    with torch.no_grad():
        decomposed = program.run_decompositions()
        assert_equal(decomposed.module()(*arguments), module(*arguments))
    if mode == "no_grad":
        assert ops_of(decomposed) == [f"flaop.{path}.default"]


@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("function", ["simple_gla", "gla"])
def test_a_range_across_the_threshold_is_refused(decay_device, tensors, function, mode):
    module = Mixer(function).to(decay_device)
    with GRAD_MODES[mode](), pytest.raises(Exception, match="T"):
        exported(module, tensors(function, 100), min=2, max=300)


@pytest.mark.parametrize("function", ["chunk_simple_gla", "chunk_gla"])
def test_an_exported_module_trains(decay_device, tensors, function):
    module = Mixer(function).to(decay_device)
    program = exported(module, tensors(function, 70))
    arguments = tensors(function, 100)
    gradients = []
    for run in (program.module(), module):
        o, state = run(*arguments)
        loss = o.sum() + state.square().sum()
        gradients.append(torch.autograd.grad(loss, dict(run.named_parameters())["weight"]))
    assert_equal(*gradients)


# The package for CUDA needs the headers of a CUDA toolkit.
@pytest.mark.parametrize(
    "decay_device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.slow])],
    indirect=True,
)
@pytest.mark.parametrize(
    "function", ["chunk_gla", pytest.param("chunk_simple_gla", marks=pytest.mark.slow)]
)
def test_aot_inductor_package(decay_device, tensors, function, tmp_path):
    module = Mixer(function).to(decay_device)
    with torch.no_grad():
        program = exported(module, tensors(function, 70))
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "mixer.pt2")
        )
        loaded = torch._inductor.aoti_load_package(package)
        for T in (70, 8, 200):
            arguments = tensors(function, T)
            assert_equal(loaded(*arguments), module(*arguments))


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names += [op._schema.name] if op.namespace == "flaop" else []
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["simple_gla", "gla"])
@pytest.mark.parametrize("suffix, forwards", [("_fwd", 1), ("", 2)])
def test_selective_checkpoint(decay_device, tensors, family, suffix, forwards):
    """The name that saves the forward from running twice is that of the op in training graphs."""
    op = getattr(torch.ops.flaop, f"chunk_{family}{suffix}").default

    def policy(ctx, other, *args, **kwargs):
        keep = other == op
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    module = Mixer(f"chunk_{family}").to(decay_device)
    leaves = [x.requires_grad_() for x in tensors(f"chunk_{family}", 70)]
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with _Count() as count:
        o, state = checkpoint(module, *leaves, use_reentrant=False, context_fn=contexts)
        found = torch.autograd.grad(o.sum() + state.square().sum(), leaves)
    names = [f"flaop::chunk_{family}_fwd"] * forwards + [f"flaop::chunk_{family}_bwd"]
    assert count.names == names
    o, state = module(*leaves)
    expected = torch.autograd.grad(o.sum() + state.square().sum(), leaves)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
