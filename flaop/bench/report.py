"""The table on the screen and the JSON file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from flaop.bench import contenders, floors
from flaop.bench.families import ATTENTION, family_name

# Families whose gate is not an input.
FIXED_GATES = {"retention": "constant", "delta_rule": "none"}

COLUMNS = (
    ("op", 32),
    ("contender", 10),
    ("mode", 6),
    ("shape", 32),
    ("gate", 17),
    ("eager ms", 9),
    ("graph ms", 9),
    ("host us", 8),
    ("peak MiB", 9),
    ("first s", 8),
    ("rel err", 8),
    ("floor ms", 9),
)


def version_of(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the source tree flaop runs from, with ``-dirty`` if files differ from it."""
    root = Path(__file__).resolve().parents[2]
    try:
        ask = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        ask.append("--exclude=*")
        done = subprocess.run(ask, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def header(device: str, peers: list[str], commit_id: str | None) -> dict:
    """Top level of the JSON file, without the records."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "commit": commit_id or commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "flaop": version_of("flaop"),
        "python": platform.python_version(),
        "peers": {peer: contenders.version(peer) for peer in peers},
        "command": "python -m flaop bench " + " ".join(sys.argv[2:]),
        "ceilings": {"bytes_per_s": floors.BYTES_PER_S, "flop_per_s": floors.FLOP_PER_S},
    }


def default_path(device: str, label: str) -> Path:
    """``benchmarks/results/<device>/<time>-<label>.json`` in the source tree or working folder."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks").is_dir():
        root = Path.cwd()
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    return root / "benchmarks" / "results" / name / f"{now}-{label}.json"


def write_json(path: Path, top: dict, records: list[dict]) -> None:
    """Write the whole file or nothing: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({**top, "records": records}, file, indent=1, allow_nan=False)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def cells(record: dict) -> list[str]:
    shape = "".join(f"{k}{v}" for k, v in _short_shape(record["shape"]).items())
    quadratic = record["op"] == ATTENTION
    drawn = f"{record['gates']} {record['gate_kind']}"
    gate = "-" if quadratic else FIXED_GATES.get(family_name(record["op"]), drawn)
    more = f" split {record['split_size']}" if record["split_size"] else ""
    if record["pool"]:
        more += f" pool {record['pool']} {'VK' if record['state_v_first'] else 'KV'}"
    figures = ("eager_ms", "graph_ms", "host_us", "peak_mib", "first_call_s", "rel_err", "floor_ms")
    return [
        "attention" if quadratic else record["op"],
        record["contender"],
        record["mode"],
        f"{shape} {record['dtype']}{more}",
        gate,
        *(_number(record[name]) for name in figures),
    ]


def _short_shape(shape: dict[str, int]) -> dict[str, int]:
    """Drop what repeats another size: HV when it is H, N when it is B, V as D when it is K."""
    sizes = dict(shape)
    if sizes["HV"] == sizes["H"]:
        del sizes["HV"]
    if sizes["N"] == sizes["B"]:
        del sizes["N"]
    if sizes["K"] == sizes["V"]:
        sizes = {("D" if k == "K" else k): v for k, v in sizes.items() if k != "V"}
    return sizes


def title() -> str:
    return "  ".join(name.ljust(width) for name, width in COLUMNS) + "  note"


def row(record: dict) -> str:
    widths = (width for _, width in COLUMNS)
    line = "  ".join(cell.ljust(width) for cell, width in zip(cells(record), widths, strict=True))
    return f"{line}  {record['note']}".rstrip()


def best_ms(record: dict) -> float | None:
    return min(record["repeats"].get("eager_ms", ()), default=None)


def case_key(record: dict) -> tuple:
    """What must agree between two records for their ratio to mean anything."""
    shape = tuple(sorted(record["shape"].items()))
    names = ("op", "mode", "dtype", "gates", "gate_kind", "split_size", "pool", "state_v_first")
    names += ("device",)
    return (*(record[name] for name in names), shape)


def ratios(records: list[dict]) -> list[str]:
    """One line per case that flaop and another contender both ran: same run, same inputs."""
    ours = {case_key(r): r for r in records if r["contender"] == "flaop"}
    lines = []
    for other in records:
        mine = ours.get(case_key(other))
        if mine is None or other["contender"] == "flaop":
            continue
        parts = []
        for name, label in (("eager_ms", "eager"), ("graph_ms", "graph"), ("host_us", "host")):
            if mine[name] and other[name]:
                parts.append(f"{label} {other[name] / mine[name]:.2f}x")
        if mine["device"] == "cpu" and parts:
            parts.append(f"best {best_ms(other) / best_ms(mine):.2f}x")
        if mine["peak_mib"] and other["peak_mib"]:
            parts.append(f"memory {other['peak_mib'] / mine['peak_mib']:.2f}x")
        if parts:
            what = " ".join(cells(mine)[i] for i in (0, 2, 3, 4))
            lines.append(f"{what}: {other['contender']} / flaop = {', '.join(parts)}")
    return lines
