// Shared memory of the chunk backward of KDA, operand tiles, the products over values, gate sums
// (see bwd.cu).
#pragma once
#include "common.cuh"

namespace flaop {
namespace {

constexpr int kThreads = 256, kWarps = 8;

struct Shared {
  __nv_bfloat16 d_o[kTokens][kRow];     // later dq on its way out
  __nv_bfloat16 v_new[kTokens][kRow];   // later dk
  __nv_bfloat16 dv_new[kTokens][kRow];  // then dR, later dg
  __nv_bfloat16 q[kTokens][kRow], k[kTokens][kRow];
  union {
    struct {
      __nv_bfloat16 h[kHead][kRow], dh[kHead][kRow];
    };
    float parked[2][8 * kBlocks][kThreads];  // accumulators that a pass does not touch
  };
  union {
    struct {
      __nv_bfloat16 v[kTokens][kRow];  // then dv
      __nv_bfloat16 g[kTokens][kRow];  // raw gate, if it is bf16
    };
    float2 gate[4 * kBlocks][kThreads];  // a lane's gate sums within blocks of 16
  };
  __nv_bfloat16 A[kTokens][kPairRow];
  __nv_bfloat16 dA_qk[kTokens][kPairRow];
  __nv_bfloat16 dL[kTokens][kPairRow];
  float part[2][kWarps][kTokens];  // sums over a warp's channels
  float sum[2][kTokens];           // <q, dq>, <k, dk>
  float beta[kTokens], q_norm[kTokens], k_norm[kTokens];
  float dA_log[kWarps];
};

using Pairs = float2[kBlocks][2][2];  // [block][half][channel], tokens in pairs
using Words =
    uint32_t[kBlocks][4];  // the same in bf16: left operands of mma, index channel + 2 half
using Sums = float[kBlocks][2][4];  // the same as accumulators, index 2 channel + e

// Left operand x^T from x stored [k][m]: 16 x 16 at (k, m).
template <int STRIDE>
__device__ __forceinline__ void load_left_transposed(uint32_t (&a)[4],
                                                     const __nv_bfloat16 (*x)[STRIDE], int k,
                                                     int m) {
  const int lane = threadIdx.x % 32;
  load_matrices_transposed(a, &x[k + lane % 8 + 8 * (lane / 16)][m + 8 * (lane / 8 % 2)]);
}
// Left operand stored [m][k].
template <int STRIDE>
__device__ __forceinline__ void load_left(uint32_t (&a)[4], const __nv_bfloat16 (*x)[STRIDE], int m,
                                          int k) {
  const int lane = threadIdx.x % 32;
  load_matrices(a, &x[m + lane % 16][k + 8 * (lane / 16)]);
}
// Right operand of 16 columns stored [n][k]: b[0], b[1] columns 0 to 7, b[2], b[3] the others.
template <int STRIDE>
__device__ __forceinline__ void load_right(uint32_t (&b)[4], const __nv_bfloat16 (*x)[STRIDE],
                                           int n, int k) {
  const int lane = threadIdx.x % 32;
  load_matrices(b, &x[n + lane % 8 + 8 * (lane / 16)][k + 8 * (lane / 8 % 2)]);
}
// Right operand stored [k][n].
template <int STRIDE>
__device__ __forceinline__ void load_right_transposed(uint32_t (&b)[4],
                                                      const __nv_bfloat16 (*x)[STRIDE], int k,
                                                      int n) {
  const int lane = threadIdx.x % 32;
  load_matrices_transposed(b, &x[k + lane % 16][n + 8 * (lane / 16)]);
}
// c[0], c[1] += a b for 16 columns.
__device__ __forceinline__ void mma16(float (&c)[2][4], const uint32_t (&a)[4],
                                      const uint32_t (&b)[4]) {
  mma(c[0], a, b[0], b[1], __nv_bfloat16());
  mma(c[1], a, b[2], b[3], __nv_bfloat16());
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Tokens of a lane at [block][half]: the first of a pair.
__device__ __forceinline__ int lane_token(int block, int half) {
  return kBlock * block + 8 * half + 2 * (threadIdx.x % 4);
}

__device__ __forceinline__ float2& pair(float (&x)[4], int c) {
  return reinterpret_cast<float2*>(x)[c];
}

struct Block {
  int row, column;
};
// The ten 16 x 16 blocks on and below the diagonal.
__device__ __forceinline__ Block block_of(int i) {
  const int row = i < 1 ? 0 : i < 3 ? 1 : i < 6 ? 2 : 3;
  return {row, i - row * (row + 1) / 2};
}

// Stores a 16 x 16 block where keep(row, column) holds, zeros elsewhere.
template <typename Keep>
__device__ __forceinline__ void store_block(__nv_bfloat16 (*x)[kPairRow], const float (&c)[2][4],
                                            Block at, float scale, Keep keep) {
  const int lane = threadIdx.x % 32, r = lane / 4, p = 2 * (lane % 4);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = at.row * kBlock + r + 8 * i, column = at.column * kBlock + 8 * n + p;
      const float a = keep(row, column) ? scale * c[n][2 * i] : 0.f;
      const float b = keep(row, column + 1) ? scale * c[n][2 * i + 1] : 0.f;
      *reinterpret_cast<uint32_t*>(&x[row][column]) = pack_bf16(a, b);
    }
}

// dR = A^T dV' in the place of dV', dv = beta dR in that of v, and its part of dbeta. A warp a slab
// of 16 values: a block of rows is written once no later one reads it.
__device__ void value_gradient(Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, p = 2 * (lane % 4);
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    float c[2][4] = {};
#pragma unroll
    for (int t = m; t < kBlocks; ++t) {
      uint32_t a[4], b[4];
      load_left_transposed(a, s.A, t * kBlock, m * kBlock);
      load_right_transposed(b, s.dv_new, t * kBlock, 16 * warp);
      mma16(c, a, b);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = m * kBlock + r + 8 * i;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int column = 16 * warp + 8 * n + p;
        uint32_t* word = reinterpret_cast<uint32_t*>(&s.v[row][column]);
        const float2 v = unpack_bf16(*word);
        sum += c[n][2 * i] * v.x + c[n][2 * i + 1] * v.y;
        *word = pack_bf16(c[n][2 * i] * s.beta[row], c[n][2 * i + 1] * s.beta[row]);
        *reinterpret_cast<uint32_t*>(&s.dv_new[row][column]) =
            pack_bf16(c[n][2 * i], c[n][2 * i + 1]);
      }
      sum = quad_sum(sum);
      if (lane % 4 == 0) s.part[0][warp][row] = sum;
    }
  }
}

// dA_qk = scale do V'^T and dL = -dR V'^T to shared memory. A block a warp, two for two of them.
__device__ void value_pairs(Shared& s, float scale) {
  for (int i = threadIdx.x / 32; i < 10; i += kWarps) {
    const Block at = block_of(i);
    float qk[2][4] = {}, kk[2][4] = {};
#pragma unroll
    for (int c = 0; c < kHead; c += 16) {
      uint32_t a[4], b[4];
      load_right(b, s.v_new, at.column * kBlock, c);
      load_left(a, s.d_o, at.row * kBlock, c);
      mma16(qk, a, b);
      load_left(a, s.dv_new, at.row * kBlock, c);
      mma16(kk, a, b);
    }
    store_block(s.dA_qk, qk, at, scale, [](int row, int column) { return row >= column; });
    store_block(s.dL, kk, at, -1.f, [](int row, int column) { return row > column; });
  }
}

// A lane's raw gates, bias included, times log2 e.
template <typename G>
__device__ __forceinline__ void load_gates(const flaop_kda_call& call, const Shared& s,
                                           const Chunk& chunk, int head, int channel, Pairs& x) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    if constexpr (sizeof(G) == 2) {
      uint32_t words[4];
      load_left_transposed(words, s.g, block * kBlock, 16 * (threadIdx.x / 32));
#pragma unroll
      for (int f = 0; f < 4; ++f) x[block][f / 2][f % 2] = unpack_bf16(words[f]);
    } else {
      const float* g = static_cast<const float*>(call.g);
#pragma unroll
      for (int f = 0; f < 4; ++f)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int t = lane_token(block, f / 2) + e;
          const int64_t at = ((chunk.token + t) * call.HV + head) * kHead + channel + 8 * (f % 2);
          (e ? x[block][f / 2][f % 2].y : x[block][f / 2][f % 2].x) =
              t < chunk.length ? g[at] : 0.f;
        }
    }
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float bias = load_bias(call, head, channel + 8 * c);
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      float2& y = x[i / 2][i % 2][c];
      y = make_float2((y.x + bias) * kLog2e, (y.y + bias) * kLog2e);
    }
  }
}

// Gates become inclusive sums within blocks of 16; total: the blocks' sums.
__device__ __forceinline__ void prefix_gates(Pairs& x, float (&total)[kBlocks][2]) {
  const int l = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float before = 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2& y = x[block][half][c];
        float sum = y.x + y.y;
        float other = __shfl_up_sync(~0u, sum, 1, 4);
        if (l >= 1) sum += other;
        other = __shfl_up_sync(~0u, sum, 2, 4);
        if (l >= 2) sum += other;
        const float up = __shfl_up_sync(~0u, sum, 1, 4);
        const float start = before + (l > 0 ? up : 0.f);
        y.x += start;
        y.y += y.x;
        before += __shfl_sync(~0u, sum, 3, 4);
      }
      total[block][c] = before;
    }
}

// Inclusive sums from a token to the chunk's end, plus `last` of the channel.
__device__ __forceinline__ void suffix_sums(Pairs& x, const float (&last)[2]) {
  const int l = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float after = last[c];
#pragma unroll
    for (int i = 2 * kBlocks - 1; i >= 0; --i) {
      float2& y = x[i / 2][i % 2][c];
      float sum = y.x + y.y;
      float other = __shfl_down_sync(~0u, sum, 1, 4);
      if (l <= 2) sum += other;
      other = __shfl_down_sync(~0u, sum, 2, 4);
      if (l <= 1) sum += other;
      const float down = __shfl_down_sync(~0u, sum, 1, 4);
      const float end = after + (l < 3 ? down : 0.f);
      y.y += end;
      y.x += y.y;
      after += __shfl_sync(~0u, sum, 0, 4);
    }
  }
}

// Sums of a per-element product over a warp's channels, per token, to part[which].
__device__ __forceinline__ void sum_channels(Shared& s, int which, const Sums& a) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    float2 sum = make_float2(a[i / 2][i % 2][0] + a[i / 2][i % 2][2],
                             a[i / 2][i % 2][1] + a[i / 2][i % 2][3]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, step);
      sum.y += __shfl_xor_sync(~0u, sum.y, step);
    }
    if (lane < 4) *reinterpret_cast<float2*>(&s.part[which][warp][lane_token(i / 2, i % 2)]) = sum;
  }
}

// Writes a lane's values to a [token][channel] tile in bf16.
__device__ __forceinline__ void scatter(__nv_bfloat16 (*to)[kRow], int channel, int block, int f,
                                        float2 x) {
  const int t = lane_token(block, f / 2);
  to[t][channel + 8 * (f % 2)] = __float2bfloat16(x.x);
  to[t + 1][channel + 8 * (f % 2)] = __float2bfloat16(x.y);
}
// The same to a [.., heads, 128] tensor in fp32.
__device__ __forceinline__ void scatter(float* to, const Chunk& chunk, int heads, int head,
                                        int channel, int block, int f, float2 x) {
  const int t = lane_token(block, f / 2);
  float* at = to + ((chunk.token + t) * heads + head) * kHead + channel + 8 * (f % 2);
  if (t < chunk.length) at[0] = x.x;
  if (t + 1 < chunk.length) at[static_cast<int64_t>(heads) * kHead] = x.y;
}

}  // namespace
}  // namespace flaop
