// y = x W' for up to 16 rows of x: a stream of records through shared memory, as fast as they come.
//
// A block owns neighbouring tiles and one slice of the inputs, whose rows of x stay in shared memory; its
// warps share the inputs of a tile. Every warp has a ring of records of its own, filled by bulk copies that
// run ahead across tiles, so that the stream never stops for a reduction. Weights do not depend on the
// kernel before us: the first records are on their way before we wait for it.
//
// Defined by whoever compiles: FLOAT (BFloat16, Float16), ROWS (8 or 16), WARPS, EPILOGUE, OUT_FLOAT32, and
// KINDS(F), a list of F(number, BITS, GROUP, SYM).
#include "record.cuh"

namespace terrazzo {

enum Epilogue { PLAIN, SILU, GELU };

constexpr int kThreads = 32 * WARPS;
constexpr int kColumnBlocks = ROWS / 8;
constexpr int kTileFloats = kOutputs * ROWS;
constexpr int kOwned = (kTileFloats + kThreads - 1) / kThreads;  // outputs of a tile that a thread sums

struct Arguments {
  const Tile* tiles;
  const uint16_t* x;   // [rows, x_stride]
  const int* lookup;   // input of each place, -1 for none; null: place k is input k
  const float* bias;   // of each column; null: none
  void* y;             // [rows, y_stride]
  float* partial;      // [slices, tiles, ROWS * 16], where there are several slices
  int* arrivals;       // of blocks that share tiles; zero before and after
  int num_tiles;
  int rows;
  int inputs;
  int units;           // of 128 places
  int x_stride;
  int y_stride;
  int depth;           // records in a ring
  int slot_bytes;
};

DEVICE float activate(float gate) {
  if constexpr (EPILOGUE == SILU) return gate / (1.0f + __expf(-gate));
  const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.0f + __expf(-2.0f * inner));
}

// The records of one warp, tile after tile: `issue` runs ahead of `next`.
struct Ring {
  uint8_t* slots;
  uint64_t* barriers;
  const Tile* tiles;
  uint64_t policy;
  int depth, slot_bytes;
  int first, last;  // units of each tile
  int end;          // of the tiles
  int ahead_tile, ahead_unit, ahead_slot;
  int slot;
  uint32_t parity;

  DEVICE void issue() {
    if (ahead_tile >= end) return;
    const Tile& tile = tiles[ahead_tile];
    const uint64_t offset = static_cast<uint64_t>(ahead_unit) * tile.record_bytes;
    barrier_expect(barriers + ahead_slot, tile.record_bytes);
    copy_bulk(slots + ahead_slot * slot_bytes, tile.records + offset, tile.record_bytes,
              barriers + ahead_slot, policy);
    ahead_slot = ahead_slot + 1 == depth ? 0 : ahead_slot + 1;
    if (++ahead_unit == last) ahead_unit = first, ++ahead_tile;
  }
  DEVICE const uint8_t* next() {
    barrier_wait(barriers + slot, parity);
    return slots + slot * slot_bytes;
  }
  DEVICE void release() {
    if (++slot == depth) slot = 0, parity ^= 1;
  }
};

// Sums one tile over the units of a warp. x: shared rows of the slice, x_row bytes apart.
template <class R>
DEVICE void multiply(Ring& ring, const uint8_t* x, int x_row, int rows, int slice_first, int lane,
                     float (&sum)[kColumnBlocks][4]) {
  // Lane l addresses row l % 8 of matrix l / 8: for 8 rows, two slices of 16 inputs; for 16, one.
  const int wanted = lane % 8 + (kColumnBlocks == 2 ? 8 * (lane / 16) : 0);
  const int row = wanted < rows ? wanted : 0;
  const int part = kColumnBlocks == 2 ? (lane / 8) % 2 : lane / 8;
  const uint8_t* matrix = x + row * x_row + 16 * part;
  for (int unit = ring.first; unit < ring.last; ++unit) {
    R record;
    record.load(ring.next(), lane);
    __syncwarp();
    if (lane == 0) ring.issue();
    ring.release();
    const uint8_t* here = matrix + (unit - slice_first) * (2 * kInputs);
    uint32_t b[kColumnBlocks][4];
#pragma unroll
    for (int block = 0; block < R::kBlocks; ++block) {
      float part_sum[kColumnBlocks][2][4] = {};
#pragma unroll
      for (int inner = 0; inner < R::kBlockSlices; ++inner) {
        const int slice = block * R::kBlockSlices + inner;
        uint32_t a[4];
        record.template fragment<FLOAT>(slice, a);
        if constexpr (kColumnBlocks == 1) {
          if (slice % 2 == 0) load_matrices(b[0], here + 32 * slice);
          FLOAT::mma(part_sum[0][slice % 2], a, b[0][2 * (slice % 2)], b[0][2 * (slice % 2) + 1]);
        } else {
          load_matrices(b[0], here + 32 * slice);
          FLOAT::mma(part_sum[0][slice % 2], a, b[0][0], b[0][1]);
          FLOAT::mma(part_sum[1][slice % 2], a, b[0][2], b[0][3]);
        }
      }
      const float low = record.scale(block, 0), high = record.scale(block, 1);
#pragma unroll
      for (int column = 0; column < kColumnBlocks; ++column)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sum[column][i] += (i < 2 ? low : high) * (part_sum[column][0][i] + part_sum[column][1][i]);
    }
  }
}

// Rows of x from `first_place` on into shared memory; places without an input become zero.
DEVICE void stage(const Arguments& args, uint8_t* x, int x_row, int first_place, int places) {
  if (args.lookup == nullptr && args.x_stride % 8 == 0 && args.inputs % 8 == 0) {
    const int chunks = places / 8;
    for (int i = threadIdx.x; i < args.rows * chunks; i += kThreads) {
      const int row = i / chunks, chunk = i % chunks, place = first_place + 8 * chunk;
      const bool valid = place < args.inputs;
      const uint16_t* source = args.x + static_cast<uint64_t>(row) * args.x_stride + (valid ? place : 0);
      copy_async(x + row * x_row + 16 * chunk, source, valid);
    }
    copy_async_commit();
    copy_async_wait<0>();
    return;
  }
  for (int i = threadIdx.x; i < args.rows * places; i += kThreads) {
    const int row = i / places, offset = i % places, place = first_place + offset;
    const int input = args.lookup ? args.lookup[place] : place < args.inputs ? place : -1;
    const uint64_t start = static_cast<uint64_t>(row) * args.x_stride;
    *reinterpret_cast<uint16_t*>(x + row * x_row + 2 * offset) = input < 0 ? 0 : args.x[start + input];
  }
}

DEVICE void store(const Arguments& args, int row, int column, float value) {
  const uint64_t place = static_cast<uint64_t>(row) * args.y_stride + column;
#if OUT_FLOAT32
  static_cast<float*>(args.y)[place] = value;
#else
  static_cast<uint16_t*>(args.y)[place] = FLOAT::round(value);
#endif
}

// What becomes of the sums of a tile. A gate tile is remembered for the up tile that follows it.
struct Finish {
  float gates[kOwned];

  DEVICE void run(const Arguments& args, const Tile* tiles, int t, int owned, int place, float value) {
    const Tile& tile = tiles[t];
    const int output = place % kOutputs, row = place / kOutputs;
    if (output >= tile.outputs) return;
    if (args.bias) value += args.bias[tile.column + output];
    if constexpr (EPILOGUE == PLAIN) {
      store(args, row, tile.column + output, value);
    } else if (t % 2 == 0) {
      gates[owned] = value;
    } else {
      store(args, row, tiles[t - 1].column + output, activate(gates[owned]) * value);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 2) decode(const Arguments args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  launch_dependents();

  // Blocks take whole pairs of tiles where gate and up belong together.
  constexpr int kUnit = EPILOGUE == PLAIN ? 1 : 2;
  const int groups = args.num_tiles / kUnit;
  const int first_tile = static_cast<int>(1LL * groups * blockIdx.x / gridDim.x) * kUnit;
  const int tile_count = static_cast<int>(1LL * groups * (blockIdx.x + 1) / gridDim.x) * kUnit - first_tile;
  const int first_unit = static_cast<int>(1LL * args.units * blockIdx.y / gridDim.y);
  const int unit_count = static_cast<int>(1LL * args.units * (blockIdx.y + 1) / gridDim.y) - first_unit;
  const int x_row = unit_count * 2 * kInputs + 16;

  uint8_t* cursor = shared;
  uint8_t* slots = cursor + warp * args.depth * args.slot_bytes;
  cursor += WARPS * args.depth * args.slot_bytes;
  float* sums = reinterpret_cast<float*>(cursor);  // [2][WARPS][ROWS][16]
  cursor += 2 * WARPS * kTileFloats * sizeof(float);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(cursor) + warp * args.depth;
  cursor += WARPS * args.depth * sizeof(uint64_t);
  Tile* tiles = reinterpret_cast<Tile*>(cursor);
  cursor += (tile_count + 1) * sizeof(Tile);
  uint8_t* x = shared + ((cursor - shared) + 15) / 16 * 16;

  for (int i = threadIdx.x; i < tile_count; i += kThreads) tiles[i] = args.tiles[first_tile + i];
  if (lane == 0) {
    for (int i = 0; i < args.depth; ++i) barrier_init(barriers + i, 1);
    barrier_init_fence();
  }
  __syncthreads();

  const int first = first_unit + unit_count * warp / WARPS;
  const int last = first_unit + unit_count * (warp + 1) / WARPS;
  Ring ring{slots, barriers, tiles, read_once_policy(), args.depth, args.slot_bytes, first, last,
            first == last ? 0 : tile_count, 0, first, 0, 0, 0};
  if (lane == 0)
    for (int i = 0; i < args.depth; ++i) ring.issue();

  wait_for_predecessor();
  stage(args, x, x_row, first_unit * kInputs, unit_count * kInputs);
  __syncthreads();

  Finish finish;
  for (int t = 0; t < tile_count; ++t) {
    float sum[kColumnBlocks][4] = {};
    switch (tiles[t].kind) {
#define KIND(NUMBER, BITS, GROUP, SYM)                                                             \
  case NUMBER:                                                                                     \
    multiply<Record<BITS, GROUP, SYM>>(ring, x, x_row, args.rows, first_unit, lane, sum);          \
    break;
      KINDS(KIND)
#undef KIND
    }
    float* mine = sums + ((t % 2) * WARPS + warp) * kTileFloats;
#pragma unroll
    for (int column = 0; column < kColumnBlocks; ++column)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * column + 2 * (lane % 4) + i % 2, output = lane / 4 + 8 * (i / 2);
        mine[row * kOutputs + output] = sum[column][i];
      }
    __syncthreads();
    const float* all = sums + (t % 2) * WARPS * kTileFloats;
#pragma unroll
    for (int owned = 0; owned < kOwned; ++owned) {
      const int place = threadIdx.x + owned * kThreads;
      if (place >= args.rows * kOutputs) continue;
      float value = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) value += all[i * kTileFloats + place];
      if (gridDim.y == 1) {
        finish.run(args, tiles, t, owned, place, value);
      } else {
        const uint64_t tile_index = static_cast<uint64_t>(blockIdx.y) * args.num_tiles + first_tile + t;
        args.partial[tile_index * kTileFloats + place] = value;
      }
    }
  }
  if (gridDim.y == 1) return;

  // The last block of those that share these tiles adds the slices in their order.
  int* arrived = reinterpret_cast<int*>(sums);
  __syncthreads();
  if (threadIdx.x == 0) {
    *arrived = count_arrival(args.arrivals + blockIdx.x) + 1;
    if (*arrived == static_cast<int>(gridDim.y)) args.arrivals[blockIdx.x] = 0;
    __threadfence();
  }
  __syncthreads();
  if (*arrived != static_cast<int>(gridDim.y)) return;
  for (int t = 0; t < tile_count; ++t)
#pragma unroll
    for (int owned = 0; owned < kOwned; ++owned) {
      const int place = threadIdx.x + owned * kThreads;
      if (place >= args.rows * kOutputs) continue;
      float value = 0.0f;
      for (int slice = 0; slice < static_cast<int>(gridDim.y); ++slice) {
        const uint64_t tile_index = static_cast<uint64_t>(slice) * args.num_tiles + first_tile + t;
        value += load_uncached(args.partial + tile_index * kTileFloats + place);
      }
      finish.run(args, tiles, t, owned, place, value);
    }
}

}  // namespace terrazzo
