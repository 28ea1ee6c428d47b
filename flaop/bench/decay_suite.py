"""The decay families' lines with their targets: simple_gla, gla and retention."""

from __future__ import annotations

import functools

from flaop.bench.case import DTYPES, parse_shape
from flaop.bench.families import CHUNK
from flaop.bench.suites import (
    Entry,
    Target,
    Verdict,
    by_label,
    cpu_entry,
    entry,
    figure,
    judge,
)
from flaop.bench.timing import MIB

SPLIT = 8 * CHUNK
LEAST_SAVED = 0.7  # of the bytes of the chunk states and their gradients
MOST_SLOWER = 1.25

DECAY_TARGETS = (
    Target("simple_gla fwd", "chunk_simple_gla forward, H96", "eager_ms", 1.5, "fla", 0.69),
    Target("simple_gla fwdbwd", "chunk_simple_gla forward + backward, H96 (ms)", "eager_ms", 3.0),
    Target("gla fwd", "chunk_gla forward, H96", "eager_ms", 2.0, "fla", 2.02),
    Target("gla fwdbwd", "chunk_gla forward + backward, H96", "eager_ms", 2.0, "fla"),
    Target("retention fwdbwd", "retention forward + backward, K256 (ms)", "eager_ms", 10.0),
    Target("simple_gla fwd", "chunk_simple_gla, host time of a call (us)", "host_us", 250),
    Target("gla fwd", "chunk_gla, host time of a call (us)", "host_us", 250),
    Target("simple_gla fwd", "chunk_simple_gla, first call (s)", "first_call_s", 15),
    Target("gla fwd", "chunk_gla, first call (s)", "first_call_s", 15),
)


def decay(device: str, seed: int = 0) -> list[Entry]:
    """Every speed and memory line of the decay families. Without a GPU: a line each on the CPU."""
    if not device.startswith("cuda"):
        names = ("simple_gla", "gla", "retention")
        return [cpu_entry(f"{name} cpu", f"chunk_{name}", seed) for name in names]
    make = functools.partial(entry, device=device, seed=seed)
    entries = []
    for name in ("simple_gla", "gla"):
        op, shape = f"chunk_{name}", parse_shape("h96")
        entries.append(make(f"{name} fwd", op, "fwd", shape, first_call=True))
        entries.append(make(f"{name} fwdbwd", op, "fwdbwd", shape))
        entries.append(make(f"{name} split", op, "fwdbwd", shape, split_size=SPLIT))
    for mode in ("fwd", "fwdbwd"):
        entries.append(make(f"retention {mode}", "chunk_retention", mode, parse_shape("wide")))
    for name in ("simple_gla", "gla"):
        for batch in (256, 32, 1):
            shape = parse_shape(f"decode{batch}")
            label = f"{name} step B{batch}"
            entries.append(make(label, f"fused_recurrent_{name}", "step", shape))
    return entries


def judge_decay(entries: list[Entry], records: list[dict]) -> list[Verdict]:
    """The targets, and those that compare a run with split_size with the one without."""
    verdicts = judge(entries, records, DECAY_TARGETS)
    labels = {entry.label for entry in entries}
    found = by_label(entries, records)
    for name in ("simple_gla", "gla"):
        if {f"{name} fwdbwd", f"{name} split"} <= labels:
            whole, split = (found.get((f"{name} {x}", "flaop")) for x in ("fwdbwd", "split"))
            verdicts += [_memory(name, whole, split), _time(name, whole, split)]
    return verdicts


def state_bytes(record: dict) -> int:
    """Bytes of the states that enter the chunks of a call, and of their gradients."""
    s = record["shape"]
    return (
        2
        * s["B"]
        * (s["T"] // CHUNK)
        * s["HV"]
        * s["K"]
        * s["V"]
        * DTYPES[record["dtype"]].itemsize
    )


def _memory(name: str, whole: dict | None, split: dict | None) -> Verdict:
    peaks = [figure(record, "peak_mib") for record in (whole, split)]
    text = f"chunk_{name}, memory that split_size = {SPLIT} saves of chunk states and gradients"
    goal = f"at least {LEAST_SAVED:.0%}"
    if None in peaks:
        return Verdict(f"{text}: {goal}", None, None)
    states = state_bytes(whole) / MIB
    saved = (peaks[0] - peaks[1]) / states
    sizes = f"peak {peaks[0]:.0f} MiB, split {peaks[1]:.0f} MiB, states {states:.0f} MiB"
    return Verdict(f"{text}: {sizes}: {saved:.0%}, {goal}", saved, saved >= LEAST_SAVED)


def _time(name: str, whole: dict | None, split: dict | None) -> Verdict:
    times = [figure(record, "eager_ms") for record in (whole, split)]
    text = f"chunk_{name} forward + backward, split_size = {SPLIT} against none"
    goal = f"at most {MOST_SLOWER}x"
    if None in times:
        return Verdict(f"{text}: {goal}", None, None)
    ratio = times[1] / times[0]
    return Verdict(
        f"{text}: {times[1]:.3f} ms, {times[0]:.3f} ms: {ratio:.2f}x, {goal}",
        ratio,
        ratio <= MOST_SLOWER,
    )


def gate_cost(entries: list[Entry], records: list[dict]) -> list[str]:
    """What a gate per key channel costs beside one per head, for each contender."""
    found = by_label(entries, records)
    lines = []
    for contender in dict.fromkeys(r["contender"] for r in records):
        for mode in ("fwd", "fwdbwd", "cpu"):
            names = (f"{name} {mode}" for name in ("gla", "simple_gla"))
            channel, head = (figure(found.get((n, contender)), "eager_ms") for n in names)
            if channel and head:
                lines.append(
                    f"{mode}: chunk_gla / chunk_simple_gla of {contender} = {channel / head:.2f}"
                )
    return lines
