// A team of threads that meets at barriers; one job at a time.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace terrazzo {

class Team {
 public:
  explicit Team(int size);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Calls job(member) on every member, 0 on the caller's thread, and returns when all have.
  void run(const std::function<void(int)>& job);

  // Inside a job: returns when all members have called it. What they wrote before is then seen by all.
  void meet();

 private:
  void serve(int member);

  const int size_;
  const std::function<void(int)>* job_ = nullptr;
  std::atomic<uint64_t> started_{0};
  std::atomic<int> running_{0};
  std::atomic<int> arrived_{0};
  std::atomic<uint64_t> meetings_{0};
  std::atomic<bool> ending_{false};
  std::atomic<int> asleep_{0};
  std::mutex callers_, sleepers_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace terrazzo
