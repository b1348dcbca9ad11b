// Memory for weights, in huge pages where the system has them: a decode step reads all of it once, and
// would otherwise wait for the address of every 4 KiB.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace terrazzo {

// Memory of one weight; the region it lies in is given back with its last block.
struct Block {
  std::shared_ptr<void> region;
  uint8_t* data = nullptr;
  size_t size = 0;
};

class Arena {
 public:
  // Zeroed, aligned to 64 bytes.
  Block take(size_t size);

 private:
  std::mutex one_taker_;
  std::shared_ptr<void> region_;
  size_t region_size_ = 0, used_ = 0;
};

}  // namespace terrazzo
