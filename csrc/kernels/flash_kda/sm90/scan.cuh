// The scanning side: a warpgroup carries the state of 64 values through the chunks of a piece.
//
// The state is kept transposed, S [values, channels], as accumulators. Everything that depends on
// it stays in registers: an accumulator tile, rounded, is the left operand of the next product.
//   X = V^T - S (k e^G)^T,  V' = X (A beta)^T,  o^T = S (q e^G)^T + V' A_qk^T,
//   S <- S e^(G_last) + V' (k e^(G_last - G))
// q and k come as they are: the factor of a token that normalises k multiplies S (k e^G)^T and is
// in the rows of A, so V' has it too; that of q multiplies o.
#pragma once
#include "tiles.cuh"

namespace flaop::flash {

// Where a state comes from or goes to: a [V, K] matrix.
struct StateSource {
  const void* from;  // or null: zero
  int dtype;
  bool identity;
};

__device__ __forceinline__ float2 load_number2(const void* x, int64_t i, int dtype) {
  if (dtype == FLAOP_F32) return load2(static_cast<const float*>(x) + i);
  if (dtype == FLAOP_BF16)
    return unpack_bf16(*reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(x) + i));
  return __half22float2(*reinterpret_cast<const __half2*>(static_cast<const __half*>(x) + i));
}

// The part of a tile's left operand that 16 columns of accumulators make.
__device__ __forceinline__ void round_operand(uint32_t (&a)[4], const float* c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pack_bf16(c[2 * i], c[2 * i + 1]);
}

template <bool OUTPUT>
__device__ __forceinline__ void scan(const flaop_flash_kda& p, Shared& shared, int group,
                                     bool with_values, StateSource source, float* to) {
  const Piece& piece = shared.piece;  // read anew for each chunk: registers are short
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const int r = lane / 4, c = 2 * (lane % 4);
  const int value = 64 * group + 16 * warp;  // first row of the warp
  float S[64];  // S[4 j + 2 i], + 1: row value + r + 8 i, channels 8 j + c, + 1
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = value + r + 8 * i, channel = 8 * j + c;
      float2 x = make_float2(0.f, 0.f);
      if (source.from != nullptr)
        x = load_number2(source.from, row * kHead + channel, source.dtype);
      if (source.identity) x = make_float2(row == channel, row == channel + 1);
      S[4 * j + 2 * i] = x.x;
      S[4 * j + 2 * i + 1] = x.y;
    }

  // Two blocks of eight tokens by two of eight values, as load_matrices_transposed wants them.
  const int at = place(8 * (lane / 16) + lane % 8, value + 8 * (lane / 8 % 2));
  FLAOP_CLOCK_START(shared);
  for (int chunk = 0; chunk < piece.chunks; ++chunk) {
    Stage& stage = shared.stage[chunk % 2];
    barrier_wait(&shared.full[chunk % 2], chunk / 2 % 2);
    FLAOP_CLOCK_STEP(0);  // waiting for operands

    uint32_t state[8][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) round_operand(state[i], &S[8 * i]);
    float x[32];
    wgmma_fence();
    wgmma_n64<false>(x, state[0], by_channels(stage.k, 0));
#pragma unroll
    for (int i = 1; i < 8; ++i) wgmma_n64<true>(x, state[i], by_channels(stage.k, i));
    wgmma_commit();
    wgmma_wait<0>();
    pin(x);
    FLAOP_CLOCK_STEP(1);  // X

    uint32_t error[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t v[4] = {0, 0, 0, 0};
      if (with_values) load_matrices_transposed(v, stage.v + at + 16 * 8 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 y = unpack_bf16(v[j]), norm = load2(&stage.k_norm[16 * i + 8 * (j / 2) + c]);
        error[i][j] =
            pack_bf16(y.x - norm.x * x[8 * i + 2 * j], y.y - norm.y * x[8 * i + 2 * j + 1]);
      }
    }
    FLAOP_CLOCK_STEP(2);  // its rounding
    float y[32];
    wgmma_fence();
    wgmma_n64<false>(y, error[0], by_channels(stage.A, 0));
#pragma unroll
    for (int i = 1; i < 4; ++i) wgmma_n64<true>(y, error[i], by_channels(stage.A, i));
    wgmma_commit();
    wgmma_wait<0>();
    pin(y);
    FLAOP_CLOCK_STEP(3);  // V'

    uint32_t v_new[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) round_operand(v_new[i], &y[8 * i]);
    float o[32];
    if constexpr (OUTPUT) {
      wgmma_fence();
      wgmma_n64<false>(o, state[0], by_channels(stage.q, 0));
#pragma unroll
      for (int i = 1; i < 8; ++i) wgmma_n64<true>(o, state[i], by_channels(stage.q, i));
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_n64<true>(o, v_new[i], by_channels(stage.A_qk, i));
      wgmma_commit();
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 decay = load2(&stage.decay[8 * j + c]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        S[4 * j + 2 * i] *= decay.x;
        S[4 * j + 2 * i + 1] *= decay.y;
      }
    }
    pin(S);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_n128_transposed(S, v_new[i], by_tokens(stage.g, i));
    wgmma_commit();
    FLAOP_CLOCK_STEP(4);  // products for o and S under way

    if constexpr (OUTPUT) {
      wgmma_wait<1>();
      pin(o);
      FLAOP_CLOCK_STEP(5);  // o
                            // this warp's values were read from there above, by itself
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t rounded[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 norm = load2(&stage.q_norm[16 * i + 8 * (j / 2) + c]);
          rounded[j] = pack_bf16(norm.x * o[8 * i + 2 * j], norm.y * o[8 * i + 2 * j + 1]);
        }
        store_matrices_transposed(stage.v + at + 16 * 8 * i, rounded[0], rounded[1], rounded[2],
                                  rounded[3]);
      }
      threads_sync<kWarpgroup>(3 + group);
      FLAOP_CLOCK_STEP(6);  // o in shared memory
      const int length = min(piece.length - chunk * kTokens, kTokens);
      const int channel = 64 * group + 8 * (thread % 8);
      const int64_t first = piece.token + static_cast<int64_t>(chunk) * kTokens;
      uint4 rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rows[i] = *reinterpret_cast<const uint4*>(stage.v + place(16 * i + thread / 8, channel));
      bf16* o_row =
          static_cast<bf16*>(p.o) + ((first + thread / 8) * p.H + piece.head) * kHead + channel;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (16 * i + thread / 8 < length) *reinterpret_cast<uint4*>(o_row) = rows[i];
        o_row += static_cast<int64_t>(16) * p.H * kHead;
      }
    }
    FLAOP_CLOCK_STEP(7);  // o stored
    wgmma_wait<0>();
    pin(S);
    barrier_arrive_warp(&shared.empty[chunk % 2], lane);
    FLAOP_CLOCK_STEP(8);  // S
  }

  if (to == nullptr) return;
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<float2*>(&to[(value + r + 8 * i) * kHead + 8 * j + c]) =
          make_float2(S[4 * j + 2 * i], S[4 * j + 2 * i + 1]);
}

}  // namespace flaop::flash
