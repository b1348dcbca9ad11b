// Products of staged activations with packed weights. Every output is summed in one fixed order, so
// that neither the number of rows nor the number of threads changes a bit of it.
namespace terrazzo::TERRAZZO_ISA {
namespace {

constexpr int kTile = 32;           // places unpacked at once
constexpr int kSteps = kTile / 4;   // vectors of 4 places
constexpr int kVector = 4 * kLanes; // bytes of a vector

inline Floats load_element(Element element, const void* base, int64_t index) {
  if (element == Element::kF16) return load_f16(static_cast<const uint16_t*>(base) + index);
  if (element == Element::kBF16) return load_bf16(static_cast<const uint16_t*>(base) + index);
  return load(static_cast<const float*>(base) + index);
}

// Codes of a tile: kSteps vectors, byte j of lane n of vector s is the code of place 4 s + j. Planes
// of 4, 2 and 1 bits follow one another, low bits first; a vector of a plane holds the fields of
// consecutive steps from its low bits up.
template <int kBits>
inline void unpack_tile(const uint8_t* packed, Bytes (&codes)[kSteps]) {
  if constexpr (kBits == 8) {
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) codes[s] = load_bytes(packed + s * kVector);
    return;
  }
  if constexpr (kBits >= 4) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const Bytes plane = load_bytes(packed + v * kVector);
      codes[2 * v] = field<0, 15>(plane);
      codes[2 * v + 1] = field<4, 15>(plane);
    }
    packed += 4 * kVector;
  }
  constexpr int kBelow = kBits >= 4 ? 4 : 0;
  if constexpr ((kBits & 2) != 0) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const Bytes plane = load_bytes(packed + v * kVector);
      const Bytes fields[4] = {field<0, 3>(plane), field<2, 3>(plane), field<4, 3>(plane),
                               field<6, 3>(plane)};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        Bytes& code = codes[4 * v + i];
        if constexpr (kBelow > 0) code = merge<kBelow>(code, fields[i]);
        else code = fields[i];
      }
    }
    packed += 2 * kVector;
  }
  if constexpr ((kBits & 1) != 0) {
    constexpr int kUnder = kBits - 1;
    const Bytes plane = load_bytes(packed);
    const Bytes fields[8] = {field<0, 1>(plane), field<1, 1>(plane), field<2, 1>(plane),
                             field<3, 1>(plane), field<4, 1>(plane), field<5, 1>(plane),
                             field<6, 1>(plane), field<7, 1>(plane)};
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) codes[s] = merge<kUnder>(codes[s], fields[s]);
  }
}

// A strip is kTiles tiles side by side: what one row of activations is multiplied by at a time. Its
// codes, scales and zero points each stand in memory in the order in which they are read.
constexpr int kTiles = 2;
constexpr int kStripOutputs = kTiles * kLanes;

constexpr int tile_bytes(int bits) { return bits * kVector; }

inline const uint8_t* strip_codes(const Weight& w, int strip) {
  if (w.bits == 0)
    return w.codes + static_cast<int64_t>(strip) * w.places.places * kStripOutputs * (w.element == Element::kF32 ? 4 : 2);
  return w.codes + static_cast<int64_t>(strip) * (w.places.places / kTile) * kTiles * tile_bytes(w.bits);
}

// Scale, zero point of all lanes of a tile for one block.
inline int64_t group_index(const Weight& w, int strip, int tile, int block) {
  return (static_cast<int64_t>(strip) * w.places.blocks + block) * kStripOutputs + tile * kLanes;
}
inline Floats scale_of(const Weight& w, int strip, int tile, int block) {
  return load_element(w.element, w.scales, group_index(w, strip, tile, block));
}
inline Floats zero_of(const Weight& w, int strip, int tile, int block) {
  if (w.zeros == nullptr) return broadcast(w.zero);
  return load_u8(w.zeros + group_index(w, strip, tile, block));
}

struct Target {
  const float* bias;
  float* out;
  int64_t stride;
};

inline void store_outputs(const Weight& w, const Target& target, int row, int strip, int tile, Floats y) {
  const int column = strip * kStripOutputs + tile * kLanes;
  float* out = target.out + row * target.stride + column;
  if (column + kLanes <= w.out_features) {
    if (target.bias != nullptr) y = add(y, load(target.bias + column));
    store(out, y);
    return;
  }
  alignas(64) float lanes[kLanes];
  store(lanes, y);
  for (int lane = 0; column + lane < w.out_features; ++lane)
    out[lane] = lanes[lane] + (target.bias == nullptr ? 0.0f : target.bias[column + lane]);
}

// kStored: bits of a code in memory; kBits: of its value. They differ for a panel, whose codes have
// been unpacked to bytes once for many rows.
template <int kStored, int kBits, int kQuantum, int kRows>
void int8_rows(const Weight& w, const uint8_t* packed, const Staged& x, int row, int strip, const Target& target) {
  constexpr int kParts = kTile / kQuantum;
  constexpr int kPartSteps = kQuantum / 4;
  constexpr int kRun = Dot<kBits>::kRun < kPartSteps ? Dot<kBits>::kRun : kPartSteps;
  const Places& places = w.places;
  const int quanta = places.places / kQuantum, per_block = places.block / kQuantum;
  const int8_t* values[kRows];
  const float* scales[kRows];
  for (int m = 0; m < kRows; ++m) {
    values[m] = x.int8 + static_cast<int64_t>(row + m) * places.places;
    scales[m] = x.scales + static_cast<int64_t>(row + m) * quanta;
  }
  Floats total[kRows][kTiles], inside[kRows][kTiles];
  for (int m = 0; m < kRows; ++m)
    for (int t = 0; t < kTiles; ++t) total[m][t] = inside[m][t] = broadcast(0.0f);
  int left = per_block, block = 0;
  Bytes codes[kTiles][kSteps];
  for (int quantum = 0; quantum < quanta; ++quantum) {
    const int part = kParts == 1 ? 0 : quantum % kParts;
    const uint8_t* here = packed + static_cast<int64_t>(quantum / kParts) * kTiles * tile_bytes(kStored);
    if (kStored != 8 && part == 0) {
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) unpack_tile<kStored>(here + t * tile_bytes(kStored), codes[t]);
    }
    Sums sums[kRows][kTiles];
#pragma GCC unroll 8
    for (int run = 0; run < kPartSteps; run += kRun) {
      Dot<kBits> dots[kRows][kTiles];
#pragma GCC unroll 8
      for (int s = run; s < run + kRun; ++s) {
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m) {
          const Bytes four = broadcast4(values[m] + quantum * kQuantum + 4 * s);
#pragma GCC unroll 2
          for (int t = 0; t < kTiles; ++t) {
            // Bytes are read where they are used: they would not all fit into registers.
            const Bytes code = kStored == 8 ? load_bytes(here + t * tile_bytes(8) + (part * kPartSteps + s) * kVector)
                                            : codes[t][kParts == 1 ? s : part * kPartSteps + s];
            if (s == run) dots[m][t].start(code, four);
            else dots[m][t].step(code, four);
          }
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
        for (int t = 0; t < kTiles; ++t) {
          const Sums sum = dots[m][t].sum();
          sums[m][t] = run == 0 ? sum : add_sums(sums[m][t], sum);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      const Floats scale = broadcast(scales[m][quantum]);
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) inside[m][t] = fma(to_floats(sums[m][t]), scale, inside[m][t]);
    }
    if (--left > 0) continue;
    for (int t = 0; t < kTiles; ++t) {
      const Floats scale = scale_of(w, strip, t, block), zero = zero_of(w, strip, t, block);
      for (int m = 0; m < kRows; ++m) {
        const Floats sum = broadcast(x.sums[static_cast<int64_t>(row + m) * places.blocks + block]);
        total[m][t] = fma(scale, fnma(zero, sum, inside[m][t]), total[m][t]);
        inside[m][t] = broadcast(0.0f);
      }
    }
    left = per_block;
    ++block;
  }
  for (int m = 0; m < kRows; ++m)
    for (int t = 0; t < kTiles; ++t) store_outputs(w, target, row + m, strip, t, total[m][t]);
}

// The same product with float activations. kBits == 0: a dense weight. kStored == 32: a panel of
// floats [place][output of the strip].
template <int kStored, int kBits, int kRows>
void float_rows(const Weight& w, const uint8_t* packed, const Staged& x, int row, int strip, const Target& target) {
  const Places& places = w.places;
  const float* values[kRows];
  for (int m = 0; m < kRows; ++m) values[m] = x.float32 + static_cast<int64_t>(row + m) * places.places;
  Floats total[kRows][kTiles], inside[kRows][kTiles];
  for (int m = 0; m < kRows; ++m)
    for (int t = 0; t < kTiles; ++t) total[m][t] = inside[m][t] = broadcast(0.0f);
  const auto multiply = [&](int place, const Floats (&weights)[kTiles]) {
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const Floats value = broadcast(values[m][place]);
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) inside[m][t] = fma(weights[t], value, inside[m][t]);
    }
  };
  const auto finish = [&](int block) {
    for (int t = 0; t < kTiles; ++t) {
      const Floats scale = scale_of(w, strip, t, block), zero = zero_of(w, strip, t, block);
      for (int m = 0; m < kRows; ++m) {
        const Floats sum = broadcast(x.sums[static_cast<int64_t>(row + m) * places.blocks + block]);
        total[m][t] = fma(scale, fnma(zero, sum, inside[m][t]), total[m][t]);
        inside[m][t] = broadcast(0.0f);
      }
    }
  };
  const auto one_place = [&](int place) {
    Floats weights[kTiles];
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; ++t) {
      const int64_t index = static_cast<int64_t>(place) * kStripOutputs + t * kLanes;
      weights[t] = kStored == 32 ? load(reinterpret_cast<const float*>(packed) + index)
                                 : load_element(w.element, packed, index);
    }
    multiply(place, weights);
  };
  if constexpr (kBits == 0) {
    for (int place = 0; place < places.places; ++place) one_place(place);
    for (int m = 0; m < kRows; ++m)
      for (int t = 0; t < kTiles; ++t) store_outputs(w, target, row + m, strip, t, inside[m][t]);
    return;
  } else if constexpr (kStored == 32) {
    for (int block = 0; block < places.blocks; ++block) {
      for (int place = block * places.block; place < (block + 1) * places.block; ++place) one_place(place);
      finish(block);
    }
  } else {
    int left = places.block, block = 0;
    Bytes codes[kTiles][kSteps];
    for (int first = 0; first < places.places; first += kTile, packed += kTiles * tile_bytes(kStored)) {
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) unpack_tile<kStored>(packed + t * tile_bytes(kStored), codes[t]);
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s) {
        Floats weights[4][kTiles];
#pragma GCC unroll 2
        for (int t = 0; t < kTiles; ++t) {
          weights[0][t] = byte_of<0>(codes[t][s]);
          weights[1][t] = byte_of<1>(codes[t][s]);
          weights[2][t] = byte_of<2>(codes[t][s]);
          weights[3][t] = byte_of<3>(codes[t][s]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) multiply(first + 4 * s + j, weights[j]);
        // A block is a multiple of 16 places.
        if (s == kSteps / 2 - 1 && left == kTile / 2) {
          finish(block++);
          left = places.block + kTile / 2;
        }
      }
      if ((left -= kTile) == 0) {
        finish(block++);
        left = places.block;
      }
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int t = 0; t < kTiles; ++t) store_outputs(w, target, row + m, strip, t, total[m][t]);
}

// As many rows at once as there are; kRows at a time first, then half as many.
template <int kStored, int kBits, int kQuantum, int kRows>
void all_int8_rows(const Weight& w, const uint8_t* packed, const Staged& x, int row, int end, int strip,
                   const Target& target) {
  for (; row + kRows <= end; row += kRows)
    int8_rows<kStored, kBits, kQuantum, kRows>(w, packed, x, row, strip, target);
  if constexpr (kRows > 1)
    all_int8_rows<kStored, kBits, kQuantum, kRows / 2>(w, packed, x, row, end, strip, target);
}

template <int kStored, int kBits>
void any_int8_rows(const Weight& w, const uint8_t* packed, const Staged& x, int begin, int end, int strip,
                   const Target& target) {
  if (w.places.quantum == 32)
    all_int8_rows<kStored, kBits, 32, kRowsAtOnce>(w, packed, x, begin, end, strip, target);
  else
    all_int8_rows<kStored, kBits, 16, kRowsAtOnce>(w, packed, x, begin, end, strip, target);
}

template <int kStored, int kBits, int kRows>
void all_float_rows(const Weight& w, const uint8_t* packed, const Staged& x, int row, int end, int strip,
                    const Target& target) {
  for (; row + kRows <= end; row += kRows) float_rows<kStored, kBits, kRows>(w, packed, x, row, strip, target);
  if constexpr (kRows > 1) all_float_rows<kStored, kBits, kRows / 2>(w, packed, x, row, end, strip, target);
}

template <int kBits>
void unpack_to_bytes(const Weight& w, const uint8_t* packed, uint8_t* panel) {
  const int tiles = w.places.places / kTile * kTiles;
  for (int tile = 0; tile < tiles; ++tile, packed += tile_bytes(kBits), panel += tile_bytes(8)) {
    Bytes codes[kSteps];
    unpack_tile<kBits>(packed, codes);
    for (int s = 0; s < kSteps; ++s) store_bytes(panel + s * kVector, codes[s]);
  }
}

template <int kBits>
void unpack_to_floats(const Weight& w, const uint8_t* packed, float* panel) {
  if constexpr (kBits == 0) {
    const int64_t count = static_cast<int64_t>(w.places.places) * kStripOutputs;
    for (int64_t i = 0; i < count; i += kLanes) store(panel + i, load_element(w.element, packed, i));
  } else {
    for (int first = 0; first < w.places.places; first += kTile)
      for (int t = 0; t < kTiles; ++t, packed += tile_bytes(kBits)) {
        Bytes codes[kSteps];
        unpack_tile<kBits>(packed, codes);
        for (int s = 0; s < kSteps; ++s) {
          float* place = panel + static_cast<int64_t>(first + 4 * s) * kStripOutputs + t * kLanes;
          store(place, byte_of<0>(codes[s]));
          store(place + kStripOutputs, byte_of<1>(codes[s]));
          store(place + 2 * kStripOutputs, byte_of<2>(codes[s]));
          store(place + 3 * kStripOutputs, byte_of<3>(codes[s]));
        }
      }
  }
}

// From so many rows on, codes are unpacked once into a panel and not by every few rows again. Codes
// of a single plane are as quick to unpack as a panel is to read.
constexpr int kPanelRows = 9;
constexpr int kFloatPanelRows = 5;
constexpr bool single_plane(int bits) { return bits == 2 || bits == 4 || bits == 8; }

template <int kBits>
void strip_of_rows(const Weight& w, const Staged& x, int begin, int end, int strip, const Target& target,
                   uint8_t* panel) {
  const uint8_t* packed = strip_codes(w, strip);
  const int rows = end - begin;
  if constexpr (kBits != 0) {
    if (x.int8 != nullptr) {
      if constexpr (!single_plane(kBits)) {
        if (rows >= kPanelRows) {
          unpack_to_bytes<kBits>(w, packed, panel);
          return any_int8_rows<8, kBits <= 4 ? 4 : kBits>(w, panel, x, begin, end, strip, target);
        }
      }
      return any_int8_rows<kBits, kBits>(w, packed, x, begin, end, strip, target);
    }
  }
  if (rows < kFloatPanelRows) return all_float_rows<kBits, kBits, kRowsAtOnce>(w, packed, x, begin, end, strip, target);
  unpack_to_floats<kBits>(w, packed, reinterpret_cast<float*>(panel));
  // The width of a code no longer matters.
  all_float_rows<32, kBits == 0 ? 0 : 8, kPanelRowsAtOnce>(w, panel, x, begin, end, strip, target);
}

constexpr int kRowBytes = 256 << 10;  // activations that stay in the cache while strips pass

template <int kBits>
void matmul_bits(const Weight& w, const Staged& x, int rows, const Target& target, int strips_begin, int strips_end,
                 uint8_t* panel) {
  const int row_bytes = w.places.places * (x.int8 == nullptr ? 4 : 1);
  const int fitting = kRowBytes / row_bytes / 12 * 12;
  const int step = fitting < 24 ? 24 : fitting;
  for (int begin = 0; begin < rows; begin += step) {
    const int end = begin + step < rows ? begin + step : rows;
    for (int strip = strips_begin; strip < strips_end; ++strip)
      strip_of_rows<kBits>(w, x, begin, end, strip, target, panel);
  }
}

void matmul(const Weight& w, const Staged& x, int rows, const float* bias, float* out, int64_t stride,
            int strips_begin, int strips_end, std::vector<uint8_t>& scratch) {
  const size_t needed = static_cast<size_t>(w.places.places) * kStripOutputs * 4 + 64;
  if (scratch.size() < needed) scratch.resize(needed);
  const auto aligned = (reinterpret_cast<uintptr_t>(scratch.data()) + 63) & ~uintptr_t{63};
  uint8_t* panel = reinterpret_cast<uint8_t*>(aligned);
  const Target target{bias, out, stride};
  switch (w.bits) {
    case 0: return matmul_bits<0>(w, x, rows, target, strips_begin, strips_end, panel);
    case 2: return matmul_bits<2>(w, x, rows, target, strips_begin, strips_end, panel);
    case 3: return matmul_bits<3>(w, x, rows, target, strips_begin, strips_end, panel);
    case 4: return matmul_bits<4>(w, x, rows, target, strips_begin, strips_end, panel);
    case 5: return matmul_bits<5>(w, x, rows, target, strips_begin, strips_end, panel);
    case 6: return matmul_bits<6>(w, x, rows, target, strips_begin, strips_end, panel);
    case 7: return matmul_bits<7>(w, x, rows, target, strips_begin, strips_end, panel);
    case 8: return matmul_bits<8>(w, x, rows, target, strips_begin, strips_end, panel);
  }
}

// Activations as a weight wants them.
inline float value_at(const float* x, const Places& places, int place) {
  if (places.lookup == nullptr) return place < places.in_features ? x[place] : 0.0f;
  const int input = places.lookup[place];
  return input < 0 ? 0.0f : x[input];
}

// Floats of `places` in order, or `x` itself where they are that already.
inline const float* in_places(const float* x, const Places& places, std::vector<float>& moved) {
  if (places.lookup == nullptr && places.in_features == places.places) return x;
  moved.resize(places.places);
  for (int place = 0; place < places.places; ++place) moved[place] = value_at(x, places, place);
  return moved.data();
}

void stage_int8(const float* x, int64_t stride, const Places& places, int rows_begin, int rows_end,
                int8_t* values, float* scales, float* sums) {
  std::vector<float> moved;
  const int quantum = places.quantum, quanta = places.places / quantum, per_block = places.block / quantum;
  for (int row = rows_begin; row < rows_end; ++row) {
    const float* from = in_places(x + row * stride, places, moved);
    int8_t* to = values + static_cast<int64_t>(row) * places.places;
    float* scale = scales + static_cast<int64_t>(row) * quanta;
    float* sum = sums + static_cast<int64_t>(row) * places.blocks;
    float block_sum = 0.0f;
    for (int q = 0; q < quanta; ++q) {
      const float* part = from + q * quantum;
      Floats largest = absolute(load(part));
      for (int i = kLanes; i < quantum; i += kLanes) largest = max(largest, absolute(load(part + i)));
      const float top = reduce_max(largest);
      scale[q] = top / 127.0f;
      const Floats inverse = broadcast(top > 0.0f ? 127.0f / top : 0.0f);
      Floats whole_sum = broadcast(0.0f);
      for (int i = 0; i < quantum; i += kLanes) {
        const Floats whole = round_even(mul(load(part + i), inverse));
        whole_sum = add(whole_sum, whole);
        store_s8(to + q * quantum + i, whole);
      }
      block_sum = __builtin_fmaf(reduce_add(whole_sum), scale[q], block_sum);
      if ((q + 1) % per_block == 0) {
        sum[q / per_block] = block_sum;
        block_sum = 0.0f;
      }
    }
  }
}

void stage_float(const float* x, int64_t stride, const Places& places, int rows_begin, int rows_end,
                 float* values, float* sums) {
  std::vector<float> moved;
  for (int row = rows_begin; row < rows_end; ++row) {
    const float* from = in_places(x + row * stride, places, moved);
    std::memcpy(values + static_cast<int64_t>(row) * places.places, from, sizeof(float) * places.places);
    for (int block = 0; block < places.blocks; ++block) {
      Floats sum = broadcast(0.0f);
      for (int i = 0; i < places.block; i += kLanes) sum = add(sum, load(from + block * places.block + i));
      sums[static_cast<int64_t>(row) * places.blocks + block] = reduce_add(sum);
    }
  }
}

}  // namespace
}  // namespace terrazzo::TERRAZZO_ISA
