"""The summaries of shards through the interpreter, in one launch and in many, against the token
loop."""

import pytest
import torch

from flaop.launch.decay import chunk as decay
from flaop.launch.delta import chunk as kda
from flaop.launch.delta import gdn
from flaop.testing import relative_error
from flaop.testing.summaries import SUMMARY_FAMILIES, summary_oracle
from flaop.validation import gated_delta_rule as gdn_check
from flaop.validation import kda as kda_check
from flaop.validation.decay import check_gla, check_simple_gla

LAUNCHERS = {
    "kda": (kda, kda_check.check),
    "gated_delta_rule": (gdn, gdn_check.check),
    "simple_gla": (decay, check_simple_gla),
    "gla": (decay, check_gla),
}
DELTA = ("kda", "gated_delta_rule")
LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3}
# of some lengths and gates each; K and V that no tile divides
CASES = {
    "batched": {"B": 2, "T": 66, "H": 1, "K": 20, "V": 24, "gates": "slow"},
    "packed": {"lengths": [70], "H": 1, "HV": 2, "K": 16, "V": 40, "gates": "mixed"},
    "fp16": {"B": 1, "T": 40, "H": 1, "K": 20, "V": 24, "dtype": torch.float16},
}


def arguments(family, case):
    maker, options, _ = SUMMARY_FAMILIES[family]
    inputs = maker(**CASES[case], **options)
    d_o = torch.randn(inputs["v"].shape, generator=torch.Generator().manual_seed(1))
    return inputs, d_o.to(inputs["v"].dtype)


def summaries(family, inputs, d_o, residuals=(None, None)):
    """Those of the forward and of the backward launcher."""
    launcher, check = LAUNCHERS[family]
    call = check(**inputs)
    residuals = residuals if family in DELTA else ()
    backward = launcher.summary_backward(call._replace(v=d_o), *residuals)
    return [*launcher.summary(call), *backward]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", SUMMARY_FAMILIES)
def test_summaries(family, case, monkeypatch):
    inputs, d_o = arguments(family, case)
    expected = summary_oracle(family, inputs, d_o)
    found = summaries(family, inputs, d_o)
    for name, got, ref in zip(expected._fields, found, expected, strict=True):
        if got.dim() == 3:
            got = torch.diag_embed(got.expand(-1, -1, ref.shape[2]))
        assert got.dtype is torch.float32 and got.shape == ref.shape
        assert relative_error(got, ref) < LIMITS[d_o.dtype], name
    if case == "fp16":  # one row
        return
    # a row a launch: what is carried between launches; and from residuals
    for module, names in ((kda, ["WORKSPACE"]), (decay, ["WORKSPACE", "BACKWARD_WORKSPACE"])):
        for name in names:
            monkeypatch.setattr(module, name, 1)
    launcher, check = LAUNCHERS[family]
    residuals = launcher.forward_residuals(check(**inputs))[2:4] if family in DELTA else ()
    for x, y in zip(summaries(family, inputs, d_o, residuals), found, strict=True):
        assert relative_error(x, y) < LIMITS[d_o.dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("family", DELTA)
def test_outputs_beside_the_summary(family, dtype, monkeypatch):
    """In one launch and, of kda, with a row a launch."""
    maker, options, oracle = SUMMARY_FAMILIES[family]
    launcher, check = LAUNCHERS[family]
    sizes = {"B": 2, "T": 66, "H": 1, "HV": 2, "K": 20, "V": 24, "gates": "slow", "dtype": dtype}
    inputs = maker(**sizes, **options)
    generator = torch.Generator().manual_seed(1)
    h0 = torch.randn(2, 2, 20, 24, dtype=torch.float64, generator=generator)
    expected, final = oracle(**{**inputs, "initial_state": h0})
    for workspace in (kda.WORKSPACE, 1)[: 2 if launcher is kda else 1]:
        monkeypatch.setattr(kda, "WORKSPACE", workspace)
        o, read, state, transfer, A, A_qk = launcher.summary_forward(check(**inputs))
        found = o + (read.double().transpose(1, 2) @ h0).transpose(1, 2)
        assert relative_error(found, expected) < LIMITS[dtype]
        assert relative_error(state + transfer.double() @ h0, final) < LIMITS[dtype]
        residuals = launcher.forward_residuals(check(**inputs))[2:4]
        assert torch.equal(A, residuals[0]) and torch.equal(A_qk, residuals[1])


def test_operands_made_once():
    """Those that the reverse summary and the backward share."""
    inputs, d_o = arguments("kda", "batched")
    call = kda_check.check(**inputs)
    A, A_qk = kda.forward_residuals(call)[2:4]
    found = kda.recompute(call, A)
    with_v = call._replace(v=d_o)
    for x, y in zip(
        kda.summary_backward(with_v, A, A_qk, *found[:4]),
        kda.summary_backward(with_v, A, A_qk),
        strict=True,
    ):
        assert torch.equal(x, y)
    empty, mask = [torch.empty(0)] * 6, (True,) * 8
    gradients = kda.backward(call, d_o, None, (A, A_qk, *found), mask)
    for x, y in zip(gradients, kda.backward(call, d_o, None, (A, A_qk, *empty), mask), strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.parametrize("family", SUMMARY_FAMILIES)
def test_a_sequence_without_tokens(family):
    """Zeros and the identity, whatever memory held."""
    maker, options, _ = SUMMARY_FAMILIES[family]
    inputs = maker(T=10, H=1, K=16, V=16, **options)
    inputs["cu_seqlens"] = torch.tensor([4, 4])
    state, transfer, d_state, d_transfer = summaries(family, inputs, inputs["v"].clone())
    eye = torch.eye(16) if family in DELTA else torch.ones(1)
    assert not state.any() and not d_state.any()
    assert torch.equal(transfer, eye.expand_as(transfer)) and torch.equal(transfer, d_transfer)
