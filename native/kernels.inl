// The kernels of one instruction set; the including file has chosen it.
#include "types.hpp"
#include "matmul.inl"
#include "layer.inl"

namespace terrazzo::TERRAZZO_ISA {
namespace {
constexpr Kernels kKernels{kName, kLanes, kStripOutputs, stage_int8, stage_float, matmul, rms_norm,
                           scale_add, gate,   turn,       store_kv,    attend};
}
}  // namespace terrazzo::TERRAZZO_ISA
