"""torch.library.opcheck on every op of the gated delta rule, the delta rule and their stages."""

import itertools

import pytest
import torch
from torch.library import opcheck

import flaop
from flaop.testing.layouts import LAYOUTS, odd_stride

OPS = torch.ops.flaop
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
GRADIENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def is_spared(device, combination):
    """On the CPU any three of the four properties meet in every combination."""
    first = [values.index(x) for values, x in zip(AXES, combination, strict=True)]
    return device == "cpu" and sum(first) % 2


@pytest.fixture
def inputs_for(delta_device, arguments):
    """Arguments of an op by name: small on the CPU, those of the compiled kernels on CUDA."""

    def make(length, state, layout, grad="no_grad", family="delta main", **changes):
        small = SMALL if delta_device == "cpu" else {}
        inputs = arguments(
            family,
            **{**small, "lengths": None, **LENGTHS[length, layout], **changes},
            device=delta_device,
            initial_state=state == "state",
            output_final_state=state == "state",
            requires_grad=grad == "grad",
        )
        hints = {"chunk_size": 64, "split_size": 64, "disable_recompute": length == "short"}
        return inputs | hints | {"backend": "auto"}

    return make


def positional(op, inputs, **others):
    """The arguments in the order of the schema."""
    values = inputs | others
    return tuple(values[a.name] for a in op._schema.arguments)


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
def test_paths(inputs_for, delta_device, kind, combination):
    if is_spared(delta_device, combination):
        pytest.skip("its properties meet in other combinations")
    op = getattr(OPS, f"{kind}_gated_delta_rule").default
    opcheck(op, positional(op, inputs_for(*combination)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["delta given gate", "delta without gate"])
def test_other_gates(inputs_for, kind, family):
    op = getattr(OPS, f"{kind}_gated_delta_rule").default
    opcheck(op, positional(op, inputs_for("long", "state", "batched", "grad", family)))


@pytest.mark.parametrize("combination", COMBINATIONS[:2] + COMBINATIONS[-2:], ids="-".join)
def test_dispatcher(inputs_for, combination):
    op = OPS.gated_delta_rule.default
    opcheck(op, positional(op, inputs_for(*combination)))


@pytest.mark.parametrize("name", ["delta_rule", "chunk_delta_rule", "fused_recurrent_delta_rule"])
def test_delta_rule(inputs_for, name):
    op = getattr(OPS, name).default
    opcheck(op, positional(op, inputs_for("long", "state", "batched", "grad")))


@pytest.mark.parametrize("combination", WITHOUT_GRADIENT, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["delta main", "delta without gate"])
def test_forward_and_backward(inputs_for, family, kind, combination):
    inputs = inputs_for(*combination, family=family)
    names = (f"{kind}_gated_delta_rule_{x}" for x in ("fwd", "bwd"))
    forward, backward = (getattr(OPS, name).default for name in names)
    opcheck(forward, positional(forward, inputs))
    o, state, *residuals = forward(*positional(forward, inputs))
    names = [returned.name for returned in forward._schema.returns[2:]]
    incoming = {
        "d_o": torch.ones_like(o),
        "d_final_state": torch.ones_like(state) if state.numel() else None,
        **dict(zip(names, residuals, strict=True)),
    }
    mask = [inputs[name] is not None for name in GRADIENTS]
    mask[1] = False
    opcheck(backward, positional(backward, inputs, **incoming, grad_mask=mask))
    found = backward(*positional(backward, inputs, **incoming, grad_mask=mask))
    for name, wanted, x in zip(GRADIENTS, mask, found, strict=True):
        given = inputs[name] if inputs[name] is not None else inputs["q"]
        assert x.shape == (given.shape if wanted else (0,)) and x.dtype == given.dtype, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(inputs_for, delta_device, layout, kind):
    """What comes out is contiguous whatever went in, in the fakes too."""
    inputs = inputs_for("long" if kind == "chunk" else "short", "none", "batched")
    inputs["v"] = layout(inputs["v"])
    assert not inputs["v"].is_contiguous()
    op = getattr(OPS, f"{kind}_gated_delta_rule").default
    if delta_device == "cuda" or layout is odd_stride:
        opcheck(op, positional(op, inputs | {"v": inputs["v"].requires_grad_()}))

    names, results = ("q", "v", "g", "beta"), []
    for v in (inputs["v"], inputs["v"].contiguous()):
        call = inputs | {"v": v}
        leaves = [call[name].detach().requires_grad_() for name in names]
        call = call | dict(zip(names, leaves, strict=True))
        o, _ = op(*positional(op, call))
        results.append((o, *torch.autograd.grad(o.float().square().sum(), leaves)))
    for x, y in zip(*results, strict=True):
        assert x.is_contiguous()
        assert torch.equal(x, y)


@pytest.mark.parametrize("layout", ["packed", "batched"])
@pytest.mark.parametrize("gate", ["scalar", "channel"])
def test_stages(inputs_for, gate, layout):
    inputs = inputs_for("long", "state", layout, family="delta given gate")
    cu_seqlens, v, g = inputs["cu_seqlens"], inputs["v"], inputs["g"]
    L = (torch.rand_like(v[..., :1]).expand(*v.shape[:3], 16) / 4).contiguous()
    opcheck(OPS.solve_tril.default, (L.requires_grad_(layout == "batched"), cu_seqlens))
    A = OPS.solve_tril.default(L.detach(), cu_seqlens)
    opcheck(OPS.solve_tril_bwd.default, (torch.ones_like(A), A, cu_seqlens))

    if gate == "channel":
        g = g.unsqueeze(-1).expand(*g.shape, inputs["k"].shape[-1]).contiguous()
    sums = OPS.chunk_local_cumsum.default(g, 16, False, 1.0, cu_seqlens)
    gates = {"g": None, "gk": None} | {"g" if gate == "scalar" else "gk": sums}
    w_u, fwd_h = OPS.recompute_w_u.default, OPS.chunk_delta_fwd_h.default
    opcheck(w_u, positional(w_u, inputs, **gates, A=A))
    w, u = w_u(*positional(w_u, inputs, **gates, A=A))
    opcheck(fwd_h, positional(fwd_h, inputs, **gates, w=w, u=u, chunk_size=16))


@pytest.mark.parametrize("name", ["recompute_w_u", "chunk_delta_fwd_h"])
def test_stages_refuse_a_gradient(name):
    k, v = torch.randn(1, 20, 2, 16, requires_grad=True), torch.randn(1, 20, 2, 8)
    A = torch.zeros(1, 20, 2, 16)
    with pytest.raises(NotImplementedError, match=f"{name} is not differentiable.*chunk_kda"):
        if name == "recompute_w_u":
            flaop.recompute_w_u(k, v, v[..., 0], A)
        else:
            flaop.chunk_delta_fwd_h(k, A, v)


def test_the_inverse_has_one_gradient(delta_device):
    L = torch.rand(1, 40, 2, 16, dtype=torch.float32, device=delta_device).requires_grad_()
    X = flaop.solve_tril(L)
    (gradient,) = torch.autograd.grad(X.sum(), L)
    assert not gradient.squeeze(0).transpose(0, 1)[:, :16].triu().any()
    with pytest.raises(NotImplementedError, match="no double backward"):
        torch.autograd.grad(flaop.solve_tril(L).square().sum(), L, create_graph=True)


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([2, 9, 9, 27])])
def test_gradcheck_of_the_inverse(cu_seqlens):
    L = torch.rand(1, 27, 2, 16, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: flaop.solve_tril(x, cu_seqlens=cu_seqlens), L)
