"""The delta families' lines with their targets: gated_delta_rule and delta_rule."""

from __future__ import annotations

import functools

from flaop.bench.case import parse_shape
from flaop.bench.suites import Entry, Target, Verdict, cpu_entry, entry, judge

PACKED = (1300, 547, 2048, 963, 271, 3063)


def _call_targets(name: str, op: str) -> tuple[Target, ...]:
    """What every chunk call is held to."""
    more = f"{op}, first call, backward added (s)"
    return (
        Target(f"{name} fwd", f"{op}, host time of a call (us)", "host_us", 250),
        Target(f"{name} fwd", f"{op}, first call (s)", "first_call_s", 15),
        Target(f"{name} fwdbwd", more, "first_call_s", 25, less=f"{name} fwd"),
    )


DELTA_TARGETS = (
    Target("gdn fwd", "chunk_gated_delta_rule forward, CUDA graph (ms)", "graph_ms", 0.50),
    Target("gdn fwd", "chunk_gated_delta_rule forward, eager (ms)", "eager_ms", 0.60),
    Target("gdn fwd H64", "chunk_gated_delta_rule forward, H64, eager (ms)", "eager_ms", 0.75),
    Target("gdn fwdbwd", "chunk_gated_delta_rule forward + backward (ms)", "eager_ms", 2.0),
    Target("gdn fwd", "chunk_gated_delta_rule, peak without gradient (MiB)", "peak_mib", 200),
    *_call_targets("gdn", "chunk_gated_delta_rule"),
    *_call_targets("delta", "chunk_delta_rule"),
)


def delta(device: str, seed: int = 0) -> list[Entry]:
    """Every speed and memory line of the delta families. Without a GPU: a line each on the CPU.

    Log gate and beta are given, as every peer takes them; "fused": both are made in the op.
    """
    gdn, rule = "chunk_gated_delta_rule", "chunk_delta_rule"
    if not device.startswith("cuda"):
        return [cpu_entry("gdn cpu", gdn, seed), cpu_entry("delta cpu", rule, seed)]
    make = functools.partial(entry, device=device, seed=seed)
    grouped, packed, plain = parse_shape("gdn"), parse_shape("gdn", PACKED), parse_shape("h32")
    modes = ("fwd", "fwdbwd")
    entries = [make(f"gdn {mode}", gdn, mode, grouped, first_call=True) for mode in modes]
    entries += [
        make(f"gdn {mode} fused", gdn, mode, grouped, gate_kind="softplus") for mode in modes
    ]
    entries += [make(f"gdn {mode} packed", gdn, mode, packed) for mode in modes]
    entries.append(make("gdn fwd H64", gdn, "fwd", parse_shape("h64")))
    entries += [make(f"delta {mode}", rule, mode, plain, first_call=True) for mode in modes]
    decodes = (("gdn", "gated_delta_rule", "H16HV32"), ("delta", "delta_rule", "H32"))
    for name, op, heads in decodes:
        for batch in (256, 32, 1):
            shape = parse_shape(f"B{batch}T1{heads}K128V128")
            entries.append(make(f"{name} step B{batch}", f"fused_recurrent_{op}", "step", shape))
    return entries


def judge_delta(entries: list[Entry], records: list[dict]) -> list[Verdict]:
    """The targets of the delta families against what was measured."""
    return judge(entries, records, DELTA_TARGETS)
