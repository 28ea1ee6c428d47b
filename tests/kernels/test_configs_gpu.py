"""Every shipped configuration row of the running architecture, alone: nothing is tuned at run time.

One test per (dtype, head size, gate) runs both paths forward and backward with every option on, in
memory that reads as NaN where no kernel wrote, and compares each result with the token loop.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

import flaop
from flaop.testing import (
    assert_within_budget,
    chunk_budget_reference,
    kda_inputs,
    kda_oracle,
    relative_error,
    worst_error,
)
from flaop.testing.comparison import assert_sum_within_budget

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GRADIENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
SLICES = {
    "o": (0, 1, 2), "q": (0, 1, 2), "k": (0, 1, 2), "v": (0, 1, 2), "g": (2, 3), "beta": (2,),
    "final_state": (0, 1), "initial_state": (0, 1),
}  # fmt: skip
# float32 against a limit: the budget of a few roundings is that of other roundings
LIMITS = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}
WORST = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
PATHS = {
    "chunk": flaop.chunk_kda,
    "chunk, kept": functools.partial(flaop.chunk_kda, disable_recompute=True),
    "recurrent": flaop.fused_recurrent_kda,
}
# float32 pair kernels take long to compile: one head size in the fast run
CASES = [
    pytest.param(
        dtype, size, gate, id=f"{dtype}-{size}-{gate}",
        marks=[pytest.mark.slow] if dtype == "fp32" and size > 64 else [],
    )
    for dtype in DTYPES for size in (64, 128, 256)
    for gate in (("softplus", "bounded") if dtype == "bf16" else ("softplus",))
]  # fmt: skip


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def results(fn, inputs, d_o, d_final_state):
    """Outputs and all gradients by name."""
    o, final_state = fn(**inputs)
    loss = (o.double() * d_o.to(o.device)).sum()
    loss = loss + (final_state.double() * d_final_state.to(o.device)).sum()
    gradients = torch.autograd.grad(loss, [inputs[name] for name in GRADIENTS])
    return {"o": o.detach(), "final_state": final_state.detach(), **dict(zip(GRADIENTS, gradients))}


def compare(name, got, ref, budget, dtype, terms):
    """terms: what the gradients of A_log and dt_bias sum up, in both references."""
    got = got.cpu()
    assert torch.isfinite(got).all(), name
    if name in terms:
        assert_sum_within_budget(name, got, ref.double(), budget.double(), *terms[name], dtype)
    elif dtype is torch.float32:
        assert relative_error(got, ref) < LIMITS[dtype], name
    else:
        kind = "output" if name in ("o", "final_state") else "gradient"
        assert_within_budget(name, got, ref, budget, dtype, kind)
    if name in SLICES:
        assert worst_error(got, ref, SLICES[name], floor=1e-2) < WORST[dtype], name


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_triton_where_cuda_kernels_serve(gate, monkeypatch):
    """The Triton rows that the CUDA C++ kernels stand in for where they were built."""
    from flaop.launch import cuda

    monkeypatch.setattr(cuda, "enabled", False)
    test_configuration("bf16", 128, gate)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, size, gate", CASES)
def test_configuration(dtype, size, gate):
    options = dict(
        H=1, HV=2, K=size, V=size, lengths=[65, 0, 1, 130], dtype=DTYPES[dtype],
        gate_in_kernel=gate, l2norm=True, neg_eigval=True, initial_state=True,
        state_v_first=True, requires_grad=True,
    )  # fmt: skip
    inputs = kda_inputs(**options)
    generator = torch.Generator().manual_seed(1)
    d_o = torch.randn(inputs["v"].shape, generator=generator, dtype=torch.float64)
    d_o = d_o.to(DTYPES[dtype]).double()
    d_final_state = torch.randn(inputs["initial_state"].shape, generator=generator)
    ref = results(kda_oracle, inputs, d_o, d_final_state)
    budget = results(chunk_budget_reference, inputs, d_o, d_final_state)
    x = inputs["g"].detach().double() + inputs["dt_bias"].detach().double()
    factor = x if gate == "bounded" else F.softplus(x) / torch.sigmoid(x)
    gates = [gradients["g"].double() for gradients in (ref, budget)]
    terms = {"A_log": [x * factor for x in gates], "dt_bias": gates}
    on_device = kda_inputs(**options, device="cuda")
    for name in GRADIENTS:
        on_device[name] = on_device[name].detach().requires_grad_()
    for path, fn in PATHS.items():
        found = results(fn, on_device, d_o, d_final_state)
        with torch.no_grad():
            o, final_state = fn(**on_device)
        for name, got in [*found.items(), ("o", o), ("final_state", final_state)]:
            try:
                compare(name, got, ref[name], budget[name], DTYPES[dtype], terms)
            except AssertionError as error:
                raise AssertionError(f"{path}: {error}") from None
