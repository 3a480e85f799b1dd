#include "simt/machine.h"

#include <signal.h>

#include <algorithm>
#include <csetjmp>
#include <numeric>
#include <sstream>
#include <utility>

#include "simt/shared.h"

namespace dpk::simt {
namespace {

std::string text(const uint3& v) {
  std::ostringstream out;
  out << "(" << v.x << ", " << v.y << ", " << v.z << ")";
  return out.str();
}

std::string text(const Where& where) {
  const std::string file = where.file_name();
  return file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(where.line());
}

bool same(const Where& a, const Where& b) {
  return a.line() == b.line() && (a.file_name() == b.file_name() || !std::strcmp(a.file_name(), b.file_name()));
}

const char* text(State state) {
  switch (state) {
    case State::kReady:
      return "runs";
    case State::kExchange:
      return "waits in an operation of its warp";
    case State::kWarpBarrier:
      return "waits at a barrier of its warp";
    case State::kBlockBarrier:
      return "waits at a barrier of the block";
    case State::kDone:
      return "has returned";
  }
  return "";
}

// An access outside of a guarded buffer, a stack that is too small, and undefined behaviour where kernels are compiled
// to trap raise a signal within a fiber. The handler runs on a stack of its own and abandons the run: it jumps back to
// launch(), which throws.
sigjmp_buf abandoned;
const void* volatile fault_address;

void on_signal(int signal, siginfo_t* info, void*) {
  fault_address = info->si_addr;
  siglongjmp(abandoned, signal);
}

class SignalGuard {
 public:
  SignalGuard() : stack_(64 << 10) {
    const stack_t own{stack_.data(), 0, stack_.size()};
    sigaltstack(&own, &stack_before_);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &before_[i]);
  }
  ~SignalGuard() {
    for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &before_[i], nullptr);
    sigaltstack(&stack_before_, nullptr);
  }

 private:
  std::vector<char> stack_;
  stack_t stack_before_{};
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL};
  struct sigaction before_[3]{};
};

}  // namespace

void Machine::fault(const std::string& what) const {
  std::string at = "kernel " + kernel_ + ", block " + text(block_index);
  if (self) at += ", thread " + text(self->index);
  throw Fault(at + ": " + what);
}

void Machine::fault(const std::string& what, const Where& where) const { fault(what + " (" + text(where) + ")"); }

void Machine::launch(const char* kernel, uint3 grid, uint3 block, size_t shared_bytes, std::function<void()> body) {
  kernel_ = kernel;
  body_ = std::move(body);
  grid_size = grid;
  block_size = block;
  block_index = {};
  shared_bytes_ = shared_bytes;
  self = nullptr;
  error_ = nullptr;
  random_.seed(1);
  const unsigned threads = block.x * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || threads % kLanes)
    fault("a block must have whole warps of 32 threads, 1024 threads at most, got " + text(block));
  ++launches[kernel_.substr(0, kernel_.find('<'))];
  threads_.resize(threads);
  warps.resize(threads / kLanes);
  stacks_.reserve(threads);
  turns_.resize(schedule.order < Order::kWarps ? threads : threads / kLanes);
  std::iota(turns_.begin(), turns_.end(), 0);
  if (schedule.order == Order::kReverse || schedule.order == Order::kWarpsReversed)
    std::reverse(turns_.begin(), turns_.end());

  const SignalGuard guard;
  if (const int signal = sigsetjmp(abandoned, 1)) {
    if (signal == SIGILL) fault("does what is undefined: a misaligned access, or an overflow of an integer");
    std::ostringstream what;
    what << "access to address " << fault_address << ", outside of every buffer (or a stack above 64 KiB)";
    fault(what.str());
  }
  run_grid();
}

void Machine::run_grid() {
  const int64_t blocks = int64_t{grid_size.x} * grid_size.y * grid_size.z;
  const bool backward = schedule.order == Order::kReverse || schedule.order == Order::kWarpsReversed;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t block = backward ? blocks - 1 - i : i;
    block_index = {static_cast<unsigned>(block % grid_size.x), static_cast<unsigned>(block / grid_size.x % grid_size.y),
                   static_cast<unsigned>(block / grid_size.x / grid_size.y)};
    run_block();
  }
}

void Machine::run_block() {
  self = nullptr;
  first_epoch = ++epoch;
  counted = 0;
  shared_memory.start(shared_bytes_);
  for (unsigned i = 0; i < threads_.size(); ++i) {
    Thread& thread = threads_[i];
    thread.index = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
    thread.number = i;
    thread.lane = i % kLanes;
    thread.warp = i / kLanes;
    thread.state = State::kReady;
    thread.exchanges = thread.groups = 0;
    thread.copies.clear();
    stacks_.prepare(i, thread.context, enter);
  }
  for (;;) {
    const bool ran = schedule.order < Order::kWarps ? run_threads() : run_warps();
    if (std::all_of(threads_.begin(), threads_.end(), [](const Thread& t) { return t.state == State::kDone; })) return;
    if (!release_block() && !ran) report_standstill();
  }
}

void Machine::enter() {
  try {
    machine.body_();
    if (!machine.self->copies.empty()) machine.fault("returns before its asynchronous copies were waited for");
  } catch (...) {
    machine.error_ = std::current_exception();
  }
  machine.wait(State::kDone, Where::current());
}

// Whether the thread could run.
bool Machine::resume(Thread& thread) {
  if (thread.state != State::kReady) return false;
  self = &thread;
  switch_fiber(scheduler_, thread.context);
  self = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  return true;
}

bool Machine::run_threads() {
  bool ran = false;
  if (schedule.order == Order::kShuffled) std::shuffle(turns_.begin(), turns_.end(), random_);
  for (const unsigned i : turns_) ran |= resume(threads_[i]);
  for (unsigned w = 0; w < warps.size(); ++w) ran |= release_warp(w);
  return ran;
}

bool Machine::run_warps() {
  bool ran = false;
  const bool backward = schedule.order == Order::kWarpsReversed;
  for (const unsigned w : turns_) do
      for (unsigned l = 0; l < kLanes; ++l) ran |= resume(threads_[w * kLanes + (backward ? kLanes - 1 - l : l)]);
    while (release_warp(w));
  return ran;
}

// Lets a warp go on whose lanes all wait in one operation.
bool Machine::release_warp(unsigned warp) {
  Thread* lanes = &threads_[warp * kLanes];
  const State state = lanes[0].state;
  if (state != State::kExchange && state != State::kWarpBarrier) return false;
  for (unsigned l = 1; l < kLanes; ++l)
    if (lanes[l].state != state || !same(lanes[l].where, lanes[0].where)) return false;
  for (unsigned l = 0; l < kLanes; ++l) lanes[l].state = State::kReady;
  if (state == State::kWarpBarrier) ++warps[warp].epoch;
  return true;
}

// Lets the block go on if all its threads wait at one barrier.
bool Machine::release_block() {
  for (const Thread& thread : threads_)
    if (thread.state != State::kBlockBarrier || !same(thread.where, threads_[0].where)) return false;
  for (Thread& thread : threads_) thread.state = State::kReady;
  ++epoch;
  count = std::exchange(counted, 0);
  return true;
}

// No thread can run and no barrier is complete: names two threads that do not go together.
void Machine::report_standstill() {
  const auto differ = [](const Thread& a, const Thread& b) { return a.state != b.state || !same(a.where, b.where); };
  const auto say = [&](const Thread& a, const Thread& b) {
    std::string what = "divergent barrier: ";
    for (const Thread* t : {&a, &b}) {
      what += "thread " + text(t->index) + " " + text(t->state);
      if (t->state != State::kDone) what += " at " + text(t->where);
      if (t == &a) what += ", ";
    }
    fault(what);
  };
  // First within a warp, where the cause lies if a warp's operation is incomplete.
  for (const Thread& thread : threads_)
    if (const Thread& first = threads_[thread.warp * kLanes]; differ(first, thread)) say(first, thread);
  for (const Thread& thread : threads_)
    if (differ(threads_[0], thread)) say(threads_[0], thread);
  fault("no thread can go on");
}

}  // namespace dpk::simt
