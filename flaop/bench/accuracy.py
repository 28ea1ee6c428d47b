"""The check before the clock: a result at the timed shape against the float64 token loop.

The recurrence is causal and its heads are independent, so the first tokens of the first heads of
the full run must equal the oracle on those tokens and heads alone. The gradient of o is zero
outside that slice, hence so is every contribution from outside to the gradients inside it.
"""

from __future__ import annotations

import torch

from flaop.bench import families
from flaop.bench.case import Case, leaves

TOKENS = 160
HEADS = 2
BATCH = 2

# Largest error that a correct kernel may have (docs/numerics.md); above WRONG nothing is timed.
OUTPUT_LIMIT_16_BIT = 1e-2
GRADIENT_LIMIT_16_BIT = 2e-2
LIMIT_FP32 = 1e-4
WRONG = 0.1


def limit(case: Case) -> float:
    if case.dtype == "fp32" and case.pool in (None, "fp32"):
        return LIMIT_FP32
    return GRADIENT_LIMIT_16_BIT if case.mode == "fwdbwd" else OUTPUT_LIMIT_16_BIT


class Slice:
    """Which part of a full run is compared: sequences, tokens and heads from the front."""

    def __init__(self, case: Case):
        s = case.shape
        self.batch = 1 if s.lengths is not None else min(s.B, BATCH)
        self.sequences = min(self.batch, s.N)
        self.tokens = min(TOKENS, s.T if s.lengths is None else s.lengths[0])
        self.heads = min(HEADS, s.H)
        self.value_heads = self.heads * (s.HV // s.H)
        self.all_value_heads = s.HV
        self.whole_sequences = self.tokens == (s.T if s.lengths is None else s.lengths[0])

    def cut(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The part of one input, output or gradient that belongs to the slice."""
        if name in ("q", "k"):
            return x[: self.batch, : self.tokens, : self.heads]
        if name in ("v", "g", "beta", "o"):
            return x[: self.batch, : self.tokens, : self.value_heads]
        if name in ("initial_state", "final_state"):
            return x[: self.sequences, : self.value_heads]
        if name == "A_log":
            return x[: self.value_heads]
        if name == "dt_bias":
            # Per head, or per head and channel: then flat or not.
            return x[: self.value_heads * (x.shape[0] // self.all_value_heads)]
        raise ValueError(f"no rule to cut {name}")

    def inputs(self, inputs: dict) -> dict:
        """The slice's own inputs as fresh CPU leaves; one sequence per batch row, no cu_seqlens."""
        part = {}
        for name, value in inputs.items():
            if name == "cu_seqlens":
                continue
            if isinstance(value, torch.Tensor):
                cut = self.cut(name, value.detach()).cpu().clone()
                value = cut.requires_grad_(value.requires_grad)
            part[name] = value
        return part


def output_gradient(case: Case, o: torch.Tensor) -> torch.Tensor:
    """Gradient of o for the check: random inside the slice, zero elsewhere."""
    part = Slice(case)
    d_o = torch.zeros_like(o)
    inside = part.cut("o", d_o)
    generator = torch.Generator().manual_seed(case.seed + 1)
    values = torch.randn(inside.shape, generator=generator)
    inside.copy_(values.to(device=o.device, dtype=o.dtype))
    return d_o


def relative_errors(case: Case, function, inputs: dict) -> dict[str, float]:
    """Relative L2 error of each output (and gradient, in mode fwdbwd) of ``function(**inputs)``."""
    from flaop.testing import relative_error

    if case.pool is not None:
        return _pool_errors(case, function, inputs)
    part = Slice(case)
    oracle = families.oracle(case.op)
    small = part.inputs(inputs)

    with torch.set_grad_enabled(case.mode == "fwdbwd"):
        o, final_state = function(**inputs)
        expected, expected_state = oracle(**small)
    got = {"o": o}
    want = {"o": expected}
    if final_state is not None and expected_state is not None and part.whole_sequences:
        got["final_state"], want["final_state"] = final_state, expected_state
    if case.mode == "fwdbwd":
        names = leaves(inputs)
        d_o = output_gradient(case, o)
        gradients = torch.autograd.grad(o, list(names.values()), d_o)
        d_expected = part.cut("o", d_o).cpu().to(expected.dtype)
        references = torch.autograd.grad(expected, [small[name] for name in names], d_expected)
        got.update(zip(names, gradients, strict=True))
        want.update(zip(names, references, strict=True))
    return {
        name: relative_error(part.cut(name, got[name].detach()).cpu(), want[name].detach())
        for name in want
    }


def _pool_errors(case: Case, function, inputs: dict) -> dict[str, float]:
    """Of the outputs and the new states of a step op."""
    from flaop.testing import relative_error

    part = Slice(case)
    slots = inputs["state_indices"][: part.sequences].long()
    small = {name: x for name, x in inputs.items() if name not in ("state", "state_indices")}
    small["initial_state"] = inputs["state"][slots]
    o, _ = function(**inputs)
    expected, expected_state = families.oracle(case.op)(
        **part.inputs(small), output_final_state=True
    )
    state = part.cut("final_state", inputs["state"][slots])
    return {
        "o": relative_error(part.cut("o", o).cpu(), expected),
        "state": relative_error(state.cpu(), expected_state),
    }
