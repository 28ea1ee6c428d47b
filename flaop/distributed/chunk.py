"""The chunk op of a family on a shard, with states and gradients carried between the ranks.

Forward: summary of the shard, all-gather, fold of the ranks before this one, the plain chunk op
from the state that results. Where an op gives outputs from a state of zeros beside the summary, and
what they read of the state that enters, it takes the place of the two: one pass over the shard.
Backward: the summary in reverse, all-gather, fold of the ranks after this one into the gradient of
the final state, the plain backward.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flaop.distributed.fold import fold, gather_summaries, through
from flaop.distributed.group import Group
from flaop.distributed.places import Places, choose, find_places, masked, row_of


class Plan(NamedTuple):
    """The ops of a family, and the names of what they take and return."""

    chunk: torch._ops.OpOverload
    forward: torch._ops.OpOverload
    backward: torch._ops.OpOverload
    summary: torch._ops.OpOverload
    summary_backward: torch._ops.OpOverload
    arguments: tuple[str, ...]  # of chunk and of forward
    tensors: tuple[str, ...]  # those of them that are tensors
    residuals: tuple[str, ...]  # what forward returns behind o and the final state
    backward_arguments: tuple[str, ...]
    inputs: tuple[str, ...]  # for each gradient that backward returns, what it is one of
    summary_arguments: tuple[str, ...]
    summary_backward_arguments: tuple[str, ...]
    summary_forward: torch._ops.OpOverload | None  # the summary with outputs
    summary_forward_arguments: tuple[str, ...]
    recompute: torch._ops.OpOverload | None  # residuals that the summary and the backward share
    recompute_arguments: tuple[str, ...]


def _plan(family: str) -> Plan:
    names = ("", "_fwd", "_bwd", "_summary", "_summary_bwd")
    ops = [getattr(torch.ops.flaop, f"chunk_{family}{name}").default for name in names]
    taken = [tuple(argument.name for argument in op._schema.arguments) for op in ops]
    _, forward, backward, *_ = (op._schema for op in ops)
    gradients = (x.name for x in backward.returns)
    fused, again = None, None
    if family in ("kda", "gated_delta_rule"):
        fused = getattr(torch.ops.flaop, f"chunk_{family}_summary_fwd").default
    if family == "kda":
        again = torch.ops.flaop.chunk_kda_recompute.default
    return Plan(
        *ops,
        arguments=taken[0],
        tensors=tuple(x.name for x in forward.arguments if "Tensor" in str(x.type)),
        residuals=tuple(x.name for x in forward.returns[2:]),
        backward_arguments=taken[2],
        inputs=tuple(x[2:] if x.startswith("d_") else x[1:] for x in gradients),
        summary_arguments=taken[3],
        summary_backward_arguments=taken[4],
        summary_forward=fused,
        summary_forward_arguments=tuple(x.name for x in fused._schema.arguments) if fused else (),
        recompute=again,
        recompute_arguments=tuple(x.name for x in again._schema.arguments) if again else (),
    )


FAMILIES = {name: _plan(name) for name in ("kda", "gated_delta_rule", "simple_gla", "gla")}


def chunk(family: str, group: Group, args: tuple) -> tuple[Tensor, Tensor | None]:
    """o, and the final state if it is asked for, with gradients.

    Args:
        family: a key of FAMILIES.
        args: those of the family's chunk op, in order, with global cu_seqlens.
    """
    plan = FAMILIES[family]
    call = dict(zip(plan.arguments, args, strict=True))
    wanted = call["output_final_state"]
    if group.size == 1:
        o, final_state = plan.chunk(*args)
        return o, final_state if wanted else None
    tensors = [call[name] for name in plan.tensors]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        outputs = _Chunk.apply(family, *group, *args)
        return outputs if wanted else (outputs, None)
    o, final_state, _, places, _ = _forward(plan, group, call, keep=False)
    return o, masked(final_state, places.ends) if wanted else None


class _Chunk(torch.autograd.Function):
    """The same with residuals; its arguments are constants of a compiled graph, and tensors."""

    @staticmethod
    def forward(ctx, family, name, rank, size, *args):
        plan = FAMILIES[family]
        call = dict(zip(plan.arguments, args, strict=True))
        o, final_state, local, places, residuals = _forward(
            plan, Group(name, rank, size), call, keep=True
        )
        ctx.call = (family, name, rank, size)
        ctx.options = tuple(call[n] for n in plan.arguments if n not in plan.tensors)
        tensors = [call[n] for n in plan.tensors]
        ctx.save_for_backward(*tensors, local["initial_state"], local["cu_seqlens"], *residuals)
        if not call["output_final_state"]:
            return o
        return o, masked(final_state, places.ends)

    @staticmethod
    def backward(ctx, d_o, d_final_state=None):
        family, *group = ctx.call
        plan, group = FAMILIES[family], Group(*group)
        saved = ctx.saved_tensors
        count = len(plan.tensors)
        call = dict(zip(plan.tensors, saved[:count], strict=True))
        options = (n for n in plan.arguments if n not in plan.tensors)
        call.update(zip(options, ctx.options, strict=True))
        local = {**call, "initial_state": saved[count], "cu_seqlens": saved[count + 1]}
        local.update(zip(plan.residuals, saved[count + 2 :], strict=True))

        places = find_places(call["cu_seqlens"], call["q"].shape[1], group)
        batched = places.cu_seqlens is None
        if plan.recompute is not None and batched and not call["disable_recompute"]:
            found = plan.recompute(*(local[n] for n in plan.recompute_arguments))
            local.update(zip(plan.residuals[2:], found, strict=True))
        local["d_o"] = d_o
        local["d_final_state"] = _leave(plan, group, local, places, d_final_state)
        place = {n: i + 4 for i, n in enumerate(plan.arguments)}
        local["grad_mask"] = [
            local[n] is not None and ctx.needs_input_grad[place[n]] for n in plan.inputs
        ]
        found = plan.backward(*(local[n] for n in plan.backward_arguments))

        result = [None] * (4 + len(plan.arguments))
        for n, gradient, wanted in zip(plan.inputs, found, local["grad_mask"], strict=True):
            if n == "initial_state" and wanted:
                gradient = masked(gradient, places.starts).to(call[n].dtype)
            if wanted:
                result[place[n]] = gradient
        return tuple(result)


def _forward(
    plan: Plan, group: Group, call: dict, keep: bool
) -> tuple[Tensor, Tensor, dict, Places, list[Tensor]]:
    """o, the final states of this rank, what the plain op takes, the places, and residuals if they
    are kept."""
    # a second product rounds o once more; fp16 may not hold a state
    one_pass = call["cu_seqlens"] is None and call["q"].dtype is torch.bfloat16
    if plan.summary_forward is not None and one_pass and not call["disable_recompute"]:
        return _forward_in_one_pass(plan, group, call, keep)
    local, places = _enter(plan, group, call)
    run = plan.forward if keep else plan.chunk
    o, final_state, *residuals = run(*local.values())
    return o, final_state, local, places, residuals


def _forward_in_one_pass(
    plan: Plan, group: Group, call: dict, keep: bool
) -> tuple[Tensor, Tensor, dict, Places, list[Tensor]]:
    """The same for a batch: outputs and summary first, then what the state that enters adds."""
    places = find_places(None, call["q"].shape[1], group)
    local = {**call, "output_final_state": True}
    if group.rank == 0:  # nothing enters but what is given
        run = plan.forward if keep else plan.chunk
        o, final_state, *residuals = run(*local.values())
        state = _key_first(call, final_state)
        gather_summaries(state, state.new_zeros(*state.shape[:3], state.shape[2]), group)
        return o, final_state, local, places, residuals
    o, read, state, transfer, *pairs = plan.summary_forward(
        *(call[n] for n in plan.summary_forward_arguments)
    )
    summaries = gather_summaries(state, transfer, group)[: group.rank]
    entering = fold(summaries, places.passes[: group.rank])
    o.add_((read.transpose(1, 2) @ entering.to(o.dtype)).transpose(1, 2))
    state = (state.double() + through(transfer, entering)).to(state.dtype)
    local["initial_state"] = _key_first(call, entering.to(state.dtype)).contiguous()
    known = dict(zip(("A", "A_qk"), pairs, strict=True))
    residuals = [known[n] if n in known else o.new_empty(0) for n in plan.residuals]
    return o, _key_first(call, state).contiguous(), local, places, residuals


def _enter(plan: Plan, group: Group, call: dict) -> tuple[dict, Places]:
    """The arguments of the plain op on this shard, in order, and where the sequences lie."""
    places = find_places(call["cu_seqlens"], call["q"].shape[1], group)
    local = {**call, "cu_seqlens": places.cu_seqlens}
    state, transfer = plan.summary(*(local[n] for n in plan.summary_arguments))
    initial_state = call["initial_state"]
    if initial_state is not None:
        initial_state = initial_state.to(state.dtype)
        here = places.starts & places.leaves
        entering = _key_first(call, row_of(initial_state, here))
        state = _plus(state, transfer, entering, here)
    summaries = gather_summaries(state, transfer, group)[: group.rank]
    reached = fold(summaries, places.passes[: group.rank])
    if reached is None:
        entering = 0.0
    else:
        entering = choose(places.enters, _key_first(call, reached).to(state.dtype), 0.0)
    if initial_state is not None:
        entering = choose(places.starts, initial_state, entering)
    # on the first rank nothing enters but what is given
    local["initial_state"] = entering if isinstance(entering, Tensor) else None
    return local, places


def _leave(
    plan: Plan, group: Group, local: dict, places: Places, d_final_state: Tensor | None
) -> Tensor | None:
    """The gradient of the states that the plain op on this shard returned."""
    state, transfer = plan.summary_backward(*(local[n] for n in plan.summary_backward_arguments))
    if d_final_state is not None:
        here = places.enters & places.ends
        leaving = _key_first(local, row_of(d_final_state, here))
        state = _plus(state, transfer, leaving, here)
    after = slice(group.size - 1, group.rank, -1)
    summaries = gather_summaries(state, transfer, group)[after]
    reached = fold(summaries, places.passes[after])
    if reached is None:
        leaving = 0.0
    else:
        leaving = choose(places.leaves, _key_first(local, reached).to(state.dtype), 0.0)
    if d_final_state is not None:
        leaving = choose(places.ends, d_final_state, leaving)
    return leaving if isinstance(leaving, Tensor) else None


def _plus(state: Tensor, transfer: Tensor, x: Tensor, here: Tensor | bool) -> Tensor:
    """The state of a summary, with what its transfer makes of x where `here` holds for a row."""
    if here is False:
        return state
    if isinstance(here, Tensor):
        here = here.any()
    return choose(here, (state.double() + through(transfer, x)).to(state.dtype), state)


def _key_first(call: dict, x: Tensor) -> Tensor:
    """A state [n, HV, K, V] from one in the layout of the call, and back."""
    return x.mT if call["state_v_first"] else x
