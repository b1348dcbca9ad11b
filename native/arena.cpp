#include "arena.hpp"

#include <new>

#include <sys/mman.h>

namespace terrazzo {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kRegion = 16 * kHugePage;
constexpr size_t kAlignment = 64;

size_t rounded_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// Whole huge pages; physical memory is taken when they are first written.
std::shared_ptr<void> map_region(size_t size) {
  const size_t mapped = size + kHugePage;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  void* aligned = reinterpret_cast<void*>(rounded_up(reinterpret_cast<uintptr_t>(base), kHugePage));
#if defined(MADV_HUGEPAGE)
  madvise(aligned, size, MADV_HUGEPAGE);
#endif
  return {aligned, [base, mapped](void*) { munmap(base, mapped); }};
}

}  // namespace

Block Arena::take(size_t size) {
  const size_t needed = rounded_up(size, kAlignment);
  std::lock_guard<std::mutex> lock(one_taker_);
  if (region_ == nullptr || used_ + needed > region_size_) {
    region_size_ = rounded_up(needed > kRegion ? needed : kRegion, kHugePage);
    region_ = map_region(region_size_);
    used_ = 0;
  }
  Block block{region_, static_cast<uint8_t*>(region_.get()) + used_, size};
  used_ += needed;
  return block;
}

}  // namespace terrazzo
