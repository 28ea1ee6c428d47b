"""torch.library.opcheck on every op: schema, fake, autograd registration, tracing."""

import itertools

import pytest
import torch
from torch.library import opcheck

import flaop
from flaop.testing.layouts import LAYOUTS, odd_stride

OPS = torch.ops.flaop
PATHS = ("chunk_kda", "fused_recurrent_kda")
LENGTHS = {
    ("short", "batched"): {"B": 2, "T": 20}, ("long", "batched"): {"B": 2, "T": 70},
    ("short", "packed"): {"lengths": [0, 1, 19]}, ("long", "packed"): {"lengths": [66, 0, 1]},
}  # fmt: skip
COMBINATIONS = list(
    itertools.product(
        ("short", "long"), ("state", "none"), ("packed", "batched"), ("grad", "no_grad")
    )
)
# The ops below the autograd formulas take no gradient, and their length changes no branch.
WITHOUT_GRADIENT = [("long", "state", "packed"), ("short", "none", "batched")]
SMALL = {"K": 16, "V": 24, "H": 1, "HV": 2, "dtype": "float32"}
GRADIENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
# Names of the arguments of KP, and of what only the chunk path takes, in the order of the schemas.
SHARED = [a.name for a in OPS.fused_recurrent_kda.default._schema.arguments]
CHUNK = [a.name for a in OPS.chunk_kda.default._schema.arguments][len(SHARED) :]


@pytest.fixture
def inputs_for(device, arguments):
    """Arguments of an op by name: small on the CPU, those of the compiled kernels on CUDA."""

    def make(length, state, layout, grad="no_grad", **changes):
        inputs = arguments(
            "packed" if layout == "packed" else "main",
            **(SMALL if device == "cpu" else {}),
            **LENGTHS[length, layout],
            device=device,
            initial_state=state == "state",
            output_final_state=state == "state",
            requires_grad=grad == "grad",
            **changes,
        )
        return inputs | {"chunk_size": 64, "split_size": 0, "disable_recompute": False}

    return make


def positional(inputs, names):
    return tuple(inputs[name] for name in names)


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("op", PATHS)
def test_paths(inputs_for, op, combination):
    names = SHARED + CHUNK if op == "chunk_kda" else SHARED
    opcheck(getattr(OPS, op).default, positional(inputs_for(*combination), names))


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_dispatcher(inputs_for, device, combination):
    length, state, layout, grad = combination
    if device == "cpu" and (state == "none") == (layout == "packed"):
        pytest.skip("its branches depend on the length and the gradient alone")
    inputs = inputs_for(*combination) | {"backend": "auto"}
    opcheck(OPS.kda.default, positional(inputs, [*SHARED, *CHUNK, "backend"]))


@pytest.mark.parametrize("kept", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("combination", WITHOUT_GRADIENT, ids="-".join)
def test_chunk_forward_and_backward(inputs_for, combination, kept):
    inputs = inputs_for(*combination) | {"disable_recompute": kept}
    opcheck(OPS.chunk_kda_fwd.default, positional(inputs, SHARED + CHUNK))
    outputs = OPS.chunk_kda_fwd.default(*positional(inputs, SHARED + CHUNK))
    opcheck(OPS.chunk_kda_bwd.default, backward_arguments(inputs, outputs, SHARED + CHUNK))


@pytest.mark.parametrize("combination", WITHOUT_GRADIENT, ids="-".join)
def test_recurrent_forward_and_backward(inputs_for, combination):
    inputs = inputs_for(*combination)
    opcheck(OPS.fused_recurrent_kda_fwd.default, positional(inputs, SHARED))
    outputs = OPS.fused_recurrent_kda_fwd.default(*positional(inputs, SHARED))
    opcheck(OPS.fused_recurrent_kda_bwd.default, backward_arguments(inputs, outputs, SHARED))


def backward_arguments(inputs, outputs, names):
    o, state, *residuals = outputs
    d_state = torch.ones_like(state) if state.numel() else None
    mask = [inputs[name] is not None for name in GRADIENTS]
    mask[1] = False
    tensors = ["q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "A_log", "dt_bias"]
    options = names[names.index("use_qk_l2norm_in_kernel") :]
    return (
        *(torch.ones_like(o), d_state, *positional(inputs, tensors), *residuals),
        *(inputs["scale"], *positional(inputs, options), mask),
    )


# Memory layouts: what comes out is contiguous whatever went in, in the fakes too.


@pytest.mark.parametrize("op", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(inputs_for, device, layout, op):
    inputs = inputs_for("long" if op == "chunk_kda" else "short", "none", "batched")
    inputs["v"] = layout(inputs["v"])
    assert not inputs["v"].is_contiguous()
    names = SHARED + CHUNK if op == "chunk_kda" else SHARED
    if device == "cuda" or layout is odd_stride:
        leaf = inputs | {"v": inputs["v"].requires_grad_()}
        opcheck(getattr(OPS, op).default, positional(leaf, names))

    fn = getattr(flaop, op)
    taken = [name for name in names if inputs[name] is not None]
    contiguous = {name: inputs[name] for name in taken} | {"v": inputs["v"].contiguous()}
    results = []
    for call in ({name: inputs[name] for name in taken}, contiguous):
        leaves = [call[name].detach().requires_grad_() for name in ("q", "v", "g")]
        call = call | dict(zip(("q", "v", "g"), leaves, strict=True))
        o, _ = fn(**call)
        results.append((o, *torch.autograd.grad(o.float().square().sum(), leaves)))
    for x, y in zip(*results, strict=True):
        assert x.is_contiguous()
        assert torch.equal(x, y)
