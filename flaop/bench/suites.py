"""Fixed sets of cases: what they share, the foundation's targets and the crossover."""

from __future__ import annotations

from dataclasses import dataclass

from flaop.bench.case import Case, Shape, parse_shape
from flaop.bench.families import ATTENTION, PRECOMPUTED, family
from flaop.bench.report import best_ms, case_key

CROSSOVER_T = (512, 1024, 2048, 4096, 8192, 16384, 32768)
CROSSOVER_T_CPU = (512, 1024, 2048)
TOKEN_LOOP = "token loop"


@dataclass(frozen=True)
class Entry:
    """A case, the contenders that belong to it beside flaop, and whether a first call is timed."""

    label: str
    case: Case
    others: tuple[str, ...] = ()
    first_call: bool = False


@dataclass(frozen=True)
class Target:
    """One line of a suite's speed and memory targets."""

    label: str
    text: str
    figure: str
    # Largest allowed value of the figure; with ratio_to the least factor that one is slower by.
    limit: float
    ratio_to: str | None = None
    # That contender's milliseconds on an H200 on 2026-11-29, for a run without it.
    quoted: float | None = None
    # The entry whose figure is taken off first: what a backward adds to the forward.
    less: str | None = None


@dataclass(frozen=True)
class Verdict:
    text: str
    value: float | None
    met: bool | None

    def __str__(self) -> str:
        state = {True: "met", False: "NOT MET", None: "not measured"}[self.met]
        return f"{state:>12}  {self.text}"


def entry(
    label: str,
    op: str,
    mode: str,
    shape: Shape,
    device: str,
    seed: int = 0,
    dtype: str = "bf16",
    gate_kind: str | None = None,
    split_size: int = 0,
    pool: str | None = None,
    state_v_first: bool = False,
    others: tuple[str, ...] = (),
    first_call: bool = False,
) -> Entry:
    """A case with mixed gates, by default of the first kind that the family takes."""
    kind = gate_kind or family(op).gate_kinds[0]
    case = Case(
        *(op, mode, shape, dtype, "mixed", kind, device, seed, state_v_first, split_size, pool)
    )
    return Entry(label, case, others, first_call)


def cpu_entry(label: str, op: str, seed: int) -> Entry:
    """A forward on the CPU beside the token loop, of a log gate in fp32."""
    shape = parse_shape("cpu")
    return entry(*(label, op, "fwd", shape, "cpu", seed, "fp32", PRECOMPUTED), others=(TOKEN_LOOP,))


def foundation(device: str, seed: int = 0) -> list[Entry]:
    """Every speed and memory line of the foundation. Without a GPU: the CPU line alone."""
    entries = []
    if device.startswith("cuda"):
        for kind in ("bounded", "softplus"):
            for mode in ("fwd", "fwdbwd"):
                what = (f"{mode} {kind}", "chunk_kda", mode, parse_shape("h96"), device, seed)
                first = kind == "bounded"
                entries.append(entry(*what, gate_kind=kind, first_call=first))
        for batch in (256, 32, 1):
            shape = parse_shape(f"decode{batch}")
            what = (f"step B{batch}", "fused_recurrent_kda", "step", shape, device, seed)
            entries.append(entry(*what))
    return [*entries, cpu_entry("cpu", "chunk_kda", seed)]


FOUNDATION_TARGETS = (
    Target("fwd bounded", "forward, bounded gate, H96", "eager_ms", 2.0, "fla", 2.63),
    Target("fwdbwd bounded", "forward + backward, bounded gate, H96", "eager_ms", 1.5, "fla", 12.5),
    Target("fwd softplus", "forward, softplus gate, H96", "eager_ms", 2.0, "fla", 2.92),
    Target(
        "fwdbwd softplus", "forward + backward, softplus gate, H96", "eager_ms", 1.5, "fla", 16.3
    ),
    Target("fwd bounded", "peak extra memory without gradient (MiB)", "peak_mib", 800),
    Target("fwdbwd bounded", "peak extra memory, forward + backward (MiB)", "peak_mib", 4500),
    Target("fwd bounded", "host time of an eager call without gradient (us)", "host_us", 300),
    Target("fwd bounded", "first call, forward (s)", "first_call_s", 20),
    Target(
        "fwdbwd bounded", "first call, backward added (s)", "first_call_s", 30, less="fwd bounded"
    ),
    Target("step B256", "fused_recurrent_kda T = 1, B256 H32, CUDA graph (ms)", "graph_ms", 0.300),
    Target("step B32", "fused_recurrent_kda T = 1, B32 H32, CUDA graph (ms)", "graph_ms", 0.045),
    Target("cpu", "forward on the CPU against the token loop", "best_ms", 5.0, TOKEN_LOOP),
)


def figure(record: dict | None, name: str) -> float | None:
    if record is None:
        return None
    if name == "best_ms":
        return best_ms(record)
    return record[name]


def by_label(entries: list[Entry], records: list[dict]) -> dict[tuple[str, str], dict]:
    """The record of each entry's label and contender."""
    labels = {case_key_of(entry.case): entry.label for entry in entries}
    return {(labels.get(case_key(r)), r["contender"]): r for r in records}


def judge(
    entries: list[Entry], records: list[dict], targets: tuple[Target, ...] = FOUNDATION_TARGETS
) -> list[Verdict]:
    """The targets, by default the foundation's, against what was measured."""
    labels = {entry.label for entry in entries}
    found = by_label(entries, records)
    verdicts = []
    for target in targets:
        if target.label not in labels:
            continue
        value = figure(found.get((target.label, "flaop")), target.figure)
        if target.less is not None:
            forward = figure(found.get((target.less, "flaop")), target.figure)
            value = None if None in (value, forward) else value - forward
        if target.ratio_to is None:
            verdicts.append(_absolute(target, value))
        else:
            other = figure(found.get((target.label, target.ratio_to)), target.figure)
            verdicts.append(_ratio(target, value, other))
    return verdicts


def case_key_of(case: Case) -> tuple:
    from flaop.bench.runner import new_record

    return case_key(new_record(case, "flaop"))


def _absolute(target: Target, value: float | None) -> Verdict:
    if value is None:
        return Verdict(f"{target.text}: at most {target.limit:g}", None, None)
    text = f"{target.text}: {value:.4g}, at most {target.limit:g}"
    return Verdict(text, value, value <= target.limit)


def _ratio(target: Target, value: float | None, other: float | None) -> Verdict:
    goal = f"at least {target.limit:g}x faster than {target.ratio_to}"
    source = "same run"
    if other is None and target.quoted is not None:
        other, source = target.quoted, "an H200 on 2026-11-29, not the same run"
    if value is None or other is None:
        return Verdict(f"{target.text}: {goal}", None, None)
    ratio = other / value
    times = f"{value:.3f} ms, {target.ratio_to} {other:.3f} ms ({source})"
    text = f"{target.text}: {times}: {ratio:.2f}x, {goal}"
    return Verdict(text, ratio, ratio >= target.limit)


def crossover(
    device: str, shape_text: str | None, dtype: str, modes: list[str], quick: bool
) -> list[Entry]:
    """Attention, chunk and recurrent over T: where linear attention starts to pay."""
    cuda = device.startswith("cuda")
    base = shape_text or ("B1T512H16K128V128" if cuda else "B1T512H2K64V64")
    lengths = CROSSOVER_T if cuda else CROSSOVER_T_CPU
    if quick:
        lengths = lengths[::3]
    first = parse_shape(base)
    if first.lengths is not None or first.HV != first.H:
        raise ValueError("the crossover compares plain batches: no packed lengths, and HV = H")
    entries = []
    for T in lengths:
        shape = type(first)(first.B, T, first.H, first.HV, first.K, first.V)
        for mode in modes:
            # One draw of inputs serves the three ops.
            for op in ("chunk_kda", "fused_recurrent_kda", ATTENTION):
                label = f"T{T} {mode} {op}"
                entries.append(entry(label, op, mode, shape, device, dtype=dtype))
    return entries


def crossing(records: list[dict]) -> list[str]:
    """For each mode, the shortest T at which each linear op is faster than attention."""

    def time_of(record):
        return record["eager_ms"] if record["graph_ms"] is None else record["graph_ms"]

    lines = []
    for mode in dict.fromkeys(r["mode"] for r in records):
        times = {
            (r["op"], r["shape"]["T"]): time_of(r)
            for r in records
            if r["mode"] == mode and time_of(r) is not None
        }
        for op in ("chunk_kda", "fused_recurrent_kda"):
            both = sorted(T for o, T in times if o == op and (ATTENTION, T) in times)
            faster = [T for T in both if times[op, T] < times[ATTENTION, T]]
            if both:
                found = f"from T = {faster[0]} on" if faster else f"at no T up to {both[-1]}"
                lines.append(f"{mode}: {op} is faster than attention {found}")
    return lines
