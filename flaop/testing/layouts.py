"""Values [B, T, HV, V] in memory layouts other than the contiguous one."""

import torch
from torch import Tensor


def transposed(v: Tensor) -> Tensor:
    return v.transpose(1, 2).contiguous().transpose(1, 2)


def slice_of_qkv(v: Tensor) -> Tensor:
    row = torch.zeros(*v.shape[:3], 3 * v.shape[3], dtype=v.dtype, device=v.device)
    row[..., 2 * v.shape[3] :] = v
    return row[..., 2 * v.shape[3] :]


def odd_stride(v: Tensor) -> Tensor:
    """Rows one element longer than their values: no row but the first is aligned."""
    B, T, HV, V = v.shape
    rows = torch.zeros(B, T, HV * V + 1, dtype=v.dtype, device=v.device)
    rows[..., :-1] = v.flatten(2)
    return rows[..., :-1].unflatten(2, (HV, V))


def expanded(v: Tensor) -> Tensor:
    return v[:1].expand_as(v)


LAYOUTS = [transposed, slice_of_qkv, odd_stride, expanded]
