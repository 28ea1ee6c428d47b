// Products of the token pairs of a chunk: ten pairs of blocks of 16 tokens.
#pragma once
#include "tiles.cuh"

namespace flaop::flash {

// Sums of products of a row and a column, per eight columns.
struct PairSums {
  float qk[2][4], kk[2][4];
};

// Adds up all channels. rows of k, and of q; columns, which BETWEEN factors of their channels
// multiply.
template <bool OUTPUT, int BETWEEN>
__device__ __forceinline__ void add_pairs(PairSums& sums, const bf16* k, const bf16* q,
                                          const bf16* columns, const bf16* factor) {
#pragma unroll 4
  for (int c = 0; c < kHead; c += 16) {
    uint32_t row[4], x[4];
    load_matrices(row, k + place(0, c));
    load_matrices(x, columns + place(0, c));
    if constexpr (BETWEEN > 0) {
      uint32_t low = word(factor, c), high = word(factor, c + 8);
      if constexpr (BETWEEN > 1) {
        low = multiply_bf16(low, word(factor, kHead + c));
        high = multiply_bf16(high, word(factor, kHead + c + 8));
      }
      x[0] = multiply_bf16(x[0], low);
      x[1] = multiply_bf16(x[1], high);
      x[2] = multiply_bf16(x[2], low);
      x[3] = multiply_bf16(x[3], high);
    }
    mma(sums.kk[0], row, x[0], x[1], bf16());
    mma(sums.kk[1], row, x[2], x[3], bf16());
    if constexpr (OUTPUT) {
      load_matrices(row, q + place(0, c));
      mma(sums.qk[0], row, x[0], x[1], bf16());
      mma(sums.qk[1], row, x[2], x[3], bf16());
    }
  }
}

// The pairs of rows of block I with columns of block J: L, and A_qk.
template <bool OUTPUT>
__device__ __forceinline__ void pairs(Stage& stage, Scratch& s, unsigned I, unsigned J,
                                      unsigned lane) {
  const unsigned r = lane / 4, p = 2 * (lane % 4), matrix = lane / 8;
  const unsigned row = place(kBlock * I + 8 * (matrix % 2) + lane % 8, 8 * (matrix / 2));
  const unsigned column = place(kBlock * J + 8 * (matrix / 2) + lane % 8, 8 * (matrix % 2));
  const bf16 *k = stage.k + row, *q = stage.q + row;
  const bf16* columns = (I == J ? stage.v : stage.g) + column;
  const bf16* factor = s.total16[J + 1] + p;  // of the block between, if there is one
  PairSums sums{};
  if (I <= J + 1) {
    add_pairs<OUTPUT, 0>(sums, k, q, columns, factor);
  } else if (I == J + 2) {
    add_pairs<OUTPUT, 1>(sums, k, q, columns, factor);
  } else {
    add_pairs<OUTPUT, 2>(sums, k, q, columns, factor);
  }
  const float unit = I == J ? 1.f : 1.f / kRowScale;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned t = kBlock * I + r + 8 * i;
    const float factor_k = s.beta[t] * stage.k_norm[t] * unit;
    const float own = s.own[t];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const unsigned u = kBlock * J + 8 * n + p;
      const float2 norm = load2(&stage.k_norm[u]);
      const float *kk = &sums.kk[n][2 * i], *qk = &sums.qk[n][2 * i];
      float l[2] = {kk[0] * factor_k * norm.x, kk[1] * factor_k * norm.y};
      float a[2] = {qk[0] * unit, qk[1] * unit};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (t <= u + j) {
          l[j] = 0.f;
          a[j] = t == u + j ? own : 0.f;
        }
      }
      *reinterpret_cast<float2*>(&s.L[t][u]) = make_float2(l[0], l[1]);
      if constexpr (OUTPUT) word(stage.A_qk, t, u) = pack_bf16(a[0], a[1]);
    }
  }
}

}  // namespace flaop::flash
