"""The least time a case can take: bytes at the copy rate or FLOPs at the matrix rate."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flaop.bench.case import Case, leaves, tensors
from flaop.bench.families import ATTENTION, family

# Measured on one H200: device copy (bytes read plus written), bf16 8192^3 matrix product.
BYTES_PER_S = 4.26e12
FLOP_PER_S = 700e12
ATTENTION_BACKWARD_TO_FORWARD = 2.5


def forward_flops(case: Case) -> float:
    s = case.shape
    if case.op == ATTENTION:
        # Two products over the causal half.
        return s.B * s.HV * s.T * s.T * (s.K + s.V)
    tokens = s.B * s.T * s.HV
    kind = family(case.op)
    if case.op.startswith("fused_recurrent_") or case.mode == "step":
        # Decay, write, read for the output; with a delta rule read for the correction too.
        return tokens * kind.recurrent * s.K * s.V
    return tokens * kind.forward(s.K, s.V)


def backward_flops(case: Case) -> float:
    """Those of the chunk form relative to its forward, whatever the form."""
    if case.op == ATTENTION:
        return forward_flops(case) * ATTENTION_BACKWARD_TO_FORWARD
    kind, (K, V) = family(case.op), (case.shape.K, case.shape.V)
    return forward_flops(case) * kind.backward(K, V) / kind.forward(K, V)


def output_bytes(case: Case, inputs: dict) -> int:
    """Bytes of o and, where it is asked for, of the fp32 final state; of a pool, of the slots."""
    s = case.shape
    state = 0
    if case.pool is not None:
        state = size([inputs["state"]]) // inputs["state"].shape[0] * s.N
    elif inputs.get("output_final_state"):
        state = 4 * s.N * s.HV * s.K * s.V
    return size([inputs["v"]]) + state


def call_bytes(case: Case, inputs: dict) -> int:
    """Bytes of the inputs that a call reads, and of its outputs."""
    read = size(tensors(inputs).values())
    if case.pool is not None:
        state = size([inputs["state"]])
        read += state // inputs["state"].shape[0] * case.shape.N - state
    return read + output_bytes(case, inputs)


def work(case: Case, inputs: dict) -> dict[str, float]:
    """Bytes, FLOPs and floor of one call: inputs read once, outputs written once.

    A backward reads the inputs again and the gradient of o, and writes a gradient per leaf.
    """
    moved = call_bytes(case, inputs)
    phases = [(moved, forward_flops(case))]
    if case.mode == "fwdbwd":
        phases.append((moved + size(leaves(inputs).values()), backward_flops(case)))
    floor = sum(max(b / BYTES_PER_S, f / FLOP_PER_S) for b, f in phases)
    return {
        "bytes": sum(b for b, _ in phases),
        "flops": sum(f for _, f in phases),
        "floor_ms": floor * 1e3,
    }


def size(several: Iterable[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in several)
