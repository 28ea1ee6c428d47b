// The inverse of I + L for a chunk: diagonal blocks in fp32, those below them by products in fp16.
#pragma once
#include "tiles.cuh"

namespace flaop::flash {

// Forward substitution of a warp's diagonal block, a column a lane.
__device__ __forceinline__ void invert_diagonal(Scratch& s, unsigned I, unsigned lane) {
  const int first = kBlock * I;
  if (lane < kBlock) {
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      x[i] = i == lane ? 1.f : 0.f;
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const float4 l = *reinterpret_cast<const float4*>(&s.L[first + i][first + m]);
        x[i] -= l.x * x[m];
        if (m + 1 < i) x[i] -= l.y * x[m + 1];
        if (m + 2 < i) x[i] -= l.z * x[m + 2];
        if (m + 3 < i) x[i] -= l.w * x[m + 3];
      }
      s.X[first + i][first + lane] = __float2half(x[i]);
    }
  }
}

// Left operand of mma() from a 16 x 16 block of L, in fp16.
__device__ __forceinline__ void load_block(uint32_t (&a)[4], const Scratch& s, int I, int J,
                                           int lane) {
  const int r = lane / 4, p = 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = load2(&s.L[kBlock * I + r + 8 * i][kBlock * J + p + 8 * half]);
      a[2 * half + i] = pack_half(x.x, x.y);
    }
}

__device__ __forceinline__ void store_block(Scratch& s, const float (&c)[2][4], float sign, int I,
                                            int J, int lane) {
  const int r = lane / 4, p = 2 * (lane % 4);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<uint32_t*>(&s.X[kBlock * I + r + 8 * i][kBlock * J + 8 * n + p]) =
          pack_half(sign * c[n][2 * i], sign * c[n][2 * i + 1]);
  __syncwarp();
}

// Column J of blocks of the inverse, by one warp: X_IJ = -X_II sum_{J <= m < I} L_Im X_mJ.
__device__ __forceinline__ void invert_below(Scratch& s, unsigned J, unsigned lane) {
  const int column = 8 * (lane / 16);
  for (int I = J + 1; I < kBlocks; ++I) {
    uint32_t a[4], b[4];
    float c[2][4] = {}, x[2][4] = {};
    for (int m = J; m < I; ++m) {
      load_block(a, s, I, m, lane);
      load_matrices_transposed(b, &s.X[kBlock * m + lane % 16][kBlock * J + column]);
      mma(c[0], a, b[0], b[1], __half());
      mma(c[1], a, b[2], b[3], __half());
    }
    load_matrices(a, &s.X[kBlock * I + lane % 16][kBlock * I + column]);
    // a result becomes a right operand by way of its place in memory
    store_block(s, c, -1.f, I, J, lane);
    load_matrices_transposed(b, &s.X[kBlock * I + lane % 16][kBlock * J + column]);
    mma(x[0], a, b[0], b[1], __half());
    mma(x[1], a, b[2], b[3], __half());
    __syncwarp();
    store_block(s, x, 1.f, I, J, lane);
  }
}

// The inverse with the factors of its rows and columns; a thread half a row. Above the diagonal
// blocks A is zero.
__device__ __forceinline__ void finish_inverse(Stage& stage, const Scratch& s, unsigned thread) {
  const int t = thread % kTokens;
  const float norm = stage.k_norm[t];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int u = 8 * (4 * (thread / kTokens) + i);
    if (u / kBlock > t / kBlock) continue;
    const uint4 four = *reinterpret_cast<const uint4*>(&s.X[t][u]);
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
    float beta[8], x[8];
    load8(beta, &s.beta[u]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 y = __half22float2(*reinterpret_cast<const __half2*>(&words[j]));
      x[2 * j] = y.x * norm * beta[2 * j];
      x[2 * j + 1] = y.y * norm * beta[2 * j + 1];
    }
    store8(stage.A + place(t, u), x);
  }
}

}  // namespace flaop::flash
