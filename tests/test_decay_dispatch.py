"""The dispatchers, autograd and autocast kernels of the decay families: who takes which call."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flaop
from flaop.testing import gla_inputs, simple_gla_inputs

OPS = torch.ops.flaop
SMALL = {"H": 1, "K": 16, "V": 24}
FAMILIES = ("simple_gla", "gla")
COMPOSITES = {
    "retention": {},
    "lightning_attn": {"layer_idx": 1, "num_layers": 4},
    "linear_attn": {"normalize": True},
}


class Recorder(TorchDispatchMode):
    """Names of the flaop ops that run, and the dtypes of their tensors."""

    def __init__(self):
        super().__init__()
        self.names, self.dtypes = [], {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        # In inference mode a composite arrives whole.
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
            with self:
                return op.decompose(*args, **(kwargs or {}))
        if op.namespace == "flaop":
            self.names.append(op._schema.name.removeprefix("flaop::"))
            named = zip(op._schema.arguments, args, strict=False)
            self.dtypes = {a.name: x.dtype for a, x in named if isinstance(x, torch.Tensor)}
        return op(*args, **(kwargs or {}))


def taken(name, **inputs):
    with Recorder() as recorder:
        getattr(flaop, name)(**inputs)
    return recorder.names


def inputs_of(name, **changes):
    if name == "gla":
        return gla_inputs(**{**SMALL, **changes})
    inputs = simple_gla_inputs(**{**SMALL, **changes})
    if name in COMPOSITES:
        del inputs["g"], inputs["g_gamma"]
        inputs |= COMPOSITES[name]
    return inputs


def op_of(name):
    return "gla" if name == "gla" else "simple_gla"


@pytest.mark.parametrize("name", [*FAMILIES, *COMPOSITES])
@pytest.mark.parametrize(
    "shape, path",
    [
        ({"T": 64}, "fused_recurrent"),
        ({"T": 65}, "chunk"),
        ({"lengths": [100, 28]}, "fused_recurrent"),
        ({"lengths": [100, 29]}, "chunk"),
    ],
)
def test_threshold_and_explain(name, shape, path):
    inputs = inputs_of(name, **shape)
    assert taken(name, **inputs) == [f"{path}_{op_of(name)}"]
    explained = flaop.explain(getattr(flaop, name), **inputs)
    assert explained.path == path
    assert "the family is not KDA" in explained.passed_over[0]
    assert len(explained.passed_over) == (2 if path == "chunk" else 1)


@pytest.mark.parametrize("T", [10, 100])
@pytest.mark.parametrize("name", [*FAMILIES, *COMPOSITES])
def test_any_gradient_leads_to_chunks(name, T):
    inputs = inputs_of(name, T=T)
    inputs["k"].requires_grad_()
    assert taken(name, **inputs) == [f"chunk_{op_of(name)}_fwd"]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            path = "fused_recurrent" if T <= 64 else "chunk"
            assert taken(name, **inputs) == [f"{path}_{op_of(name)}"]


@pytest.mark.parametrize("name", [*FAMILIES, *COMPOSITES])
def test_forced_paths(name):
    inputs = inputs_of(name, T=70, requires_grad=True)
    op = op_of(name)
    assert taken(name, **inputs, backend="fused_recurrent") == [f"fused_recurrent_{op}_fwd"]
    with flaop.backend("chunk"), torch.no_grad():
        assert taken(name, **inputs_of(name, T=5)) == [f"chunk_{op}"]
    fn = getattr(flaop, name)
    assert flaop.supports("chunk", fn, **inputs)
    assert flaop.supports("fused_recurrent", fn, **inputs)
    assert not flaop.supports("flash_kda", fn, **inputs)
    for backend in ("flash_kda", "auto:flash_kda"):
        with pytest.raises(ValueError, match="the family is not KDA"):
            fn(**inputs, backend=backend)


@pytest.mark.parametrize("T", [10, 100])
@pytest.mark.parametrize("grad", [False, True])
def test_a_gate_on_value_channels_runs_token_by_token(T, grad):
    inputs = gla_inputs(**SMALL, T=T, value_gate=True, requires_grad=grad)
    suffix = "_fwd" if grad else ""
    assert taken("gla", **inputs) == [f"fused_recurrent_gla{suffix}"]
    path, declined = flaop.explain(flaop.gla, **inputs)
    assert path == "fused_recurrent"
    assert "chunk: a gate on the channels of the values (gv)" in declined
    assert not flaop.supports("chunk", flaop.gla, **inputs)
    with flaop.backend("chunk"), pytest.raises(ValueError, match="chunk cannot serve.*gv"):
        flaop.gla(**inputs)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("path", ["chunk", "fused_recurrent"])
def test_gradients_asked_for_later(name, path):
    """The mask is that of the backward call, not of the forward."""
    options = {"value_gate": path != "chunk"} if name == "gla" else {"gate": "both"}
    inputs = inputs_of(name, T=70, initial_state=True, requires_grad=True, **options)
    leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    o, state = getattr(flaop, f"{path}_{name}")(**inputs)
    loss = o.sum() + state.sum()
    every = torch.autograd.grad(loss, leaves, retain_graph=True)
    for leaf, expected in zip(leaves, every, strict=True):
        (alone,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        assert torch.equal(alone, expected)
    with pytest.raises(NotImplementedError, match="no double backward"):
        torch.autograd.grad(loss, leaves[0], create_graph=True)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("path", ["chunk", "fused_recurrent"])
def test_gradcheck(name, path):
    options = {"value_gate": path != "chunk"} if name == "gla" else {"gate": "both"}
    inputs = inputs_of(
        name, T=5, K=3, V=2, dtype=torch.float64, initial_state=True, requires_grad=True, **options
    )
    names = [n for n, x in inputs.items() if isinstance(x, torch.Tensor) and x.requires_grad]

    def call(*values):
        return getattr(flaop, f"{path}_{name}")(**inputs | dict(zip(names, values, strict=True)))

    assert torch.autograd.gradcheck(call, tuple(inputs[n] for n in names), fast_mode=True)


@pytest.mark.parametrize("op", [f"{p}_{f}" for p in ("chunk", "fused_recurrent") for f in FAMILIES])
def test_ops_without_a_gradient_refuse_one(op):
    name = op.removeprefix("chunk_").removeprefix("fused_recurrent_")
    inputs = inputs_of(name, T=5, requires_grad=True)
    arguments = [inputs[n] for n in ("q", "k", "v", "g")]
    with pytest.raises(NotImplementedError, match=f"{op}_fwd is not .*: call flaop::{op},"):
        getattr(OPS, f"{op}_fwd").default(*arguments)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("path", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("shape", [(2, 0), (0, 5)], ids=["no token", "no batch"])
def test_empty_calls_pass_the_state_on(name, path, shape):
    inputs = inputs_of(name, B=2, T=5, initial_state=True, state_v_first=True)
    B, T = shape
    for x in ("q", "k", "v", "g"):
        inputs[x] = inputs[x][:B, :T].detach().requires_grad_()
    inputs["initial_state"] = inputs["initial_state"][:B].bfloat16().requires_grad_()
    o, state = getattr(flaop, f"{path}_{name}")(**inputs)
    assert o.shape == (B, T, 1, SMALL["V"]) and state.dtype == torch.float32
    assert torch.equal(state, inputs["initial_state"].float())
    (o.sum() + 2 * state.sum()).backward()
    assert (inputs["initial_state"].grad == 2).all()
    assert inputs["g"].grad.shape == inputs["g"].shape


def test_stages_without_a_token():
    k, v = torch.zeros(1, 0, 2, 16), torch.zeros(1, 0, 2, 8)
    state = torch.randn(1, 2, 16, 8)
    h, final_state = flaop.chunk_fwd_h(k, v, initial_state=state, output_final_state=True)
    assert h.shape == (0, 2, 16, 8) and torch.equal(final_state, state)
    assert flaop.chunk_fwd_o(k, k, v, h).shape == v.shape
    assert flaop.chunk_local_cumsum(k, 64).shape == k.shape


@pytest.mark.parametrize("name", [*FAMILIES, *COMPOSITES])
def test_autocast_casts_q_k_v_only(name):
    inputs = inputs_of(name, T=20, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), Recorder() as recorder:
        o, state = getattr(flaop, name)(**inputs)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    cast = {n for n, dtype in recorder.dtypes.items() if dtype == torch.bfloat16}
    assert cast == {"q", "k", "v"}
    o.float().sum().backward()
    assert inputs["q"].grad.dtype == torch.float32


def test_the_cumulative_sum_is_its_own_backward_in_reverse():
    g = torch.randn(1, 100, 2, dtype=torch.float16, requires_grad=True)
    weight = torch.randn(1, 100, 2)
    options = {"scale": 0.5, "cu_seqlens": torch.tensor([0, 30, 30, 100])}
    out = flaop.chunk_local_cumsum(g, 32, **options)
    assert out.dtype == torch.float32
    (found,) = torch.autograd.grad(out, g, weight)
    expected = flaop.chunk_local_cumsum(weight, 32, reverse=True, **options)
    assert torch.equal(found, expected.half())


def test_warmup_leaves_the_arguments_alone():
    inputs = inputs_of("gla", T=70, requires_grad=True)
    with Recorder() as recorder:
        flaop.warmup(flaop.gla, **inputs)
    assert recorder.names == ["chunk_gla_fwd", "chunk_gla_bwd"]
    assert all(x.grad is None for x in inputs.values() if isinstance(x, torch.Tensor))
