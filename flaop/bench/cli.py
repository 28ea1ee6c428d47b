"""The command line of ``python -m flaop bench``."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch

from flaop.bench import decay_suite, decode_suite, delta_suite, flash_suite, plot, report, suites
from flaop.bench.case import DTYPES, GATES, MODES, PRESETS, Case, parse_shape
from flaop.bench.contenders import PEERS
from flaop.bench.families import ATTENTION, GATE_KINDS, OPS, POOL_OPS, family
from flaop.bench.runner import Settings, run_case
from flaop.bench.suites import Entry

AUTO = "auto"
# Suites with targets: their cases, and what judges the records.
JUDGED = {
    "foundation": (suites.foundation, suites.judge),
    "decay": (decay_suite.decay, decay_suite.judge_decay),
    "delta": (delta_suite.delta, delta_suite.judge_delta),
    "decode": (decode_suite.decode, decode_suite.judge_decode),
    "flash": (flash_suite.flash, flash_suite.judge_flash),
}
SUITES = (*JUDGED, "crossover")


def parser() -> argparse.ArgumentParser:
    path = {"nargs": "?", "const": AUTO, "metavar": "PATH"}
    p = argparse.ArgumentParser(
        prog="python -m flaop bench",
        description="Measure flaop and, where asked, its peers. Columns: docs/bench.md.",
    )
    p.add_argument("--suite", choices=SUITES, help="a fixed set of cases")
    p.add_argument(
        "--only", metavar="TEXT", help="of a suite: only cases whose label contains TEXT"
    )
    p.add_argument("--op", nargs="+", choices=(*OPS, "crossover"), help="default: KDA, by mode")
    p.add_argument(
        "--shape",
        nargs="+",
        help=f"such as B1T8192H96K128V128, or a preset: {', '.join(PRESETS)}",
    )
    p.add_argument("--lengths", help="packed lengths, such as 1300,547,2048 (their sum replaces T)")
    p.add_argument("--mode", nargs="+", choices=MODES, default=["fwd"])
    p.add_argument("--gates", nargs="+", choices=GATES, default=["mixed"])
    p.add_argument(
        "--gate-kind",
        nargs="+",
        choices=GATE_KINDS,
        help="default: bounded for KDA, precomputed for the others",
    )
    p.add_argument(
        "--split-size",
        nargs="+",
        type=int,
        default=[0],
        metavar="TOKENS",
        help="of the chunk ops of the decay families; 0: none",
    )
    p.add_argument(
        "--pool",
        nargs="+",
        choices=tuple(DTYPES),
        default=["fp32"],
        help="dtypes of the pool of the step ops",
    )
    p.add_argument("--dtype", choices=tuple(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    p.add_argument("--device", help="default: cuda if there is a GPU, else cpu")
    p.add_argument("--state-v-first", action="store_true", help="states as [N, HV, V, K]")
    p.add_argument(
        "--vs", nargs="+", choices=PEERS, default=[], help="peers to measure beside flaop"
    )
    p.add_argument(
        "--cp",
        action="store_true",
        help="under torchrun: chunk ops on sequences that all ranks share, and on one rank",
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--quick", action="store_true", help="fewer repeats, no first call")
    p.add_argument(
        "--first-call",
        choices=("none", "flaop", "all"),
        help="whose first call is timed in a fresh process (default: flaop's where a suite asks)",
    )
    p.add_argument("--first-call-timeout", type=float, default=600.0, metavar="SECONDS")
    p.add_argument("--json", **path, help="write the records, by default under benchmarks/results")
    p.add_argument("--plot", **path, help="draw a picture (needs matplotlib)")
    p.add_argument("--commit", help="the commit to record where the source tree has no git")
    return p


def choose_device(text: str | None) -> str:
    """The device's name; raises ValueError with one sentence when it cannot be used."""
    if text is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"--device {text}: no such device, use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {text}: use cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"--device {text}: this torch sees no GPU")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device {text}: there are {torch.cuda.device_count()} GPUs")
    return text


def plan(args: argparse.Namespace, device: str) -> list[Entry]:
    """The cases that the arguments ask for; raises ValueError."""
    dtype = args.dtype or ("bf16" if device.startswith("cuda") else "fp32")
    if args.suite in JUDGED:
        build, _ = JUDGED[args.suite]
        entries = build(device, args.seed)
    elif args.suite == "crossover" or args.op == ["crossover"]:
        if args.shape and len(args.shape) > 1:
            raise ValueError("the crossover takes one --shape; its T is replaced")
        shape = args.shape[0] if args.shape else None
        entries = suites.crossover(device, shape, dtype, args.mode, args.quick)
    else:
        entries = list(_products(args, device, dtype))
    if args.only:
        entries = [entry for entry in entries if args.only in entry.label]
    if not entries:
        raise ValueError("no case is left to measure")
    return entries


def _products(args: argparse.Namespace, device: str, dtype: str):
    if args.op and "crossover" in args.op:
        raise ValueError("--op crossover stands alone")
    lengths = _lengths(args.lengths)
    kinds = args.gate_kind or [None]
    combinations = itertools.product(kinds, args.gates, args.mode, args.split_size)
    for kind, gates, mode, split in combinations:
        step = mode == "step"
        default = "decode32" if step else "h96" if device.startswith("cuda") else "cpu"
        for text in args.shape or [default]:
            shape = parse_shape(text, lengths)
            for op in args.op or ["fused_recurrent_kda" if step else "chunk_kda"]:
                gate = kind or family(op).gate_kinds[0]
                for pool in args.pool if op in POOL_OPS else [None]:
                    case = Case(
                        *(op, mode, shape, dtype, gates, gate, device, args.seed),
                        *(args.state_v_first, split, pool),
                    )
                    yield Entry(f"{op} {mode} {shape} {gates} {gate} {pool or ''}".strip(), case)


def _lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"--lengths {text}: give numbers such as 1300,547,2048") from None


def contenders_of(entry: Entry, peers: list[str]) -> list[str]:
    if entry.case.op == ATTENTION:
        return ["torch"]
    cuda = entry.case.device.startswith("cuda")
    return ["flaop", *entry.others, *(peers if cuda else [])]


def wants_first_call(args: argparse.Namespace, entry: Entry, contender: str) -> bool:
    if args.quick or args.first_call == "none":
        return False
    if args.first_call is None:
        return entry.first_call and contender == "flaop"
    return contender == "flaop" or args.first_call == "all"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. 0: every flaop case was measured; 1: one failed; 2: bad arguments."""
    args = parser().parse_args(argv)
    if args.cp:
        from flaop.bench import context_parallel

        return context_parallel.run(args, lambda device: _path(args.json, device, "cp"))
    try:
        device = choose_device(args.device)
        entries = plan(args, device)
        if args.plot:
            plot.check()
    except (ValueError, ImportError) as error:
        print(f"flaop bench: {error}", file=sys.stderr)
        return 2
    top = report.header(device, args.vs, args.commit)
    label = args.suite or "-".join(args.op or ["kda"])
    path = _path(args.json, device, label)
    try:
        records = _measure(args, entries, top, path)
    except OSError as error:
        print(f"flaop bench: cannot write {path}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = f"; what was measured is in {path}" if path else ""
        print(f"\nflaop bench: interrupted{kept}", file=sys.stderr)
        return 130
    _summary(args, entries, records)
    if path:
        print(f"records: {path}")
    if args.plot:
        picture = _path(args.plot, device, label).with_suffix(".png")
        plot.draw(picture, top, records)
        print(f"picture: {picture}")
    return 1 if any(r["status"] == "failed" for r in records) else 0


def _path(text: str | None, device: str, label: str) -> Path | None:
    if text is None:
        return None
    return report.default_path(device, label) if text == AUTO else Path(text)


def _measure(args, entries: list[Entry], top: dict, path: Path | None) -> list[dict]:
    print(f"{top['device']}, torch {top['torch']}, triton {top['triton']}, commit {top['commit']}")
    print(report.title(), flush=True)
    records = []
    for entry in entries:
        for contender in contenders_of(entry, args.vs):
            timed = wants_first_call(args, entry, contender)
            settings = Settings(args.quick, timed, args.first_call_timeout)
            records.append(run_case(entry.case, contender, settings))
            print(report.row(records[-1]), flush=True)
            if path:
                report.write_json(path, top, records)
    return records


def _summary(args, entries: list[Entry], records: list[dict]) -> None:
    print(
        "floor: every input read and every output written once at 4.26 TB/s, or the FLOPs at"
        " 700 TFLOP/s, whichever takes longer (measured rates of an H200)"
    )
    for line in report.ratios(records):
        print(line)
    if args.suite == "decay":
        for line in decay_suite.gate_cost(entries, records):
            print(line)
    if args.suite in JUDGED:
        _, judge = JUDGED[args.suite]
        verdicts = judge(entries, records)
        print("\ntargets" if verdicts else "targets: none for these cases")
        for verdict in verdicts:
            print(verdict)
    if args.suite == "crossover" or args.op == ["crossover"]:
        for line in suites.crossing(records):
            print(line)
