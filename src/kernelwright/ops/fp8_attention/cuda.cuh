// softmax(q8 k8ᵀ) v8 with their scales, on Hopper.
//
// One warp copies tiles of keys and values to shared memory; each of the other warpgroups has 64
// queries. While a warpgroup computes the probabilities of one tile, its product of the tile before
// with the values is under way, and the products of the other warpgroups are.
//
// A thread holds, of its two rows r of 64 and for each 8 keys j, the scores 4 j + 2 r and the one
// after. Tiles of keys are stored in such an order that these are the probabilities that the next
// product wants from this thread: see reference.in_kernel_order.
#pragma once
#include "ops/fp8_attention/hopper.cuh"

namespace kernelwright {

struct EightArgs {
  const void *q8, *k8, *v8;
  const float *q_scale, *k_scale, *v_scale;
  void* out;
  i64 out_b, out_h, out_s;
  int queries, keys, heads, blocks;  // blocks of queries
};

constexpr int TILE = 128;  // keys
// Integers summed on top of these bits are floats already: 1.5 * 2 ** 23, from which on floats are 1
// apart, plus the sum, which is less than 2 ** 22.
constexpr int AS_BITS = 0x4B400000;
constexpr float AS_FLOAT = 12582912.f;
constexpr float SHIFT = 8.f;  // the largest probability is 2 ** 8

template <int D, int STAGES> struct EightShared {
  alignas(128) unsigned char keys[STAGES][TILE * D];
  alignas(128) unsigned char values[STAGES][TILE * D];
  Barrier keys_there[STAGES], values_there[STAGES], keys_read[STAGES], values_read[STAGES];
};

// The running maximum and sum of a thread's two rows.
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

struct Running {
  float most[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.f, 0.f}, decay[2];
};

// From scores to probabilities, in place. `left`: how many of the tile's keys there are.
template <bool EDGE>
__device__ __forceinline__ void probabilities(int (&scores)[64], Running& run, const float (&of_row)[2], float k_scale,
                                              float v_scale, int left) {
  const float log_v = __log2f(v_scale), per_v = __frcp_rn(v_scale);
  const int first = threadIdx.x % 4 * 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float most = minus_infinity();
#pragma unroll
    for (int j = 0; j < 16; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = 4 * j + 2 * r + e;
        if (EDGE && j / 2 * 16 + first + j % 2 * 2 + e >= left) scores[i] = __float_as_int(minus_infinity());
        most = fmaxf(most, __int_as_float(scores[i]));
      }
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float factor = of_row[r] * k_scale;
    // whole numbers, so that what is rounded does not depend on the tiles before
    const float now = fmaxf(run.most[r], ceilf((most - AS_FLOAT) * factor + log_v));
    const float minus = AS_FLOAT * factor + now - SHIFT - log_v;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 16; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = 4 * j + 2 * r + e;
        const float p = exp2_near(__int_as_float(scores[i]) * factor - minus);
        sum += p;
        scores[i] = __float_as_int(p);
      }
    }
    run.decay[r] = exp2_near(run.most[r] - now);
    run.sum[r] = run.sum[r] * run.decay[r] + sum * per_v;
    run.most[r] = now;
  }
}

template <int N> __device__ __forceinline__ void decay(float (&out)[N], const Running& run) {
  // maxima are whole numbers, and seldom change after the first tiles
  if (__any_sync(~0u, run.decay[0] != 1.f || run.decay[1] != 1.f)) {
#pragma unroll
    for (int i = 0; i < N; i++) out[i] *= run.decay[i / 2 % 2];
  }
}

__device__ __forceinline__ void round_to_eight(unsigned (&p8)[4][4], const int (&p)[64]) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const int i = 16 * k + 8 * (part / 2) + 2 * (part % 2);
      p8[k][part] = four_e4m3(__int_as_float(p[i]), __int_as_float(p[i + 1]), __int_as_float(p[i + 4]),
                              __int_as_float(p[i + 5]));
    }
  }
}

template <int D, int STAGES> __device__ void copy_tiles(const EightArgs& a, EightShared<D, STAGES>& shared, i64 head, int tiles) {
  constexpr int BYTES = TILE * D;
  const unsigned char* keys = (const unsigned char*)a.k8 + head * tiles * BYTES;
  const unsigned char* values = (const unsigned char*)a.v8 + head * tiles * BYTES;
  for (int j = 0; j < tiles; j++) {
    const int stage = j % STAGES, phase = j / STAGES % 2;
    shared.keys_read[stage].wait(phase ^ 1);
    shared.keys_there[stage].arrive_expecting(BYTES);
    bulk_copy(shared.keys[stage], keys + (i64)j * BYTES, BYTES, shared.keys_there[stage]);
    shared.values_read[stage].wait(phase ^ 1);
    shared.values_there[stage].arrive_expecting(BYTES);
    bulk_copy(shared.values[stage], values + (i64)j * BYTES, BYTES, shared.values_there[stage]);
  }
}

template <class T, int D, int STAGES>
__device__ void attend(const EightArgs& a, EightShared<D, STAGES>& shared, i64 head, int tiles, int row0) {
  constexpr int STEPS = D / 32;
  const int lane = threadIdx.x % 32, first = row0 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const int padded = (a.queries + TILE - 1) / TILE * TILE;
  unsigned q[STEPS][4];
  float of_row[2];
  const bool present[2] = {first < a.queries, first + 8 < a.queries};
  const unsigned* q8 = (const unsigned*)a.q8 + (head * padded + first) * (D / 4) + lane % 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    of_row[r] = present[r] ? a.q_scale[head * padded + first + 8 * r] : 0.f;
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      q[k][r] = present[r] ? q8[r * 2 * D + 8 * k] : 0u;
      q[k][2 + r] = present[r] ? q8[r * 2 * D + 8 * k + 4] : 0u;
    }
  }
  const float* k_scale = a.k_scale + head * tiles;
  const float* v_scale = a.v_scale + head * tiles;
  const int in_last = a.keys - (tiles - 1) * TILE;

  float out[D / 2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) out[i] = 0.f;
  int scores[64];
  unsigned p8[4][4];
  Running run;

  const auto start_scores = [&](int j) {
    shared.keys_there[j % STAGES].wait(j / STAGES % 2);
#pragma unroll
    for (int i = 0; i < 64; i++) scores[i] = AS_BITS;
    const Operand keys(shared.keys[j % STAGES], 8 * D);
    before_products();
#pragma unroll
    for (int k = 0; k < STEPS; k++) start_product(scores, q[k], keys.step(k));
    end_group();
  };
  const auto start_values = [&](int j) {
    shared.values_there[j % STAGES].wait(j / STAGES % 2);
    const Operand values(shared.values[j % STAGES], 8 * TILE);
    before_products();
#pragma unroll
    for (int k = 0; k < 4; k++) start_product(out, p8[k], values.step(k));
    end_group();
  };
  const auto done_with = [&](Barrier& barrier) {
    if (threadIdx.x % 128 == 0) barrier.arrive();
  };
  const auto find_probabilities = [&](int j, float k_now, float v_now) {
    if (j + 1 == tiles && in_last < TILE) {
      probabilities<true>(scores, run, of_row, k_now, v_now, in_last);
    } else {
      probabilities<false>(scores, run, of_row, k_now, v_now, TILE);
    }
  };

  start_scores(0);
  float k_next = k_scale[0], v_next = v_scale[0];
  wait_for_products<0>();
  results_are_there(scores);
  done_with(shared.keys_read[0]);
  find_probabilities(0, k_next, v_next);
  round_to_eight(p8, scores);
  if (tiles > 1) k_next = k_scale[1], v_next = v_scale[1];
  for (int j = 1; j < tiles; j++) {
    const float k_now = k_next, v_now = v_next;
    if (j + 1 < tiles) k_next = k_scale[j + 1], v_next = v_scale[j + 1];
    start_scores(j);
    start_values(j - 1);
    wait_for_products<1>();
    results_are_there(scores);
    done_with(shared.keys_read[j % STAGES]);
    find_probabilities(j, k_now, v_now);
    wait_for_products<0>();
    results_are_there(out);
    done_with(shared.values_read[(j - 1) % STAGES]);
    decay(out, run);
    round_to_eight(p8, scores);
  }
  start_values(tiles - 1);
  wait_for_products<0>();
  results_are_there(out);

  T* p = (T*)a.out + head / a.heads * a.out_b + head % a.heads * a.out_h;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = run.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float factor = 1.f / sum;
    if (!present[r]) continue;
    T* row = p + (first + 8 * r) * a.out_s + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
      *(unsigned*)(row + 8 * j) = pair<T>(out[4 * j + 2 * r] * factor, out[4 * j + 2 * r + 1] * factor);
    }
  }
}

// GROUPS warpgroups attend; REGISTERS are those of their threads.
template <class T, int D, int GROUPS, int STAGES, int REGISTERS>
__device__ __forceinline__ void eight_bit_attention(const EightArgs& a) {
  extern __shared__ unsigned char memory[];
  using Shared = EightShared<D, STAGES>;
  Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<size_t>(memory) + 127) / 128 * 128);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      shared.keys_there[i].init(1);
      shared.values_there[i].init(1);
      shared.keys_read[i].init(GROUPS);
      shared.values_read[i].init(GROUPS);
    }
    barriers_are_made();
  }
  __syncthreads();
  const int tiles = (a.keys + TILE - 1) / TILE, group = threadIdx.x / 128;
  const i64 head = blockIdx.x / a.blocks;
  if (group == 0) {
    give_registers_back<24>();
    if (threadIdx.x == 0) copy_tiles(a, shared, head, tiles);
  } else {
    take_registers<REGISTERS>();
    attend<T>(a, shared, head, tiles, (blockIdx.x % a.blocks * GROUPS + group - 1) * 64);
  }
}

}  // namespace kernelwright
