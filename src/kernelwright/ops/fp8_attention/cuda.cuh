// softmax(q8 k8ᵀ) v8 with their scales, on Hopper.
//
// One thread copies tiles of keys and values to shared memory; each warpgroup but its own has 64
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
  int queries, keys, heads, blocks;  // blocks of queries of a head
};

constexpr int TILE = 128;  // keys
constexpr int NONE = -(1 << 30);  // less than any score
constexpr float SHIFT = 8.f;  // the largest probability is 2 ** 8
// Tensor cores keep fewer bits of a running sum of fp8 products than float32 has. After so many tiles
// the sum is added to one in float32, in shared memory. Without that first sight refused Wan's
// attention: 256 tiles, and values with a common mean.
constexpr int TILES_OF_A_SUM = 16;

template <int D, int GROUPS, int STAGES> struct EightShared {
  alignas(128) unsigned char keys[STAGES][TILE * D];
  alignas(128) unsigned char values[STAGES][TILE * D];
  float sums[GROUPS][D / 2][128];  // one of each result that a thread holds
  Barrier keys_there[STAGES], values_there[STAGES], keys_read[STAGES], values_read[STAGES];
};

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// The running maximum and sum of a thread's two rows.
struct Running {
  float most[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.f, 0.f}, decay[2];
};

// 2 ** x for the integer scores of a row, where x is linear in the score. Read as an integer, a float is its exponent and
// then its mantissa: if between powers of two the mantissa may be linear in x, the whole is one multiply-add.
struct Line {
  int least;  // smaller scores count as this one
  unsigned slope, offset;

  __device__ __forceinline__ Line(int largest, float x_of_largest, float factor) {
    constexpr float ONE = 1 << 23, BIAS = 127.f;
    constexpr float DEPTH = 60.f;  // 2 ** -60 is nothing beside the largest of a row, and 2 ** -120 still a float
    constexpr float MOST = 1 << 24;  // two scores differ by less
    factor = fminf(factor, DEPTH);
    slope = __float2int_rn(factor * ONE);
    least = largest - __float2int_rz(fminf(__fdividef(DEPTH + 1.f, factor), MOST));
    offset = __float2int_rn((fmaxf(x_of_largest, -DEPTH) + BIAS) * ONE) - largest * slope;
  }
  __device__ __forceinline__ float operator()(int score) const {
    return __int_as_float(max(score, least) * slope + offset);
  }
};

// From scores to probabilities, in place. `left`: how many of the keys there are; log_v is that of
// the scale of their values. Maxima and sums of a row are made in parts: one after the other, each
// would wait for the one before.
template <bool EDGE, int N>
__device__ __forceinline__ void probabilities(int (&scores)[N], Running& run, const float (&factor)[2], float log_v,
                                              float per_v, int left) {
  constexpr int APART = 4;
  const int first = threadIdx.x % 4 * 4;
  int most[2][APART], largest[2];
  float sum[2][APART], from[2];
#pragma unroll
  for (int i = 0; EDGE && i < N; i++) {
    if (i / 8 * 16 + first + i / 4 % 2 * 2 + i % 2 >= left) scores[i] = NONE;
  }
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    int& so_far = most[i / 2 % 2][i / 4 % APART];
    so_far = i < 4 * APART ? max(scores[i], scores[i + 1]) : max_of_three(so_far, scores[i], scores[i + 1]);
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int all = max(max_of_three(most[r][0], most[r][1], most[r][2]), most[r][3]);
    all = max(all, __shfl_xor_sync(~0u, all, 1));
    all = max(all, __shfl_xor_sync(~0u, all, 2));
    const float x = all * factor[r] + log_v;
    // whole numbers, so that what is rounded does not depend on the keys before
    const float now = fmaxf(run.most[r], ceilf(x));
    largest[r] = all, from[r] = x - now + SHIFT;
    run.decay[r] = exp2_near(run.most[r] - now);
    run.most[r] = now;
  }
  const Line line[2] = {{largest[0], from[0], factor[0]}, {largest[1], from[1], factor[1]}};
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int r = i / 2 % 2, part = (i / 4 * 2 + i % 2) % APART;
    const float p = EDGE && scores[i] == NONE ? 0.f : line[r](scores[i]);
    sum[r][part] = i < 2 * APART ? p : sum[r][part] + p;
    scores[i] = __float_as_int(p);
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    run.sum[r] = run.sum[r] * run.decay[r] + ((sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3])) * per_v;
  }
}

template <int N> __device__ __forceinline__ void decay(float (&out)[N], const Running& run) {
  // maxima are whole numbers, and seldom change after the first tiles
  if (__any_sync(~0u, run.decay[0] != 1.f || run.decay[1] != 1.f)) {
#pragma unroll
    for (int i = 0; i < N; i++) out[i] *= run.decay[i / 2 % 2];
  }
}

template <int N> __device__ __forceinline__ void round_to_eight(unsigned (&p8)[N / 16][4], const int (&p)[N]) {
#pragma unroll
  for (int k = 0; k < N / 16; k++) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const int i = 16 * k + 8 * (part / 2) + 2 * (part % 2);
      p8[k][part] = four_e4m3(__int_as_float(p[i]), __int_as_float(p[i + 1]), __int_as_float(p[i + 4]),
                              __int_as_float(p[i + 5]));
    }
  }
}

template <int D, int GROUPS, int STAGES>
__device__ void copy_tiles(const EightArgs& a, EightShared<D, GROUPS, STAGES>& shared, i64 head, int tiles) {
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

// The 64 queries from row0 on.
template <class T, int D, int GROUPS, int STAGES>
__device__ void attend(const EightArgs& a, EightShared<D, GROUPS, STAGES>& shared, i64 head, int tiles, int group,
                       int row0) {
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

  float out[D / 2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) out[i] = 0.f;
  int scores[TILE / 2];
  unsigned p8[TILE / 32][4];
  Running run;
  float* const sums = &shared.sums[group][0][threadIdx.x % 128];
#pragma unroll
  for (int i = 0; i < D / 2; i++) sums[i * 128] = 0.f;
  float most_of_sums[2] = {minus_infinity(), minus_infinity()};
  float factor[2], log_v, per_v, k_next = k_scale[0], v_next = v_scale[0];

  const auto stage = [](int j) { return j % STAGES; };
  const auto phase = [](int j) { return j / STAGES % 2; };
  const auto begin_tile = [&](int j) {
    factor[0] = of_row[0] * k_next, factor[1] = of_row[1] * k_next;
    log_v = __log2f(v_next), per_v = exp2_near(-log_v);
    if (j + 1 < tiles) k_next = k_scale[j + 1], v_next = v_scale[j + 1];
    shared.keys_there[stage(j)].wait(phase(j));
  };
  const auto start_scores = [&](int j) {
    const Operand keys(shared.keys[stage(j)], 8 * D);
    before_products();
    start_new_product(scores, q[0], keys.step(0));
#pragma unroll
    for (int k = 1; k < STEPS; k++) start_product(scores, q[k], keys.step(k));
    end_group();
  };
  const auto start_values = [&](int j) {
    shared.values_there[stage(j)].wait(phase(j));
    const Operand values(shared.values[stage(j)], 8 * TILE);
    before_products();
#pragma unroll
    for (int k = 0; k < TILE / 32; k++) start_product(out, p8[k], values.step(k));
    end_group();
  };
  const auto done_with = [&](Barrier& barrier) {
    if (threadIdx.x % 128 == 0) barrier.arrive();
  };
  const auto find_probabilities = [&](int j) {
    const int left = a.keys - j * TILE;
    if (left < TILE) {
      probabilities<true>(scores, run, factor, log_v, per_v, left);
    } else {
      probabilities<false>(scores, run, factor, log_v, per_v, TILE);
    }
  };
  // The sums so far, relative to the maximum of now. The last ones are the results.
  const auto add_to_sums = [&](bool last) {
    const float fade[2] = {exp2_near(most_of_sums[0] - run.most[0]), exp2_near(most_of_sums[1] - run.most[1])};
#pragma unroll
    for (int i = 0; i < D / 2; i++) {
      const float sum = sums[i * 128] * fade[i / 2 % 2] + out[i];
      if (!last) sums[i * 128] = sum;
      out[i] = last ? sum : 0.f;
    }
    most_of_sums[0] = run.most[0], most_of_sums[1] = run.most[1];
  };

  begin_tile(0);
  start_scores(0);
  wait_for_products<0>();
  results_are_there(scores);
  done_with(shared.keys_read[stage(0)]);
  find_probabilities(0);
  round_to_eight(p8, scores);
  for (int j = 1; j < tiles; j++) {  // while the product of the tile before with its values is under way
    begin_tile(j);
    start_scores(j);
    start_values(j - 1);
    wait_for_products<1>();
    results_are_there(scores);
    done_with(shared.keys_read[stage(j)]);
    find_probabilities(j);
    wait_for_products<0>();
    results_are_there(out);
    done_with(shared.values_read[stage(j - 1)]);
    decay(out, run);
    round_to_eight(p8, scores);
    if (j % TILES_OF_A_SUM == 0) add_to_sums(false);
  }
  start_values(tiles - 1);
  wait_for_products<0>();
  results_are_there(out);
  add_to_sums(true);

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
  using Shared = EightShared<D, GROUPS, STAGES>;
  Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<size_t>(dynamic_shared()) + 127) / 128 * 128);
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
    const int row0 = (blockIdx.x % a.blocks * GROUPS + group - 1) * 64;
    attend<T, D, GROUPS, STAGES>(a, shared, head, tiles, group - 1, row0);
  }
}

}  // namespace kernelwright
