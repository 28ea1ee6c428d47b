// Gradients within one chunk of KDA on tensor cores. The formulas: triton_kernels/delta/bwd.py.
//
// One block of 8 warps per (chunk, value head); K = V = 128, 64 tokens. A warp owns 16 channels and all tokens,
// so gates, prefix and suffix sums and the pairs need no other warp; products that contract over channels go
// through shared memory. Per-token matrices are kept transposed, [16 channels x 64 tokens]: the accumulator of
// mma then has the layout of its left operand, and a lane holds
//
//   x[block][half][c][e]: channel 16 warp + lane / 4 + 8 c, token 16 block + 8 half + 2 (lane % 4) + e
//
// The gate gradient sums the products of rounded operands, so that pairs wholly after a token cancel.
#include <cuda_runtime.h>

#include "common.cuh"

namespace flaop {
namespace {

constexpr int kThreads = 256, kWarps = 8;

struct Shared {
  union {
    struct {
      __nv_bfloat16 d_o[kTokens][kRow];    // later dq on its way out
      __nv_bfloat16 v_new[kTokens][kRow];  // later dk
    };
    float2 gate[4 * kBlocks][kThreads];  // a lane's gate sums within blocks of 16
  };
  __nv_bfloat16 dv_new[kTokens][kRow];  // later dg
  __nv_bfloat16 q[kTokens][kRow], k[kTokens][kRow];
  union {
    struct {
      __nv_bfloat16 h[kHead][kRow], dh[kHead][kRow];
    };
    float parked[2][8 * kBlocks][kThreads];  // accumulators that a pass does not touch
  };
  union {
    __nv_bfloat16 v[kTokens][kRow];       // then dv
    __nv_bfloat16 kb[kHead][kPairRow];    // beta k exp2(G), transposed
  };
  union {
    __nv_bfloat16 g[kTokens][kRow];       // raw gate, if it is bf16
    __nv_bfloat16 dW[kHead][kPairRow];    // transposed
    __nv_bfloat16 T[kTokens][kPairRow];   // dA A^T
  };
  __nv_bfloat16 A[kTokens][kPairRow];
  __nv_bfloat16 dA_qk[kTokens][kPairRow];
  __nv_bfloat16 dL[kTokens][kPairRow];  // dA first
  float part[2][kWarps][kTokens];       // sums over a warp's channels
  float sum[2][kTokens];                // <q, dq>, <k, dk>
  float beta[kTokens], q_norm[kTokens], k_norm[kTokens];
  float dA_log[kWarps];
};

using Pairs = float2[kBlocks][2][2];  // [block][half][channel], tokens in pairs
using Words = uint32_t[kBlocks][4];   // the same in bf16: left operands of mma, index channel + 2 half
using Sums = float[kBlocks][2][4];    // the same as accumulators, index 2 channel + e

// Left operand x^T from x stored [k][m]: 16 x 16 at (k, m).
template <int STRIDE>
__device__ __forceinline__ void load_left_transposed(uint32_t (&a)[4], const __nv_bfloat16 (*x)[STRIDE], int k, int m) {
  const int lane = threadIdx.x % 32;
  load_matrices_transposed(a, &x[k + lane % 8 + 8 * (lane / 16)][m + 8 * (lane / 8 % 2)]);
}
// Left operand stored [m][k].
template <int STRIDE>
__device__ __forceinline__ void load_left(uint32_t (&a)[4], const __nv_bfloat16 (*x)[STRIDE], int m, int k) {
  const int lane = threadIdx.x % 32;
  load_matrices(a, &x[m + lane % 16][k + 8 * (lane / 16)]);
}
// Right operand of 16 columns stored [n][k]: b[0], b[1] columns 0 to 7, b[2], b[3] the others.
template <int STRIDE>
__device__ __forceinline__ void load_right(uint32_t (&b)[4], const __nv_bfloat16 (*x)[STRIDE], int n, int k) {
  const int lane = threadIdx.x % 32;
  load_matrices(b, &x[n + lane % 8 + 8 * (lane / 16)][k + 8 * (lane / 8 % 2)]);
}
// Right operand stored [k][n].
template <int STRIDE>
__device__ __forceinline__ void load_right_transposed(uint32_t (&b)[4], const __nv_bfloat16 (*x)[STRIDE], int k, int n) {
  const int lane = threadIdx.x % 32;
  load_matrices_transposed(b, &x[k + lane % 16][n + 8 * (lane / 16)]);
}
// c[0], c[1] += a b for 16 columns.
__device__ __forceinline__ void mma16(float (&c)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
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

__device__ __forceinline__ float2& pair(float (&x)[4], int c) { return reinterpret_cast<float2*>(x)[c]; }

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
__device__ __forceinline__ void store_block(__nv_bfloat16 (*x)[kPairRow], const float (&c)[2][4], Block at, float scale,
                                            Keep keep) {
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

// dA_qk = scale do V'^T, and the part dV' (beta v)^T of dA, to shared memory. A block a warp, two for two of them.
__device__ void value_pairs(Shared& s, float scale) {
  const int p = 2 * (threadIdx.x % 4);
  for (int i = threadIdx.x / 32; i < 10; i += kWarps) {
    const Block at = block_of(i);
    float qk[2][4] = {}, dA[2][4] = {};
#pragma unroll
    for (int c = 0; c < kHead; c += 16) {
      uint32_t a[4], b[4];
      load_left(a, s.d_o, at.row * kBlock, c);
      load_right(b, s.v_new, at.column * kBlock, c);
      mma16(qk, a, b);
      load_left(a, s.dv_new, at.row * kBlock, c);
      load_right(b, s.v, at.column * kBlock, c);
      mma16(dA, a, b);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) dA[n][j] *= s.beta[at.column * kBlock + 8 * n + p + j % 2];
    store_block(s.dA_qk, qk, at, scale, [](int row, int column) { return row >= column; });
    store_block(s.dL, dA, at, 1.f, [](int, int) { return true; });
  }
}

// What store_block stored.
__device__ __forceinline__ void load_block(float (&c)[2][4], const __nv_bfloat16 (*x)[kPairRow], Block at) {
  const int lane = threadIdx.x % 32, r = lane / 4, p = 2 * (lane % 4);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      pair(c[n], i) = unpack_bf16(
          *reinterpret_cast<const uint32_t*>(&x[at.row * kBlock + r + 8 * i][at.column * kBlock + 8 * n + p]));
}

// dv = beta A^T dV' in the place of v, and its part of dbeta. A warp a slab of 16 values.
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
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = m * kBlock + r + 8 * i;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t* word = reinterpret_cast<uint32_t*>(&s.v[row][16 * warp + 8 * n + p]);
        const float2 v = unpack_bf16(*word);
        sum += c[n][2 * i] * v.x + c[n][2 * i + 1] * v.y;
        *word = pack_bf16(c[n][2 * i] * s.beta[row], c[n][2 * i + 1] * s.beta[row]);
      }
      sum = quad_sum(sum);
      if (lane % 4 == 0) s.part[0][warp][row] = sum;
    }
  }
}

// A lane's raw gates, bias included, times log2 e.
template <typename G>
__device__ __forceinline__ void load_gates(const flaop_kda_call& call, const Shared& s, const Chunk& chunk, int head,
                                           int channel, Pairs& x) {
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
          (e ? x[block][f / 2][f % 2].y : x[block][f / 2][f % 2].x) = t < chunk.length ? g[at] : 0.f;
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

// What a lane holds during the pairs. They are worked through twice, first for the gradients of rows, then for
// those of columns: all accumulators at once do not fit in registers.
struct Lane {
  Words q, k;  // raw rows
  float total[kBlocks][2];
  Sums dq;  // rows
  Sums dk;  // rows: dk_erase / beta; columns: all of dk
  Pairs dgate;

  // Inclusive sum of the gates within the block of 16.
  __device__ __forceinline__ float2 gate(const Shared& s, int block, int half, int c) const {
    return s.gate[4 * block + 2 * half + c][threadIdx.x];
  }
  __device__ __forceinline__ float2 query(const Shared& s, int block, int f) const {
    return multiply(unpack_bf16(q[block][f]), load2(&s.q_norm[lane_token(block, f / 2)]));
  }
  __device__ __forceinline__ float2 key(const Shared& s, int block, int f) const {
    return multiply(unpack_bf16(k[block][f]), load2(&s.k_norm[lane_token(block, f / 2)]));
  }
};

// Hides what the rows and shared memory hold, so that nothing computed from them is kept in registers.
__device__ __forceinline__ void forget(Lane& x) {
  asm volatile("" ::: "memory");
#pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) asm volatile("" : "+r"(x.q[i / 4][i % 4]), "+r"(x.k[i / 4][i % 4]));
}

// Left operands of one block: scaled rows q and beta k, scaled columns k, and the factors.
struct Operands {
  float2 factor[4];
  uint32_t q[4], k[4];

  __device__ __forceinline__ void rows(const Shared& s, const Lane& x, int block, const float2 (&f)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      factor[i] = f[i];
      q[i] = pack_bf16(multiply(x.query(s, block, i), f[i]));
      const float2 beta = load2(&s.beta[lane_token(block, i / 2)]);
      k[i] = pack_bf16(multiply(multiply(x.key(s, block, i), f[i]), beta));
    }
  }
  __device__ __forceinline__ void columns(const Shared& s, const Lane& x, int block, const float2 (&f)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      factor[i] = f[i];
      k[i] = pack_bf16(multiply(x.key(s, block, i), f[i]));
    }
  }
};

__device__ __forceinline__ void add_scaled(float2& to, float2 a, float2 b) {
  to.x += a.x * b.x;
  to.y += a.y * b.y;
}

__device__ __forceinline__ void mask(uint32_t (&b)[4], const uint32_t (&m)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] &= m[i];
}

// Pairs of rows of block I with columns of block J: gradients of the rows. m: which pairs count.
__device__ __forceinline__ void row_gradients(const Shared& s, Lane& x, const Operands& row, const Operands& column,
                                              int I, int J, const uint32_t (&m)[4]) {
  uint32_t a[4], b[4];
  float rq[2][4] = {}, rk[2][4] = {};
  load_right(a, s.dA_qk, I * kBlock, J * kBlock);
  load_right(b, s.dL, I * kBlock, J * kBlock);
  mask(a, m);
  mask(b, m);
  mma16(rq, column.k, a);
  mma16(rk, column.k, b);
#pragma unroll
  for (int f = 0; f < 4; ++f) {
    const int half = f / 2, c = f % 2;
    add_scaled(pair(x.dq[I][half], c), row.factor[f], pair(rq[half], c));
    add_scaled(pair(x.dk[I][half], c), row.factor[f], pair(rk[half], c));
    add_scaled(x.dgate[I][half][c], unpack_bf16(row.q[f]), pair(rq[half], c));
    add_scaled(x.dgate[I][half][c], unpack_bf16(row.k[f]), pair(rk[half], c));
  }
}

// The same pairs: gradients of the columns.
__device__ __forceinline__ void column_gradients(const Shared& s, Lane& x, const Operands& row, const Operands& column,
                                                 int I, int J, const uint32_t (&m)[4]) {
  uint32_t a[4], b[4];
  float c[2][4] = {}, d[2][4] = {};
  load_right_transposed(a, s.dA_qk, I * kBlock, J * kBlock);
  load_right_transposed(b, s.dL, I * kBlock, J * kBlock);
  mask(a, m);
  mask(b, m);
  mma16(c, row.q, a);
  mma16(d, row.k, b);
#pragma unroll
  for (int f = 0; f < 4; ++f) {
    const int half = f / 2, channel = f % 2;
    const float2 sum = add(pair(c[half], channel), pair(d[half], channel));
    add_scaled(pair(x.dk[J][half], channel), column.factor[f], sum);
    const float2 z = unpack_bf16(column.k[f]);
    add_scaled(x.dgate[J][half][channel], make_float2(-z.x, -z.y), sum);
  }
}

template <bool ROWS>
__device__ __forceinline__ void pair_gradients(const Shared& s, Lane& x, const Operands& row, const Operands& column,
                                               int I, int J, const uint32_t (&row_mask)[4],
                                               const uint32_t (&column_mask)[4]) {
  if constexpr (ROWS) {
    row_gradients(s, x, row, column, I, J, row_mask);
  } else {
    column_gradients(s, x, row, column, I, J, column_mask);
  }
}

__device__ __forceinline__ void exponents(const Shared& s, float2 (&f)[4], const Lane& x, int block, float sign,
                                          const float (&shift)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 e = x.gate(s, block, i / 2, i % 2);
    f[i] = exp2_pair(make_float2(sign * e.x + shift[i % 2], sign * e.y + shift[i % 2]));
  }
}

constexpr uint32_t kAll = 0xffffffffu;

template <bool ROWS>
__device__ __forceinline__ void pairs_between(const Shared& s, Lane& x) {
  const uint32_t all[4] = {kAll, kAll, kAll, kAll};
#pragma unroll
  for (int I = 1; I < kBlocks; ++I) {
    forget(x);
    Operands row, column;
    float2 f[4];
    exponents(s, f, x, I, 1.f, {0.f, 0.f});
    row.rows(s, x, I, f);
#pragma unroll
    for (int J = 0; J < I; ++J) {
      forget(x);
      float rest[2] = {0.f, 0.f};
#pragma unroll
      for (int m = J; m < I; ++m) {
        rest[0] += x.total[m][0];
        rest[1] += x.total[m][1];
      }
      exponents(s, f, x, J, -1.f, rest);
      column.columns(s, x, J, f);
      pair_gradients<ROWS>(s, x, row, column, I, J, all, all);
    }
  }
}

template <bool ROWS>
__device__ __forceinline__ void pairs_within_bounded(const Shared& s, Lane& x) {
  const uint32_t all[4] = {kAll, kAll, kAll, kAll};
#pragma unroll
  for (int I = 0; I < kBlocks; ++I) {
    forget(x);
    Operands row, column;
    float2 f[4];
    exponents(s, f, x, I, 1.f, {kCentre, kCentre});
    row.rows(s, x, I, f);
    forget(x);
    exponents(s, f, x, I, -1.f, {-kCentre, -kCentre});
    column.columns(s, x, I, f);
    pair_gradients<ROWS>(s, x, row, column, I, I, all, all);
  }
}

// The gate sum of the token `reference` of a lane's block, for both channels.
__device__ __forceinline__ float reference_gate(const Shared& s, const Lane& x, int block, int channel, int reference) {
  const float2 e = x.gate(s, block, reference / 8, channel);
  return __shfl_sync(~0u, reference % 2 ? e.y : e.x, reference % 8 / 2, 4);
}

template <bool ROWS, int LEVEL>
__device__ __forceinline__ void pairs_level(const Shared& s, Lane& x) {
  const int lane = threadIdx.x % 32, r = lane / 4, p = 2 * (lane % 4);
  const auto counts = [](int i, int j) {
    return (i & LEVEL) && !(j & LEVEL) && i / (2 * LEVEL) == j / (2 * LEVEL);
  };
  uint32_t row_mask[4], column_mask[4];
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = p + 8 * half, column = r + 8 * n;
      // row products: k runs over columns j of the pair, n over rows i; column products the reverse
      row_mask[2 * n + half] = (counts(column, k) ? 0xffffu : 0u) | (counts(column, k + 1) ? 0xffff0000u : 0u);
      column_mask[2 * n + half] = (counts(k, column) ? 0xffffu : 0u) | (counts(k + 1, column) ? 0xffff0000u : 0u);
    }
#pragma unroll
  for (int I = 0; I < kBlocks; ++I) {
    forget(x);
    float2 f[4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float2 e = x.gate(s, I, half, c);
        float2 reference;
        if constexpr (LEVEL == 8) {
          reference.x = reference.y = reference_gate(s, x, I, c, 7);
        } else if constexpr (LEVEL == 1) {
          reference.x = reference.y = e.x;  // the even token of the pair
        } else {
          // the end of the lower half of the lane's block of 2 LEVEL tokens, within these eight
          const int source = (p / (2 * LEVEL) * (2 * LEVEL) + LEVEL - 1) / 2;
          reference.x = reference.y = __shfl_sync(~0u, e.y, source, 4);
        }
        const float2 d = subtract(e, reference);
        f[c + 2 * half] = exp2_pair(make_float2(-fabsf(d.x), -fabsf(d.y)));
      }
    Operands row, column;
    row.rows(s, x, I, f);
    column.columns(s, x, I, f);
    pair_gradients<ROWS>(s, x, row, column, I, I, row_mask, column_mask);
  }
}

// The diagonal of A_qk: a plain product of rows, without decay.
template <bool ROWS>
__device__ __forceinline__ void pairs_diagonal(const Shared& s, Lane& x) {
#pragma unroll
  for (int I = 0; I < kBlocks; ++I)
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      const int t = lane_token(I, f / 2);
      const float2 d = make_float2(__bfloat162float(s.dA_qk[t][t]), __bfloat162float(s.dA_qk[t + 1][t + 1]));
      if constexpr (ROWS) {
        add_scaled(pair(x.dq[I][f / 2], f % 2), d, x.key(s, I, f));
      } else {
        add_scaled(pair(x.dk[I][f / 2], f % 2), d, x.query(s, I, f));
      }
    }
}

template <bool ROWS, bool BOUNDED>
__device__ __forceinline__ void all_pairs(const Shared& s, Lane& x) {
  pairs_between<ROWS>(s, x);
  if constexpr (BOUNDED) {
    pairs_within_bounded<ROWS>(s, x);
  } else {
    pairs_level<ROWS, 8>(s, x);
    pairs_level<ROWS, 4>(s, x);
    pairs_level<ROWS, 2>(s, x);
    pairs_level<ROWS, 1>(s, x);
    pairs_diagonal<ROWS>(s, x);
  }
}

// Accumulators to and from a place of the lane's own.
__device__ __forceinline__ void park(Shared& s, int place, const Sums& x) {
#pragma unroll
  for (int i = 0; i < 8 * kBlocks; ++i) s.parked[place][i][threadIdx.x] = x[i / 8][i / 4 % 2][i % 4];
}
__device__ __forceinline__ void unpark(const Shared& s, int place, Sums& x) {
#pragma unroll
  for (int i = 0; i < 8 * kBlocks; ++i) x[i / 8][i / 4 % 2][i % 4] = s.parked[place][i][threadIdx.x];
}

// Sums of a per-element product over a warp's channels, per token, to part[which].
__device__ __forceinline__ void sum_channels(Shared& s, int which, const Sums& a) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    float2 sum = make_float2(a[i / 2][i % 2][0] + a[i / 2][i % 2][2], a[i / 2][i % 2][1] + a[i / 2][i % 2][3]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, step);
      sum.y += __shfl_xor_sync(~0u, sum.y, step);
    }
    if (lane < 4) *reinterpret_cast<float2*>(&s.part[which][warp][lane_token(i / 2, i % 2)]) = sum;
  }
}

// Writes a lane's values to a [token][channel] tile in bf16.
__device__ __forceinline__ void scatter(__nv_bfloat16 (*to)[kRow], int channel, int block, int f, float2 x) {
  const int t = lane_token(block, f / 2);
  to[t][channel + 8 * (f % 2)] = __float2bfloat16(x.x);
  to[t + 1][channel + 8 * (f % 2)] = __float2bfloat16(x.y);
}
// The same to a [.., heads, 128] tensor in fp32.
__device__ __forceinline__ void scatter(float* to, const Chunk& chunk, int heads, int head, int channel, int block, int f,
                                        float2 x) {
  const int t = lane_token(block, f / 2);
  float* at = to + ((chunk.token + t) * heads + head) * kHead + channel + 8 * (f % 2);
  if (t < chunk.length) at[0] = x.x;
  if (t + 1 < chunk.length) at[static_cast<int64_t>(heads) * kHead] = x.y;
}

template <typename G, bool BOUNDED>
__global__ void __launch_bounds__(kThreads, 1) kda_bwd_kernel(const flaop_kda_bwd p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const flaop_kda_call& call = p.call;
  const int row = blockIdx.x / call.HV, head = blockIdx.x % call.HV;
  const Chunk chunk(call, row);
  const int64_t tile = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int channel = 16 * warp + lane / 4;
  if (chunk.length <= 0) {
    if (p.dA_log && threadIdx.x == 0) p.dA_log[tile] = 0.f;
    if (p.ddt_bias && threadIdx.x < kHead) p.ddt_bias[tile * kHead + threadIdx.x] = 0.f;
    return;
  }
  const int64_t token = chunk.token;
  const int length = chunk.length, key_head = head / (call.HV / call.H);

  // what the values need, then what the channels need
  load_tile<kThreads>(s.d_o, p.d_o ? p.d_o : p.dv_new, token, call.HV, head, p.d_o ? length : 0);
  load_tile<kThreads>(s.v_new, p.v_new, token, call.HV, head, length);
  load_tile<kThreads>(s.dv_new, p.dv_new, token, call.HV, head, length);
  load_tile<kThreads>(s.v, call.v, token, call.HV, head, length);
  for (int i = threadIdx.x; i < kTokens * kTokens / 8; i += kThreads) {
    const int t = i / 8, c = 8 * (i % 8), at = t < length ? t : 0;
    const __nv_bfloat16* A = static_cast<const __nv_bfloat16*>(p.A) + ((token + at) * call.HV + head) * kTokens + c;
    copy_async(&s.A[t][c], A, t < length);
  }
  copy_commit();
  load_tile<kThreads>(s.q, call.q, token, call.H, key_head, length);
  load_tile<kThreads>(s.k, call.k, token, call.H, key_head, length);
  if constexpr (sizeof(G) == 2) load_tile<kThreads>(s.g, call.g, token, call.HV, head, length);
  const __nv_bfloat16* h = static_cast<const __nv_bfloat16*>(p.h) + tile * kHead * kHead;
  const __nv_bfloat16* dh = static_cast<const __nv_bfloat16*>(p.dh) + tile * kHead * kHead;
  for (int i = threadIdx.x; i < kHead * kHead / 8; i += kThreads) {
    copy_async(&s.h[i / 16][8 * (i % 16)], h + 8 * i, true);
    copy_async(&s.dh[i / 16][8 * (i % 16)], dh + 8 * i, true);
  }
  copy_commit();
  if (threadIdx.x < kTokens) {
    const int t = threadIdx.x;
    s.beta[t] = t < length ? load_beta(call, token + t, head) : 0.f;
  }
  copy_wait_group<1>();
  __syncthreads();

  value_pairs(s, call.scale);
  __syncthreads();
  value_gradient(s);
  copy_wait();
  __syncthreads();
  const int64_t stride = static_cast<int64_t>(call.HV) * kHead;
  const int64_t first = (token * call.HV + head) * kHead;
  store_tile<kThreads>(s.v, static_cast<__nv_bfloat16*>(p.dv) + first, stride, length);
  if (threadIdx.x < 2 * kTokens) row_norms(s.q, s.k, s.q_norm, s.k_norm, call.l2norm);

  // through the states
  Lane x;
  Sums dW, dk_write;
#pragma unroll
  for (int i = 0; i < 8 * kBlocks; ++i) {
    const int block = i / 8, half = i / 4 % 2, j = i % 4;
    x.dq[block][half][j] = dk_write[block][half][j] = dW[block][half][j] = 0.f;
  }
  float last[2] = {0.f, 0.f};
#pragma unroll 2
  for (int c = 0; c < kHead; c += 16) {
    uint32_t S[4], dS[4], b[4];
    load_left(S, s.h, 16 * warp, c);
    load_left(dS, s.dh, 16 * warp, c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 product = multiply(unpack_bf16(S[i]), unpack_bf16(dS[i]));
      last[i % 2] += product.x + product.y;
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      load_right(b, s.d_o, block * kBlock, c);
      mma16(x.dq[block], S, b);
      load_right(b, s.dv_new, block * kBlock, c);
      mma16(dW[block], S, b);
      load_right(b, s.v_new, block * kBlock, c);
      mma16(dk_write[block], dS, b);
    }
  }
  Words minus_dW;
#pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) {
    const float2 w = pair(dW[i / 4][i / 2 % 2], i % 2);
    minus_dW[i / 4][i % 4] = pack_bf16(-w.x, -w.y);
  }
  const Gate gate(call, head);
  Pairs gates;
  load_gates<G>(call, s, chunk, head, channel, gates);
  with_kind(call.gate, [&](auto kind) {
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      float2& y = gates[i / 4][i / 2 % 2][i % 2];
      const int t = lane_token(i / 4, i / 2 % 2);
      const float y0 = gate.activate<kind>(y.x), y1 = gate.activate<kind>(y.y);
      y = make_float2(t < length ? y0 : 0.f, t + 1 < length ? y1 : 0.f);
    }
  });
  prefix_gates(gates, x.total);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    load_left_transposed(x.q[block], s.q, block * kBlock, 16 * warp);
    load_left_transposed(x.k[block], s.k, block * kBlock, 16 * warp);
  }
  __syncthreads();  // v, g, d_o and v_new have been read, the norms are there
#pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) s.gate[i][threadIdx.x] = gates[i / 4][i / 2 % 2][i % 2];

  float all[2] = {0.f, 0.f};
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    all[0] += x.total[m][0];
    all[1] += x.total[m][1];
  }
  last[0] = quad_sum(last[0]) * exp2_approx(all[0]);
  last[1] = quad_sum(last[1]) * exp2_approx(all[1]);
  float before[2] = {0.f, 0.f}, written[2] = {0.f, 0.f};
  forget(x);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    float after[2] = {0.f, 0.f};
#pragma unroll
    for (int m = block; m < kBlocks; ++m) {
      after[0] += x.total[m][0];
      after[1] += x.total[m][1];
    }
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      const int half = f / 2, c = f % 2, t = lane_token(block, half);
      const float2 e = x.gate(s, block, half, c);
      const float2 eG = exp2_pair(make_float2(before[c] + e.x, before[c] + e.y));
      const float2 eE = exp2_pair(make_float2(after[c] - e.x, after[c] - e.y));
      const float2 k = x.key(s, block, f), q = x.query(s, block, f);
      float2& dq = pair(x.dq[block][half], c);
      dq = make_float2(dq.x * eG.x * call.scale, dq.y * eG.y * call.scale);
      float2& dw = pair(dk_write[block][half], c);
      dw = multiply(dw, eE);
      const float2 w = multiply(k, dw);
      written[c] += w.x + w.y;
      x.dgate[block][half][c] = subtract(multiply(q, dq), w);
      *reinterpret_cast<uint32_t*>(&s.dW[channel + 8 * c][t]) = minus_dW[block][f];
      *reinterpret_cast<uint32_t*>(&s.kb[channel + 8 * c][t]) = pack_bf16(multiply(multiply(k, eG), load2(&s.beta[t])));
    }
    before[0] += x.total[block][0];
    before[1] += x.total[block][1];
  }
  park(s, 0, dk_write);
  park(s, 1, x.dq);
  last[0] += quad_sum(written[0]);
  last[1] += quad_sum(written[1]);
  forget(x);
  // dk_erase / beta = exp2(G) A^T dW
  before[0] = before[1] = 0.f;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    float c[2][4] = {};
#pragma unroll
    for (int t = m; t < kBlocks; ++t) {
      uint32_t b[4];
      load_right_transposed(b, s.A, t * kBlock, m * kBlock);
      mma16(c, minus_dW[t], b);
    }
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      const float2 e = x.gate(s, m, f / 2, f % 2);
      const float2 eG = exp2_pair(make_float2(before[f % 2] + e.x, before[f % 2] + e.y));
      const float2 de = multiply(pair(c[f / 2], f % 2), eG);
      pair(x.dk[m][f / 2], f % 2) = de;
      const float2 beta = load2(&s.beta[lane_token(m, f / 2)]);
      add_scaled(x.dgate[m][f / 2][f % 2], multiply(x.key(s, m, f), beta), de);
    }
    before[0] += x.total[m][0];
    before[1] += x.total[m][1];
  }
  __syncthreads();

  // dA, and through the inverse: dL = -A^T (dA A^T)
  for (int i = warp; i < 10; i += kWarps) {
    const Block at = block_of(i);
    float dA[2][4];
    load_block(dA, s.dL, at);
#pragma unroll 2
    for (int c = 0; c < kHead; c += 16) {
      uint32_t a[4], b[4];
      load_left_transposed(a, s.dW, c, at.row * kBlock);
      load_right_transposed(b, s.kb, c, at.column * kBlock);
      mma16(dA, a, b);
    }
    store_block(s.dL, dA, at, 1.f, [](int row, int column) { return row >= column; });
  }
  __syncthreads();
  for (int i = warp; i < 10; i += kWarps) {
    const Block at = block_of(i);
    float c[2][4] = {};
    for (int m = 0; m <= at.column; ++m) {
      uint32_t a[4], b[4];
      load_left(a, s.dL, at.row * kBlock, m * kBlock);
      load_right(b, s.A, at.column * kBlock, m * kBlock);
      mma16(c, a, b);
    }
    store_block(s.T, c, at, 1.f, [](int, int) { return true; });
  }
  __syncthreads();
  for (int i = warp; i < 10; i += kWarps) {
    const Block at = block_of(i);
    float c[2][4] = {};
    for (int t = at.row; t < kBlocks; ++t) {
      uint32_t a[4], b[4];
      load_left_transposed(a, s.A, t * kBlock, at.row * kBlock);
      load_right_transposed(b, s.T, t * kBlock, at.column * kBlock);
      mma16(c, a, b);
    }
    store_block(s.dL, c, at, -1.f, [](int row, int column) { return row > column; });
  }
  __syncthreads();

  // through the pairs: rows, which completes dq and gives dbeta, then columns
  forget(x);
  unpark(s, 1, x.dq);
  all_pairs<true, BOUNDED>(s, x);
  park(s, 1, x.dq);
  forget(x);
  Sums products;
#pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) {
    const int block = i / 4, f = i % 4;
    pair(products[block][f / 2], f % 2) = multiply(x.key(s, block, f), pair(x.dk[block][f / 2], f % 2));
  }
  sum_channels(s, 1, products);
  unpark(s, 0, products);
#pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) {
    const int block = i / 4, f = i % 4;
    const float2 beta = load2(&s.beta[lane_token(block, f / 2)]);
    float2& dk = pair(x.dk[block][f / 2], f % 2);
    dk = add(multiply(dk, beta), pair(products[block][f / 2], f % 2));
  }
  forget(x);
  all_pairs<false, BOUNDED>(s, x);
  forget(x);
  unpark(s, 1, x.dq);

  const bool complete = call.H == call.HV;
  float db = 0.f;
  if (threadIdx.x < kTokens) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) db += s.part[0][w][threadIdx.x];
  }
  __syncthreads();
  if (threadIdx.x < kTokens) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) db += s.part[1][w][threadIdx.x];
    const int t = threadIdx.x;
    if (t < length) {
      const int64_t at = (token + t) * call.HV + head;
      if (call.beta_kind > 0) {
        const float y = load_number(call.beta, at, call.beta_dtype) * kLog2e;
        db *= call.beta_kind * sigmoid_base2(y) * sigmoid_base2(-y);
      }
      if (call.beta_dtype == FLAOP_F32) static_cast<float*>(p.dbeta)[at] = db;
      if (call.beta_dtype == FLAOP_BF16) static_cast<__nv_bfloat16*>(p.dbeta)[at] = __float2bfloat16(db);
      if (call.beta_dtype == FLAOP_F16) static_cast<__half*>(p.dbeta)[at] = __float2half(db);
    }
  }
  if (complete && call.l2norm) {
    __syncthreads();
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) {
        const int block = i / 4, f = i % 4;
        pair(products[block][f / 2], f % 2) =
            which ? multiply(x.key(s, block, f), pair(x.dk[block][f / 2], f % 2))
                  : multiply(x.query(s, block, f), pair(x.dq[block][f / 2], f % 2));
      }
      sum_channels(s, which, products);
    }
    __syncthreads();
    if (threadIdx.x < 2 * kTokens) {
      const int which = threadIdx.x / kTokens, t = threadIdx.x % kTokens;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += s.part[which][w][t];
      s.sum[which][t] = sum;
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) {
    const int block = i / 4, f = i % 4, t = lane_token(block, f / 2);
    float2 dq = pair(x.dq[block][f / 2], f % 2), dk = pair(x.dk[block][f / 2], f % 2);
    if (!complete) {
      scatter(static_cast<float*>(p.dq), chunk, call.HV, head, channel, block, f, dq);
      scatter(static_cast<float*>(p.dk), chunk, call.HV, head, channel, block, f, dk);
      continue;
    }
    if (call.l2norm) {
      dq = multiply(load2(&s.q_norm[t]), subtract(dq, multiply(x.query(s, block, f), load2(&s.sum[0][t]))));
      dk = multiply(load2(&s.k_norm[t]), subtract(dk, multiply(x.key(s, block, f), load2(&s.sum[1][t]))));
    }
    scatter(s.d_o, channel, block, f, dq);
    scatter(s.v_new, channel, block, f, dk);
  }

  // the gate: suffix sums, then its derivative
  suffix_sums(x.dgate, last);
  if (call.gate != FLAOP_GATE_LOG) {
    if constexpr (sizeof(G) == 2) {
      __syncthreads();  // T and dL have been read
      load_tile<kThreads>(s.g, call.g, token, call.HV, head, length);
      copy_commit();
      copy_wait();
      __syncthreads();
    }
    load_gates<G>(call, s, chunk, head, channel, gates);
    float da = 0.f, bias[2] = {0.f, 0.f};
    const auto derive = [&](auto kind) {
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) {
        const int block = i / 4, f = i % 4, t = lane_token(block, f / 2);
        float2& d = x.dgate[block][f / 2][f % 2];
        const float2 y = gates[block][f / 2][f % 2];
        const float2 a = gate.derivative<kind>(t < length ? d.x : 0.f, y.x);
        const float2 b = gate.derivative<kind>(t + 1 < length ? d.y : 0.f, y.y);
        d = make_float2(a.x, b.x);
        da += a.y + b.y;
        bias[f % 2] += a.x + b.x;
      }
    };
    if (call.gate == FLAOP_GATE_BOUNDED) {
      derive(std::integral_constant<int, FLAOP_GATE_BOUNDED>());
    } else {
      derive(std::integral_constant<int, FLAOP_GATE_SOFTPLUS>());
    }
    bias[0] = quad_sum(bias[0]);
    bias[1] = quad_sum(bias[1]);
    if (p.ddt_bias && lane % 4 == 0) {
      p.ddt_bias[tile * kHead + channel] = bias[0];
      p.ddt_bias[tile * kHead + channel + 8] = bias[1];
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) da += __shfl_xor_sync(~0u, da, step);
    if (lane == 0) s.dA_log[warp] = da;
  }
#pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) {
    const int block = i / 4, f = i % 4;
    const float2 d = x.dgate[block][f / 2][f % 2];
    if constexpr (sizeof(G) == 2) {
      scatter(s.dv_new, channel, block, f, d);
    } else {
      scatter(static_cast<float*>(p.dg), chunk, call.HV, head, channel, block, f, d);
    }
  }
  __syncthreads();
  if (complete) {
    store_tile<kThreads>(s.d_o, static_cast<__nv_bfloat16*>(p.dq) + first, stride, length);
    store_tile<kThreads>(s.v_new, static_cast<__nv_bfloat16*>(p.dk) + first, stride, length);
  }
  if constexpr (sizeof(G) == 2) store_tile<kThreads>(s.dv_new, static_cast<__nv_bfloat16*>(p.dg) + first, stride, length);
  if (p.dA_log && threadIdx.x == 0) {
    float sum = 0.f;
    for (int w = 0; w < kWarps; ++w) sum += s.dA_log[w];
    p.dA_log[tile] = sum;
  }
}

template <typename G, bool BOUNDED>
int launch(const flaop_kda_bwd& p, cudaStream_t stream) {
  const auto kernel = kda_bwd_kernel<G, BOUNDED>;
  const int64_t blocks = static_cast<int64_t>(p.call.row1) * p.call.HV;
  if (blocks <= 0) return 0;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), kThreads, sizeof(Shared), stream>>>(p);
  return cudaGetLastError();
}

template <typename G>
int select(const flaop_kda_bwd& p, cudaStream_t stream) {
  return p.call.bounded ? launch<G, true>(p, stream) : launch<G, false>(p, stream);
}

}  // namespace
}  // namespace flaop

extern "C" int flaop_kda_bwd_launch(const flaop_kda_bwd* params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return params->call.g_dtype == FLAOP_F32 ? flaop::select<float>(*params, s)
                                           : flaop::select<__nv_bfloat16>(*params, s);
}
