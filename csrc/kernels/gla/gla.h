// C interface of the chunk kernels of GLA (bf16, K = 128, chunks of 64 tokens). The mathematics:
// triton_kernels/decay/intra.py.
#pragma once
#include "../kda/kda.h"

#ifdef __cplusplus
extern "C" {
#endif

// Forward within the chunks. rows' = row1 - row0. Of the call: q, k, g (the log gate), bounds,
// table, scale, sizes, rows and g_dtype.
struct flaop_gla_intra {
  struct flaop_kda_call call;
  void* A;       // [B, T, HV, 64] bf16, written, or null
  void* qg;      // [rows', HV, 64, 128] bf16, written
  void* kg;      // [rows', HV, 64, 128] bf16, written
  float* decay;  // [rows', HV, 128], written
};

// Launches on a stream of the current device. Returns 0, or the CUDA error code.
int flaop_gla_intra_launch(const struct flaop_gla_intra* params, void* stream);

#ifdef __cplusplus
}
#endif
