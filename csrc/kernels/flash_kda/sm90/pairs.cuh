// Products of the token pairs of a chunk: ten pairs of blocks of 16 tokens.
#pragma once
#include "tiles.cuh"

namespace flaop::flash {

// Sums of products of a row and a column, per eight columns.
struct PairSums {
  float qk[2][4], kk[2][4];
};

// Operands of 16 channels: rows of k, of q, and columns.
struct PairStep {
  uint32_t k[4], q[4], x[4], factor[2];
};

// Adds up all channels. Rows of k, and of q; columns, which with BETWEEN the factors of their
// channels multiply. Operands are loaded two steps ahead; ORDER: the assembler is kept from loading
// them later, which it otherwise does where registers are short.
// rows: a place in k and q; column: in columns, swizzled or not.
template <bool OUTPUT, bool SWIZZLED, bool BETWEEN, bool ORDER>
__device__ __forceinline__ void add_pairs(PairSums& sums, bf16* k, bf16* q, unsigned rows,
                                          bf16* columns, unsigned column, const bf16* factor) {
  PairStep steps[3];
  const auto load = [&](int i) {
    PairStep& step = steps[i % 3];
    const unsigned far = i / 4 * kHalfTile, near = i % 4 * 32;
    load_matrices(step.x, &access<bf16>(columns, SWIZZLED ? (column ^ near) + far
                                                          : column + 2 * place(0, 16 * i)));
    load_matrices(step.k, &access<bf16>(k, (rows ^ near) + far));
    if constexpr (OUTPUT) load_matrices(step.q, &access<bf16>(q, (rows ^ near) + far));
    if constexpr (BETWEEN) {
      step.factor[0] = word(factor, 16 * i);
      step.factor[1] = word(factor, 16 * i + 8);
    }
  };
  load(0);
  load(1);
#pragma unroll
  for (int i = 0; i < kHead / 16; ++i) {
    PairStep& now = steps[i % 3];
    if (i + 2 < kHead / 16) load(i + 2);
    if constexpr (ORDER) keep_order();
    if constexpr (BETWEEN)
#pragma unroll
      for (int j = 0; j < 4; ++j) now.x[j] = multiply_bf16(now.x[j], now.factor[j % 2]);
    mma(sums.kk[0], now.k, now.x[0], now.x[1], bf16());
    mma(sums.kk[1], now.k, now.x[2], now.x[3], bf16());
    if constexpr (OUTPUT) {
      mma(sums.qk[0], now.q, now.x[0], now.x[1], bf16());
      mma(sums.qk[1], now.q, now.x[2], now.x[3], bf16());
    }
  }
}

// A warp: rows of block I and columns of block J: L, and A_qk. factor: of the blocks between.
template <bool OUTPUT, bool DIAGONAL, bool BETWEEN>
__device__ __forceinline__ void pairs(Shared& shared, Stage& stage, bf16* A_qk, unsigned I,
                                      unsigned J, const bf16* factor, unsigned lane) {
  Scratch& s = shared.scratch;
  const unsigned r = lane / 4, p = 2 * (lane % 4), matrix = lane / 8;
  const unsigned row = swizzled(kBlock * I + lane % 16, 8 * (lane / 16));
  const unsigned token = kBlock * J + 8 * (matrix / 2) + lane % 8, channel = 8 * (matrix % 2);
  float2 norm[2];
  float factor_k[2], own[2];
  const float unit = DIAGONAL ? 1.f : 1.f / kRowScale;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned t = kBlock * I + r + 8 * i;
    norm[i] = load2(&stage.k_norm[kBlock * J + 8 * i + p]);
    factor_k[i] = stage.beta[t] * stage.k_norm[t] * unit;
    if constexpr (OUTPUT && DIAGONAL) own[i] = stage.own[t];
  }
  PairSums sums{};
  if constexpr (DIAGONAL) {
    add_pairs<OUTPUT, false, BETWEEN, false>(sums, stage.k, stage.q, row, shared.reciprocal,
                                             2 * place(token, channel), factor + p);
  } else {
    add_pairs<OUTPUT, true, BETWEEN, !BETWEEN>(sums, stage.k, stage.q, row, stage.g,
                                               swizzled(token, channel), factor + p);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const unsigned t = r + 8 * i, u = 8 * n + p;
      const float *kk = &sums.kk[n][2 * i], *qk = &sums.qk[n][2 * i];
      float l[2] = {kk[0] * factor_k[i] * norm[n].x, kk[1] * factor_k[i] * norm[n].y};
      float a[2] = {qk[0] * unit, qk[1] * unit};
      if constexpr (DIAGONAL) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (t <= u + j) {
            l[j] = 0.f;
            a[j] = OUTPUT && t == u + j ? own[i] : 0.f;
          }
          s.diagonal[I][u + j][t] = l[j];
        }
      } else {
        *reinterpret_cast<uint32_t*>(&s.below[below(I, J)][n][t][p]) = pack_half(l[0], l[1]);
      }
      if constexpr (OUTPUT) word(A_qk, kBlock * I + t, kBlock * J + u) = pack_bf16(a[0], a[1]);
    }
}

}  // namespace flaop::flash
