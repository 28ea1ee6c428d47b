// The inverse of I + L for a chunk: diagonal blocks in fp32, those below them by products in fp16.
//
// Transposed, the products chain in registers: X_IJ^T = -(sum_{J <= m < I} X_mJ^T L_Im^T) X_II^T,
// and an accumulator tile, rounded, is the left operand of the next product.
#pragma once
#include "tiles.cuh"

namespace flaop::flash {

// Substitution in a warp's diagonal block, a column a lane; lanes from 16 on repeat the others.
// What is known of a column goes to all rows below at once: the updates do not wait for each other.
__device__ __forceinline__ void invert_diagonal(Scratch& s, unsigned I, unsigned lane) {
  const unsigned column = lane % kBlock;
  float x[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) x[i] = i == column ? 1.f : 0.f;
#pragma unroll
  for (int m = 0; m < kBlock - 1; ++m)
#pragma unroll
    for (int i = (m + 1) / 4 * 4; i < kBlock; i += 4) {
      const float4 l = *reinterpret_cast<const float4*>(&s.diagonal[I][m][i]);
      if (i > m) x[i] -= l.x * x[m];
      if (i + 1 > m) x[i + 1] -= l.y * x[m];
      if (i + 2 > m) x[i + 2] -= l.z * x[m];
      if (i + 3 > m) x[i + 3] -= l.w * x[m];
    }
  if (lane >= kBlock) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* y = x + 8 * half;
    *reinterpret_cast<uint4*>(s.inverse[I][half][column]) = make_uint4(
        pack_half(y[0], y[1]), pack_half(y[2], y[3]), pack_half(y[4], y[5]), pack_half(y[6], y[7]));
  }
}

// Operands of mma() from a block: the left one; the right one of the block and of its transpose.
__device__ __forceinline__ void load_left(uint32_t (&a)[4], const Square& x, unsigned lane) {
  load_matrices(a, x[lane / 16][lane % 16]);
}
__device__ __forceinline__ void load_right(uint32_t (&b)[4], const Square& x, unsigned lane) {
  load_matrices_transposed(b, x[lane / 16][lane % 16]);
}
__device__ __forceinline__ void load_right_transposed(uint32_t (&b)[4], const Square& x,
                                                      unsigned lane) {
  load_matrices(b, x[lane / 8 % 2][8 * (lane / 16) + lane % 8]);
}

__device__ __forceinline__ void multiply_add(float (&c)[2][4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[4]) {
  mma(c[0], a, b[0], b[1], __half());
  mma(c[1], a, b[2], b[3], __half());
}

// A tile, rounded, as the left operand.
__device__ __forceinline__ void round_half(uint32_t (&a)[4], const float (&c)[2][4], float sign) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = pack_half(sign * c[i / 2][2 * (i % 2)], sign * c[i / 2][2 * (i % 2) + 1]);
}

// Block (I, J) of the inverse, transposed, to A with the factors of its rows and columns.
// beta: of columns r and r + 8.
__device__ __forceinline__ void store_block(bf16* A, const Stage& stage, const uint32_t (&x)[4],
                                            const float (&beta)[2], unsigned I, unsigned J,
                                            unsigned lane) {
  const unsigned p = 2 * (lane % 4);
  uint32_t a[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 norm = load2(&stage.k_norm[kBlock * I + 8 * (i / 2) + p]);
    const float2 y = __half22float2(*reinterpret_cast<const __half2*>(&x[i]));
    a[i] = pack_bf16(y.x * norm.x * beta[i % 2], y.y * norm.y * beta[i % 2]);
  }
  store_matrices_transposed(
      A + place(kBlock * I + 8 * (lane / 16) + lane % 8, kBlock * J + (lane & 8)), a[0], a[1], a[2],
      a[3]);
}

// Column J of blocks of the inverse, by one warp. Above the diagonal blocks A is zero.
__device__ __forceinline__ void invert_column(bf16* A, const Stage& stage, const Scratch& s,
                                              unsigned J, unsigned lane) {
  const unsigned first = kBlock * J + lane / 4;
  const float beta[2] = {stage.beta[first], stage.beta[first + 8]};
  uint32_t x[kBlocks][4];
  uint32_t own[4];
  load_left(own, s.inverse[J], lane);
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[m][i] = own[i];  // those before J are never used
  store_block(A, stage, own, beta, J, J, lane);
#pragma unroll
  for (int I = 1; I < kBlocks; ++I) {
    if (I <= J) continue;
    uint32_t l[kBlocks - 1][4], diagonal[4];
    float sum[2][4] = {}, result[2][4] = {};
#pragma unroll
    for (int m = 0; m < I; ++m)
      if (m >= J) load_right_transposed(l[m], s.below[below(I, m)], lane);
    load_right(diagonal, s.inverse[I], lane);
#pragma unroll
    for (int m = 0; m < I; ++m)
      if (m >= J) multiply_add(sum, x[m], l[m]);
    uint32_t a[4];
    round_half(a, sum, -1.f);
    multiply_add(result, a, diagonal);
    round_half(x[I], result, 1.f);
    store_block(A, stage, x[I], beta, I, J, lane);
  }
}

}  // namespace flaop::flash
