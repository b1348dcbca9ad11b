// What the kernels of every instruction set share: weights, staged activations, a forward pass.
#pragma once
#include <cstdint>
#include <vector>

namespace terrazzo {

enum class Element : int { kF32 = 0, kF16 = 1, kBF16 = 2 };

// How the inputs of a weight stand: `blocks` blocks of `block` places, one scale each. Activations
// are quantized `quantum` places at a time (16 or 32; block is a multiple of it, places of 32).
// lookup: the input of each place, -1 for none; nullptr where place k is input k.
struct Places {
  int in_features;
  int places;
  int block;
  int blocks;
  int quantum;
  const int32_t* lookup;
};

// A strip is Kernels::strip outputs. codes: [strip][32 places][tile of lanes], 4 * bits bytes a lane;
// see unpack_tile. scales, zeros: [strip][block][output]. zeros: nullptr where `zero` holds for all.
// Dense weights: bits == 0, codes are elements [strip][place][output].
struct Weight {
  int bits;
  int out_features;
  Places places;
  Element element;
  const uint8_t* codes;
  const void* scales;
  const uint8_t* zeros;
  float zero;
};

// Rows of activations, permuted and padded as a weight wants them. Int8: values [row][place], with
// scale [row][place / quantum]. sums: float [row][block], of what stands in `values`.
struct Staged {
  const int8_t* int8;
  const float* float32;
  const float* scales;
  const float* sums;
};

// Pages of keys and values: [page][kv_head][page_size][head_dim].
struct KVLayer {
  void* keys;
  void* values;
};

struct Sequence {
  int query_start;
  int query_len;
  int kv_len;
  const int64_t* block_table;
};

struct AttentionShape {
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int page_size;
  Element element;
  float scale;
  float softcap;  // infinity: none
  int64_t window;
};

enum class Activation : int { kSilu = 0, kGeluTanh = 1 };

// The functions of one instruction set. Rows are [begin, end).
struct Kernels {
  const char* name;
  int lanes;  // outputs of a tile
  int strip;  // outputs of a strip, whole tiles
  void (*stage_int8)(const float* x, int64_t stride, const Places&, int rows_begin, int rows_end,
                     int8_t* values, float* scales, float* sums);
  void (*stage_float)(const float* x, int64_t stride, const Places&, int rows_begin, int rows_end,
                      float* values, float* sums);
  // Outputs of the strips [begin, end), of all `rows`; bias may be nullptr.
  void (*matmul)(const Weight&, const Staged&, int rows, const float* bias, float* out,
                 int64_t stride, int strips_begin, int strips_end, std::vector<uint8_t>& scratch);
  void (*rms_norm)(const float* x, const float* weight, float eps, int width, float* out);
  void (*scale_add)(float* x, const float* y, float multiplier, int width);
  void (*gate)(const float* gate, const float* up, Activation, int width, float* out);
  void (*turn)(float* head, const float* cos, const float* sin, int rotary_dim, int neighbours);
  void (*store_kv)(const float* x, Element, int width, void* out);
  void (*attend)(const AttentionShape&, const KVLayer&, const Sequence&, int kv_head, int query_begin,
                 int query_end, const float* q, int64_t q_stride, float* out, int64_t out_stride,
                 std::vector<uint8_t>& scratch);
};

const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* portable_kernels();

}  // namespace terrazzo
