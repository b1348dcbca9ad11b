#include "pack.hpp"

#include <cmath>
#include <cstring>

#include "half.hpp"

namespace terrazzo {
namespace {

constexpr int kTile = 32;
constexpr int kMaxLanes = 16;

// Tiles [begin, end) of a member.
struct Share {
  int begin, end;
  Share(int count, int member, int size)
      : begin(static_cast<int>(static_cast<int64_t>(count) * member / size)),
        end(static_cast<int>(static_cast<int64_t>(count) * (member + 1) / size)) {}
};

inline int input_of(const Places& places, int place) {
  if (places.lookup != nullptr) return places.lookup[place];
  return place < places.in_features ? place : -1;
}

// Codes of one input for `count` outputs from `first` on.
inline void read_codes(const int32_t* words, int bits, int out_features, int input, int first, int count,
                       uint8_t* codes) {
  const int64_t bit = static_cast<int64_t>(input) * bits;
  const int shift = static_cast<int>(bit % 32);
  const auto* low = reinterpret_cast<const uint32_t*>(words) + bit / 32 * out_features + first;
  const uint32_t mask = (1u << bits) - 1;
  if (shift + bits <= 32) {
    for (int lane = 0; lane < count; ++lane) codes[lane] = static_cast<uint8_t>(low[lane] >> shift & mask);
    return;
  }
  const uint32_t* high = low + out_features;
  for (int lane = 0; lane < count; ++lane)
    codes[lane] = static_cast<uint8_t>((low[lane] >> shift | high[lane] << (32 - shift)) & mask);
}

// One plane of a tile. codes: [place][lane].
void put_plane(const uint8_t (&codes)[kTile][kMaxLanes], int lanes, int below, int width, uint8_t* plane) {
  const int per_byte = 8 / width;
  const uint32_t mask = (1u << width) - 1;
  for (int step = 0; step < kTile / 4; step += per_byte, plane += 4 * lanes) {
    uint32_t vector[kMaxLanes] = {};
    for (int i = 0; i < per_byte; ++i)
      for (int byte = 0; byte < 4; ++byte) {
        const uint8_t* place = codes[4 * (step + i) + byte];
        for (int lane = 0; lane < kMaxLanes; ++lane)
          vector[lane] |= (static_cast<uint32_t>(place[lane]) >> below & mask) << (8 * byte + i * width);
      }
    std::memcpy(plane, vector, static_cast<size_t>(4 * lanes));
  }
}

}  // namespace

void pack_codes(Team& team, const int32_t* words, int bits, int out_features, const Places& places, int lanes,
                int strip, uint8_t* packed) {
  const int strips = (out_features + strip - 1) / strip, place_tiles = places.places / kTile, tiles = strip / lanes;
  const int64_t tile_bytes = static_cast<int64_t>(bits) * 4 * lanes;
  team.run([&](int member) {
    const Share share(strips * tiles, member, team.size());
    for (int tile = share.begin; tile < share.end; ++tile) {
      const int first = tile * lanes, there = out_features - first;
      const int count = there < 0 ? 0 : there < lanes ? there : lanes;
      for (int t = 0; t < place_tiles; ++t) {
        uint8_t codes[kTile][kMaxLanes] = {};
        for (int place = 0; place < kTile; ++place) {
          const int input = input_of(places, t * kTile + place);
          if (input >= 0) read_codes(words, bits, out_features, input, first, count, codes[place]);
        }
        const int64_t index = (static_cast<int64_t>(tile / tiles) * place_tiles + t) * tiles + tile % tiles;
        uint8_t* plane = packed + index * tile_bytes;
        int below = 0;
        for (int width : {8, 4, 2, 1}) {
          if ((bits & width) == 0) continue;
          put_plane(codes, lanes, below, width, plane);
          below += width;
          plane += width * 4 * lanes;
        }
      }
    }
  });
}

void pack_dense(Team& team, const void* values, int element_bytes, int out_features, const Places& places,
                int strip, uint8_t* packed) {
  const int strips = (out_features + strip - 1) / strip;
  const auto* from = static_cast<const uint8_t*>(values);
  const int64_t row_bytes = static_cast<int64_t>(places.in_features) * element_bytes;
  team.run([&](int member) {
    const Share share(strips, member, team.size());
    for (int s = share.begin; s < share.end; ++s) {
      uint8_t* to = packed + static_cast<int64_t>(s) * places.places * strip * element_bytes;
      std::memset(to, 0, static_cast<size_t>(places.places) * strip * element_bytes);
      for (int output = 0; output < strip && s * strip + output < out_features; ++output) {
        const uint8_t* row = from + (static_cast<int64_t>(s) * strip + output) * row_bytes;
        for (int k = 0; k < places.in_features; ++k)
          std::memcpy(to + (static_cast<int64_t>(k) * strip + output) * element_bytes, row + k * element_bytes,
                      element_bytes);
      }
    }
  });
}

namespace {

inline float element_at(const void* values, Element element, int64_t index) {
  if (element == Element::kF32) return static_cast<const float*>(values)[index];
  const uint16_t half = static_cast<const uint16_t*>(values)[index];
  return element == Element::kF16 ? half_to_float(half) : bf16_to_float(half);
}

// A scale that is no smaller, so that no code leaves its range.
inline uint16_t bf16_above(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0xffff) >> 16);
}

}  // namespace

void pack_rounded(Team& team, const void* values, Element element, int out_features, const Places& places, int lanes,
                  int strip, uint8_t* codes, uint16_t* scales) {
  const int strips = (out_features + strip - 1) / strip, place_tiles = places.places / kTile, tiles = strip / lanes;
  team.run([&](int member) {
    const Share share(strips * strip, member, team.size());
    for (int output = share.begin; output < share.end; ++output) {
      const int tile = output / lanes, lane = output % lanes;
      for (int t = 0; t < place_tiles; ++t) {
        float x[kTile] = {}, largest = 0.0f;
        for (int i = 0; i < kTile && t * kTile + i < places.in_features && output < out_features; ++i) {
          x[i] = element_at(values, element, static_cast<int64_t>(output) * places.in_features + t * kTile + i);
          largest = std::fmax(largest, std::fabs(x[i]));
        }
        const uint16_t rounded = bf16_above(largest / 127.0f);
        const float scale = bf16_to_float(rounded), inverse = largest > 0.0f ? 1.0f / scale : 0.0f;
        scales[(static_cast<int64_t>(output / strip) * place_tiles + t) * strip + output % strip] = rounded;
        uint8_t* to = codes + ((static_cast<int64_t>(tile / tiles) * place_tiles + t) * tiles + tile % tiles) * kTile * lanes;
        for (int i = 0; i < kTile; ++i)
          to[i / 4 * 4 * lanes + 4 * lane + i % 4] = static_cast<uint8_t>(128 + std::lrintf(x[i] * inverse));
      }
    }
  });
}

void pack_groups(const void* values, int element_bytes, int out_features, const int32_t* groups, int blocks,
                 int strip, uint8_t* packed) {
  const int strips = (out_features + strip - 1) / strip;
  const auto* from = static_cast<const uint8_t*>(values);
  std::memset(packed, 0, static_cast<size_t>(strips) * blocks * strip * element_bytes);
  for (int s = 0; s < strips; ++s) {
    const int first = s * strip, count = out_features - first < strip ? out_features - first : strip;
    for (int block = 0; block < blocks; ++block)
      std::memcpy(packed + (static_cast<int64_t>(s) * blocks + block) * strip * element_bytes,
                  from + (static_cast<int64_t>(groups[block]) * out_features + first) * element_bytes,
                  static_cast<size_t>(count) * element_bytes);
  }
}

}  // namespace terrazzo
