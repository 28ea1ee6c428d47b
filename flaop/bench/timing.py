"""The clocks. Definitions of every column: docs/bench.md."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable

import torch

from flaop.bench.case import SLOTS, Case, another_set, leaves

MIB = 2**20
DEFAULT_L2_BYTES = 60 * 10**6
# Work below this many L2 sizes per call rotates its inputs, over this many L2 sizes in all.
RESIDENT_BELOW = 4
ROTATE_OVER = 5
MOST_SETS = 64


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """The device as the current one: events, streams and captures belong to that."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Budget:
    """How long one column may take, and how many repeats at least and at most."""

    def __init__(self, quick: bool):
        self.seconds = 0.15 if quick else 0.6
        self.least = 3 if quick else 10
        self.most = 20 if quick else 100

    def repeats(self, seconds_per_call: float) -> int:
        wanted = self.seconds / max(seconds_per_call, 1e-7)
        return int(min(max(wanted, self.least), self.most))


def l2_bytes(device: torch.device) -> int:
    size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    return size or DEFAULT_L2_BYTES


def number_of_sets(bytes_per_call: int, l2: int) -> int:
    """How many copies of the inputs to rotate so that no call finds its data in the L2."""
    if bytes_per_call >= RESIDENT_BELOW * l2:
        return 1
    return min(MOST_SETS, math.ceil(ROTATE_OVER * l2 / max(bytes_per_call, 1)))


def most_sets(case: Case) -> int:
    """Sets of a step op have slots of their own in one pool."""
    return MOST_SETS if case.pool is None else min(MOST_SETS, SLOTS // case.shape.N)


class Work:
    """One contender on one case, ready to run on any of its input sets."""

    def __init__(self, case: Case, function: Callable, inputs: dict, sets: int):
        self.case, self.function = case, function
        self.sets = [inputs] + [another_set(inputs, index) for index in range(1, sets)]
        self.names = list(leaves(inputs))
        # o has the shape and dtype of v.
        self.d_o = torch.randn_like(inputs["v"].detach()) if self.names else None

    def run(self, index: int = 0):
        """One call, with its backward in mode fwdbwd; returns what keeps the outputs' addresses."""
        inputs = self.sets[index % len(self.sets)]
        if self.case.mode != "fwdbwd":
            with torch.no_grad():
                return self.function(**inputs)
        o, _ = self.function(**inputs)
        return torch.autograd.grad(o, [inputs[name] for name in self.names], self.d_o)


def _seconds(run: Callable, device: torch.device) -> float:
    """A rough time of one call, to choose the number of repeats."""
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    run(0)
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _events(run: Callable, repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of each repeat between two CUDA events."""
    stamps = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    torch.cuda.synchronize(device)
    for index, (start, end) in enumerate(stamps):
        start.record()
        run(index)
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in stamps]


def eager(work: Work, device: torch.device, budget: Budget) -> list[float]:
    for index in range(3):
        work.run(index)
    return _events(work.run, budget.repeats(_seconds(work.run, device)), device)


def host(work: Work, device: torch.device, budget: Budget) -> list[float]:
    """Microseconds until a call returns, the queue empty when it starts."""
    work.run(0)
    times = []
    for index in range(budget.repeats(_seconds(work.run, device))):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        work.run(index)
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize(device)
    return times


def peak_memory(work: Work, device: torch.device) -> float:
    """MiB at the peak of one call above what was allocated before it, outputs included."""
    work.run(0)
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work.run(0)
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


def graph(work: Work, device: torch.device, budget: Budget, warm: bool = False) -> list[float]:
    """Milliseconds per call of a replayed CUDA graph that holds one call per input set.

    Outputs stay alive while the graph is captured, so that they have addresses of their own too.
    ``warm`` captures the same number of calls on the first set alone: its data stay in the L2 if
    they fit.
    """
    calls = len(work.sets)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for index in range(3):
            work.run(index)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    captured, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(captured, stream=side):
        for index in range(calls):
            result = work.run(0 if warm else index)
            kept = [result] if warm else [*kept, result]

    def replay(_):
        captured.replay()

    for _ in range(3):
        replay(0)
    times = _events(replay, budget.repeats(_seconds(replay, device)), device)
    return [time_ms / calls for time_ms in times]


def wall(work: Work, budget: Budget) -> list[float]:
    """Milliseconds of each call on the CPU: ten repeats after one warm-up, more for short calls."""
    start = time.perf_counter()
    work.run(0)
    repeats = budget.repeats(time.perf_counter() - start)
    times = []
    for index in range(repeats):
        start = time.perf_counter()
        work.run(index)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def median(values: list[float] | None) -> float | None:
    return statistics.median(values) if values else None
