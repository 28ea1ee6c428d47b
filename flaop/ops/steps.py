"""Kernels and fakes of the decode ops on a pool of states, for every family.

Schemas, autograd and version counters are in csrc/ops/steps.cpp.
"""

from functools import partial

import torch
from torch import Tensor

from flaop.validation import checks, step_values, steps
from flaop.validation.steps import FAMILIES, CommitCall, PoolCall, StepCall

from .common import device_guard, implement


def _named(op: str) -> tuple[str, ...]:
    """The names of the arguments of an op: a family lacks those that it has no use for."""
    schema = getattr(torch.ops.flaop, op).default._schema
    return tuple(argument.name for argument in schema.arguments)


def _run(kind: str, call: StepCall | CommitCall | PoolCall, x: Tensor, **options):
    """step, verify, commit or chunk_pool on the device of x; options are of the launcher alone."""
    if x.device.type == "cpu":
        from flaop.reference import steps as reference

        return getattr(reference, kind)(call)
    from flaop.launch import decode

    with device_guard(x):
        return getattr(decode, kind)(call, **options)


def _new_output(call: StepCall) -> Tensor:
    return call.v.new_empty((call.B, call.T, call.HV, call.V))


def _new_kept(call: StepCall) -> tuple[Tensor, Tensor, Tensor]:
    """k, u and g of verify, contiguous whatever the strides of the inputs."""
    tokens, gate = (call.B, call.T), (0,)
    if call.gated:
        gate = (*tokens, call.HV, call.K) if call.channel else (*tokens, call.HV)
    return tuple(
        call.q.new_empty(shape, dtype=call.state_dtype)
        for shape in ((*tokens, call.H, call.K), (*tokens, call.HV, call.V), gate)
    )


def _step_fake(family: str, names: tuple[str, ...], *args) -> Tensor:
    return _new_output(steps.check_step(family, **dict(zip(names, args, strict=False))))


def _step(family: str, names: tuple[str, ...], *args) -> Tensor:
    call = steps.check_step(family, **dict(zip(names, args, strict=False)))
    if checks.DEBUG:
        step_values.check_step(call)
    if call.N == 0:
        return _new_output(call).zero_()
    # a remembered call is not checked again
    return _run("step", call, call.q, remember=not checks.DEBUG)


def _pool_fake(family: str, names: tuple[str, ...], *args) -> Tensor:
    return _new_output(steps.check_pool(family, **dict(zip(names, args, strict=False))).step)


def _pool(family: str, names: tuple[str, ...], *args) -> Tensor:
    call = steps.check_pool(family, **dict(zip(names, args, strict=False)))
    if checks.DEBUG:
        step_values.check_pool(call)
    if call.step.N == 0:
        return _new_output(call.step).zero_()
    return _run("chunk_pool", call, call.step.q)


def _verify_fake(family: str, names: tuple[str, ...], *args) -> tuple[Tensor, ...]:
    call = steps.check_verify(family, **dict(zip(names, args, strict=False)))
    return _new_output(call), *_new_kept(call)


def _verify(family: str, names: tuple[str, ...], *args) -> tuple[Tensor, ...]:
    call = steps.check_verify(family, **dict(zip(names, args, strict=False)))
    if checks.DEBUG:
        step_values.check_verify(call)
    if call.N == 0:
        return tuple(x.zero_() for x in (_new_output(call), *_new_kept(call)))
    return _run("verify", call, call.q)


def _commit_fake(*args) -> None:
    steps.check_commit(*args)


def _commit(*args) -> None:
    call = steps.check_commit(*args)
    if checks.DEBUG:
        step_values.check_commit(call)
    if call.N > 0:
        _run("commit", call, call.k)


for family in FAMILIES:
    for name, kernel, fake in (
        (f"{family}_step_", _step, _step_fake),
        (f"chunk_{family}_pool_", _pool, _pool_fake),
        (f"{family}_verify", _verify, _verify_fake),
    ):
        names = _named(name)
        torch.library.register_fake(f"flaop::{name}", partial(fake, family, names))
        implement(name, partial(kernel, family, names), remembered=kernel is _step)
    torch.library.register_fake(f"flaop::{family}_commit_", _commit_fake)
    implement(f"{family}_commit_", _commit)
