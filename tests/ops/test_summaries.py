"""The summary ops against the token loop, by opcheck, and what they refuse."""

import itertools

import pytest
import torch
from torch.library import opcheck

from flaop.testing import relative_error
from flaop.testing.summaries import SUMMARY_FAMILIES, summary_oracle

OPS = torch.ops.flaop
FAMILIES = list(SUMMARY_FAMILIES)
DELTA = ("kda", "gated_delta_rule")
# lengths, and the sequence that the forward and the backward op are about
LAYOUTS = {
    "batched": (None, None, None),
    "packed": ([0, 5, 70, 0, 90, 0], 4, 1),
    "one packed": ([150], 0, 0),
}
RESIDUALS = ("A", "A_qk", "w", "qg", "kg", "decay")
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def summary_device(request, poisoned_memory):
    return request.param


def make(family, device="cpu", layout="batched", **options):
    """Arguments by name, those of flaop.<family> and d_o."""
    maker, full, _ = SUMMARY_FAMILIES[family]
    sizes = {"B": 2, "T": 150, "H": 1, "HV": 2, "K": 16, "V": 24}
    inputs = maker(
        **(sizes | full | options), lengths=LAYOUTS[layout][0], initial_state=False, device=device
    )
    generator = torch.Generator().manual_seed(1)
    d_o = torch.randn(inputs["v"].shape, generator=generator).to(inputs["v"])
    return inputs | dict.fromkeys(RESIDUALS) | {"d_o": d_o, "chunk_size": 64}


def ops(family):
    name = f"chunk_{family}_summary"
    return getattr(OPS, name).default, getattr(OPS, f"{name}_bwd").default


def positional(op, inputs):
    return tuple(inputs[argument.name] for argument in op._schema.arguments)


def oracle(family, inputs):
    skipped = ("d_o", "chunk_size", *RESIDUALS)
    known = {name: x for name, x in inputs.items() if name not in skipped}
    return summary_oracle(family, known, inputs["d_o"])


def matrix(transfer, K):
    """A transfer as a matrix [N, HV, K, K]."""
    if transfer.dim() == 4:
        return transfer
    return torch.diag_embed(transfer.expand(-1, -1, K))


def compare(name, got, ref, dtype):
    assert got.shape == ref.shape and got.dtype == (
        torch.float64 if dtype is torch.float64 else torch.float32
    )
    for i, j in itertools.product(range(len(ref)), range(ref.shape[1])):  # each head by itself
        if ref[i, j].norm() < 1e-6:  # what fast gates leave
            assert got[i, j].norm() < 1e-6, (name, i, j)
        else:
            assert relative_error(got[i, j], ref[i, j]) < LIMITS[dtype], (name, i, j)


@pytest.mark.parametrize("gates", ["mixed", "slow"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_values(family, layout, gates, summary_device):
    if summary_device == "cuda":
        cases = [(torch.float32, {}), (torch.bfloat16, {"K": 128, "V": 128})]
    else:
        cases = [(torch.float64, {}), (torch.float32, {"K": 20})]
    for dtype, sizes in cases:
        inputs = make(family, summary_device, layout, gates=gates, dtype=dtype, **sizes)
        ref = oracle(family, inputs)
        _, last, first = LAYOUTS[layout]
        K = inputs["q"].shape[3]
        for op, (state, transfer), n in zip(ops(family), (ref[:2], ref[2:]), (last, first)):
            which = slice(None) if n is None else slice(n, n + 1)
            got = op(*positional(op, inputs))
            compare(op.name(), got[0].cpu(), state[which], dtype)
            compare(op.name(), matrix(got[1].cpu(), K), transfer[which], dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", DELTA)
def test_residuals_of_the_forward_serve_the_backward(family, layout, summary_device):
    inputs = make(family, summary_device, layout)
    forward = getattr(OPS, f"chunk_{family}_fwd").default
    hints = {"split_size": 0, "disable_recompute": False, "initial_state": None}
    A, A_qk = forward(*positional(forward, inputs | hints))[2:4]
    _, op = ops(family)
    with_them = op(*positional(op, inputs | {"A": A, "A_qk": A_qk}))
    for got, ref in zip(with_them, op(*positional(op, inputs))):
        assert relative_error(got, ref) < 1e-6
    # they are read
    other = op(*positional(op, inputs | {"A": 2 * A, "A_qk": A_qk}))
    assert relative_error(other[0], with_them[0]) > 1e-3
    with pytest.raises(ValueError, match="A and A_qk come from one forward"):
        op(*positional(op, inputs | {"A": A}))


@pytest.mark.parametrize("gates", ["mixed", "slow"])
@pytest.mark.parametrize("family", DELTA)
def test_outputs_beside_the_summary(family, gates, summary_device):
    """With what they read of a state they are the outputs from that state."""
    op = getattr(OPS, f"chunk_{family}_summary_fwd").default
    dtypes = {"cpu": (torch.float64, torch.float32), "cuda": (torch.float32, torch.bfloat16)}
    for dtype in dtypes[summary_device]:
        sizes = {"K": 128, "V": 128} if dtype is torch.bfloat16 else {"K": 20}
        inputs = make(family, summary_device, gates=gates, dtype=dtype, **sizes)
        o, read, state, transfer, A, A_qk = op(*positional(op, inputs))
        B, T, HV, V = o.shape
        h0 = torch.randn(B, HV, inputs["q"].shape[3], V, device=summary_device)
        skipped = ("d_o", "chunk_size", *RESIDUALS)
        known = {name: x for name, x in inputs.items() if name not in skipped}
        states = {"initial_state": h0, "output_final_state": True}
        expected, final = SUMMARY_FAMILIES[family].oracle(**known | states)
        wide = h0.cpu().double()
        found = o.cpu() + (read.cpu().double().transpose(1, 2) @ wide).transpose(1, 2)
        assert relative_error(found, expected) < LIMITS[dtype]
        found = state.cpu() + transfer.cpu().double() @ wide
        assert relative_error(found, final) < LIMITS[dtype]
        forward = getattr(OPS, f"chunk_{family}_fwd").default
        hints = {"split_size": 0, "disable_recompute": False, "initial_state": None}
        residuals = forward(*positional(forward, inputs | hints))[2:4]
        for x, y in zip((A, A_qk), residuals):
            assert relative_error(x, y) < 1e-6


def test_recompute(summary_device):
    """What it gives serves both backwards."""
    op, summary, backward = (
        getattr(OPS, f"chunk_kda_{name}").default for name in ("recompute", "summary_bwd", "bwd")
    )
    sizes = {"K": 128, "V": 128, "dtype": torch.bfloat16} if summary_device == "cuda" else {}
    inputs = make("kda", summary_device, **sizes)
    forward = OPS.chunk_kda_fwd.default
    inputs |= {"split_size": 0, "disable_recompute": False, "initial_state": None}
    names = [x.name for x in forward._schema.returns[2:]]
    inputs |= dict(zip(names, forward(*positional(forward, inputs))[2:]))
    inputs |= {"d_final_state": None, "grad_mask": [True] * 7 + [False]}
    opcheck(op, positional(op, inputs))
    found = op(*positional(op, inputs))
    assert all((x.numel() > 0) == (summary_device == "cuda") for x in found)
    made = inputs | dict(zip(names[2:], found))
    opcheck(summary, positional(summary, made))
    for of in (summary, backward):
        for x, y in zip(of(*positional(of, made)), of(*positional(of, inputs))):
            assert torch.equal(x, y)


@pytest.mark.parametrize("family", DELTA)
def test_opcheck_of_outputs_beside_the_summary(family, summary_device):
    op = getattr(OPS, f"chunk_{family}_summary_fwd").default
    for T in (70, 0):
        opcheck(op, positional(op, make(family, summary_device, T=T)))
    with pytest.raises(NotImplementedError, match="functions of flaop.distributed"):
        op(*positional(op, make(family, summary_device, requires_grad=True)))


@pytest.mark.parametrize("layout", ["batched", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_opcheck(family, layout, summary_device):
    inputs = make(family, summary_device, layout)
    for op in ops(family):
        opcheck(op, positional(op, inputs))


@pytest.mark.parametrize("family", FAMILIES)
def test_without_tokens_nothing_changes(family, summary_device):
    batched = make(family, summary_device, T=0)
    packed = make(family, summary_device, B=1, T=30)
    packed["cu_seqlens"] = torch.tensor([7, 7, 7], device=summary_device)
    for inputs, N in ((batched, 2), (packed, 1)):
        for op in ops(family):
            state, transfer = op(*positional(op, inputs))
            assert state.shape == (N, 2, 16, 24) and not state.any()
            eye = torch.eye(16, device=summary_device).expand(N, 2, 16, 16)
            assert torch.equal(matrix(transfer, 16), eye)


@pytest.mark.parametrize("family", FAMILIES)
def test_offsets_outside_are_cut(family, summary_device):
    """They must not lead outside the tensors, whatever they are."""
    inputs = make(family, summary_device, B=1, T=30)
    for op in ops(family):
        found = [
            op(*positional(op, inputs | {"cu_seqlens": torch.tensor(x, device=summary_device)}))
            for x in ([-5, 40], [0, 30], [0, 30, 10])
        ]
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_gradient_of_its_own(family):
    inputs = make(family, requires_grad=True)
    for op in ops(family):
        with pytest.raises(NotImplementedError, match="functions of flaop.distributed"):
            op(*positional(op, inputs))


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_name_what_the_op_takes(family):
    forward, backward = ops(family)
    inputs = make(family)
    for op, changes, error, sentence in (
        (forward, {"k": inputs["k"][0]}, ValueError, "k must have 4 dimensions"),
        (forward, {"v": inputs["v"].double()}, TypeError, "v must have the dtype of k"),
        (forward, {"chunk_size": 7}, ValueError, "chunk_size must be one of"),
        (backward, {"d_o": inputs["d_o"][:, :3]}, ValueError, "d_o must have shape"),
        (backward, {"d_o": inputs["d_o"].double()}, TypeError, "d_o must have the dtype of q"),
    ):
        with pytest.raises(error, match=sentence):
            op(*positional(op, inputs | changes))
