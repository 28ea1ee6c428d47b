// C interface of the chunk kernels of KDA (bf16, K = V = 128, chunks of 64 tokens). The
// mathematics: triton_kernels/delta/intra.py and bwd.py.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// How a number is stored.
enum flaop_dtype { FLAOP_F32 = 0, FLAOP_BF16 = 1, FLAOP_F16 = 2 };
// What g holds: the log gate, or the input of the softplus or the bounded gate.
enum flaop_gate { FLAOP_GATE_LOG = 0, FLAOP_GATE_SOFTPLUS = 1, FLAOP_GATE_BOUNDED = 2 };

// What every kernel of a call reads. Tensors are contiguous and 16-byte aligned.
struct flaop_kda_call {
  const void* q;          // [B, T, H, 128] bf16
  const void* k;          // [B, T, H, 128] bf16
  const void* v;          // [B, T, HV, 128] bf16
  const void* g;          // [B, T, HV, 128] g_dtype (fp32 or bf16)
  const void* beta;       // [B, T, HV] beta_dtype
  const void* A_log;      // [HV] A_log_dtype, or null
  const void* dt_bias;    // [HV, 128] dt_bias_dtype, or null
  const int64_t* bounds;  // [N + 1], or null when batched
  const int32_t* table;   // [rows, 2], or null when batched
  float scale;
  float lower_bound;
  int32_t T, B, H, HV;
  int32_t row0, row1;  // rows of the table to work on
  int32_t gate;        // flaop_gate
  int32_t bounded;     // gates are known to lie in [-5, 0]
  int32_t l2norm;      // normalise rows of q and k
  int32_t beta_kind;   // 0 as is, 1 sigmoid, 2 twice the sigmoid
  int32_t g_dtype, beta_dtype, A_log_dtype, dt_bias_dtype;  // flaop_dtype
};

// Forward within the chunks. rows' = row1 - row0.
struct flaop_kda_intra {
  struct flaop_kda_call call;
  void* A;         // [B, T, HV, 64] bf16: read with load_A, else written if not null
  void* A_qk;      // [B, T, HV, 64] bf16: written unless load_A
  void* w;         // [rows', HV, 64, 128] bf16, written
  void* u;         // [B, T, HV, 128] bf16, written
  void* qg;        // [rows', HV, 64, 128] bf16, written
  void* kg;        // [rows', HV, 64, 128] bf16, written
  float* decay;    // [rows', HV, 128], written
  int32_t load_A;  // A is given: only w, u, qg, kg and decay are made
};

// Backward within the chunks, given the states and their gradients.
struct flaop_kda_bwd {
  struct flaop_kda_call call;
  const void* A;       // [B, T, HV, 64] bf16
  const void* v_new;   // [B, T, HV, 128] bf16
  const void* h;       // [rows, HV, 128, 128] bf16
  const void* d_o;     // [B, T, HV, 128] bf16, or null
  const void* dv_new;  // [B, T, HV, 128] bf16
  const void* dh;      // [rows, HV, 128, 128] bf16
  void* dq;  // written: [B, T, H, 128] bf16 if H == HV, else [B, T, HV, 128] fp32 of the normalised
             // rows
  void* dk;  // as dq
  void* dv;  // [B, T, HV, 128] bf16, written
  void* dg;  // [B, T, HV, 128] g_dtype, written
  void* dbeta;      // [B, T, HV] beta_dtype, written
  float* dA_log;    // [rows, HV] or null, written: sums over the chunk
  float* ddt_bias;  // [rows, HV, 128] or null, written: sums over the chunk
};

// Launch on a stream of the current device. Return 0, or the CUDA error code.
int flaop_kda_intra_launch(const struct flaop_kda_intra* params, void* stream);
int flaop_kda_bwd_launch(const struct flaop_kda_bwd* params, void* stream);

// The text of a CUDA error code.
const char* flaop_cuda_error(int code);

#ifdef __cplusplus
}
#endif
