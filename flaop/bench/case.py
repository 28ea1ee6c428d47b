"""What is measured: shapes, cases and their inputs."""

from __future__ import annotations

import functools
import re
from dataclasses import asdict, dataclass, replace

import torch

from flaop.bench.families import ATTENTION, POOL_OPS, family, family_name

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GATES = ("fast", "slow", "mixed")
MODES = ("fwd", "fwdbwd", "step")
# Of the pool that a step op works on, and the distance of the slots of neighbouring rows.
SLOTS = 1024
SLOT_STEP = 389

PRESETS = {
    "h96": "B1T8192H96K128V128",
    "h64": "B1T8192H64K128V128",
    "h32": "B1T8192H32K128V128",
    "gdn": "B1T8192H16HV32K128V128",
    "long": "B1T65536H32K128V128",
    "batch": "B8T2048H32K128V128",
    "wide": "B8T2048H32K256V256",
    "packed": "B1T8192H96K128V128N8",
    "decode1": "B1T1H32K128V128",
    "decode32": "B32T1H32K128V128",
    "decode256": "B256T1H32K128V128",
    "cpu": "B1T2048H4K64V64",
}


@dataclass(frozen=True)
class Shape:
    """Sizes of one case. ``lengths`` is given for packed sequences only (then B is 1)."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    lengths: tuple[int, ...] | None = None

    @property
    def N(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    def as_record(self) -> dict[str, int]:
        sizes = {name: getattr(self, name) for name in ("B", "T", "H", "HV", "K", "V")}
        return {**sizes, "N": self.N}

    def __str__(self) -> str:
        grouped = f"HV{self.HV}" if self.HV != self.H else ""
        packed = f"N{self.N}" if self.lengths is not None else ""
        return f"B{self.B}T{self.T}H{self.H}{grouped}K{self.K}V{self.V}{packed}"


def parse_shape(text: str, lengths: tuple[int, ...] | None = None) -> Shape:
    """Read a preset's name or a shape such as ``B1T8192H32HV64K128V128``.

    ``D`` stands for K and V together, ``N`` cuts T into that many packed sequences of equal length,
    and ``lengths`` gives packed lengths one by one (their sum replaces T).
    Raises ValueError with the accepted form.
    """
    spelled = PRESETS.get(text.lower(), text).upper()
    pairs = re.findall(r"(HV|[BTHKVDN])(\d+)", spelled)
    sizes = {name: int(number) for name, number in pairs}
    if "".join(name + number for name, number in pairs) != spelled or len(sizes) != len(pairs):
        raise ValueError(
            f"shape {text!r} is not of the form B1T8192H96K128V128 (optional: HV, D for K and V, N)"
            f" nor a preset ({', '.join(PRESETS)})"
        )
    if "D" in sizes:
        sizes.setdefault("K", sizes["D"])
        sizes.setdefault("V", sizes["D"])
    missing = [name for name in ("T", "H", "K", "V") if name not in sizes]
    if missing:
        raise ValueError(f"shape {text!r} does not give {', '.join(missing)}")
    if min(sizes.values()) < 1:
        raise ValueError(f"shape {text!r}: every size must be at least 1")
    packed = sizes.get("N")
    if lengths is None and packed is not None:
        if sizes["T"] % packed:
            raise ValueError(f"shape {text!r}: T must be a multiple of N for equal packed lengths")
        lengths = (sizes["T"] // packed,) * packed
    if lengths is not None:
        if sizes.get("B", 1) != 1:
            raise ValueError(f"shape {text!r}: packed sequences need B1")
        if min(lengths) < 1:
            raise ValueError(f"lengths {lengths}: every length must be at least 1")
        sizes["T"] = sum(lengths)
    H, HV = sizes["H"], sizes.get("HV", sizes["H"])
    if HV % H:
        raise ValueError(f"shape {text!r}: HV must be a multiple of H")
    return Shape(sizes.get("B", 1), sizes["T"], H, HV, sizes["K"], sizes["V"], lengths)


@dataclass(frozen=True)
class Case:
    """One row of the benchmark before a contender is chosen. Plain data, so it travels as JSON."""

    op: str
    mode: str
    shape: Shape
    dtype: str
    gates: str
    gate_kind: str
    device: str
    seed: int = 0
    state_v_first: bool = False
    split_size: int = 0
    # Dtype of the pool of a step op.
    pool: str | None = None

    def __post_init__(self):
        serves_step = not self.op.startswith("chunk_") and self.op != ATTENTION
        if self.mode == "step" and not serves_step:
            raise ValueError(f"mode step measures one decode token: {self.op} does not serve it")
        if self.mode == "step" and set(self.shape.lengths or (self.shape.T,)) != {1}:
            raise ValueError(f"mode step measures one token: the shape {self.shape} needs T1")
        if (self.op in POOL_OPS) != (self.pool is not None):
            raise ValueError(f"a pool goes with the ops {', '.join(POOL_OPS)}, this is {self.op}")
        if self.op in POOL_OPS and (self.mode != "step" or self.shape.N > SLOTS):
            limit = f"in mode step for up to {SLOTS} sequences"
            raise ValueError(f"{self.op} is measured {limit}: got {self.mode}, {self.shape}")
        kinds = family(self.op).gate_kinds
        if self.gate_kind not in kinds:
            lack = f"has no {self.gate_kind} gate in its kernel"
            raise ValueError(f"{self.op} {lack}: the gate kind is {' or '.join(kinds)}")
        if self.split_size and not self.op.startswith("chunk_"):
            raise ValueError(f"split_size changes nothing for {self.op}: measure a chunk op")
        if self.split_size and not family(self.op).splits:
            raise ValueError(f"{self.op} has no split_size")

    def to_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict) -> Case:
        lengths = data["shape"]["lengths"]
        shape = Shape(**{**data["shape"], "lengths": lengths and tuple(lengths)})
        return Case(**{**data, "shape": shape})

    @property
    def options(self) -> dict:
        """How ``flaop.testing`` is asked for the inputs; recorded in the JSON too."""
        state = self.mode == "step" and self.pool is None
        return {
            "gates": self.gates,
            "initial_state": state,
            "output_final_state": state,
            "state_v_first": self.state_v_first,
            "seed": self.seed,
            **family(self.op).options(self.gate_kind),
        }


def build_inputs(case: Case) -> dict:
    """Keyword arguments of the op for this case: one set of values for all contenders and modes."""
    mode = "step" if case.mode == "step" else "fwd"
    if case.pool is not None:
        return _with_pool(case, _values(case))
    inputs = _values(replace(case, op=family_name(case.op), mode=mode, split_size=0))
    if case.op == ATTENTION:
        inputs = {name: inputs[name] for name in ("q", "k", "v")}
    if case.split_size:
        inputs = {**inputs, "split_size": case.split_size}
    return {
        name: value.detach().requires_grad_(case.mode == "fwdbwd" and value.is_floating_point())
        if isinstance(value, torch.Tensor)
        else value
        for name, value in inputs.items()
    }


# One entry: modes and contenders of a case follow each other, and large inputs take long to draw.
@functools.lru_cache(maxsize=1)
def _values(case: Case) -> dict:
    s = case.shape
    lengths = None if s.lengths is None else list(s.lengths)
    return family(case.op).inputs(
        s.B, s.T, s.H, s.HV, s.K, s.V,
        dtype=DTYPES[case.dtype], device=case.device, lengths=lengths, **case.options,
    )  # fmt: skip


def _with_pool(case: Case, inputs: dict) -> dict:
    """The arguments of a step op: slots far apart in a pool of SLOTS random states."""
    s = case.shape
    last = (s.V, s.K) if case.state_v_first else (s.K, s.V)
    generator = torch.Generator(case.device).manual_seed(case.seed)
    pool = torch.empty(SLOTS, s.HV, *last, dtype=DTYPES[case.pool], device=case.device)
    pool.normal_(generator=generator)
    rows = torch.arange(s.N, dtype=torch.int32, device=case.device)
    others = ("initial_state", "output_final_state", "safe_gate")
    inputs = {name: value for name, value in inputs.items() if name not in others}
    if case.op == "simple_gla_step_":
        inputs["g_gamma"] = None
    return {**inputs, "state": pool, "state_indices": rows * SLOT_STEP % SLOTS}


def another_set(inputs: dict, index: int) -> dict:
    """The same values at new addresses, the index-th time; of a pool other slots."""
    if "state" not in inputs:
        return clone_inputs(inputs)
    slots = inputs["state_indices"]
    moved = (slots + index * slots.numel() * SLOT_STEP) % SLOTS
    rest = {name: value for name, value in inputs.items() if name != "state"}
    return {**clone_inputs(rest), "state": inputs["state"], "state_indices": moved}


def tensors(inputs: dict) -> dict[str, torch.Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def leaves(inputs: dict) -> dict[str, torch.Tensor]:
    """The inputs that get a gradient."""
    return {name: value for name, value in tensors(inputs).items() if value.requires_grad}


def clone_inputs(inputs: dict) -> dict:
    """The same values at new addresses."""
    return {
        name: value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in inputs.items()
    }
