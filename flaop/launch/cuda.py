"""The CUDA C++ kernels: loaded at first use, where they were built and the device can run them."""

import ctypes
import functools
import pathlib

import torch

from flaop._extension import bindings

from .kernel import arch, not_warmed

LIBRARY = pathlib.Path(__file__).parent.parent / "_kernels.so"
ARCH = 90  # compiled for sm_90a
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum flaop_dtype
GATE_LOG, GATE_SOFTPLUS, GATE_BOUNDED = range(3)  # enum flaop_gate

enabled = True  # tests compare with the Triton kernels by switching this off
_warmed = set()


def _structure(**groups):
    """A ctypes structure from groups of field names of one type, in order."""
    types = {"pointers": ctypes.c_void_p, "floats": ctypes.c_float, "ints": ctypes.c_int32}
    fields = []
    for kind, names in groups.items():
        fields += [(name, types[kind]) for name in names.split()]
    return fields


class KdaCall(ctypes.Structure):
    """struct flaop_kda_call of csrc/kernels/kda/kda.h."""

    _fields_ = _structure(
        pointers="q k v g beta A_log dt_bias bounds table",
        floats="scale lower_bound",
        ints="T B H HV row0 row1 gate bounded l2norm beta_kind "
        "g_dtype beta_dtype A_log_dtype dt_bias_dtype",
    )


class KdaIntra(ctypes.Structure):
    """struct flaop_kda_intra."""

    _fields_ = [
        ("call", KdaCall),
        *_structure(pointers="A A_qk w u qg kg decay", ints="load_A"),
    ]


class KdaBackward(ctypes.Structure):
    """struct flaop_kda_bwd."""

    _fields_ = [
        ("call", KdaCall),
        *_structure(pointers="A v_new h d_o dv_new dh dq dk dv dg dbeta dA_log ddt_bias"),
    ]


class GlaIntra(ctypes.Structure):
    """struct flaop_gla_intra of csrc/kernels/gla/gla.h."""

    _fields_ = [("call", KdaCall), *_structure(pointers="A qg kg decay")]


@functools.cache
def library():
    """The loaded library, or None if it was not built."""
    if not LIBRARY.is_file():
        return None
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.flaop_cuda_error.restype = ctypes.c_char_p
    return loaded


def serves_gla(call):
    """Whether the CUDA kernel can do the forward within the chunks of a call."""
    return (
        enabled
        and call.q.device.type == "cuda"
        and (call.q.dtype, call.K) == (torch.bfloat16, 128)
        and call.g.dtype in (torch.bfloat16, torch.float32)
        and arch(call.q.device) == ARCH
        and library() is not None
    )


def serves_kda(call):
    """Whether the CUDA kernels can do the within-chunk work of a call."""
    gates = (call.beta, call.A_log, call.dt_bias)
    return call.V == 128 and all(x is None or x.dtype in DTYPES for x in gates) and serves_gla(call)


def _pointers(*tensors):
    return [None if x is None else x.data_ptr() for x in tensors]


def _kda_call(p, row0, row1):
    call = p.call
    if not call.use_gate_in_kernel:
        gate = GATE_LOG
    else:
        gate = GATE_SOFTPLUS if call.lower_bound is None else GATE_BOUNDED
    beta_kind = int(call.use_beta_sigmoid_in_kernel) * (2 if call.allow_neg_eigval else 1)
    return KdaCall(
        *_pointers(p.q, p.k, p.v, p.g, p.beta, p.A_log, p.dt_bias, p.bounds, p.table_rows),
        call.scale, call.lower_bound or 0.0, call.T, call.B, call.H, call.HV, row0, row1,
        gate, p.gate["BOUNDED"], call.use_qk_l2norm_in_kernel, beta_kind,
        *(0 if x is None else DTYPES[x.dtype] for x in (p.g, p.beta, p.A_log, p.dt_bias)),
    )  # fmt: skip


@functools.cache
def _address(name):
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value


@functools.cache
def _pointer_places(structure):
    """Bytes at which a ctypes structure holds addresses."""
    places = []
    for name, kind in structure._fields_:
        start = getattr(structure, name).offset
        if kind is ctypes.c_void_p:
            places.append(start)
        elif issubclass(kind, ctypes.Structure):
            places += [start + place for place in _pointer_places(kind)]
    return places


def _launch(name, params, device, variant):
    """Launches on the current stream of the current device, which is that of the tensors."""
    index = device.index
    key = (name, index, *variant)
    if key not in _warmed and torch.cuda.is_current_stream_capturing():
        raise not_warmed(name)
    code = bindings.call_library(
        _address(name), ctypes.addressof(params), ctypes.sizeof(params),
        _pointer_places(type(params)), torch._C._cuda_getCurrentRawStream(index),
    )  # fmt: skip
    if code:
        raise RuntimeError(f"{name}: {library().flaop_cuda_error(code).decode()}")
    _warmed.add(key)


def kda_intra(p, A, A_qk, u, work, load_A):
    """A function of (row0, row1): gates, pairs, inverse (unless A is given), W, U, qg, kg of these
    rows in one launch. A may be None where nobody reads it."""
    tensors = _pointers(A, A_qk, work.w, u, work.qg, work.kg, work.decay)
    params = KdaIntra(_kda_call(p, 0, 0), *tensors, load_A)
    variant = (p.g.dtype, p.gate["BOUNDED"], load_A)

    def launch(row0, row1):
        params.call.row0, params.call.row1 = row0, row1
        _launch("flaop_kda_intra_launch", params, p.q.device, variant)

    return launch


def kda_backward(p, A, v_new, h, do, dv_new, dh, dq, dk, dv, dg, dbeta, dA_log, ddt_bias):
    """All gradients within the chunks in one launch; pairs are exact for every gate."""
    tensors = _pointers(A, v_new, h, do, dv_new, dh, dq, dk, dv, dg, dbeta, dA_log, ddt_bias)
    params = KdaBackward(_kda_call(p, 0, p.rows), *tensors)
    _launch("flaop_kda_bwd_launch", params, p.q.device, (p.g.dtype,))


def gla_intra(p, A, qg, kg, decay, row0, row1):
    """Decayed operands of rows [row0, row1), and A unless None, in one launch."""
    call, none = p.call, (None,) * 3
    gate = KdaCall(
        *_pointers(p.q, p.k, None, p.g, *none, p.bounds, p.table_rows),
        call.scale, 0.0, call.T, call.B, call.H, call.HV, row0, row1,
        GATE_LOG, False, False, 0, DTYPES[p.g.dtype], 0, 0, 0,
    )  # fmt: skip
    params = GlaIntra(gate, *_pointers(A, qg, kg, decay))
    _launch("flaop_gla_intra_launch", params, p.q.device, (p.g.dtype, A is None))
