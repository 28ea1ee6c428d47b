"""``torchrun -m flaop bench --cp``: one sequence on all ranks, and on one of them."""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import flaop
import flaop.distributed
from flaop.bench import report, timing
from flaop.bench.case import Case, build_inputs, leaves, parse_shape
from flaop.bench.families import family, family_name
from flaop.bench.runner import new_record
from flaop.distributed import Group, resolve, shard
from flaop.distributed.fold import all_gather
from flaop.testing.tolerances import relative_error

OPS = ("chunk_kda", "chunk_gated_delta_rule", "chunk_simple_gla", "chunk_gla")
SHAPES = {"cuda": "B1T131072H32K128V128", "cpu": "B1T2048H2K32V32"}
# Inputs with a dimension of tokens.
_TOKENS = ("q", "k", "v", "g", "beta")


def run(args, path: Callable[[str], Path | None]) -> int:
    """Measure on the ranks that torchrun started; 0, or 2 with a sentence for bad arguments.

    path: of the device, where the records go.
    """
    try:
        if "LOCAL_RANK" not in os.environ:
            raise ValueError("--cp runs by torchrun --nproc-per-node N -m flaop bench --cp")
        device = (args.device or ("cuda" if torch.cuda.is_available() else "cpu")).split(":")[0]
        cases = [_case(args, op, mode, device) for op in args.op or OPS[:1] for mode in args.mode]
    except ValueError as error:
        print(f"flaop bench: {error}", file=sys.stderr)
        return 2
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        group = resolve(dist.group.WORLD)
        records = [measure(case, group, timing.Budget(args.quick)) for case in cases]
        if group.rank == 0:
            _report(path(device), args.commit, device, records)
    finally:
        dist.destroy_process_group()
    return 0


def _case(args, op: str, mode: str, device: str) -> Case:
    if op not in OPS:
        raise ValueError(f"--cp measures {', '.join(OPS)}, not {op}")
    shape = parse_shape(args.shape[0] if args.shape else SHAPES[device])
    ranks = int(os.environ["WORLD_SIZE"])
    if shape.T % ranks:
        raise ValueError(f"the shape's T, of all ranks, must be a multiple of {ranks}")
    kind = args.gate_kind[0] if args.gate_kind else family(op).gate_kinds[0]
    dtype = args.dtype or ("bf16" if device == "cuda" else "fp32")
    return Case(op, mode, shape, dtype, args.gates[0], kind, device, args.seed)


def measure(case: Case, group: Group, budget: timing.Budget) -> dict:
    """The record of a case: eager_ms on all ranks, the slowest of them, and single_ms on one."""
    whole = build_inputs(case)
    name = family_name(case.op)
    plain = getattr(flaop, case.op)
    fn = functools.partial(getattr(flaop.distributed, name), group=group)
    part = {
        key: shard(x, group).detach().clone().requires_grad_(x.requires_grad)
        if key in _TOKENS and x is not None else x
        for key, x in whole.items()
    }  # fmt: skip
    device = whole["q"].device
    record = new_record(case, "flaop")
    with torch.no_grad():
        error = relative_error(fn(**part)[0], shard(plain(**whole)[0], group))
    record["rel_err"] = _largest(error)
    single = torch.zeros(1)
    if group.rank == 0:  # the others wait, so that this GPU has the host to itself
        single[0] = statistics.median(_times(_call(case, plain, whole), device, budget, None))
    dist.broadcast(single, 0)
    times = _times(_call(case, fn, part), device, budget, group)
    gathers = _times(_collectives(case, group, device), device, budget, group)
    record["repeats"] = {"eager_ms": times}
    record["eager_ms"] = _largest(statistics.median(times))
    record["single_ms"] = single.item()
    record["all_gather_ms"] = _largest(statistics.median(gathers))
    record["ranks"] = group.size
    speedup = record["single_ms"] / record["eager_ms"]
    share = record["all_gather_ms"] / record["eager_ms"]
    record["note"] = (
        f"{group.size} ranks {speedup:.2f}x faster than one ({record['single_ms']:.2f} ms); "
        f"all-gathers alone {record['all_gather_ms']:.3f} ms, {share:.1%}"
    )
    return record


def _call(case: Case, fn: Callable, inputs: dict) -> Callable[[], object]:
    if case.mode == "fwd":
        return lambda: fn(**inputs)
    wanted = list(leaves(inputs).values())
    d_o = torch.randn_like(inputs["v"].detach())
    return lambda: torch.autograd.grad(fn(**inputs)[0], wanted, d_o)


def _collectives(case: Case, group: Group, device: torch.device) -> Callable[[], object]:
    """The all-gathers of a call alone: one a direction."""
    s = case.shape
    width = s.V + (s.K if "kda" in case.op or "delta" in case.op else 1)
    x = torch.zeros(s.B, s.HV, s.K, width, device=device)
    count = 2 if case.mode == "fwdbwd" else 1
    return lambda: [all_gather(x, group) for _ in range(count)]


def _times(
    call: Callable, device: torch.device, budget: timing.Budget, group: Group | None
) -> list[float]:
    """Milliseconds of each call; with a group every rank makes as many, and starts together."""
    for _ in range(2):
        call()
    start = time.perf_counter()
    call()
    _wait(device)
    seconds = time.perf_counter() - start
    repeats = budget.repeats(_largest(seconds) if group else seconds)
    times = []
    for _ in range(repeats):
        if group is not None:
            dist.barrier()
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _largest(x: float) -> float:
    """Of the ranks."""
    value = torch.tensor([x], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def _report(path: Path | None, commit: str | None, device: str, records: list[dict]) -> None:
    top = report.header(device, [], commit)
    print(f"{top['device']}, torch {top['torch']}, triton {top['triton']}, commit {top['commit']}")
    print(report.title())
    for record in records:
        print(report.row(record))
    if path:
        report.write_json(path, top, records)
        print(f"records: {path}")
