"""The lines of decode with their targets: steps on a pool of states, and what a call costs."""

from __future__ import annotations

import functools
from dataclasses import replace

from flaop.bench.case import parse_shape
from flaop.bench.families import POOL_OPS, family_name
from flaop.bench.suites import Entry, Target, Verdict, by_label, entry, figure, judge

BATCHES = (256, 32, 1, 128, 8)
HEADS = (32, 96)
POOLS = ("fp32", "bf16")
# Most milliseconds of a replay with 32 value heads, by pool and batch.
TIMES = {
    "fp32": {256: 0.285, 32: 0.040, 1: 0.0065},
    "bf16": {256: 0.150, 32: 0.024},
}
STEP_HOST_US = 20
CHUNK_HOST_US = 120
FIRST_CALLS_S = 3


def step_label(family: str, heads: int, batch: int, pool: str, layout: str = "VK") -> str:
    return f"{family} HV{heads} B{batch} {pool} {layout}"


DECODE_TARGETS = (
    *(
        Target(
            step_label(family, 32, batch, pool),
            f"{family}_step_, B{batch}, {pool} pool, CUDA graph (ms)",
            "graph_ms",
            limit,
        )
        for family in ("kda", "gated_delta_rule")
        for pool, limits in TIMES.items()
        for batch, limit in limits.items()
    ),
    Target(
        step_label("kda", 32, 32, "fp32"),
        "kda_step_, host time of a call (us)",
        "host_us",
        STEP_HOST_US,
    ),
    Target("chunk_kda fwd", "chunk_kda, host time of a call (us)", "host_us", CHUNK_HOST_US),
)


def _step(family: str, heads: int, batch: int, pool: str, layout: str, device: str, seed: int):
    op = f"{family}_step_"
    H = heads // 2 if family == "gated_delta_rule" else heads
    shape = parse_shape(f"B{batch}T1H{H}HV{heads}K128V128")
    label = step_label(family, heads, batch, pool, layout)
    first = label == step_label("kda", 32, 32, "fp32")
    dtype = "bf16" if device.startswith("cuda") else "fp32"
    return entry(
        label, op, "step", shape, device, seed, dtype,
        gate_kind="softplus" if family == "gated_delta_rule" else None,
        pool=pool, state_v_first=layout == "VK", first_call=first,
    )  # fmt: skip


def decode(device: str, seed: int = 0) -> list[Entry]:
    """Every speed line of decode: steps of all families with slots [V, K], KDA's with [K, V], too.

    Without a GPU: a step of each family.
    """
    families = [family_name(op) for op in POOL_OPS]
    if not device.startswith("cuda"):
        steps = (_step(name, 32, 1, "fp32", "VK", device, seed) for name in families)
        return [replace(step, label=f"{step.label} cpu") for step in steps]
    make = functools.partial(_step, device=device, seed=seed)
    entries = [
        make(name, heads, batch, pool, "VK")
        for name in families
        for heads in HEADS
        for batch in BATCHES
        for pool in POOLS
    ]
    entries += [make("kda", 32, batch, pool, "KV") for batch in BATCHES for pool in POOLS]
    chunk = functools.partial(entry, op="chunk_kda", shape=parse_shape("h32"), device=device)
    entries.append(chunk("chunk_kda fwd", mode="fwd", seed=seed))
    entries.append(chunk("chunk_kda fwdbwd", mode="fwdbwd", seed=seed, first_call=True))
    return entries


def judge_decode(entries: list[Entry], records: list[dict]) -> list[Verdict]:
    """The targets, and what the first calls of training and decode take together."""
    verdicts = judge(entries, records, DECODE_TARGETS)
    labels = ("chunk_kda fwdbwd", step_label("kda", 32, 32, "fp32"))
    if set(labels) <= {entry.label for entry in entries}:
        found = by_label(entries, records)
        times = [figure(found.get((label, "flaop")), "first_call_s") for label in labels]
        verdicts.append(_first_calls(times))
    return verdicts


def _first_calls(times: list[float | None]) -> Verdict:
    text = "first calls of chunk_kda forward + backward and of kda_step_ (s)"
    if None in times:
        return Verdict(f"{text}: at most {FIRST_CALLS_S}", None, None)
    total = sum(times)
    parts = " + ".join(f"{t:.2f}" for t in times)
    return Verdict(f"{text}: {parts}, at most {FIRST_CALLS_S}", total, total <= FIRST_CALLS_S)
