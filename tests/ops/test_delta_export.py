"""torch.export, AOTInductor packages and selective checkpointing of the gated delta rule and the
delta rule.
"""

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
TENSORS = ("q", "k", "v", "g", "beta")
CHUNK = "chunk_gated_delta_rule"


class Mixer(torch.nn.Module):
    """A module with a gate of its own around one op."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.A_log = torch.nn.Parameter(torch.tensor([0.1]))
        self.dt_bias = torch.nn.Parameter(torch.tensor([-1.5]))

    def forward(self, q, k, v, g, beta):
        options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        if "gated" in self.function:
            gate = {"A_log": self.A_log, "dt_bias": self.dt_bias, "use_gate_in_kernel": True}
            inputs = (q, k, v, g, beta)
        else:
            gate, inputs = {}, (q, k, v, beta + self.A_log * g + self.dt_bias)
        o, state = getattr(flaop, self.function)(
            *inputs, **gate, **options, output_final_state=True
        )
        return o.sigmoid(), state


@pytest.fixture
def tensors(delta_device, arguments):
    def make(T):
        inputs = arguments("delta small", T=T, device=delta_device)
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
        (CHUNK, {}, (70, 8, 200), CHUNK),
        ("gated_delta_rule", {"max": 64}, (33, 2, 64), "fused_recurrent_gated_delta_rule"),
        ("gated_delta_rule", {"min": 65}, (100, 65, 300), CHUNK),
        ("delta_rule", {"min": 65}, (100, 65, 300), CHUNK),
    ],
)
def test_export(delta_device, tensors, mode, function, bounds, lengths, path):
    module = Mixer(function).to(delta_device)
    with GRAD_MODES[mode]():
        program = exported(module, tensors(lengths[0]), **bounds)
        assert ops_of(program) == [f"flaop.{function}.default"]
        for T in lengths:
            arguments = tensors(T)
            assert_equal(program.module()(*arguments), module(*arguments))
    with torch.no_grad():
        decomposed = program.run_decompositions()
        assert_equal(decomposed.module()(*arguments), module(*arguments))
    if mode == "no_grad":
        assert ops_of(decomposed) == [f"flaop.{path}.default"]


@pytest.mark.parametrize("mode", GRAD_MODES)
def test_a_range_across_the_threshold_is_refused(delta_device, tensors, mode):
    module = Mixer("gated_delta_rule").to(delta_device)
    with GRAD_MODES[mode](), pytest.raises(Exception, match="T"):
        exported(module, tensors(100), min=2, max=300)


def test_an_exported_module_trains(delta_device, tensors):
    module = Mixer(CHUNK).to(delta_device)
    program = exported(module, tensors(70))
    arguments = tensors(100)
    gradients = []
    for run in (program.module(), module):
        o, state = run(*arguments)
        parameters = dict(run.named_parameters())
        loss = o.sum() + state.square().sum()
        wanted = [parameters[name] for name in ("A_log", "dt_bias")]
        gradients.append(torch.autograd.grad(loss, wanted))
    assert_equal(*gradients)


# The package for CUDA needs the headers of a CUDA toolkit.
@pytest.mark.parametrize(
    "delta_device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.slow])],
    indirect=True,
)
def test_aot_inductor_package(delta_device, tensors, tmp_path):
    module = Mixer(CHUNK).to(delta_device)
    with torch.no_grad():
        program = exported(module, tensors(70))
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "mixer.pt2")
        )
        loaded = torch._inductor.aoti_load_package(package)
        for T in (70, 8, 200):
            arguments = tensors(T)
            assert_equal(loaded(*arguments), module(*arguments))


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names += [op._schema.name] if op.namespace == "flaop" else []
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("suffix, forwards", [("_fwd", 1), ("", 2)])
def test_selective_checkpoint(delta_device, tensors, suffix, forwards):
    """The name that saves the forward from running twice is that of the op in training graphs."""
    op = getattr(torch.ops.flaop, CHUNK + suffix).default

    def policy(ctx, other, *args, **kwargs):
        keep = other == op
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    module = Mixer(CHUNK).to(delta_device)
    leaves = [x.requires_grad_() for x in tensors(70)]
    wanted = [*leaves, module.A_log, module.dt_bias]
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with _Count() as count:
        o, state = checkpoint(module, *leaves, use_reentrant=False, context_fn=contexts)
        found = torch.autograd.grad(o.sum() + state.square().sum(), wanted)
    assert count.names == [f"flaop::{CHUNK}_fwd"] * forwards + [f"flaop::{CHUNK}_bwd"]
    o, state = module(*leaves)
    expected = torch.autograd.grad(o.sum() + state.square().sum(), wanted)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
