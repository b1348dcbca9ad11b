// A decoder as a list of operations over buffers, run for one step by a team of threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "choose.hpp"
#include "threads.hpp"
#include "types.hpp"

namespace terrazzo {

// A packed weight and the memory it lives in.
struct PackedWeight {
  const Kernels& kernels;  // whose tiles these are
  Weight weight;
  std::vector<int32_t> lookup;
  Block memory;
  size_t num_bytes() const { return memory.size + lookup.size() * sizeof(int32_t); }
};

enum class Arithmetic : int { kFloat = 0, kInt8 = 1 };

// One weight of a linear, and where its outputs stand.
struct Segment {
  std::shared_ptr<const PackedWeight> weight;
  int column;
  std::vector<float> bias;  // empty: none
};

// Rotation of a kind of layers: angles of a position are position * frequencies.
struct Rope {
  std::vector<float> frequencies;
  float magnitude;
  bool neighbours;
};

// What a step gives to every operation. Buffers: rows of the width they were declared with.
struct Step {
  Team& team;
  const Kernels& kernels;
  int rows;
  const std::vector<float*>& buffers;
  const std::vector<int>& widths;
  const int64_t* slots;
  const std::vector<Sequence>& sequences;
  const std::vector<std::vector<float>>& angles;  // of each rope: cosines, then sines, [row][pair]
  std::vector<std::vector<uint8_t>>& scratch;     // of each member
};

class Operation {
 public:
  virtual ~Operation() = default;
  // Makes room for a step; called by one thread before any member runs.
  virtual void prepare(int /*rows*/, int /*members*/) {}
  // Called by every member; ends with a meeting, so that its output is there for the next one.
  virtual void run(const Step& step, int member) = 0;
};

// dst = rms norm of src.
class NormOperation final : public Operation {
 public:
  NormOperation(int src, int dst, std::vector<float> weight, float eps)
      : src_(src), dst_(dst), weight_(std::move(weight)), eps_(eps) {}
  void run(const Step& step, int member) override;

 private:
  int src_, dst_;
  std::vector<float> weight_;
  float eps_;
};

// residual += multiplier * norm(y); x = norm(residual). A norm without weights passes its input.
class SettleOperation final : public Operation {
 public:
  SettleOperation(int y, int residual, int x, std::vector<float> after, float multiplier,
                  std::vector<float> before, float eps)
      : y_(y), residual_(residual), x_(x), after_(std::move(after)), multiplier_(multiplier),
        before_(std::move(before)), eps_(eps) {}
  void run(const Step& step, int member) override;

 private:
  int y_, residual_, x_;
  std::vector<float> after_;
  float multiplier_;
  std::vector<float> before_;
  float eps_;
};

// dst = src times the segments side by side.
class LinearOperation final : public Operation {
 public:
  LinearOperation(int src, int dst, std::vector<Segment> segments, Arithmetic arithmetic);
  void prepare(int rows, int members) override;
  void run(const Step& step, int member) override;
  // Rows of x to rows of y, for every member; ends with a meeting.
  void multiply(const Step& step, int member, int rows, const float* x, int64_t x_stride, float* y, int64_t y_stride);

 private:
  // Activations as one or more segments want them.
  struct Stage {
    Places places;
    Arithmetic arithmetic;
    std::vector<int8_t> int8;
    std::vector<float> float32, scales, sums;
    void reserve(int rows);
    void fill(const Step& step, const float* x, int64_t stride, int begin, int end, int copy);
    Staged view(int copy) const;
  };
  int src_, dst_;
  std::vector<Segment> segments_;
  std::vector<int> stage_of_;
  std::vector<Stage> stages_;
};

// dst = activation(first half of src) * second half.
class GateOperation final : public Operation {
 public:
  GateOperation(int src, int dst, Activation activation) : src_(src), dst_(dst), activation_(activation) {}
  void run(const Step& step, int member) override;

 private:
  int src_, dst_;
  Activation activation_;
};

enum class HeadNorm : int { kNone = 0, kHead = 1, kProjection = 2 };

// src: queries, keys, values side by side -> dst: the attended heads.
class AttendOperation final : public Operation {
 public:
  AttendOperation(int src, int dst, AttentionShape shape, KVLayer kv, HeadNorm norm,
                  std::vector<float> query_norm, std::vector<float> key_norm, float eps, int rope,
                  int rotary_dim, bool neighbours)
      : src_(src), dst_(dst), shape_(shape), kv_(kv), norm_(norm), query_norm_(std::move(query_norm)),
        key_norm_(std::move(key_norm)), eps_(eps), rope_(rope), rotary_dim_(rotary_dim),
        neighbours_(neighbours) {}
  void run(const Step& step, int member) override;

 private:
  void normalize_projections(const Step& step, int row);
  void settle_head(const Step& step, int row, int head);
  void attend(const Step& step, int member);
  int src_, dst_;
  AttentionShape shape_;
  KVLayer kv_;
  HeadNorm norm_;
  std::vector<float> query_norm_, key_norm_;
  float eps_;
  int rope_;  // -1: positions do not turn
  int rotary_dim_;
  bool neighbours_;
};

class Program {
 public:
  explicit Program(std::shared_ptr<Machine> machine) : machine_(std::move(machine)) {}
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  int buffer(int width);
  int rope(Rope rope);
  // A buffer of the rows of `src` that a step asks for; operations appended from here on run on these.
  int select(int src);
  void append(std::unique_ptr<Operation> operation) { operations_.push_back(std::move(operation)); }

  // bound: memory of the first buffers, in order; the others are the program's own. positions, slots:
  // of each row. selected: the rows that `select` takes.
  struct Inputs {
    int rows;
    std::vector<float*> bound;
    const int64_t* positions;
    const int64_t* slots;
    std::vector<Sequence> sequences;
    const int64_t* selected;
    int num_selected;
  };
  void run(const Inputs& inputs);

 private:
  std::shared_ptr<Machine> machine_;
  std::vector<int> widths_;
  std::vector<std::vector<float>> memory_;
  std::vector<Rope> ropes_;
  std::vector<std::vector<float>> angles_;
  std::vector<std::vector<uint8_t>> scratch_;
  void turn_positions(const Inputs& inputs);
  void take_rows(const Step& step, const Inputs& inputs, int member) const;

  std::vector<std::unique_ptr<Operation>> operations_;
  size_t selecting_ = SIZE_MAX;  // operations before the selection
  int select_src_ = -1, select_dst_ = -1;
};

}  // namespace terrazzo
