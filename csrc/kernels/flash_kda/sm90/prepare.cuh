// The preparing side: a warpgroup makes a chunk's operands, from its inputs to the inverse.
//
// Warp b works on block b of 16 tokens. Gates of [lower_bound, 0] with lower_bound >= -5 let the
// decays within a block be products in fp32: rows from the start of the block, columns to its end
// for rows of later blocks, and what lies between is a factor per block and channel. Within a block
// columns have the reciprocals of the rows' factors, so that no row depends on what follows it.
#pragma once
#include "inverse.cuh"
#include "pairs.cuh"

namespace flaop::flash {

// Twice -inf: the bounded gate of it is zero.
constexpr uint32_t kNoDecay = 0xff80ff80u;

// Rows of a [.., H, 128] tensor to a tile. Past the end there are zeros, or (GATE) what makes a
// decay of 1.
template <bool GATE>
__device__ __forceinline__ void load_rows_async(bf16* tile, const void* from, int64_t token,
                                                const flaop_flash_kda& p, int head, int length,
                                                unsigned thread) {
  constexpr int kRows = kWarpgroup / 16;
  const int first = thread / 16, channel = 8 * (thread % 16);
  const int64_t step = static_cast<int64_t>(p.H) * kHead;
  const bf16* x = static_cast<const bf16*>(from) + (token + first) * step + head * kHead + channel;
  bf16* to = tile + place(first, channel);
#pragma unroll
  for (int t = 0; t < kTokens; t += kRows) {
    const bool inside = first + t < length;
    if (!GATE || inside) {
      copy_async(to + place(t, 0), x, inside);  // nothing is read past the end
    } else {
      *reinterpret_cast<uint4*>(to + place(t, 0)) =
          make_uint4(kNoDecay, kNoDecay, kNoDecay, kNoDecay);
    }
    x += kRows * step;
  }
}

// Starts moving the rows of a later chunk to the L2 cache.
template <bool OUTPUT>
__device__ __forceinline__ void prefetch_rows(const flaop_flash_kda& p, int64_t token, int head,
                                              int length, unsigned thread) {
  const int t = thread / 2;
  if (t >= length) return;
  const int64_t at = ((token + t) * p.H + head) * kHead + 64 * (thread % 2);
  prefetch(static_cast<const bf16*>(p.k) + at);
  prefetch(static_cast<const bf16*>(p.g) + at);
  prefetch(static_cast<const bf16*>(p.v) + at);
  if constexpr (OUTPUT) prefetch(static_cast<const bf16*>(p.q) + at);
}

// Of the 16 rows of a warp's block: 1 / norm, and the products of queries with their own keys,
// which the rounding of decayed rows would spoil.
template <bool OUTPUT>
__device__ __forceinline__ void row_norms(Stage& stage, Scratch& s, float scale, unsigned thread) {
  const int lane = thread % 32, token = kBlock * (thread / 32) + lane % 16;
  float kk = 0.f, qq = 0.f, qk = 0.f;
#pragma unroll 4
  for (int i = 0; i < 8; ++i) {
    const int at = place(token, 64 * (lane / 16) + 8 * i);
    const uint4 k4 = *reinterpret_cast<const uint4*>(stage.k + at);
    uint4 q4 = make_uint4(0, 0, 0, 0);
    if constexpr (OUTPUT) q4 = *reinterpret_cast<const uint4*>(stage.q + at);
    const uint32_t ks[4] = {k4.x, k4.y, k4.z, k4.w}, qs[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 k = unpack_bf16(ks[j]), q = unpack_bf16(qs[j]);
      kk = fmaf(k.x, k.x, fmaf(k.y, k.y, kk));
      if constexpr (OUTPUT) {
        qq = fmaf(q.x, q.x, fmaf(q.y, q.y, qq));
        qk = fmaf(q.x, k.x, fmaf(q.y, k.y, qk));
      }
    }
  }
  kk += __shfl_xor_sync(~0u, kk, 16);
  qq += __shfl_xor_sync(~0u, qq, 16);
  qk += __shfl_xor_sync(~0u, qk, 16);
  if (lane < 16) {
    stage.k_norm[token] = rsqrtf(kk + kNormEps);
    stage.q_norm[token] = scale * rsqrtf(qq + kNormEps);
    s.own[token] = qk;
  }
}

// bias times rate may be infinite where no gate is; two such terms must not meet.
constexpr float kMostBias = 0x1p100f;
// Smaller rates move no gate; zero times an infinite gate would be no number.
constexpr float kLeastRate = 0x1p-100f;

struct HeadGate {
  float rate, bound;  // -exp(A_log) log2 e; the lower bound in base 2

  __device__ HeadGate(const flaop_flash_kda& p, int head) {
    const float log_rate = p.A_log ? load_number(p.A_log, head, p.A_log_dtype) : 0.f;
    rate = fminf(-kLog2e * exp2_approx(fminf(log_rate, kAmplitudeCap) * kLog2e), -kLeastRate);
    bound = p.lower_bound * kLog2e;
  }
  // rate times the bias of a channel
  __device__ float shift(const flaop_flash_kda& p, int head, int channel) const {
    if (p.dt_bias == nullptr) return 0.f;
    const float x = rate * load_number(p.dt_bias, head * kHead + channel, p.dt_bias_dtype);
    return x > kMostBias ? kMostBias : x < -kMostBias ? -kMostBias : x;
  }
  // The decay of a token.
  __device__ __forceinline__ float decay(float x, float shift) const {
    return exp2_approx(bound * reciprocal_approx(1.f + exp2_approx(rate * x + shift)));
  }
};

// Decays within a warp's block: rows of q and k in place, columns of k in the places of g (for
// later blocks) and v (for this one), and the totals of the block.
template <bool OUTPUT>
__device__ __forceinline__ void decay_within(Stage& stage, Scratch& s, const HeadGate& gate,
                                             unsigned thread) {
  const int block = thread / 32, first = kBlock * block;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int channel = 64 * half + 2 * (thread % 32);
    const float2 shift = load2(&s.shift[channel]);
    float2 a[kBlock];
#pragma unroll
    for (int t = 0; t < kBlock; ++t) {
      const float2 x = unpack_bf16(word(stage.g, first + t, channel));
      a[t] = make_float2(gate.decay(x.x, shift.x), gate.decay(x.y, shift.y));
    }
    float2 column = make_float2(1.f, 1.f);
#pragma unroll
    for (int t = kBlock - 1; t >= 0; --t) {
      word(stage.g, first + t, channel) =
          multiply_bf16(word(stage.k, first + t, channel), pack_bf16(column));
      column = multiply(column, a[t]);
    }
    *reinterpret_cast<float2*>(&s.total[block][channel]) = column;
    *reinterpret_cast<uint32_t*>(&s.total16[block][channel]) = pack_bf16(column);
    float2 row = make_float2(kRowScale, kRowScale);
#pragma unroll
    for (int t = 0; t < kBlock; ++t) {
      row = multiply(row, a[t]);
      const uint32_t factor = pack_bf16(row);
      uint32_t& k = word(stage.k, first + t, channel);
      word(stage.v, first + t, channel) =
          multiply_bf16(k, pack_bf16(reciprocal_approx(row.x), reciprocal_approx(row.y)));
      k = multiply_bf16(k, factor);
      if constexpr (OUTPUT) {
        uint32_t& q = word(stage.q, first + t, channel);
        q = multiply_bf16(q, factor);
      }
    }
  }
}

__device__ __forceinline__ void multiply8(bf16* x, const uint32_t (&factor)[4]) {
  uint4& y = *reinterpret_cast<uint4*>(x);
  y = make_uint4(multiply_bf16(y.x, factor[0]), multiply_bf16(y.y, factor[1]),
                 multiply_bf16(y.z, factor[2]), multiply_bf16(y.w, factor[3]));
}

// From decays within the block to those from the chunk's start and to its end. A lane: eight
// channels of every second token.
template <bool OUTPUT>
__device__ __forceinline__ void decay_across(Stage& stage, const Scratch& s, unsigned thread) {
  const int block = thread / 32, channel = 8 * (thread % 16);
  float before[8], after[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    before[i] = 1.f / kRowScale;
    after[i] = 1.f;
  }
  for (int m = 0; m < kBlocks; ++m) {
    if (m == block) continue;
    float total[8];
    load8(total, &s.total[m][channel]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      before[i] *= m < block ? total[i] : 1.f;
      after[i] *= m > block ? total[i] : 1.f;
    }
  }
  if (thread < 16) {
    float own[8];
    load8(own, &s.total[0][channel]);
#pragma unroll
    for (int i = 0; i < 8; ++i) stage.decay[channel + i] = own[i] * after[i];
  }
  uint32_t start[4], end[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    start[i] = pack_bf16(before[2 * i], before[2 * i + 1]);
    end[i] = pack_bf16(after[2 * i], after[2 * i + 1]);
  }
  const int first = place(kBlock * block + thread / 16 % 2, channel);
#pragma unroll
  for (int t = 0; t < kBlock; t += 2) {
    multiply8(stage.k + first + place(t, 0), start);
    if constexpr (OUTPUT) multiply8(stage.q + first + place(t, 0), start);
    if (block < kBlocks - 1) multiply8(stage.g + first + place(t, 0), end);
  }
}

// Chunks group, group + 2, ... of a piece. with_values: v is read.
template <bool OUTPUT>
__device__ __forceinline__ void prepare(const flaop_flash_kda& p, Shared& shared,
                                        const Piece& piece, int group, bool with_values) {
  Stage& stage = shared.stage[group];
  Scratch& s = shared.scratch[group];
  const int sync = 1 + group;
  const HeadGate gate(p, piece.head);
  unsigned thread = threadIdx.x % kWarpgroup;
  s.shift[thread] = gate.shift(p, piece.head, thread);  // read behind a barrier
  // blocks above the diagonal are never written again
  for (int i = thread; i < kSquare / 2; i += kWarpgroup) {
    reinterpret_cast<uint32_t*>(stage.A)[i] = 0;
    reinterpret_cast<uint32_t*>(stage.A_qk)[i] = 0;
  }
  for (int chunk = group; chunk < piece.chunks; chunk += 2) {
    // addresses are made anew: kept from chunk to chunk they would not fit into the registers
    asm volatile("" : "+r"(thread));
    const unsigned block = thread / 32, lane = thread % 32;
    const int64_t token = piece.token + static_cast<int64_t>(chunk) * kTokens;
    const int length = min(piece.length - chunk * kTokens, kTokens);
    barrier_wait(&shared.empty[group], chunk / 2 % 2 ^ 1);
    load_rows_async<true>(stage.g, p.g, token, p, piece.head, length, thread);
    load_rows_async<false>(stage.k, p.k, token, p, piece.head, length, thread);
    if constexpr (OUTPUT)
      load_rows_async<false>(stage.q, p.q, token, p, piece.head, length, thread);
    copy_commit();
    prefetch_rows<OUTPUT>(p, token + 2 * kTokens, piece.head, piece.length - (chunk + 2) * kTokens,
                          thread);
    if (thread < kTokens) {
      float beta = 0.f;
      if (thread < length) {
        beta = load_number(p.beta, (token + thread) * p.H + piece.head, p.beta_dtype);
        beta = p.beta_bound * sigmoid_base2(beta * kLog2e);
      }
      s.beta[thread] = beta;
    }
    copy_wait();
    warpgroup_sync(sync);
    row_norms<OUTPUT>(stage, s, p.scale, thread);
    __syncwarp();
    decay_within<OUTPUT>(stage, s, gate, thread);
    warpgroup_sync(sync);
    // ten pairs of blocks, at a distance of 0, 1 and 2 from this warp's; the last warp has (3, 0)
    const int distances = block < 2 ? 3 : 2;
#pragma unroll 1
    for (int distance = 0; distance < distances; ++distance) {
      const bool last = block == 3 && distance == 1;
      pairs<OUTPUT>(stage, s, last ? 3 : block + distance, last ? 0 : block, lane);
    }
    warpgroup_sync(sync);
    if (with_values) load_rows_async<false>(stage.v, p.v, token, p, piece.head, length, thread);
    invert_diagonal(s, block, lane);
    warpgroup_sync(sync);
    invert_below(s, block, lane);
    decay_across<OUTPUT>(stage, s, thread);
    copy_wait();
    warpgroup_sync(sync);
    finish_inverse(stage, s, thread);
    fence_async();
    barrier_arrive_warp(&shared.full[group], lane);
  }
}

}  // namespace flaop::flash
