// Within one chunk of KDA on tensor cores: gates, pair matrices, inverse, W, U, qg, kg in one pass.
//
// One block of 4 warps per (chunk, value head); K = V = 128, 64 tokens, four blocks of 16 tokens.
// The gate is kept as its inclusive sum within each block of 16 and the totals of the blocks, so
// every exponent is a sum over at most 16 gates plus whole blocks. Pairs of different blocks go
// through the start of the row's block; pairs of one block through its start with a centred
// exponent if gates lie in [-5, 0], else through dyadic levels 8, 4, 2, 1
// (triton_kernels/delta/pairs.py explains why both are exact).
#include <cuda_runtime.h>

#include "intra_pairs.cuh"

namespace flaop {
namespace {

// A warp's finished blocks: L scaled into shared memory, A_qk to memory.
__device__ void finish_pairs(const flaop_kda_intra& p, Shared& s, const PairSums<true>& sums, int I,
                             int J, int64_t token, int length, int head) {
  const int lane = threadIdx.x % 32, r = lane / 4, c = 2 * (lane % 4);
  float* L = reinterpret_cast<float*>(s.q);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = I * kBlock + r + 8 * i, column = J * kBlock + 8 * n + c;
      const float row_q = s.q_norm[row] * p.call.scale, row_k = s.k_norm[row] * s.beta[row];
      float qk[2], kk[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float norm = s.k_norm[column + j];
        qk[j] = row >= column + j ? sums.qk[n][2 * i + j] * row_q * norm : 0.f;
        kk[j] = row > column + j ? sums.kk[n][2 * i + j] * row_k * norm : 0.f;
      }
      *reinterpret_cast<float2*>(&L[row * kLRow + column]) = make_float2(kk[0], kk[1]);
      if (row < length) {
        __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.A_qk) +
                             ((token + row) * p.call.HV + head) * kTokens + column;
        *reinterpret_cast<uint32_t*>(out) = pack_bf16(qk[0], qk[1]);
      }
    }
}

// Forward substitution of a warp's diagonal block, a column a lane; the inverse goes to X.
__device__ void invert_diagonal(Shared& s, int I) {
  const int lane = threadIdx.x % 32;
  const float* L = reinterpret_cast<const float*>(s.q) + I * kBlock * kLRow + I * kBlock;
  if (lane < kBlock) {
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      x[i] = i == lane ? 1.f : 0.f;
#pragma unroll
      for (int m = 0; m < i; ++m) x[i] -= L[i * kLRow + m] * x[m];
      s.late.X[I * kBlock + i][I * kBlock + lane] = __float2half(x[i]);
    }
  }
}

// A fragment of a 16 x 16 fp32 block in fp16.
__device__ __forceinline__ void load_rows(uint32_t (&a)[4], const float* x, int stride) {
  const int lane = threadIdx.x % 32, r = lane / 4, p = 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 y = load2(x + (r + 8 * i) * stride + p + 8 * half);
      a[2 * half + i] = pack_half(y.x, y.y);
    }
}

// Column J of blocks of the inverse: X_IJ = -X_II sum_{J <= m < I} L_Im X_mJ. A warp a column.
__device__ void invert_below(Shared& s, int J) {
  const int lane = threadIdx.x % 32, r = lane / 4, p = 2 * (lane % 4);
  const float* L = reinterpret_cast<const float*>(s.q);
  for (int I = J + 1; I < kBlocks; ++I) {
    float c[2][4] = {};
    for (int m = J; m < I; ++m) {
      uint32_t a[4], b[4];
      load_rows(a, L + I * kBlock * kLRow + m * kBlock, kLRow);
      load_matrices_transposed(b, &s.late.X[m * kBlock + lane % 16][J * kBlock + 8 * (lane / 16)]);
      mma(c[0], a, b[0], b[1], __half());
      mma(c[1], a, b[2], b[3], __half());
    }
    uint32_t a[4];
    load_matrices(a, &s.late.X[I * kBlock + lane % 16][I * kBlock + 8 * (lane / 16)]);
    // an accumulator tile is the right operand of the next product once it is transposed in shared
    // memory
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint32_t*>(&s.late.X[I * kBlock + r + 8 * i][J * kBlock + 8 * n + p]) =
            pack_half(-c[n][2 * i], -c[n][2 * i + 1]);
    __syncwarp();
    uint32_t b[4];
    load_matrices_transposed(b, &s.late.X[I * kBlock + lane % 16][J * kBlock + 8 * (lane / 16)]);
    float x[2][4] = {};
    mma(x[0], a, b[0], b[1], __half());
    mma(x[1], a, b[2], b[3], __half());
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint32_t*>(&s.late.X[I * kBlock + r + 8 * i][J * kBlock + 8 * n + p]) =
            pack_half(x[n][2 * i], x[n][2 * i + 1]);
    __syncwarp();
  }
}

// out[64][128] = (A beta) x for x [64][128] in shared memory; a warp makes 32 columns, staged in
// the place of q.
__device__ void multiply_by_inverse(Shared& s, const __nv_bfloat16 (*x)[kRow]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, p = 2 * (lane % 4);
  uint32_t b[kBlocks][2][4];  // per 16 tokens and 16 columns
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n)
      load_matrices_transposed(b[m][n],
                               &x[m * kBlock + lane % 16][32 * warp + 16 * n + 8 * (lane / 16)]);
#pragma unroll
  for (int I = 0; I < kBlocks; ++I) {
    float c[4][4] = {};
#pragma unroll
    for (int m = 0; m <= I; ++m) {
      uint32_t a[4];
      load_matrices(a, &s.late.A[I * kBlock + lane % 16][m * kBlock + 8 * (lane / 16)]);
#pragma unroll
      for (int n = 0; n < 4; ++n)
        mma(c[n], a, b[m][n / 2][2 * (n % 2)], b[m][n / 2][2 * (n % 2) + 1], __nv_bfloat16());
    }
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint32_t*>(&s.q[I * kBlock + r + 8 * i][32 * warp + 8 * n + p]) =
            pack_bf16(c[n][2 * i], c[n][2 * i + 1]);
  }
}

template <typename G, bool BOUNDED, bool LOAD_A>
__global__ void __launch_bounds__(kThreads, 3) kda_intra_kernel(const flaop_kda_intra p) {
  const flaop_kda_call& call = p.call;
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int local = blockIdx.x / call.HV, head = blockIdx.x % call.HV;
  const Chunk chunk(call, call.row0 + local);
  if (chunk.length <= 0) return;
  const int64_t token = chunk.token;
  const int length = chunk.length;
  const int warp = threadIdx.x / 32;
  const int key_head = head / (call.HV / call.H);

  load_tile<kThreads>(s.q, call.q, token, call.H, key_head, length);
  load_tile<kThreads>(s.k, call.k, token, call.H, key_head, length);
  copy_commit();
  // what is needed late is on its way to the L2 cache
  const int line = threadIdx.x / 2;
  if (line < length) {
    const int64_t at = (token + line) * call.HV + head;
    prefetch(static_cast<const __nv_bfloat16*>(call.v) + at * kHead + 64 * (threadIdx.x % 2));
    if (LOAD_A && threadIdx.x % 2 == 0)
      prefetch(static_cast<const __nv_bfloat16*>(p.A) + at * kTokens);
  }
  sum_gates<G>(call, s, token, length, head);
  if (threadIdx.x < kTokens) {
    const int t = threadIdx.x;
    s.beta[t] = t < length ? load_beta(call, token + t, head) : 0.f;
  }
  copy_wait();
  __syncthreads();
  row_norms(s.q, s.k, s.q_norm, s.k_norm, call.l2norm);

  // Six blocks below the diagonal and four on it: three or two a warp.
  constexpr int kRows[kBlocks][2] = {{1, 2}, {2, 3}, {3, 0}, {3, 0}};
  constexpr int kColumns[kBlocks][2] = {{0, 0}, {1, 1}, {2, -1}, {0, -1}};
  PairSums<true> sums[3];
  if constexpr (!LOAD_A) {
#pragma unroll
    for (int i = 0; i < 3; ++i) sums[i].clear();
    if constexpr (BOUNDED) {
      pairs_within_bounded(s, sums[0], warp);
    } else {
      pairs_within(s, sums[0], warp);
    }
    pairs_between(s, sums[1], kRows[warp][0], kColumns[warp][0]);
    if (warp < 2) pairs_between(s, sums[2], kRows[warp][1], kColumns[warp][1]);
  }
  __syncthreads();
  const int64_t tile = static_cast<int64_t>(local) * call.HV + head;
  decayed_operands<true>({static_cast<__nv_bfloat16*>(p.qg), static_cast<__nv_bfloat16*>(p.kg),
                          p.decay, call.scale, tile},
                         s);
  __syncthreads();  // q and the gate sums are done with
  load_tile<kThreads>(s.late.v, call.v, token, call.HV, head, length);
  copy_commit();

  __nv_bfloat16* A = static_cast<__nv_bfloat16*>(p.A);
  const int column = 8 * (threadIdx.x % 8);
  if constexpr (LOAD_A) {
    for (int t = threadIdx.x / 8; t < kTokens; t += kThreads / 8) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (t < length)
        x = *reinterpret_cast<const uint4*>(A + ((token + t) * call.HV + head) * kTokens + column);
      uint32_t* to = reinterpret_cast<uint32_t*>(&s.late.A[t][column]);
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 y = unpack_bf16(words[j]);
        to[j] = pack_bf16(y.x * s.beta[column + 2 * j], y.y * s.beta[column + 2 * j + 1]);
      }
    }
  } else {
    finish_pairs(p, s, sums[0], warp, warp, token, length, head);
    finish_pairs(p, s, sums[1], kRows[warp][0], kColumns[warp][0], token, length, head);
    if (warp < 2)
      finish_pairs(p, s, sums[2], kRows[warp][1], kColumns[warp][1], token, length, head);
    __syncthreads();
    invert_diagonal(s, warp);
    __syncthreads();
    invert_below(s, warp);
    __syncthreads();
    // A to memory, and times beta of its columns to shared memory; blocks above the diagonal are
    // zero
    for (int t = threadIdx.x / 8; t < kTokens; t += kThreads / 8) {
      float x[8], y[8];
      const bool below = column / kBlock <= t / kBlock;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[j] = below ? __half2float(s.late.X[t][column + j]) : 0.f;
        y[j] = x[j] * s.beta[column + j];
      }
      store8(&s.late.A[t][column], y);
      if (t < length) {
        const int64_t at = ((token + t) * call.HV + head) * kTokens + column;
        if (A != nullptr) store8(A + at, x);
        if (!below)
          *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.A_qk) + at) =
              make_uint4(0, 0, 0, 0);
      }
    }
  }
  copy_wait();
  __syncthreads();

  multiply_by_inverse(s, s.k);
  __syncthreads();
  store_tile<kThreads>(s.q, static_cast<__nv_bfloat16*>(p.w) + tile * kTokens * kHead, kHead,
                       kTokens);
  __syncthreads();
  multiply_by_inverse(s, s.late.v);
  __syncthreads();
  __nv_bfloat16* u = static_cast<__nv_bfloat16*>(p.u) + (token * call.HV + head) * kHead;
  store_tile<kThreads>(s.q, u, static_cast<int64_t>(call.HV) * kHead, length);
}

template <typename G, bool BOUNDED, bool LOAD_A>
int launch(const flaop_kda_intra& p, cudaStream_t stream) {
  const auto kernel = kda_intra_kernel<G, BOUNDED, LOAD_A>;
  const int64_t blocks = static_cast<int64_t>(p.call.row1 - p.call.row0) * p.call.HV;
  if (blocks <= 0) return 0;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), kThreads, sizeof(Shared), stream>>>(p);
  return cudaGetLastError();
}

template <typename G>
int select(const flaop_kda_intra& p, cudaStream_t stream) {
  if (p.load_A) return launch<G, true, true>(p, stream);
  return p.call.bounded ? launch<G, true, false>(p, stream) : launch<G, false, false>(p, stream);
}

}  // namespace
}  // namespace flaop

extern "C" int flaop_kda_intra_launch(const flaop_kda_intra* params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return params->call.g_dtype == FLAOP_F32 ? flaop::select<float>(*params, s)
                                           : flaop::select<__nv_bfloat16>(*params, s);
}

extern "C" const char* flaop_cuda_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
