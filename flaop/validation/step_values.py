"""What only the device knows of the arguments of the decode ops.

Reads tensors on the host: FLAOP_DEBUG=1, outside capture.
"""

from torch import Tensor

from . import checks
from .kda import SAFE_LOWER_BOUND
from .steps import MAX_TOKENS, CommitCall, PoolCall, StepCall


def check_step(call: StepCall, few: bool = True) -> None:
    """`few`: of an op that takes at most MAX_TOKENS tokens a sequence."""
    lengths = _lengths(call, few)
    if not call.use_gate_in_kernel:
        for name in ("g", "g_gamma"):
            if getattr(call, name) is not None:
                checks.gate_values(name, getattr(call, name))
    slots = call.state.shape[0]
    _slot_values("state_indices", call.state_indices, slots)
    if call.write_indices is not None:
        _slot_values("write_indices", call.write_indices, slots)
    name = "state_indices" if call.write_indices is None else "write_indices"
    _no_duplicates(name, _written(call, getattr(call, name).tolist(), lengths))


def check_pool(call: PoolCall) -> None:
    check_step(call.step, few=False)
    s = call.step
    if call.safe_gate and s.g is not None and not s.use_gate_in_kernel and s.g.numel():
        low = s.g.min().item()
        if low < SAFE_LOWER_BOUND:
            raise ValueError(
                f"safe_gate=True promises g in [{SAFE_LOWER_BOUND}, 0], got {low} (FLAOP_DEBUG=1)"
            )
    if call.checkpoint_indices is None:
        return
    slots = s.state.shape[0]
    _slot_values("checkpoint_indices", call.checkpoint_indices, slots)
    last = s.state_indices if s.write_indices is None else s.write_indices
    lengths = _lengths(s, False)
    written = _written(s, last.tolist(), lengths)
    for row, length, read, final in zip(
        *(call.checkpoint_indices.tolist(), lengths, s.state_indices.tolist(), last.tolist()),
        strict=True,
    ):
        count, rest = divmod(length, call.checkpoint_interval)
        kept = row[:count]
        # The last checkpoint may be the state that leaves.
        if kept and rest == 0 and kept[-1] == final:
            kept.pop()
        if read >= 0:
            written += [x for x in kept if x >= 0]
    _no_duplicates("checkpoint_indices", written)


def check_verify(call: StepCall) -> None:
    """A pool that is not written may be read twice."""
    _lengths(call, True)
    _slot_values("state_indices", call.state_indices, call.state.shape[0])
    if not call.use_gate_in_kernel:
        for name in ("g", "g_gamma"):
            if getattr(call, name) is not None:
                checks.gate_values(name, getattr(call, name))


def check_commit(call: CommitCall) -> None:
    _lengths(call, True)
    if call.g is not None:
        checks.gate_values("g", call.g)
    _slot_values("state_indices", call.state_indices, call.state.shape[0])
    _no_duplicates("state_indices", [x for x in call.state_indices.tolist() if x >= 0])


def _lengths(call, few: bool) -> list[int]:
    """Of the sequences."""
    if call.cu_seqlens is None:
        return [call.T] * call.N
    checks.cu_seqlens_values(call.cu_seqlens, call.T)
    lengths = call.cu_seqlens.diff().tolist()
    if few and max(lengths, default=0) > MAX_TOKENS:
        raise ValueError(
            f"cu_seqlens must hold sequences of at most {MAX_TOKENS} tokens, got one of "
            f"{max(lengths)} (FLAOP_DEBUG=1)"
        )
    return lengths


def _slot_values(name: str, x: Tensor, slots: int) -> None:
    if x.numel() and (high := x.max().item()) >= slots:
        raise ValueError(
            f"{name} must be less than the {slots} slots of state, got {high} (FLAOP_DEBUG=1)"
        )


def _written(call: StepCall, targets: list, lengths: list[int]) -> list[int]:
    """The slots that a call writes, from the rows of the indices that say so."""
    reads = call.state_indices
    if reads.dim() == 1:
        rows = zip(reads.tolist(), targets, strict=True)
        return [write for read, write in rows if read >= 0 and write >= 0]
    S = reads.shape[1]
    accepted = [1] * call.N
    if call.num_accepted_tokens is not None:
        accepted = call.num_accepted_tokens.clamp(min=1).tolist()
    written = []
    for row, count, write, length in zip(reads.tolist(), accepted, targets, lengths, strict=True):
        if count <= S and row[count - 1] >= 0:
            written += [slot for slot in write[:length] if slot >= 0]
    return written


def _no_duplicates(name: str, written: list[int]) -> None:
    if len(set(written)) < len(written):
        twice = sorted({x for x in written if written.count(x) > 1})
        raise ValueError(
            f"{name} must write each slot once, got {twice} more than once (FLAOP_DEBUG=1)"
        )
