"""Checks shared by the families. Every error names the argument, what came and what was expected.

Sizes may be symbolic: only sizes of tensors are compared with each other, so that no check
specialises a length, and a comparison of unbacked sizes becomes a run-time assertion.
"""

import os

import torch
from torch import Tensor

# Read once: a traced graph and the process it runs in must agree on it.
DEBUG = os.environ.get("FLAOP_DEBUG", "0") not in ("", "0")

QKV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def holds(condition) -> bool:
    """The truth of a comparison of sizes; an undecidable symbolic one is asserted at run time."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import expect_true

    return expect_true(condition)


def rank(name: str, x: Tensor, layout: str) -> None:
    """`layout` lists the dimensions, e.g. "B, T, H, K"."""
    expected = layout.count(",") + 1
    if x.dim() != expected:
        raise ValueError(
            f"{name} must have {expected} dimensions [{layout}], got shape {list(x.shape)}"
        )


def shape(name: str, x: Tensor, expected: tuple, layout: str) -> None:
    """`expected` are the sizes of the dimensions that `layout` lists."""
    sizes = x.shape
    if len(sizes) == len(expected):
        for got, wanted in zip(sizes, expected):
            same = got == wanted
            if same is not True and not holds(same):
                break
        else:
            return
    raise ValueError(f"{name} must have shape [{layout}] = {list(expected)}, got {list(sizes)}")


def dtype(name: str, x: Tensor, allowed: tuple) -> None:
    if x.dtype not in allowed:
        raise TypeError(f"{name} must be {_names(allowed)}, got {x.dtype}")


def qkv_dtype(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One dtype for q, k and v; float64 on the CPU only."""
    if q.dtype is torch.float64:
        if q.device.type not in ("cpu", "meta"):
            raise TypeError(f"q may be torch.float64 on the CPU only, got it on {q.device}")
    else:
        dtype("q", q, QKV_DTYPES)
    for name, x in (("k", k), ("v", v)):
        if x.dtype is not q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")


def state_dtype(name: str, x: Tensor, q: Tensor) -> None:
    """fp32, bf16 or fp16; float64 beside float64 inputs."""
    dtype(name, x, (*STATE_DTYPES, torch.float64) if q.dtype is torch.float64 else STATE_DTYPES)


def device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")


def cu_seqlens_layout(cu_seqlens: Tensor, q: Tensor) -> None:
    """Offsets [N + 1], int32 or int64, beside packed tokens in a batch of one."""
    rank("cu_seqlens", cu_seqlens, "N + 1")
    dtype("cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    if not holds(cu_seqlens.shape[0] >= 1):
        raise ValueError("cu_seqlens must have shape [N + 1], got [0]")
    if not holds(q.shape[0] == 1):
        raise ValueError(
            f"cu_seqlens needs a batch of one (packed sequences), got q of shape {list(q.shape)}"
        )


def _names(dtypes: tuple) -> str:
    *head, last = map(str, dtypes)
    return f"{', '.join(head)} or {last}" if head else last


def cu_seqlens_values(cu_seqlens: Tensor, T: int) -> None:
    """Read the offsets on the host (FLAOP_DEBUG=1 only)."""
    bounds = cu_seqlens.tolist()
    if bounds[0] < 0 or bounds[-1] > T or any(a > b for a, b in zip(bounds, bounds[1:])):
        raise ValueError(
            f"cu_seqlens must not decrease and stay in [0, T = {T}], got {bounds} (FLAOP_DEBUG=1)"
        )
