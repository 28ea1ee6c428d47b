"""The lines of KDA's fused inference forward with their targets, through the dispatcher."""

from __future__ import annotations

import dataclasses
import functools

from flaop.bench.case import GATES, parse_shape
from flaop.bench.delta_suite import PACKED
from flaop.bench.suites import Entry, Target, Verdict, cpu_entry, entry, judge

# Shape, and milliseconds of a replayed graph at most.
ROWS = {
    "h96": (parse_shape("h96"), 0.95),
    "h64": (parse_shape("h64"), 0.75),
    "h32": (parse_shape("h32"), 0.60),
    "long": (parse_shape("long"), 4.0),
    "h16": (parse_shape("B1T4096H16K128V128"), 0.33),
    "batch": (parse_shape("batch"), 0.60),
    "t1024": (parse_shape("B1T1024H32K128V128"), 0.116),
    "packed lengths": (parse_shape("h96", PACKED), 1.00),
    "packed equal": (parse_shape("packed"), 0.90),
}
HOST_US = 30
FLASH_TARGETS = (
    *(
        Target(f"flash {name} mixed", f"kda forward, {shape}, CUDA graph (ms)", "graph_ms", limit)
        for name, (shape, limit) in ROWS.items()
    ),
    *(
        Target(f"flash h96 {gates}", f"kda forward, {gates} gates (ms)", "graph_ms", 0.95)
        for gates in ("fast", "slow")
    ),
    Target("flash h96 mixed", "kda forward, host time of a call (us)", "host_us", HOST_US),
)


def flash(device: str, seed: int = 0) -> list[Entry]:
    """Forward without gradient, all options in the kernel, three gate regimes.

    Without a GPU: one line on the CPU.
    """
    if not device.startswith("cuda"):
        return [cpu_entry("flash cpu", "kda", seed)]
    make = functools.partial(entry, op="kda", mode="fwd", device=device, seed=seed)
    entries = []
    for name, (shape, _) in ROWS.items():
        mixed = make("flash", shape=shape)
        for gates in GATES:
            case = dataclasses.replace(mixed.case, gates=gates)
            entries.append(Entry(f"flash {name} {gates}", case))
    return entries


def judge_flash(entries: list[Entry], records: list[dict]) -> list[Verdict]:
    """The targets of the fused forward against what was measured."""
    return judge(entries, records, FLASH_TARGETS)
