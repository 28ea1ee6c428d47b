"""Field reports on torch.compile, fakes, export and checkpointing (C)."""

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
from flaop.testing import kda_inputs, relative_error

OPS = torch.ops.flaop
TOKENS = ("q", "k", "v", "g", "beta")
DIFFERENTIABLE = (*TOKENS, "A_log", "dt_bias", "initial_state")
SMALL = dict(H=1, K=16, V=8)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(fn, backend="aot_eager", **options):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, backend=counter, fullgraph=True, **options), counter


def equal(found, expected):
    for part, ref in zip(found, expected):
        for name in ref:
            assert torch.equal(part[name], ref[name]), name


def test_C01_compiled_is_eager_with_many_blocks_of_channels(fn, device, gradients_of):
    inputs = kda_inputs(B=1, T=20, H=1, K=256, V=16, device=device)
    call, _ = compiled(lambda **x: fn(**x))
    equal(gradients_of(call, inputs), gradients_of(fn, inputs))


class TwoLayers(torch.nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn, self.weight = fn, torch.nn.Parameter(torch.eye(16))

    def forward(self, q, k, v, g, beta):
        o, _ = self.fn(q, k, v @ self.weight, g, beta)
        return self.fn(q, k, o, g, beta)[0]


@pytest.mark.parametrize("mode", ["train", "no_grad", "inference_mode", "autocast"])
def test_C02_one_op_per_call_and_no_break(fn, device, mode):
    inputs = [kda_inputs(T=70, H=1, K=16, V=16, device=device)[name] for name in TOKENS]
    model = TwoLayers(fn).to(device)
    context = {
        "train": torch.enable_grad, "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(device, dtype=torch.bfloat16),
    }[mode]  # fmt: skip
    with context():
        report = torch._dynamo.explain(model)(*inputs)
    assert report.graph_count == 1 and report.graph_break_count == 0
    nodes = [n for graph in report.graphs for n in graph.graph.nodes if "flaop" in str(n.target)]
    assert len(nodes) == 2


def test_C04_boundaries_made_inside_the_graph(device):
    """By arange: no host read, lengths stay dynamic."""

    def call(q, k, v, g, beta):
        B, T = q.shape[:2]
        bounds = torch.arange(B + 1, device=q.device) * T
        packed = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g, beta))
        return flaop.chunk_kda(*packed, cu_seqlens=bounds)[0]

    fn, counter = compiled(call, dynamic=True)
    for T in (64, 65, 200):
        inputs = kda_inputs(B=2, T=T, device=device, **SMALL)
        o = fn(*(inputs[name] for name in TOKENS))
        torch.testing.assert_close(o.view_as(inputs["v"]), flaop.chunk_kda(**inputs)[0])
    assert counter.frame_count == 1


def test_C05_packings_do_not_recompile(device):
    fn, counter = compiled(lambda cu, *x: flaop.chunk_kda(*x, cu_seqlens=cu)[0])
    inputs = kda_inputs(lengths=[256], device=device, **SMALL)
    tensors = [inputs[name] for name in TOKENS]
    for first in range(1, 11):
        fn(torch.tensor([0, first, 100, 101, 256], device=device), *tensors)
    assert counter.frame_count == 1
    for n in range(1, 21):
        fn(torch.linspace(0, 256, n + 1, device=device).long(), *tensors)
    # N = 1 may be a graph of its own
    assert counter.frame_count <= 3


def test_C06_numbers_reach_the_kernels_as_numbers(fn, device):
    """Numbers of any kind are one float below the schema, and never part of a key."""
    numpy = pytest.importorskip("numpy")
    inputs = kda_inputs(T=3, device=device, **SMALL)
    o, _ = fn(**{**inputs, "scale": 0.5})
    for scale in (numpy.float64(0.5), torch.tensor(0.5, device=device)):
        assert torch.equal(fn(**{**inputs, "scale": scale})[0], o)
    (argument,) = [a for a in OPS.kda.default._schema.arguments if a.name == "scale"]
    assert str(argument.type) == "Optional[float]"


@pytest.mark.gpu
def test_C06_F01_no_value_compiles_a_kernel(fn):
    """Lengths, packings, strides and scales: nothing new after the first call."""
    from flaop.launch.delta import recurrent, stages
    from flaop.launch.kernel import Kernel

    kernels = [x for m in (stages, recurrent) for x in vars(m).values() if isinstance(x, Kernel)]
    assert len(kernels) > 8

    def variants():
        return sum(len(kernel.variants) for kernel in kernels)

    def step(inputs):
        o, state = fn(**inputs)
        (o.sum() + state.sum()).backward()

    for lengths in (False, True):
        step(kda_inputs(**({"lengths": [40, 60]} if lengths else {"T": 100}), device="cuda",
                        requires_grad=True, **SMALL))  # fmt: skip
        before = variants()
        for n in range(1, 40):
            shape = (
                {"lengths": [n, 0, 17 * n]} if lengths else {"T": 16 * n + n % 5, "B": 1 + n % 3}
            )
            inputs = kda_inputs(**shape, device="cuda", requires_grad=True, **SMALL)
            inputs["scale"] = 1.0 if n % 2 else 0.1 * n
            step(inputs)
        assert variants() == before


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("gate", [None, "softplus", "bounded"])
def test_C08_every_subset_of_optional_tensors(fn, packed, state, gate):
    """One gradient at a time, for each combination of what may be absent."""
    shape = {"lengths": [3, 0, 4]} if packed else {"T": 7}
    inputs = kda_inputs(**shape, gate_in_kernel=gate, initial_state=state, **SMALL)
    for name in DIFFERENTIABLE:
        if inputs[name] is None:
            continue
        leaf = inputs[name].clone().requires_grad_()
        o, final_state = fn(**{**inputs, name: leaf})
        (gradient,) = torch.autograd.grad(o.sum() + final_state.sum(), leaf)
        assert gradient.shape == leaf.shape and torch.isfinite(gradient).all()


@pytest.mark.parametrize("family", ["chunk_kda", "fused_recurrent_kda"])
def test_C08_gradients_are_those_of_the_schema(family):
    forward = getattr(OPS, f"{family}_fwd").default._schema
    backward = getattr(OPS, f"{family}_bwd").default._schema
    differentiable = [
        a for a in forward.arguments if "Tensor" in str(a.type) and a.name != "cu_seqlens"
    ]
    assert len(backward.returns) == len(differentiable) == len(DIFFERENTIABLE)


LAYOUTS = {
    "contiguous": lambda v: v,
    "head first": lambda v: v.transpose(1, 2).contiguous().transpose(1, 2),
    "slice of qkv": lambda v: torch.cat([v, v, v], -1)[..., v.shape[-1] :][..., : v.shape[-1]],
    "odd outer stride": lambda v: torch.stack(
        [torch.nn.functional.pad(row.flatten(), (0, 1)) for row in v]
    )[:, :-1].view(v.shape),
    "expanded": lambda v: v[:1].expand_as(v),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_C13_outputs_are_contiguous_whatever_comes(fn, device, layout):
    """Fake and real strides agree since both are fresh contiguous tensors."""
    inputs = kda_inputs(B=3, T=6, device=device, **SMALL)
    v = LAYOUTS[layout](inputs["v"]).detach().requires_grad_()
    q = inputs["q"].clone().requires_grad_()
    eager = fn(**{**inputs, "v": v, "q": q})
    call, _ = compiled(lambda **x: fn(**x))
    for o, state in (eager, call(**{**inputs, "v": v, "q": q})):
        assert o.is_contiguous() and state.is_contiguous() and torch.equal(o, eager[0])
        assert all(x.is_contiguous() for x in torch.autograd.grad(o.sum(), [q], retain_graph=True))


@pytest.mark.parametrize(
    "shape", [{"T": 64}, {"T": 65}, {"T": 127}, {"lengths": [1, 63, 64, 65]}], ids=str
)
@pytest.mark.parametrize("keep", [False, True])
def test_C14_fakes_know_the_residuals(device, shape, keep):
    """Chunk states and inverses: shapes, dtypes and strides of fake and real, per sequence."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = kda_inputs(**shape, device=device, **SMALL)
    arguments = {n: x for n, x in inputs.items() if x is not None}
    op = OPS.chunk_kda_fwd.default
    real = op(**arguments, disable_recompute=keep)
    with FakeTensorMode() as mode:
        fakes = {
            n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for n, x in arguments.items()
        }
        fake = op(**fakes, disable_recompute=keep)
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


@pytest.mark.parametrize("loss", ["o", "state", "both"])
@pytest.mark.parametrize("wanted", [True, False])
def test_C15_C16_no_gradient_is_lost(fn, device, matches, gradients_of, loss, wanted):
    inputs = kda_inputs(T=66, device=device, gate_in_kernel="bounded", initial_state=True, **SMALL)
    _, gradients = matches(fn, inputs, loss=loss)
    assert gradients["q"].any() == (loss != "state")
    if not wanted:
        leaf = inputs["v"].clone().requires_grad_()
        o, state = fn(**{**inputs, "v": leaf, "output_final_state": False})
        assert state is None and torch.autograd.grad(o.sum(), leaf)[0].any()


def test_C17_the_forward_only_op_names_the_alternative(device):
    inputs = kda_inputs(
        T=70, H=1, K=128, V=128, dtype=torch.bfloat16, device=device, requires_grad=True
    )
    assert flaop.explain(flaop.kda, **inputs).path == "chunk"
    with pytest.raises(NotImplementedError, match="flash_kda_fwd is not differentiable: .*flaop::"):
        flaop.flash_kda_fwd(**inputs)


@pytest.mark.parametrize("T", [60, 66])
def test_C18_compiled_gradients_are_eager_ones(fn, device, gradients_of, T):
    inputs = kda_inputs(
        T=T, device=device, gate_in_kernel="softplus", l2norm=True, initial_state=True, **SMALL
    )
    call, counter = compiled(lambda **x: fn(**x))
    equal(gradients_of(call, inputs), gradients_of(fn, inputs))
    assert counter.frame_count == 1


def test_C19_function_transforms_raise_a_message(fn, device):
    inputs = kda_inputs(T=3, device=device, **SMALL)
    with pytest.raises(RuntimeError, match="functorch transforms|vmap|torch.func"):
        torch.func.grad(lambda q: fn(**{**inputs, "q": q})[0].sum())(inputs["q"])


@pytest.mark.parametrize("strict", [True, False])
def test_C20_C22_export_and_decompose(fn, device, strict):
    """One op node before and after; another batch and length run and equal eager."""

    class Block(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return fn(q, k, v, g, beta)[0]

    def arguments(B, T):
        inputs = kda_inputs(B=B, T=T, device=device, **SMALL)
        return tuple(inputs[name] for name in TOKENS)

    B, T = torch.export.Dim("B", max=64), torch.export.Dim("T", max=4096)
    with torch.no_grad():
        program = torch.export.export(
            Block(), arguments(2, 70), dynamic_shapes=({0: B, 1: T},) * 5, strict=strict
        )
        for stage in (program, program.run_decompositions()):
            assert sum("flaop" in str(node.target) for node in stage.graph.nodes) == 1
            inputs = arguments(3, 33)
            assert torch.equal(stage.module()(*inputs), Block()(*inputs))


def test_C24_interpreter_mode_leaves_the_cpu_path_alone():
    """TRITON_INTERPRET=1 on a machine without a GPU: the public ops run their CPU kernels."""
    code = (
        "import flaop; from flaop.testing import *\n"
        "x = kda_inputs(T=20, H=1, K=16, V=16)\n"
        "for fn in (flaop.kda, flaop.chunk_kda, flaop.fused_recurrent_kda):\n"
        "    assert relative_error(fn(**x)[0], kda_oracle(**x)[0]) < 1e-4"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_C25_other_lengths_share_one_graph(fn, device, gradients_of):
    call, counter = compiled(lambda **x: fn(**x))
    for T in (20, 30, 40, 64, 1, 0):
        inputs = kda_inputs(T=T, device=device, **SMALL)
        equal(gradients_of(call, inputs), gradients_of(fn, inputs))
    # the first length, the dynamic one, and lengths 1 and 0
    assert counter.frame_count <= 4


def forwards_with(policy):
    inputs = kda_inputs(lengths=[5, 64, 59], requires_grad=True, **SMALL)
    calls = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            calls.append(op)
            return op(*args, **(kwargs or {}))

    def call(*tensors):
        return flaop.chunk_kda(**{**inputs, **dict(zip(TOKENS, tensors))})

    def select(context, op, *args, **kwargs):
        saved = op is OPS.chunk_kda_fwd.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    options = (
        {"context_fn": lambda: create_selective_checkpoint_contexts(select)}
        if policy == "save"
        else {}
    )
    leaves = [inputs[name] for name in TOKENS]
    with Count():
        run = (
            call
            if policy == "none"
            else lambda *x: checkpoint(call, *x, use_reentrant=False, **options)
        )
        o, state = run(*leaves)
        gradients = torch.autograd.grad(o.sum() + state.sum(), leaves)
    return calls.count(OPS.chunk_kda_fwd.default), gradients


def test_C26_C27_checkpoints_with_packed_sequences():
    """Saved by a policy that lists the overload: one forward. Recomputed: two. Equal gradients."""
    (plain, expected), (saved, first), (again, second) = map(
        forwards_with, ("none", "save", "recompute")
    )
    assert (plain, saved, again) == (1, 1, 2)
    for a, b, c in zip(expected, first, second):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_C28_eager_use_compiles_nothing(device):
    counters = torch._dynamo.utils.counters
    counters.clear()
    inputs = kda_inputs(T=70, device=device, requires_grad=True, **SMALL)
    flaop.kda(**inputs)[0].sum().backward()
    assert not counters["stats"]


def test_C28_compiled_autograd(device):
    """The backward of the C++ formula runs under compiled autograd (as a call out of its graph)."""
    inputs = kda_inputs(T=70, device=device, **SMALL)
    results = []
    for context in (
        contextlib.nullcontext(),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")),
    ):
        leaves = {n: inputs[n].clone().requires_grad_() for n in TOKENS}
        loss = flaop.chunk_kda(**{**inputs, **leaves})[0].square().sum()
        with context:
            loss.backward()
        results.append([x.grad for x in leaves.values()])
    for got, ref in zip(*results):
        assert relative_error(got, ref) < 1e-6
