// Within one chunk of GLA on tensor cores: gates, the matrix of token pairs, decayed operands.
//
// One block of 4 warps per (chunk, value head); the parts are those of KDA's kernel (../kda), whose
// pairs are exact for every gate.
#include <cuda_runtime.h>

#include "../kda/intra_pairs.cuh"
#include "gla.h"

namespace flaop {
namespace {

// A warp's finished block of pairs to memory.
__device__ void store_pairs(const flaop_gla_intra& p, const PairSums<false>& sums, int I, int J,
                            int64_t token, int length, int head) {
  const int lane = threadIdx.x % 32, r = lane / 4, c = 2 * (lane % 4);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = I * kBlock + r + 8 * i, column = J * kBlock + 8 * n + c;
      float x[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        x[j] = row >= column + j ? sums.qk[n][2 * i + j] * p.call.scale : 0.f;
      if (row < length) {
        __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.A) +
                             ((token + row) * p.call.HV + head) * kTokens + column;
        *reinterpret_cast<uint32_t*>(out) = pack_bf16(x[0], x[1]);
      }
    }
}

template <typename G, bool PAIRS>
__global__ void __launch_bounds__(kThreads, 3) gla_intra_kernel(const flaop_gla_intra p) {
  const flaop_kda_call& call = p.call;
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int local = blockIdx.x / call.HV, head = blockIdx.x % call.HV;
  const Chunk chunk(call, call.row0 + local);
  if (chunk.length <= 0) return;
  const int64_t token = chunk.token;
  const int length = chunk.length;
  const int warp = threadIdx.x / 32;
  const int key_head = head / (call.HV / call.H);

  load_tile<kThreads>(s.q, call.q, token, call.H, key_head, length);
  load_tile<kThreads>(s.k, call.k, token, call.H, key_head, length);
  copy_commit();
  sum_gates<G>(call, s, token, length, head);
  if (threadIdx.x < kTokens) s.q_norm[threadIdx.x] = s.k_norm[threadIdx.x] = 1.f;
  copy_wait();
  __syncthreads();
  if constexpr (PAIRS) {
    PairSums<false> sums;
    sums.clear();
    pairs_within(s, sums, warp);
    store_pairs(p, sums, warp, warp, token, length, head);
    // Six blocks below the diagonal: two or one a warp. The blocks above it are zero.
    constexpr int kRows[6] = {1, 2, 3, 3, 2, 3}, kColumns[6] = {0, 1, 2, 0, 0, 1};
    for (int i = warp; i < 6; i += kBlocks) {
      sums.clear();
      pairs_between(s, sums, kRows[i], kColumns[i]);
      store_pairs(p, sums, kRows[i], kColumns[i], token, length, head);
      sums.clear();
      store_pairs(p, sums, kColumns[i], kRows[i], token, length, head);
    }
  }
  decayed_operands<false>({static_cast<__nv_bfloat16*>(p.qg), static_cast<__nv_bfloat16*>(p.kg),
                           p.decay, call.scale, static_cast<int64_t>(local) * call.HV + head},
                          s);
}

template <typename G, bool PAIRS>
int launch(const flaop_gla_intra& p, cudaStream_t stream) {
  const auto kernel = gla_intra_kernel<G, PAIRS>;
  const int64_t blocks = static_cast<int64_t>(p.call.row1 - p.call.row0) * p.call.HV;
  if (blocks <= 0) return 0;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), kThreads, sizeof(Shared), stream>>>(p);
  return cudaGetLastError();
}

template <typename G>
int select(const flaop_gla_intra& p, cudaStream_t stream) {
  return p.A ? launch<G, true>(p, stream) : launch<G, false>(p, stream);
}

}  // namespace
}  // namespace flaop

extern "C" int flaop_gla_intra_launch(const flaop_gla_intra* params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return params->call.g_dtype == FLAOP_F32 ? flaop::select<float>(*params, s)
                                           : flaop::select<__nv_bfloat16>(*params, s);
}
