// The machine: runs the blocks of a grid one after another, each thread of a block as a fiber.
//
// A fiber runs until it waits: at a block barrier, or at an operation of its warp (a barrier, a shuffle, a vote, a
// matrix product), which all 32 lanes perform together. The schedule says in which order ready fibers run. No result
// may depend on it, so every kernel is tested under all schedules. What no hardware promises ends the run with a Fault:
// lanes that wait at different places, barriers that some thread never reaches. Fibers of a faulty run are abandoned,
// not unwound: a kernel holds nothing that needs a destructor.
//
// Everything here is used by one thread of the CPU at a time; the Python module holds the interpreter lock throughout.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <random>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

#include "simt/fiber.h"

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  operator uint3() const { return {x, y, z}; }
};

namespace dpk::simt {

constexpr unsigned kLanes = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kExchangeBytes = 64;  // what a lane can hand to its warp at once

using Where = std::source_location;

// What ended a run; its text names the kernel, the thread and the line.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Order { kForward, kReverse, kShuffled, kWarps, kWarpsReversed };

// Forward, reverse and shuffled orders give every ready thread a turn; the warp orders run one warp for as long as it
// can go on. Asynchronous copies land at once (eager), or not before they are waited for.
struct Schedule {
  Order order = Order::kForward;
  bool eager = true;
};

enum class State : uint8_t { kReady, kExchange, kWarpBarrier, kBlockBarrier, kDone };

// An asynchronous copy into shared memory that has not been waited for.
struct Copy {
  uint32_t to, bytes;
  const void* from;  // null for zeros
  unsigned group;    // groups that its thread had closed before
};

struct Thread {
  uint3 index;
  unsigned number, lane, warp;
  State state;
  unsigned exchanges;  // operations of the warp so far
  unsigned groups;     // groups of copies closed so far
  Where where;         // of the wait
  std::vector<Copy> copies;
  Context context;
};

struct Warp {
  uint32_t epoch;  // barriers of the warp so far, in this process
  alignas(16) unsigned char given[2][kLanes][kExchangeBytes];
};

class Machine {
 public:
  Schedule schedule;
  std::map<std::string, int64_t> launches;  // by kernel, in this process

  // What a kernel sees.
  uint3 block_index{}, block_size{}, grid_size{};
  Thread* self = nullptr;
  std::vector<Warp> warps;
  uint32_t epoch = 1;        // barriers of all blocks so far, in this process
  uint32_t first_epoch = 1;  // the running block's first
  int64_t counted = 0;       // of __syncthreads_count: gathered, and at the last barrier
  int64_t count = 0;

  void launch(const char* kernel, uint3 grid, uint3 block, size_t shared_bytes, std::function<void()> body);

  void wait(State state, const Where& where) {
    self->state = state;
    self->where = where;
    switch_fiber(self->context, scheduler_);
  }

  [[noreturn]] void fault(const std::string& what) const;
  [[noreturn]] void fault(const std::string& what, const Where& where) const;

 private:
  std::string kernel_;
  std::function<void()> body_;
  std::vector<Thread> threads_;
  std::vector<unsigned> turns_;  // order of the threads or, under warp orders, of the warps
  std::mt19937 random_;
  Stacks stacks_;
  Context scheduler_{};
  std::exception_ptr error_;

  size_t shared_bytes_ = 0;

  static void enter();
  void run_grid();
  void run_block();
  bool resume(Thread& thread);
  bool run_threads();
  bool run_warps();
  bool release_warp(unsigned warp);
  bool release_block();
  [[noreturn]] void report_standstill();
};

inline Machine machine;

// What the lanes of a warp handed over: [lane].
template <typename T>
struct Given {
  const unsigned char (*slots)[kExchangeBytes];
  T operator[](unsigned lane) const {
    T value;
    std::memcpy(&value, slots[lane], sizeof(T));
    return value;
  }
};

// Hands `value` to the warp and waits until all lanes have done so. It does not order memory, as on the device.
template <typename T>
Given<T> exchange(uint32_t mask, const T& value, const Where& where) {
  static_assert(sizeof(T) <= kExchangeBytes);
  if (mask != 0xffffffffu) machine.fault("operations of a warp must name all 32 lanes in their mask", where);
  Thread& self = *machine.self;
  // Two sets of slots in turn: no lane reaches the next but one operation before all have read this one's.
  auto& slots = machine.warps[self.warp].given[self.exchanges++ % 2];
  std::memcpy(slots[self.lane], &value, sizeof(T));
  machine.wait(State::kExchange, where);
  return {slots};
}

}  // namespace dpk::simt
