// Gradients of the pairs of one chunk, a warp for 16 channels (see bwd.cu).
#pragma once
#include "bwd_tiles.cuh"

namespace flaop {
namespace {

// What a lane holds during the pairs. They are worked through twice, first for the gradients of
// rows, then for those of columns: all accumulators at once do not fit in registers.
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

// Hides what the rows and shared memory hold, so that nothing computed from them is kept in
// registers.
__device__ __forceinline__ void forget(Lane& x) {
  asm volatile("" ::: "memory");
#pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i)
    asm volatile("" : "+r"(x.q[i / 4][i % 4]), "+r"(x.k[i / 4][i % 4]));
}

// Left operands of one block: scaled rows q and beta k, scaled columns k, and the factors.
struct Operands {
  float2 factor[4];
  uint32_t q[4], k[4];

  __device__ __forceinline__ void rows(const Shared& s, const Lane& x, int block,
                                       const float2 (&f)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      factor[i] = f[i];
      q[i] = pack_bf16(multiply(x.query(s, block, i), f[i]));
      const float2 beta = load2(&s.beta[lane_token(block, i / 2)]);
      k[i] = pack_bf16(multiply(multiply(x.key(s, block, i), f[i]), beta));
    }
  }
  __device__ __forceinline__ void columns(const Shared& s, const Lane& x, int block,
                                          const float2 (&f)[4]) {
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
__device__ __forceinline__ void row_gradients(const Shared& s, Lane& x, const Operands& row,
                                              const Operands& column, int I, int J,
                                              const uint32_t (&m)[4]) {
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
__device__ __forceinline__ void column_gradients(const Shared& s, Lane& x, const Operands& row,
                                                 const Operands& column, int I, int J,
                                                 const uint32_t (&m)[4]) {
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
__device__ __forceinline__ void pair_gradients(const Shared& s, Lane& x, const Operands& row,
                                               const Operands& column, int I, int J,
                                               const uint32_t (&row_mask)[4],
                                               const uint32_t (&column_mask)[4]) {
  if constexpr (ROWS) {
    row_gradients(s, x, row, column, I, J, row_mask);
  } else {
    column_gradients(s, x, row, column, I, J, column_mask);
  }
}

__device__ __forceinline__ void exponents(const Shared& s, float2 (&f)[4], const Lane& x, int block,
                                          float sign, const float (&shift)[2]) {
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

// The gate sum of the token `reference` of a lane's block, for both channels.
__device__ __forceinline__ float reference_gate(const Shared& s, const Lane& x, int block,
                                                int channel, int reference) {
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
      row_mask[2 * n + half] =
          (counts(column, k) ? 0xffffu : 0u) | (counts(column, k + 1) ? 0xffff0000u : 0u);
      column_mask[2 * n + half] =
          (counts(k, column) ? 0xffffu : 0u) | (counts(k + 1, column) ? 0xffff0000u : 0u);
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
      const float2 d =
          make_float2(__bfloat162float(s.dA_qk[t][t]), __bfloat162float(s.dA_qk[t + 1][t + 1]));
      if constexpr (ROWS) {
        add_scaled(pair(x.dq[I][f / 2], f % 2), d, x.key(s, I, f));
      } else {
        add_scaled(pair(x.dk[I][f / 2], f % 2), d, x.query(s, I, f));
      }
    }
}

template <bool ROWS>
__device__ __forceinline__ void all_pairs(const Shared& s, Lane& x) {
  pairs_between<ROWS>(s, x);
  pairs_level<ROWS, 8>(s, x);
  pairs_level<ROWS, 4>(s, x);
  pairs_level<ROWS, 2>(s, x);
  pairs_level<ROWS, 1>(s, x);
  pairs_diagonal<ROWS>(s, x);
}

// Accumulators to and from a place of the lane's own.
__device__ __forceinline__ void park(Shared& s, int place, const Sums& x) {
#pragma unroll
  for (int i = 0; i < 8 * kBlocks; ++i)
    s.parked[place][i][threadIdx.x] = x[i / 8][i / 4 % 2][i % 4];
}
__device__ __forceinline__ void unpark(const Shared& s, int place, Sums& x) {
#pragma unroll
  for (int i = 0; i < 8 * kBlocks; ++i)
    x[i / 8][i / 4 % 2][i % 4] = s.parked[place][i][threadIdx.x];
}

}  // namespace
}  // namespace flaop
