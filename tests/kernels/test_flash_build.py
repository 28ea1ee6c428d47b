"""The fused kernel of KDA as machine code, and its choice of pieces. Needs no GPU."""

import ctypes
import pathlib
import re
import shutil
import subprocess

import pytest

from flaop._extension import bindings
from flaop.launch.cuda import LIBRARY

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "csrc/kernels/flash_kda/sm90/flash_kda.cu"
NVCC = shutil.which("nvcc")
MIB = 2**20


def disassembler():
    found = shutil.which("cuobjdump")
    if found is None and NVCC is not None:
        beside = pathlib.Path(NVCC).resolve().with_name("cuobjdump")
        found = str(beside) if beside.exists() else None
    if found is None:
        backend = pytest.importorskip("triton.backends.nvidia")
        inside = pathlib.Path(backend.__path__[0]) / "bin" / "cuobjdump"
        found = str(inside) if inside.exists() else None
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(what ptxas says, {kernel: its instructions})."""
    if NVCC is None:
        pytest.skip("needs nvcc")
    code = tmp_path_factory.mktemp("flash") / "flash.cubin"
    target = "-gencode=arch=compute_90a,code=sm_90a"
    command = [NVCC, "-std=c++17", "-O3", target, "-Xptxas", "-v", "-cubin", "-o", code, SOURCE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tool = disassembler()
    if tool is None:
        return done.stderr, {}
    text = subprocess.run([tool, "-sass", code], capture_output=True, text=True, check=True).stdout
    _, *functions = text.split("Function : ")
    return done.stderr, dict(f.split("\n", 1) for f in functions)


def test_nothing_spills_and_no_product_waits_for_another(compiled):
    messages, _ = compiled
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", messages)
    assert len(found) == 3 and all(pair == ("0", "0") for pair in found), messages
    # what ptxas says where it takes wgmma one by one, or ignores setmaxnreg
    assert not re.search(r"C75\d\d", messages), messages


def test_products_are_those_of_warpgroups(compiled):
    _, functions = compiled
    if not functions:
        pytest.skip("needs cuobjdump")
    fused = {name: code for name, code in functions.items() if "flash_kda_kernel" in name}
    assert len(fused) == 2
    for name, code in fused.items():
        # with outputs: state times k and q, the inverse, A_qk, the new state
        expected = 28 if "ILb1E" in name else 16
        assert len(re.findall(r"\bHGMMA\b", code)) == expected, name
        assert "USETMAXREG" in code, name
        # inputs come by TMA alone
        assert "UTMALDG.3D" in code and "LDGSTS" not in code, name
        assert not re.search(r"\b(LDL|STL)\b", code), name


@pytest.fixture(scope="module")
def library():
    if not bindings.FLASH_KDA_BUILT or not LIBRARY.is_file():
        pytest.skip("the CUDA kernels are not built")
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.flaop_flash_kda_pieces.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_int32] * 2
    loaded.flaop_flash_kda_workspace.argtypes = [ctypes.c_int64] * 3
    loaded.flaop_flash_kda_workspace.restype = ctypes.c_int64
    return loaded


@pytest.mark.parametrize(
    "T, N, H, packed", [(8192, 1, 96, 0), (8192, 6, 96, 1), (2048, 8, 32, 0), (64, 1, 1, 0)]
)
def test_one_piece_where_blocks_fill_the_gpu(library, T, N, H, packed):
    assert library.flaop_flash_kda_pieces(T, N, H, packed, 132) == 1
    assert library.flaop_flash_kda_workspace(N, H, 1) == 0


@pytest.mark.parametrize("T, N, H", [(8192, 1, 32), (65536, 1, 32), (4096, 1, 16), (65536, 1, 1)])
def test_pieces_where_they_do_not(library, T, N, H):
    pieces = library.flaop_flash_kda_pieces(T, N, H, 0, 132)
    assert 1 < pieces <= 16
    assert 0 < library.flaop_flash_kda_workspace(N, H, pieces) < 450 * MIB
    # on a GPU that one sequence and head fill, there is nothing to gain
    assert library.flaop_flash_kda_pieces(T, N, H, 0, 1) == 1


def test_the_workspace_stays_bounded(library):
    for N in (1, 7, 100):
        for H in (1, 3, 16, 64, 96, 512):
            for T in (0, 1, 1000, 10**6):
                pieces = library.flaop_flash_kda_pieces(T, N, H, 0, 132)
                assert pieces >= 1
                assert library.flaop_flash_kda_workspace(N, H, pieces) <= 450 * MIB
