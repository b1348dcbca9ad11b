// From the words of a checkpoint to the tiles of the kernels.
#pragma once
#include "threads.hpp"
#include "types.hpp"

namespace terrazzo {

// words: int32 [ceil(in_features * bits / 32)][out_features], continuous. codes: as in Weight.
void pack_codes(Team& team, const int32_t* words, int bits, int out_features, const Places& places,
                int lanes, int strip, uint8_t* codes);

// values: [out_features][in_features] -> [strip][place][output], zero outside.
void pack_dense(Team& team, const void* values, int element_bytes, int out_features, const Places& places,
                int strip, uint8_t* packed);

// The same weight in 8 bits: codes around 128, one bfloat16 scale for every block of 32.
void pack_rounded(Team& team, const void* values, Element element, int out_features, const Places& places, int lanes,
                  int strip, uint8_t* codes, uint16_t* scales);

// values: [groups][out_features] -> [strip][block][output], zero outside. groups: of each block.
void pack_groups(const void* values, int element_bytes, int out_features, const int32_t* groups, int blocks,
                 int strip, uint8_t* packed);

}  // namespace terrazzo
