"""Runs one case with one contender; whatever goes wrong ends up in the record."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass

import torch

from flaop.bench import accuracy, first_call, floors, timing
from flaop.bench.case import Case, build_inputs
from flaop.bench.contenders import Unavailable, first_line, load

MEASURED = ("eager_ms", "graph_ms", "host_us", "peak_mib", "first_call_s", "rel_err")


@dataclass(frozen=True)
class Settings:
    quick: bool = False
    first_call: bool = False
    first_call_timeout_s: float = 600.0


def new_record(case: Case, contender: str) -> dict:
    """The record of docs/bench.md with every figure null."""
    return {
        "op": case.op,
        "mode": case.mode,
        "shape": case.shape.as_record(),
        "dtype": case.dtype,
        "gates": case.gates,
        "contender": contender,
        **dict.fromkeys(MEASURED),
        "note": "",
        "status": "ok",
        "device": case.device,
        "gate_kind": case.gate_kind,
        "split_size": case.split_size,
        "pool": case.pool,
        "state_v_first": case.state_v_first,
        "inputs": {**case.options, "lengths": case.shape.lengths},
        "graph_warm_ms": None,
        "bytes": None,
        "flops": None,
        "floor_ms": None,
        "errors": {},
        "repeats": {},
    }


def run_case(case: Case, contender: str, settings: Settings) -> dict:
    """One record; its ``status`` is ok, unavailable (a peer is missing or refuses) or failed."""
    record = new_record(case, contender)
    try:
        function = load(contender, case.op)
        with timing.on(torch.device(case.device)):
            _check_and_time(record, case, function, settings)
        if settings.first_call:
            timeout = settings.first_call_timeout_s
            record["first_call_s"] = first_call.measure(case, contender, timeout)
    except Unavailable as reason:
        _note(record, str(reason))
        record["status"] = "unavailable"
    except torch.OutOfMemoryError:
        _note(record, "out of memory")
        record["status"] = "failed"
    # Whatever one case raises, the others are still measured.
    except Exception as error:
        _note(record, first_line(error))
        record["status"] = "failed"
    if record["status"] == "failed" and contender not in ("flaop", "token loop"):
        record["status"] = "unavailable"
    gc.collect()
    if torch.device(case.device).type == "cuda":
        torch.cuda.empty_cache()
    return record


def _note(record: dict, text: str) -> None:
    record["note"] = "; ".join(part for part in (record["note"], text) if part)


def _check_and_time(record: dict, case: Case, function, settings: Settings) -> None:
    inputs = build_inputs(case)
    record.update(floors.work(case, inputs))
    if torch.device(case.device).type != "cuda":
        record["floor_ms"] = None  # the rates are a GPU's
    if record["contender"] != "token loop":
        _check(record, case, function, inputs)
    device = torch.device(case.device)
    if device.type == "cuda":
        _time_cuda(record, case, function, inputs, device, timing.Budget(settings.quick))
    else:
        times = timing.wall(timing.Work(case, function, inputs, 1), timing.Budget(settings.quick))
        record["repeats"]["eager_ms"] = times
        record["eager_ms"] = timing.median(times)
        _note(record, f"best {min(times):.3f} ms of {len(times)}")


def _check(record: dict, case: Case, function, inputs: dict) -> None:
    errors = accuracy.relative_errors(case, function, inputs)
    record["errors"] = {name: _finite(error) for name, error in errors.items()}
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    record["rel_err"] = _finite(errors[worst])
    if not errors[worst] <= accuracy.WRONG:
        error = f"relative error of {worst} {errors[worst]:.1e}"
        raise RuntimeError(f"wrong result, not timed: {error}")
    if errors[worst] > accuracy.limit(case):
        _note(record, f"error of {worst} above {accuracy.limit(case):g}")


def _time_cuda(record, case, function, inputs, device, budget) -> None:
    l2 = timing.l2_bytes(device)
    sets = timing.number_of_sets(floors.call_bytes(case, inputs), l2)
    sets = min(sets, timing.most_sets(case))
    work = timing.Work(case, function, inputs, sets)
    repeats = record["repeats"]
    repeats["eager_ms"] = timing.eager(work, device, budget)
    # Other work on the host slows a whole round: the quietest of three is the call's own time.
    rounds = [timing.host(work, device, budget)]
    record["peak_mib"] = timing.peak_memory(work, device)
    rounds.append(timing.host(work, device, budget))
    if sets > 1:
        _note(record, f"cold L2: {sets} input sets rotated")
    try:
        repeats["graph_ms"] = timing.graph(work, device, budget)
        if sets > 1:
            repeats["graph_warm_ms"] = timing.graph(work, device, budget, warm=True)
    # A peer may fail inside a capture in any way; its other figures stand.
    except Exception as error:
        _note(record, f"no CUDA graph ({first_line(error)})")
    rounds.append(timing.host(work, device, budget))
    repeats["host_us"] = min(rounds, key=timing.median)
    for name in ("eager_ms", "host_us"):
        record[name] = timing.median(repeats[name])
    record["graph_ms"] = timing.median(repeats.get("graph_ms"))
    record["graph_warm_ms"] = timing.median(repeats.get("graph_warm_ms"))
    if record["graph_warm_ms"] is not None:
        _note(record, f"graph on one warm set {record['graph_warm_ms'] * 1e3:.1f} us")


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
