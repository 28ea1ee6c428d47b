"""torch.library.opcheck on every op of the decay families and on the stages."""

import itertools

import pytest
import torch
from torch.library import opcheck

import flaop
from flaop.testing.layouts import LAYOUTS, odd_stride

OPS = torch.ops.flaop
FAMILIES = ("simple_gla", "gla")
KINDS = ("chunk", "fused_recurrent")
LENGTHS = {
    ("short", "batched"): {"B": 2, "T": 20}, ("long", "batched"): {"B": 2, "T": 70},
    ("short", "packed"): {"lengths": [0, 1, 19]}, ("long", "packed"): {"lengths": [66, 0, 1]},
}  # fmt: skip
AXES = (("short", "long"), ("state", "none"), ("packed", "batched"), ("grad", "no_grad"))
COMBINATIONS = list(itertools.product(*AXES))
# The ops below the autograd formulas take no gradient, and their length changes no branch.
WITHOUT_GRADIENT = [("long", "state", "packed"), ("short", "none", "batched")]
SMALL = {"K": 16, "V": 24, "H": 1, "HV": 2, "dtype": "float32"}
GRADIENTS = {
    "simple_gla": ("q", "k", "v", "g", "g_gamma", "initial_state"),
    "gla": ("q", "k", "v", "g", "initial_state", "gv"),
}


def is_spared(device, combination):
    """On the CPU any three of the four properties meet in every combination."""
    first = [values.index(x) for values, x in zip(AXES, combination, strict=True)]
    return device == "cpu" and sum(first) % 2


@pytest.fixture
def inputs_for(decay_device, arguments):
    """Arguments of an op by name: small on the CPU, those of the compiled kernels on CUDA."""

    def make(family, length, state, layout, grad="no_grad", value_gate=False):
        name = f"{'channel' if family == 'gla' else 'simple'} "
        name += "packed" if layout == "packed" else "main"
        name = "channel and value" if value_gate else name
        inputs = arguments(
            name,
            **(SMALL if decay_device == "cpu" else {}),
            **LENGTHS[length, layout],
            device=decay_device,
            initial_state=state == "state",
            output_final_state=state == "state",
            requires_grad=grad == "grad",
        )
        hints = {"chunk_size": 64, "split_size": 64 if length == "long" else 0}
        return {"gv": None} | inputs | hints | {"backend": "auto"}

    return make


def positional(op, inputs, **others):
    """The arguments in the order of the schema."""
    values = inputs | others
    return tuple(values[a.name] for a in op._schema.arguments)


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_paths(inputs_for, decay_device, family, kind, combination):
    if is_spared(decay_device, combination):
        pytest.skip("its properties meet in other combinations")
    op = getattr(OPS, f"{kind}_{family}").default
    opcheck(op, positional(op, inputs_for(family, *combination)))


@pytest.mark.parametrize("combination", COMBINATIONS[:2] + COMBINATIONS[-2:], ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_dispatchers(inputs_for, family, combination):
    op = getattr(OPS, family).default
    opcheck(op, positional(op, inputs_for(family, *combination)))


@pytest.mark.parametrize("op", ["gla", "fused_recurrent_gla"])
def test_value_gate(inputs_for, op):
    op = getattr(OPS, op).default
    inputs = inputs_for("gla", "long", "state", "batched", "grad", value_gate=True)
    opcheck(op, positional(op, inputs))


LAYER = {"layer_idx": 1, "num_layers": 4}


@pytest.mark.parametrize(
    "name, others",
    [
        ("retention", {}),
        ("chunk_lightning_attn", LAYER),
        ("linear_attn", {"normalize": True, "initial_state": None}),
        ("fused_recurrent_linear_attn", {"normalize": False}),
    ],
)
def test_composites(inputs_for, name, others):
    op = getattr(OPS, name).default
    inputs = inputs_for("simple_gla", "long", "state", "batched", "grad")
    opcheck(op, positional(op, inputs, **others))


@pytest.mark.parametrize("combination", WITHOUT_GRADIENT, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward(inputs_for, family, kind, combination):
    inputs = inputs_for(family, *combination)
    forward, backward = (getattr(OPS, f"{kind}_{family}_{x}").default for x in ("fwd", "bwd"))
    opcheck(forward, positional(forward, inputs))
    o, state, *A = forward(*positional(forward, inputs))
    incoming = {
        "d_o": torch.ones_like(o),
        "d_final_state": torch.ones_like(state) if state.numel() else None,
        "A": A[0] if A else None,
    }
    mask = [inputs[name] is not None for name in GRADIENTS[family]]
    mask = mask[: len(backward._schema.returns)]
    mask[1] = False
    opcheck(backward, positional(backward, inputs, **incoming, grad_mask=mask))
    found = backward(*positional(backward, inputs, **incoming, grad_mask=mask))
    for name, wanted, x in zip(GRADIENTS[family], mask, found, strict=False):
        given = inputs[name] if inputs[name] is not None else inputs["q"]
        assert x.shape == (given.shape if wanted else (0,)) and x.dtype == given.dtype, name


@pytest.mark.parametrize("layout", ["packed", "batched"])
@pytest.mark.parametrize("gate", ["scalar", "channel"])
def test_stages(inputs_for, gate, layout):
    family = "gla" if gate == "channel" else "simple_gla"
    inputs = inputs_for(family, "long", "state", layout)
    cumsum, fwd_h, fwd_o = OPS.chunk_local_cumsum, OPS.chunk_fwd_h, OPS.chunk_fwd_o
    raw = inputs["g"].requires_grad_(layout == "batched")
    opcheck(cumsum.default, (raw, 32, layout == "packed", 0.5, inputs["cu_seqlens"]))

    g = cumsum.default(raw.detach(), 32, False, 1.0, inputs["cu_seqlens"])
    gates = {"g": g, "gk": None} if gate == "scalar" else {"g": None, "gk": g}
    others = {**gates, "g_gamma": inputs.get("g_gamma"), "chunk_size": 32}
    split = {"split_size": 64, "states_in_fp32": layout == "packed"}
    opcheck(fwd_h.default, positional(fwd_h.default, inputs, **others, **split))
    if gate == "scalar":
        plain = {"split_size": 0, "states_in_fp32": False}
        h, _ = fwd_h.default(*positional(fwd_h.default, inputs, **others, **plain))
        opcheck(fwd_o.default, positional(fwd_o.default, inputs, **others, h=h))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(inputs_for, decay_device, layout, family, kind):
    """What comes out is contiguous whatever went in, in the fakes too."""
    inputs = inputs_for(family, "long" if kind == "chunk" else "short", "none", "batched")
    inputs["v"] = layout(inputs["v"])
    assert not inputs["v"].is_contiguous()
    op = getattr(OPS, f"{kind}_{family}").default
    if decay_device == "cuda" or layout is odd_stride:
        opcheck(op, positional(op, inputs | {"v": inputs["v"].requires_grad_()}))

    results = []
    for v in (inputs["v"], inputs["v"].contiguous()):
        call = inputs | {"v": v}
        leaves = [call[name].detach().requires_grad_() for name in ("q", "v", "g")]
        call = call | dict(zip(("q", "v", "g"), leaves, strict=True))
        o, _ = op(*positional(op, call))
        results.append((o, *torch.autograd.grad(o.float().square().sum(), leaves)))
    for x, y in zip(*results, strict=True):
        assert x.is_contiguous()
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["chunk_fwd_h", "chunk_fwd_o"])
def test_stages_refuse_a_gradient(name):
    k, v = torch.randn(1, 20, 2, 16, requires_grad=True), torch.randn(1, 20, 2, 8)
    h = torch.zeros(1, 2, 16, 8)
    with pytest.raises(NotImplementedError, match=f"{name} is not differentiable.*chunk_gla"):
        flaop.chunk_fwd_h(k, v) if name == "chunk_fwd_h" else flaop.chunk_fwd_o(k, k, v, h)
