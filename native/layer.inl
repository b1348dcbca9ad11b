// What stands between the products of a decoder layer: norms, gates, rotation, attention.
#include <cmath>
#include <type_traits>

#include "half.hpp"

namespace terrazzo::TERRAZZO_ISA {
namespace {

// exp(x) with a relative error below 2e-7 for x in [-87, 88]; 0 below that.
inline Floats exponential(Floats x) {
  const Floats lowest = broadcast(-87.0f);
  x = min(max(x, lowest), broadcast(88.0f));
  const Floats n = round_even(mul(x, broadcast(1.44269504088896341f)));
  // ln 2 in two parts, so that the difference stays exact.
  Floats r = fnma(n, broadcast(0.693359375f), x);
  r = fnma(n, broadcast(-2.12194440e-4f), r);
  Floats p = broadcast(1.0f / 5040.0f);
  p = fma(p, r, broadcast(1.0f / 720.0f));
  p = fma(p, r, broadcast(1.0f / 120.0f));
  p = fma(p, r, broadcast(1.0f / 24.0f));
  p = fma(p, r, broadcast(1.0f / 6.0f));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  return mul(p, power_of_two(n));
}

inline Floats load_some(const float* p, int count) {
  alignas(64) float lanes[kLanes] = {};
  std::memcpy(lanes, p, sizeof(float) * count);
  return load(lanes);
}
inline void store_some(float* p, Floats x, int count) {
  alignas(64) float lanes[kLanes];
  store(lanes, x);
  std::memcpy(p, lanes, sizeof(float) * count);
}

void rms_norm(const float* x, const float* weight, float eps, int width, float* out) {
  Floats squares = broadcast(0.0f);
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  float sum = reduce_add(squares);
  for (; i < width; ++i) sum += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
  const Floats factor = broadcast(inverse);
  for (i = 0; i + kLanes <= width; i += kLanes) store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
  for (; i < width; ++i) out[i] = x[i] * inverse * weight[i];
}

void scale_add(float* x, const float* y, float multiplier, int width) {
  const Floats factor = broadcast(multiplier);
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) store(x + i, fma(load(y + i), factor, load(x + i)));
  for (; i < width; ++i) x[i] = __builtin_fmaf(y[i], multiplier, x[i]);
}

inline Floats sigmoid(Floats x) {
  return div(broadcast(1.0f), add(broadcast(1.0f), exponential(sub(broadcast(0.0f), x))));
}

inline Floats activated(Floats x, Activation activation) {
  if (activation == Activation::kSilu) return mul(x, sigmoid(x));
  // (1 + tanh(y)) / 2 is the sigmoid of 2 y.
  const Floats cube = mul(mul(x, x), x);
  const Floats inner = fma(cube, broadcast(0.044715f), x);
  return mul(x, sigmoid(mul(inner, broadcast(2.0f * 0.7978845608028654f))));
}

void gate(const float* opening, const float* up, Activation activation, int width, float* out) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes)
    store(out + i, mul(activated(load(opening + i), activation), load(up + i)));
  if (i < width)
    store_some(out + i, mul(activated(load_some(opening + i, width - i), activation), load_some(up + i, width - i)),
               width - i);
}

void turn(float* head, const float* cos, const float* sin, int rotary_dim, int neighbours) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const int first = neighbours ? 2 * i : i, second = neighbours ? 2 * i + 1 : i + half;
    const float a = head[first], b = head[second];
    head[first] = a * cos[i] - b * sin[i];
    head[second] = b * cos[i] + a * sin[i];
  }
}

inline float element_at(Element element, const void* base, int64_t index) {
  if (element == Element::kF32) return static_cast<const float*>(base)[index];
  return bf16_to_float(static_cast<const uint16_t*>(base)[index]);
}

void store_kv(const float* x, Element element, int width, void* out) {
  if (element == Element::kF32) {
    std::memcpy(out, x, sizeof(float) * width);
    return;
  }
  for (int i = 0; i < width; ++i) static_cast<uint16_t*>(out)[i] = float_to_bf16(x[i]);
}

// Attention over blocks of keys at fixed positions: a query sums in the same order whether it comes
// alone, with others, or in another chunk of its prompt. A block is whole units, a page is too.
constexpr int kUnit = 32;
constexpr int kUnits = 2;
constexpr int kKeys = kUnits * kUnit;
constexpr int kQueryRows = 64;
constexpr int kLargestHead = 512;
static_assert(kUnit % (2 * kLanes) == 0);

struct Work {
  float queries[kQueryRows * kLargestHead];
  float out[kQueryRows * kLargestHead];
  float keys[kLargestHead * kUnit];  // of a unit, [head_dim][key]
  float scores[kQueryRows * kKeys];
  float highest[kQueryRows], sum[kQueryRows];
};

template <Element kElement>
inline Floats load_kv(const void* base, int64_t index) {
  if constexpr (kElement == Element::kF32) return load(static_cast<const float*>(base) + index);
  else return load_bf16(static_cast<const uint16_t*>(base) + index);
}

// The sum of the last elements of a head, where it is no multiple of a vector.
inline float tail_score(const float* query, Element element, const void* keys, int64_t at, int width) {
  float sum = 0.0f;
  for (int d = width / kLanes * kLanes; d < width; ++d)
    sum = __builtin_fmaf(query[d], element_at(element, keys, at + d), sum);
  return sum;
}

// Scores of a unit of keys, which stand [key][head_dim], for few queries: lane l sums the elements l,
// l + kLanes, ... and the lanes are added as `reduce_add` does.
template <Element kElement, int kRows>
inline void score_few(const AttentionShape& shape, const void* keys, int64_t at, const float* queries, float* scores) {
  constexpr int kAtOnce = kRows == 1 ? 8 : kRows == 2 ? 4 : 2;
  const int width = shape.head_dim;
  for (int key = 0; key < kUnit; key += kAtOnce) {
    Floats sums[kRows][kAtOnce];
    for (int m = 0; m < kRows; ++m)
      for (int k = 0; k < kAtOnce; ++k) sums[m][k] = broadcast(0.0f);
    const int64_t first = at + static_cast<int64_t>(key) * width;
    for (int d = 0; d + kLanes <= width; d += kLanes) {
      Floats q[kRows];
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) q[m] = load(queries + m * width + d);
#pragma GCC unroll 8
      for (int k = 0; k < kAtOnce; ++k) {
        const Floats element = load_kv<kElement>(keys, first + static_cast<int64_t>(k) * width + d);
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m) sums[m][k] = fma(q[m], element, sums[m][k]);
      }
    }
    for (int m = 0; m < kRows; ++m)
      for (int k = 0; k < kAtOnce; ++k)
        scores[m * kKeys + key + k] = reduce_add(sums[m][k]) * shape.scale;
    if (width % kLanes != 0)
      for (int m = 0; m < kRows; ++m)
        for (int k = 0; k < kAtOnce; ++k)
          scores[m * kKeys + key + k] +=
              tail_score(queries + m * width, shape.element, keys, first + static_cast<int64_t>(k) * width, width) *
              shape.scale;
  }
}

// For many queries the keys of a unit are turned once, to [head_dim][key].
template <Element kElement>
inline void turn_keys(const AttentionShape& shape, const void* keys, int64_t at, float* turned) {
  const int width = shape.head_dim;
  alignas(64) float lanes[kLanes];
  for (int key = 0; key < kUnit; ++key) {
    const int64_t first = at + static_cast<int64_t>(key) * width;
    int d = 0;
    for (; d + kLanes <= width; d += kLanes) {
      store(lanes, load_kv<kElement>(keys, first + d));
      for (int lane = 0; lane < kLanes; ++lane) turned[(d + lane) * kUnit + key] = lanes[lane];
    }
    for (; d < width; ++d) turned[d * kUnit + key] = element_at(kElement, keys, first + d);
  }
}

template <int kRows>
struct Scores {
  Floats sum[kRows][2];
};

// Adds elements kFirst, kFirst + kStep, ... of each kLanes in the order of `reduce_add`.
template <int kRows, int kFirst, int kStep>
inline Scores<kRows> lane_scores(const float* turned, const float* queries, int width) {
  Scores<kRows> result;
  if constexpr (kStep == kLanes) {
    for (int m = 0; m < kRows; ++m) result.sum[m][0] = result.sum[m][1] = broadcast(0.0f);
    for (int d = kFirst; d - kFirst + kLanes <= width; d += kLanes) {
      const Floats left = load(turned + d * kUnit), right = load(turned + d * kUnit + kLanes);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) {
        const Floats q = broadcast(queries[m * width + d]);
        result.sum[m][0] = fma(q, left, result.sum[m][0]);
        result.sum[m][1] = fma(q, right, result.sum[m][1]);
      }
    }
  } else {
    result = lane_scores<kRows, kFirst, 2 * kStep>(turned, queries, width);
    const Scores<kRows> other = lane_scores<kRows, kFirst + kStep, 2 * kStep>(turned, queries, width);
    for (int m = 0; m < kRows; ++m)
      for (int half = 0; half < 2; ++half) result.sum[m][half] = add(result.sum[m][half], other.sum[m][half]);
  }
  return result;
}

template <int kRows>
inline void score_many(const AttentionShape& shape, const float* turned, const float* queries, float* scores) {
  const int width = shape.head_dim;
  const Floats scale = broadcast(shape.scale);
  for (int key = 0; key < kUnit; key += 2 * kLanes) {
    Scores<kRows> result = lane_scores<kRows, 0, 1>(turned + key, queries, width);
    for (int m = 0; m < kRows; ++m)
      for (int half = 0; half < 2; ++half) {
        Floats score = mul(result.sum[m][half], scale);
        if (width % kLanes != 0) {
          Floats tail = broadcast(0.0f);
          for (int d = width / kLanes * kLanes; d < width; ++d)
            tail = fma(broadcast(queries[m * width + d]), load(turned + d * kUnit + key + half * kLanes), tail);
          score = add(score, mul(tail, scale));
        }
        store(scores + m * kKeys + key + half * kLanes, score);
      }
  }
}

// Adds the values of `count` keys, which stand [page_size][head_dim], by their weights.
template <Element kElement, int kRows>
inline void weigh_rows(const AttentionShape& shape, const void* values, int64_t at, int count, const float* weights,
                       float* out) {
  const int width = shape.head_dim;
  int d = 0;
  for (; d + 2 * kLanes <= width; d += 2 * kLanes) {
    Floats sums[kRows][2];
    for (int m = 0; m < kRows; ++m)
      for (int half = 0; half < 2; ++half) sums[m][half] = load(out + m * width + d + half * kLanes);
    for (int key = 0; key < count; ++key) {
      const int64_t index = at + static_cast<int64_t>(key) * width + d;
      const Floats left = load_kv<kElement>(values, index), right = load_kv<kElement>(values, index + kLanes);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) {
        const Floats p = broadcast(weights[m * kKeys + key]);
        sums[m][0] = fma(p, left, sums[m][0]);
        sums[m][1] = fma(p, right, sums[m][1]);
      }
    }
    for (int m = 0; m < kRows; ++m)
      for (int half = 0; half < 2; ++half) store(out + m * width + d + half * kLanes, sums[m][half]);
  }
  for (; d < width; ++d)
    for (int m = 0; m < kRows; ++m)
      for (int key = 0; key < count; ++key) {
        const int64_t index = at + static_cast<int64_t>(key) * width + d;
        out[m * width + d] = __builtin_fmaf(weights[m * kKeys + key], element_at(shape.element, values, index), out[m * width + d]);
      }
}

inline void cap(float* scores, int rows, float softcap) {
  for (int i = 0; i < rows * kKeys; ++i) scores[i] = softcap * std::tanh(scores[i] / softcap);
}

// One row of a block whose keys [begin, end) the query sees: the weights of its keys, beside the sum
// and the highest score so far.
inline void soften(Work& work, int row, int width, int begin, int end) {
  float* scores = work.scores + row * kKeys;
  for (int key = 0; key < begin; ++key) scores[key] = -INFINITY;
  for (int key = end; key < kKeys; ++key) scores[key] = -INFINITY;
  Floats top = load(scores);
  for (int key = kLanes; key < kKeys; key += kLanes) top = max(top, load(scores + key));
  const float highest = std::fmax(work.highest[row], reduce_max(top));
  if (highest == -INFINITY) {
    for (int key = 0; key < kKeys; ++key) scores[key] = 0.0f;
    return;
  }
  if (highest > work.highest[row]) {
    const float shrink = work.highest[row] == -INFINITY ? 0.0f : std::exp(work.highest[row] - highest);
    work.sum[row] *= shrink;
    for (int d = 0; d < width; ++d) work.out[row * width + d] *= shrink;
    work.highest[row] = highest;
  }
  Floats sum = broadcast(0.0f);
  for (int key = 0; key < kKeys; key += kLanes) {
    const Floats distance = sub(load(scores + key), broadcast(highest));
    // Below that a weight is nothing beside the largest, which is 1; hidden keys are exactly nothing.
    const Floats p = keep_above(exponential(distance), distance, broadcast(-86.0f));
    sum = add(sum, p);
    store(scores + key, p);
  }
  work.sum[row] += reduce_add(sum);
}

// f with every row, four at a time.
template <typename F>
inline void in_fours(int rows, F f) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) f(row, std::integral_constant<int, 4>{});
  if (rows - row == 3) f(row, std::integral_constant<int, 3>{});
  if (rows - row == 2) f(row, std::integral_constant<int, 2>{});
  if (rows - row == 1) f(row, std::integral_constant<int, 1>{});
}

constexpr int kManyRows = 12;

inline int clamp(int64_t x, int low, int high) { return static_cast<int>(x < low ? low : x > high ? high : x); }

template <Element kElement>
void attend_block(const AttentionShape& shape, const KVLayer& kv, const Sequence& sequence, int kv_head, Work& work,
                  int rows, int64_t first, int count, int64_t position) {
  const int width = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
  const bool many = rows >= kManyRows;
  int64_t at[kUnits];
  for (int unit = 0; unit < kUnits && unit * kUnit < count; ++unit) {
    const int64_t key = first + unit * kUnit, page = sequence.block_table[key / shape.page_size];
    const int64_t offset = key % shape.page_size;
    at[unit] = ((page * shape.num_kv_heads + kv_head) * shape.page_size + offset) * width;
    if (many) turn_keys<kElement>(shape, kv.keys, at[unit], work.keys);
    in_fours(rows, [&](int row, auto some) {
      const float* queries = work.queries + row * width;
      float* scores = work.scores + row * kKeys + unit * kUnit;
      if (many) score_many<some>(shape, work.keys, queries, scores);
      else score_few<kElement, some>(shape, kv.keys, at[unit], queries, scores);
    });
  }
  if (shape.softcap < INFINITY) cap(work.scores, rows, shape.softcap);
  for (int row = 0; row < rows; ++row) {
    const int64_t own = position + row / group;
    soften(work, row, width, clamp(own - shape.window + 1 - first, 0, count), clamp(own + 1 - first, 0, count));
  }
  for (int unit = 0; unit < kUnits && unit * kUnit < count; ++unit) {
    const int left = count - unit * kUnit;
    in_fours(rows, [&](int row, auto some) {
      weigh_rows<kElement, some>(shape, kv.values, at[unit], left < kUnit ? left : kUnit,
                                 work.scores + row * kKeys + unit * kUnit, work.out + row * width);
    });
  }
}

// The queries [query_begin, query_end) of a sequence, of all heads that share one key head.
void attend(const AttentionShape& shape, const KVLayer& kv, const Sequence& sequence, int kv_head,
            int query_begin, int query_end, const float* q, int64_t q_stride, float* out, int64_t out_stride,
            std::vector<uint8_t>& scratch) {
  if (scratch.size() < sizeof(Work) + 64) scratch.resize(sizeof(Work) + 64);
  Work& work = *reinterpret_cast<Work*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) & ~uintptr_t{63});
  const int width = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
  const int rows = (query_end - query_begin) * group;
  for (int row = 0; row < rows; ++row) {
    const int query = sequence.query_start + query_begin + row / group, head = kv_head * group + row % group;
    std::memcpy(work.queries + row * width, q + query * q_stride + head * width, sizeof(float) * width);
    std::memset(work.out + row * width, 0, sizeof(float) * width);
    work.highest[row] = -INFINITY;
    work.sum[row] = 0.0f;
  }
  const int64_t position = sequence.kv_len - sequence.query_len + query_begin;
  const int64_t last = position + (query_end - query_begin) - 1, seen = position - shape.window + 1;
  for (int64_t first = seen > 0 ? seen / kKeys * kKeys : 0; first <= last; first += kKeys) {
    const int count = clamp(last + 1 - first, 0, kKeys);
    if (shape.element == Element::kF32)
      attend_block<Element::kF32>(shape, kv, sequence, kv_head, work, rows, first, count, position);
    else
      attend_block<Element::kBF16>(shape, kv, sequence, kv_head, work, rows, first, count, position);
  }
  for (int row = 0; row < rows; ++row) {
    const int query = sequence.query_start + query_begin + row / group, head = kv_head * group + row % group;
    float* to = out + query * out_stride + head * width;
    const float inverse = 1.0f / work.sum[row];
    for (int d = 0; d < width; ++d) to[d] = work.out[row * width + d] * inverse;
  }
}

}  // namespace
}  // namespace terrazzo::TERRAZZO_ISA
