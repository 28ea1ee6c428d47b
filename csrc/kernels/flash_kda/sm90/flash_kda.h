// C interface of the fused inference forward of KDA (bf16, K = V = 128, HV = H, bounded gate).
#pragma once
#include <stdint.h>

#include "../../kda/kda.h"

#ifdef __cplusplus
extern "C" {
#endif

// One call. Tensors are contiguous and 16-byte aligned.
struct flaop_flash_kda {
  const void* q;              // [B, T, H, 128] bf16
  const void* k;              // [B, T, H, 128] bf16
  const void* v;              // [B, T, H, 128] bf16
  const void* g;              // [B, T, H, 128] bf16, the input of the gate
  const void* beta;           // [B, T, H] beta_dtype, before the sigmoid
  const void* A_log;          // [H] A_log_dtype, or null
  const void* dt_bias;        // [H, 128] dt_bias_dtype, or null
  const void* initial_state;  // [N, H, V, K] state_dtype, or null
  const void* cu_seqlens;     // [N + 1] int32, or int64 with long_seqlens; null: N = B sequences
  void* o;                    // [B, T, H, 128] bf16, written
  float* final_state;         // [N, H, V, K], written, or null
  float* workspace;           // flaop_flash_kda_workspace bytes, or null if that is 0
  float scale;
  float lower_bound;  // in [-5, 0)
  float beta_bound;   // beta is so many times the sigmoid
  int32_t T, N, H;
  int32_t pieces;        // >= 1: each sequence is cut into so many
  int32_t long_seqlens;  // cu_seqlens is int64
  int32_t beta_dtype, A_log_dtype, dt_bias_dtype, state_dtype;  // flaop_dtype
};

// The number of pieces of least estimated time. T: tokens of a sequence; if packed, of all.
int32_t flaop_flash_kda_pieces(int64_t T, int64_t N, int64_t H, int32_t packed, int32_t processors);
// Bytes of workspace.
int64_t flaop_flash_kda_workspace(int64_t N, int64_t H, int64_t pieces);
// Launches on a stream of the current device. Returns 0, or the CUDA error code.
int flaop_flash_kda_launch(const struct flaop_flash_kda* params, void* stream);

#ifdef __cplusplus
}
#endif
