"""The archive of shipped machine code: what is found in it, and what a damaged one does."""

import concurrent.futures
import json
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch

from flaop._extension import bindings
from flaop.launch import archive
from flaop.launch.archive import Code, Variant

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles: not in the interpreter's process", allow_module_level=True)

X = torch.empty(4, 4, device="meta", dtype=torch.bfloat16)
ARGS = (X, None, 3, 0.5)
CONSTANTS = {"K": 128, "STATE_DTYPE": torch.bfloat16, "HAS_BIAS": False}
OPTIONS = {"num_warps": 4}
CODE = Code(b"code" * 100, "entry", 4, 1024, "P-if")


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """An archive with one code, in the place of the package's own."""
    path = tmp_path / "_archive.bin"
    variant = Variant("delta.scan", "kernel", 90, archive.label(ARGS, CONSTANTS, OPTIONS))
    archive.write(
        path, {variant: CODE}, {variant: "mark"}, {variant[:2]: ["x", "y", "n", "s"]}, "compilers"
    )
    monkeypatch.setattr(archive, "PATH", path)
    monkeypatch.delenv("FLAOP_AOT", raising=False)
    archive.opened.cache_clear()
    yield path
    archive.opened.cache_clear()


def find(args=ARGS, constants=CONSTANTS, options=OPTIONS, arch=90, name="kernel"):
    return archive.find("delta.scan", name, arch, args, constants, options)


def test_a_code_is_found_by_all_that_it_was_compiled_for(shipped):
    assert find() == CODE
    assert archive.argument_names("delta.scan", "kernel") == ["x", "y", "n", "s"]
    assert find(args=(X, None, 5, 0.25)) == CODE, "values of numbers do not matter"
    assert find(args=(X.float(), None, 3, 0.5)) is None
    assert find(args=(X, X, 3, 0.5)) is None
    assert find(args=(X, None, 1 << 31, 0.5)) is None, "a number wider than 32 bits"
    assert find(constants={**CONSTANTS, "STATE_DTYPE": torch.float32}) is None
    assert find(options={"num_warps": 8}) is None
    assert find(arch=80) is None
    assert find(name="other") is None and archive.argument_names("delta.scan", "other") is None


def test_it_is_read_back_whole(shipped):
    ((variant, mark), code), *more = archive.read(shipped).items()
    assert (mark, code, more) == ("mark", CODE, []) and variant.arch == 90


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def cut_index(path):
    path.write_bytes(path.read_bytes()[:40])


def overwrite(path):
    path.write_bytes(b"something else\n")


def age(path):
    index, start = archive.read_index(path)
    codes = path.read_bytes()[start:]
    head = json.dumps({**index, "version": "0.0.1"}).encode()
    size = len(head).to_bytes(archive.LENGTH, "little")
    path.write_bytes(archive.MAGIC + size + head + codes)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (truncate, "is truncated"),
        (cut_index, "is truncated"),
        (overwrite, "is of another format"),
        (age, "is of version 0.0.1"),
    ],
)
def test_a_damaged_archive_warns_once_and_is_left_alone(shipped, damage, sentence):
    damage(shipped)
    with pytest.warns(UserWarning, match=sentence):
        assert find() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find() is None and archive.argument_names("delta.scan", "kernel") is None


def test_it_can_be_switched_off(shipped, monkeypatch):
    monkeypatch.setenv("FLAOP_AOT", "0")
    assert find() is None


def test_launchers_need_no_triton():
    code = (
        "import sys, flaop, flaop.launch.decode, flaop.launch.decay.chunk\n"
        "import flaop.launch.delta.gdn, flaop.launch.delta.chunk, flaop.launch.delta.recurrent\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'triton']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_labels_of_the_builder_are_those_of_a_launch(monkeypatch):
    """What `records` asks for is what a call looks up: the launchers' own constants."""
    from flaop import aot
    from flaop.launch import kernel

    group = aot.Group("kda", 90, "bf16", 128)
    asked = set()

    def find(module, name, arch, args, constants, options):
        asked.add(Variant(module, name, arch, archive.label(args, constants, options)))
        return CODE

    wanted = set(aot.records(group))
    monkeypatch.setattr(archive, "find", find)
    monkeypatch.setattr(kernel, "_device_index", lambda args: 0)
    monkeypatch.setattr(kernel, "arch", lambda device: 90)
    monkeypatch.setattr(kernel, "bindings", _NoDriver)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    (call, *_) = aot._chunk_calls(group)
    from flaop.launch.delta import chunk

    chunk.forward(call)
    assert asked and asked <= wanted


class _NoDriver:
    """Loads and launches nothing."""

    argument_types = staticmethod(bindings.argument_types)

    def load(*code):
        return 1

    def launch(*call):
        return True


def test_the_builder_keeps_what_is_there(tmp_path, monkeypatch):
    """One small kernel of a group, compiled, then found and kept."""
    pytest.importorskip("triton")
    from flaop import aot

    group = aot.Group("kda", 90, "bf16", 128)
    (variant, record), *_ = (x for x in aot.records(group).items() if "table" in x[0].name)
    monkeypatch.setattr(aot, "records", lambda group: {variant: record})
    monkeypatch.setattr(aot, "_compilers", concurrent.futures.ThreadPoolExecutor)
    path = tmp_path / "_archive.bin"
    assert "1 kernels" in (first := aot.make(path, [group], 1)) and "1 compiled" in first
    assert "0 compiled" in aot.make(path, [group], 1)
    ((found, _), code), *_ = archive.read(path).items()
    assert found == variant and code.image.startswith(b"\x7fELF")
    assert code.warps == 4 and set(code.kinds) <= set("Pil-f")


def test_wrong_code_is_refused(tmp_path, monkeypatch):
    """What the builder scans is what the other disassembler shows, kernel by kernel."""
    pytest.importorskip("triton")
    from flaop import aot
    from flaop.testing import aot as reading

    group = aot.Group("kda", 90, "bf16", 128)
    small = [x for x in aot.records(group).items() if "table" in x[0].name or "zero" in x[0].name]
    codes = {item: aot.build(group, item) for item, _ in small[:3]}
    images = [code.image for code in codes.values()]
    shown = reading.disassemble_all(images, 90)
    assert len(shown) == 3
    for image, found in zip(images, shown, strict=True):
        names = re.compile(r"`\(.*?\)|0x[0-9a-f]+")
        expected, _ = reading.disassemble(image)
        assert [names.sub("", x) for x in found] == [names.sub("", x) for x in expected]
    aot.scan(codes)
    wrong = next(iter(codes)).name

    def marked(instructions):
        return ["UIADD3 UR4, UR5, UR6, URZ"] if instructions == shown[0] else []

    monkeypatch.setattr(reading, "unwritten_uniform_reads", marked)
    with pytest.raises(RuntimeError, match=f"{wrong} for sm_90 reads a register"):
        aot.scan(codes)
