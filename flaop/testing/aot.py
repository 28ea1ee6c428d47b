"""Compiles recorded launches ahead of time, without a GPU, and reads what the assembler made of
them.
"""

import itertools
import re
import struct
import subprocess
import tempfile
from typing import NamedTuple

import triton

from flaop.launch.compile import compiled

# columns of tensor memory that a block may have; a launch that needs more compiles to a trap
TENSOR_MEMORY_LIMIT = 512
# bytes of shared memory that a block may have
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
INSTRUCTION_BYTES = 16
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", re.M)
_UNIFORM = re.compile(r"UR(\d+)")


class Build(NamedTuple):
    """One compiled launch."""

    name: str
    shared: int  # bytes
    tensor_memory: int  # columns, on sm_100
    registers: int  # per thread
    spills: int  # local-memory instructions
    tensor_core: int  # matrix instructions
    unwritten: list  # instructions that read a uniform register nothing wrote
    overwritten: list  # buffers that are filled while a product may still read them
    cubin: bytes


def disassemble(cubin):
    """SASS instructions of a cubin, in order."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = _INSTRUCTION.findall(text)
    registers = re.search(r"REG:(\d+)", usage)
    return [" ".join(line.split()) for line in found], int(registers[1]) if registers else 0


def _machine_code(cubin):
    """The instructions in a cubin: the section .text.<kernel> of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    start_of_names = sections[names][4]
    for name, _, _, _, start, length in sections:
        if cubin[start_of_names + name :].startswith(b".text."):
            return cubin[start : start + length]
    raise ValueError("no machine code in the cubin")


def disassemble_all(cubins, arch):
    """SASS instructions of each cubin, with addresses for names.

    By one run of nvdisasm, which takes half a second to start. arch: 80 or newer.
    """
    codes = [_machine_code(cubin) for cubin in cubins]
    if not codes:
        return []
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-b", f"SM{arch}", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [" ".join(line.split()) for line in _INSTRUCTION.findall(text)]
    counts = [len(code) // INSTRUCTION_BYTES for code in codes]
    if len(found) != sum(counts):
        raise RuntimeError(f"nvdisasm shows {len(found)} of {sum(counts)} instructions")
    ends = list(itertools.accumulate(counts))
    return [found[end - count : end] for count, end in zip(counts, ends, strict=True)]


def unwritten_uniform_reads(instructions):
    """Instructions that read a uniform register before anything wrote it (UPRMT excepted).

    The mark of the ptxas 12.8 fault on Hopper: its wrong kernels have such a read, right ones have
    none.
    """
    written, marked = set(), []
    for text in instructions:
        body = re.sub(r"^@!?U?P\w+ ", "", text)
        op, _, operands = body.partition(" ")
        parts = [part.strip().removesuffix(".reuse") for part in operands.split(",")]
        stores = op.startswith(("ST", "LD", "HGMMA", "UBLK", "UTMA", "SYNCS", "ATOM", "RED."))
        writes = bool(re.fullmatch(r"UR\d+", parts[0])) and not stores
        if op != "UPRMT":
            reads = set()
            for part in parts[1:] if writes else parts:
                if "gdesc[" in part:
                    # a descriptor pair: both operands from shared memory, or one and registers
                    first = int(_UNIFORM.search(part)[1])
                    from_registers = re.match(r"HGMMA\S* R\d+, R\d+, gdesc", body)
                    reads |= set(range(first + (2 if from_registers else 0), first + 4))
                elif "desc[" not in part:
                    for number in map(int, _UNIFORM.findall(part)):
                        reads |= {number, number + 1} if op == "UIADD3.64" else {number}
            if reads - written:
                marked.append(text)
                written |= reads
        if writes:
            number = int(parts[0][2:])
            wide = ".64" in op or op.startswith("UIMAD.WIDE")
            written |= {number, number + 1} if wide else {number}
    return marked


def overwritten_operands(ttgir):
    """Buffers with room for one tile that a loop fills for its next turn while an asynchronous
    product of this turn may still read them.

    triton 3.6 gives one tile to a load that is summed up as well as multiplied, and waits for the
    sum alone.
    """
    allocated, single, marked, products = {}, set(), [], []
    for line in ttgir.splitlines():
        result, _, body = (part.strip() for part in line.partition(" = "))
        result = result.split(":")[0]
        op, operands = (body or line.strip()).split(" ")[0], re.findall(r"%[\w#]+", body)
        if op == "ttg.local_alloc":
            allocated[result] = result
            if "-> !ttg.memdesc<1x" in line and not operands:
                single.add(result)
        elif op.startswith("ttg.memdesc_"):
            allocated[result] = allocated.get(operands[0])
        elif op in ("scf.for", "scf.yield"):
            products = []
        elif op == "ttng.warp_group_dot":
            products.append({allocated.get(x) for x in operands[:2]})
        elif op == "ttng.warp_group_dot_wait":
            pending = int(re.search(r"pendings = (\d+)", line)[1])
            products = products[len(products) - pending :] if pending else []
        elif op == "ttg.async_copy_global_to_local":
            buffer = allocated.get(operands[1])
            if buffer in single and any(buffer in read for read in products):
                marked.append(buffer)
    return marked


def build(record, arch):
    """Compiles one recorded launch for an architecture (80, 90, 100, ...)."""
    function, args, constants, options = record
    made = compiled(function, args, constants, options, arch)
    cubin = made.asm["cubin"]
    instructions, registers = disassemble(cubin)
    return Build(
        function.fn.__name__,
        made.metadata.shared,
        getattr(made.metadata, "tmem_size", None) or 0,
        registers,
        sum(text.split(" ", 1)[0].startswith(("LDL", "STL")) or " LDL" in text or " STL" in text
            for text in instructions),
        sum(bool(re.search(r"\b(HGMMA|HMMA|UTCHMMA|UTCMMA)", text)) for text in instructions),
        unwritten_uniform_reads(instructions),
        overwritten_operands(made.asm["ttgir"]),
        cubin,
    )  # fmt: skip
