"""Errors that all ranks raise together, before the first collective that could wait for one.

Every rank sends a record of fixed size: what it was called with, or the sentence of its error. The
exchange runs on the CPU and waits for no kernel. It is left out where there is no host to raise:
in traced calls, and while a CUDA graph is captured.
"""

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from flaop.distributed.group import Group
from flaop.validation import checks

_BYTES = 2048
_ERRORS = {1: ValueError, 2: TypeError}
# By the name of a group: the group, and one of the same members that can exchange CPU tensors.
_cpu_groups: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def agree(group: Group, check: Callable[[], None], call: dict) -> None:
    """Raise what `check` raises on any rank, or that the calls differ, on every rank.

    Args:
        check: checks this rank's arguments, by raising ValueError or TypeError.
        call: arguments by name, which must be alike on all ranks: of tensors shape and dtype, and
            with FLAOP_DEBUG=1 the values of cu_seqlens.
    """
    if torch.compiler.is_compiling():
        return
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in call.values())
    if group.size == 1 or (on_gpu and torch.cuda.is_current_stream_capturing()):
        check()
        return
    kind, text = 0, ""
    try:
        check()
    except ValueError as error:
        kind, text = 1, str(error)
    except TypeError as error:
        kind, text = 2, str(error)
    if kind == 0:
        text = "\n".join(f"{name}\t{_described(name, x)}" for name, x in call.items())
    records = _exchange(group, kind, text)
    for rank, (other, sentence) in enumerate(records):
        if other:
            raise _ERRORS[other](f"rank {rank} of the group: {sentence}")
    if any(record != records[0] for record in records):
        raise ValueError(_difference([sentence for _, sentence in records]))


def _described(name: str, x) -> str:
    if not isinstance(x, Tensor):
        return str(x)
    text = f"{x.dtype} {list(x.shape)}"
    if name == "cu_seqlens" and checks.DEBUG:
        values = ",".join(map(str, x.tolist()))
        text += f" with values {values if len(values) < 200 else hex(zlib.crc32(values.encode()))}"
    return text


def _difference(records: list[str]) -> str:
    """A sentence on the first argument that differs."""
    calls = [dict(line.split("\t") for line in record.split("\n")) for record in records]
    for name in calls[0]:
        found = [call.get(name) for call in calls]
        if len(set(found)) > 1:
            values = "; ".join(f"{value} on rank {rank}" for rank, value in enumerate(found))
            return f"{name} must be the same on every rank of the group, got {values}"
    return "the ranks of the group call with different arguments"


def _exchange(group: Group, kind: int, text: str) -> list[tuple[int, str]]:
    content = text.encode()[: _BYTES - 1]
    record = torch.zeros(_BYTES, dtype=torch.uint8)
    record[0] = kind
    record[1 : 1 + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    records = [torch.empty_like(record) for _ in range(group.size)]
    dist.all_gather(records, record, group=_cpu_group(group))
    found = []
    for other in records:
        content = bytes(other[1:].tolist()).rstrip(b"\0").decode(errors="ignore")
        found.append((int(other[0]), content))
    return found


def _cpu_group(group: Group) -> dist.ProcessGroup:
    """The group itself where it has a backend for the CPU, else one of the same ranks by gloo."""
    found = dist.distributed_c10d._resolve_process_group(group.name)
    known = _cpu_groups.get(group.name)
    if known is None or known[0] is not found:
        able = found
        if "cpu:" not in dist.get_backend_config(found):
            ranks = dist.get_process_group_ranks(found)
            able = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        known = _cpu_groups[group.name] = (found, able)
    return known[1]
