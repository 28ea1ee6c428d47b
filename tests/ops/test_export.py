"""torch.export, AOTInductor packages and selective checkpointing."""

import contextlib
import functools

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flaop
from flaop.testing import relative_error

FUNCTIONS = {"chunk_kda": flaop.chunk_kda, "kda": flaop.kda}
GRAD_MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad}
TENSORS = ("q", "k", "v", "g", "beta")


class Mixer(torch.nn.Module):
    """A module with a gate of its own around one op."""

    def __init__(self, function):
        super().__init__()
        self.function = FUNCTIONS[function]
        self.A_log = torch.nn.Parameter(torch.tensor([0.1]))
        self.dt_bias = torch.nn.Parameter(torch.linspace(-2, 1, 16).view(1, 16))

    def forward(self, q, k, v, g, beta):
        o, state = self.function(
            q, k, v, g, beta, A_log=self.A_log, dt_bias=self.dt_bias, use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True,
        )  # fmt: skip
        return o.sigmoid(), state


@pytest.fixture
def tensors(device, arguments):
    def make(T):
        inputs = arguments("small", T=T, device=device)
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
        ("chunk_kda", {}, (70, 8, 200), "chunk_kda"),
        ("kda", {"max": 64}, (33, 2, 64), "fused_recurrent_kda"),
        ("kda", {"min": 65}, (100, 65, 300), "chunk_kda"),
    ],
)
def test_export(device, tensors, mode, function, bounds, lengths, path):
    module = Mixer(function).to(device)
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
def test_a_range_across_the_threshold_is_refused(device, tensors, mode):
    module = Mixer("kda").to(device)
    with GRAD_MODES[mode](), pytest.raises(Exception, match="T"):
        exported(module, tensors(100), min=2, max=300)


def test_an_exported_module_trains(device, tensors):
    module = Mixer("chunk_kda").to(device)
    program = exported(module, tensors(70))
    arguments = tensors(100)
    gradients = []
    for run in (program.module(), module):
        o, state = run(*arguments)
        parameters = dict(run.named_parameters())
        loss = o.sum() + state.square().sum()
        gradients.append(
            torch.autograd.grad(loss, [parameters[name] for name in ("A_log", "dt_bias")])
        )
    assert_equal(*gradients)


# The package for CUDA needs the headers of a CUDA toolkit.
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.slow])],
    indirect=True,
)
def test_aot_inductor_package(device, tensors, tmp_path):
    module = Mixer("chunk_kda").to(device)
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


@pytest.mark.parametrize(
    "listed, forwards",
    [("chunk_kda_fwd", 1), ("chunk_kda", 2)],
)
def test_selective_checkpoint(device, tensors, listed, forwards):
    """The name that saves the forward from running twice is that of the op with residuals."""
    op = getattr(torch.ops.flaop, listed).default

    def policy(ctx, other, *args, **kwargs):
        keep = other == op
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    module = Mixer("chunk_kda").to(device)
    leaves = [x.requires_grad_() for x in tensors(70)]
    wanted = [*leaves, module.A_log, module.dt_bias]
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with _Count() as count:
        o, state = checkpoint(module, *leaves, use_reentrant=False, context_fn=contexts)
        found = torch.autograd.grad(o.sum() + state.square().sum(), wanted)
    assert count.names == ["flaop::chunk_kda_fwd"] * forwards + ["flaop::chunk_kda_bwd"]
    o, state = module(*leaves)
    expected = torch.autograd.grad(o.sum() + state.square().sum(), wanted)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_compiled_selective_checkpoint(device, tensors):
    """The same policy under torch.compile, where the partitioner decides."""
    op = torch.ops.flaop.chunk_kda_fwd.default
    module = Mixer("chunk_kda").to(device)
    contexts = functools.partial(create_selective_checkpoint_contexts, [op])

    def block(*arguments):
        return checkpoint(module, *arguments, use_reentrant=False, context_fn=contexts)

    graphs = []

    def record(graph, _):
        targets = [getattr(node.target, "_schema", None) for node in graph.graph.nodes]
        graphs.append([t.name for t in targets if t is not None and t.name.startswith("flaop::")])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition
    )
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in tensors(70)]
    o, state = torch.compile(block, fullgraph=True, backend=backend)(*leaves)
    found = torch.autograd.grad(o.sum() + state.square().sum(), leaves)
    assert graphs == [["flaop::chunk_kda_fwd"], ["flaop::chunk_kda_bwd"]]
    o, state = module(*leaves)
    expected = torch.autograd.grad(o.sum() + state.square().sum(), leaves)
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) < 1e-5
