// Gradients within one chunk of KDA on tensor cores. The formulas: triton_kernels/delta/bwd.py.
//
// One block of 8 warps per (chunk, value head); K = V = 128, 64 tokens. A warp owns 16 channels and
// all tokens, so gates, prefix and suffix sums and the pairs need no other warp; products that
// contract over channels go through shared memory. Per-token matrices are kept transposed, [16
// channels x 64 tokens]: the accumulator of mma then has the layout of its left operand, and a lane
// holds
//
//   x[block][half][c][e]: channel 16 warp + lane / 4 + 8 c, token 16 block + 8 half + 2 (lane % 4)
//   + e
//
// The gate gradient sums the products of rounded operands, so that pairs wholly after a token
// cancel.
#include <cuda_runtime.h>

#include "bwd_pairs.cuh"

namespace flaop {
namespace {

template <typename G>
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
    const __nv_bfloat16* A =
        static_cast<const __nv_bfloat16*>(p.A) + ((token + at) * call.HV + head) * kTokens + c;
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

  value_gradient(s);
  __syncthreads();
  value_pairs(s, call.scale);
  copy_wait();
  __syncthreads();
  const int64_t stride = static_cast<int64_t>(call.HV) * kHead;
  const int64_t first = (token * call.HV + head) * kHead;
  store_tile<kThreads>(s.v, static_cast<__nv_bfloat16*>(p.dv) + first, stride, length);
  if (threadIdx.x < 2 * kTokens) row_norms(s.q, s.k, s.q_norm, s.k_norm, call.l2norm);

  // gate sums, then through the states
  Lane x;
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
  __syncthreads();  // v and g have been read, the norms are there
#pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) s.gate[i][threadIdx.x] = gates[i / 4][i / 2 % 2][i % 2];
  Sums erased, dk_write;  // erased: S dR^T
#pragma unroll
  for (int i = 0; i < 8 * kBlocks; ++i) {
    const int block = i / 8, half = i / 4 % 2, j = i % 4;
    x.dq[block][half][j] = dk_write[block][half][j] = erased[block][half][j] = 0.f;
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
      mma16(erased[block], S, b);
      load_right(b, s.v_new, block * kBlock, c);
      mma16(dk_write[block], dS, b);
    }
  }
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    load_left_transposed(x.q[block], s.q, block * kBlock, 16 * warp);
    load_left_transposed(x.k[block], s.k, block * kBlock, 16 * warp);
  }
  __syncthreads();  // the states have been read

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
      // dk_erase / beta = -exp2(G) dR S^T
      const float2 read = pair(erased[block][half], c);
      const float2 de = make_float2(-read.x * eG.x, -read.y * eG.y);
      pair(x.dk[block][half], c) = de;
      x.dgate[block][half][c] = subtract(multiply(q, dq), w);
      add_scaled(x.dgate[block][half][c], multiply(k, load2(&s.beta[t])), de);
    }
    before[0] += x.total[block][0];
    before[1] += x.total[block][1];
  }
  park(s, 0, dk_write);
  park(s, 1, x.dq);
  last[0] += quad_sum(written[0]);
  last[1] += quad_sum(written[1]);

  // through the pairs: rows, which completes dq and gives dbeta, then columns
  forget(x);
  unpark(s, 1, x.dq);
  all_pairs<true>(s, x);
  park(s, 1, x.dq);
  forget(x);
  Sums products;
#pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) {
    const int block = i / 4, f = i % 4;
    pair(products[block][f / 2], f % 2) =
        multiply(x.key(s, block, f), pair(x.dk[block][f / 2], f % 2));
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
  all_pairs<false>(s, x);
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
      if (call.beta_dtype == FLAOP_BF16)
        static_cast<__nv_bfloat16*>(p.dbeta)[at] = __float2bfloat16(db);
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
      dq = multiply(load2(&s.q_norm[t]),
                    subtract(dq, multiply(x.query(s, block, f), load2(&s.sum[0][t]))));
      dk = multiply(load2(&s.k_norm[t]),
                    subtract(dk, multiply(x.key(s, block, f), load2(&s.sum[1][t]))));
    }
    scatter(s.d_o, channel, block, f, dq);
    scatter(s.v_new, channel, block, f, dk);
  }

  // the gate: suffix sums, then its derivative
  suffix_sums(x.dgate, last);
  if (call.gate != FLAOP_GATE_LOG) {
    if constexpr (sizeof(G) == 2) {
      __syncthreads();  // the gate sums have been read
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
  if constexpr (sizeof(G) == 2)
    store_tile<kThreads>(s.dv_new, static_cast<__nv_bfloat16*>(p.dg) + first, stride, length);
  if (p.dA_log && threadIdx.x == 0) {
    float sum = 0.f;
    for (int w = 0; w < kWarps; ++w) sum += s.dA_log[w];
    p.dA_log[tile] = sum;
  }
}

template <typename G>
int launch(const flaop_kda_bwd& p, cudaStream_t stream) {
  const auto kernel = kda_bwd_kernel<G>;
  const int64_t blocks = static_cast<int64_t>(p.call.row1) * p.call.HV;
  if (blocks <= 0) return 0;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), kThreads, sizeof(Shared), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace
}  // namespace flaop

extern "C" int flaop_kda_bwd_launch(const flaop_kda_bwd* params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return params->call.g_dtype == FLAOP_F32 ? flaop::launch<float>(*params, s)
                                           : flaop::launch<__nv_bfloat16>(*params, s);
}
