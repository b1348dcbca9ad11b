#include "threads.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace terrazzo {
namespace {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Rounds of waiting awake: members of a step wait for each other a few microseconds, the next step
// comes within a fraction of a millisecond, and after that a core is worth more to somebody else.
constexpr int kEager = 4000;
constexpr int kAwake = 20000;

}  // namespace

Team::Team(int size) : size_(size < 1 ? 1 : size) {
  for (int member = 1; member < size_; ++member) threads_.emplace_back([this, member] { serve(member); });
}

Team::~Team() {
  ending_ = true;
  {
    std::lock_guard<std::mutex> lock(sleepers_);
    started_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)>& job) {
  std::lock_guard<std::mutex> one_caller(callers_);
  job_ = &job;
  running_.store(size_ - 1);
  started_.fetch_add(1);
  if (asleep_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleepers_);
    wake_.notify_all();
  }
  job(0);
  for (int round = 0; running_.load(std::memory_order_acquire) != 0; ++round)
    round < kEager ? relax() : std::this_thread::yield();
}

void Team::meet() {
  if (size_ == 1) return;
  const uint64_t meeting = meetings_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    meetings_.store(meeting + 1, std::memory_order_release);
    return;
  }
  for (int round = 0; meetings_.load(std::memory_order_acquire) == meeting; ++round)
    round < kEager ? relax() : std::this_thread::yield();
}

void Team::serve(int member) {
  uint64_t seen = 0;
  for (;;) {
    for (int round = 0; started_.load(std::memory_order_acquire) == seen && round < kAwake; ++round) relax();
    if (started_.load() == seen) {
      std::unique_lock<std::mutex> lock(sleepers_);
      asleep_.fetch_add(1);
      wake_.wait(lock, [&] { return started_.load() != seen; });
      asleep_.fetch_sub(1);
    }
    ++seen;
    if (ending_) return;
    (*job_)(member);
    running_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace terrazzo
