"""The least time a case can take: bytes at the copy rate or FLOPs at the matrix rate."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flaop.bench.case import Case, leaves, tensors

# Measured on one H200: device copy (bytes read plus written), bf16 8192^3 matrix product.
BYTES_PER_S = 4.26e12
FLOP_PER_S = 700e12
CHUNK = 64
# KDA at K = V = 128: 475 thousand FLOPs per token and head backward, 164 thousand forward.
BACKWARD_TO_FORWARD = 475 / 163.84
ATTENTION_BACKWARD_TO_FORWARD = 2.5


def forward_flops(case: Case) -> float:
    s = case.shape
    if case.op == "scaled_dot_product_attention":
        # Two products over the causal half.
        return s.B * s.HV * s.T * s.T * (s.K + s.V)
    tokens = s.B * s.T * s.HV
    if case.op == "fused_recurrent_kda" or case.mode == "step":
        # Decay, read for the correction, write, read for the output.
        return tokens * 7 * s.K * s.V
    return tokens * (6 * s.K * s.V + 4 * CHUNK * (s.K + s.V))


def output_bytes(case: Case, inputs: dict) -> int:
    """Bytes of o and, where it is asked for, of the fp32 final state."""
    s = case.shape
    state = 4 * s.N * s.HV * s.K * s.V if inputs.get("output_final_state") else 0
    return size([inputs["v"]]) + state


def work(case: Case, inputs: dict) -> dict[str, float]:
    """Bytes, FLOPs and floor of one call: inputs read once, outputs written once.

    A backward reads the inputs again and the gradient of o, and writes a gradient per leaf.
    """
    moved = size(tensors(inputs).values()) + output_bytes(case, inputs)
    phases = [(moved, forward_flops(case))]
    if case.mode == "fwdbwd":
        attention = case.op == "scaled_dot_product_attention"
        factor = ATTENTION_BACKWARD_TO_FORWARD if attention else BACKWARD_TO_FORWARD
        phases.append((moved + size(leaves(inputs).values()), phases[0][1] * factor))
    floor = sum(max(b / BYTES_PER_S, f / FLOP_PER_S) for b, f in phases)
    return {
        "bytes": sum(b for b, _ in phases),
        "flops": sum(f for _, f in phases),
        "floor_ms": floor * 1e3,
    }


def size(several: Iterable[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in several)
