// Shared memory under observation. A kernel reaches it through Shared<T> alone: a pointer with bounds, whose every
// access is checked against what the block's threads have done to the same bytes since the last barrier:
//   out of bounds     outside of the array or slice, or misaligned
//   poison            read before anything was written
//   conflict          two threads, at least one of which writes, and no barrier between: of the block, or of the warp
//                     where both belong to one warp. Atomic operations do not conflict with each other.
//   in flight         the target of an asynchronous copy that its thread has not waited for
// The checks do not depend on the schedule: they need no unlucky order to find a missing barrier.
#pragma once

#include <concepts>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "simt/machine.h"

namespace dpk::simt {

constexpr size_t kMaxSharedBytes = 163 << 10;  // of a block of sm_80, the smallest of our targets
constexpr size_t kGranule = 2;                 // bytes that are observed as one: the smallest element

enum class Access { kRead, kWrite, kAtomic };

class SharedMemory {
 public:
  // A new block: all is poison, and `dynamic` bytes are dynamic shared memory.
  void start(size_t dynamic);
  // Where the array declared at `site` lies in this block; 0 is where the dynamic memory starts.
  uint32_t place(const void* site, size_t bytes);
  uint32_t dynamic_bytes() const { return dynamic_; }

  unsigned char* access(uint32_t at, size_t bytes, Access access, const Where& where) {
    for (uint32_t g = at / kGranule; g < (at + bytes) / kGranule; ++g) observe(cells_[g], g, access, where);
    return bytes_.data() + at;
  }

  // Asynchronous copies: begin marks the target, land writes it, finish ends the waiting.
  void begin(const Copy& copy, const Where& where);
  void land(const Copy& copy);
  void finish(const Copy& copy);

 private:
  // What has been done to a granule. Times are block barriers (epoch) and warp barriers (warp_epoch).
  struct Cell {
    uint32_t written = 0, written_warp_epoch = 0;
    uint32_t read = 0, read_warp_epoch = 0;
    uint16_t writer = 0, reader = 0;
    enum : uint8_t {
      kOne,
      kLanes,
      kWarps
    } readers = kOne;  // since the last barrier: `reader`, its warp, several warps
    bool atomic = false, in_flight = false;
  };
  std::vector<unsigned char> bytes_;
  std::vector<Cell> cells_;
  std::vector<std::pair<const void*, uint32_t>> sites_;
  uint32_t dynamic_ = 0, used_ = 0;

  void observe(Cell& cell, uint32_t granule, Access access, const Where& where);
  [[noreturn]] void conflict(uint32_t granule, const char* before, unsigned thread, Access access, const Where&) const;
};

inline SharedMemory shared_memory;

// Starts a copy of `bytes` bytes, zeros where `from` is null; and waits for all but the last `groups` closed groups.
void copy_async(uint32_t to, uint32_t bytes, const void* from, const Where& where);
void copy_async_wait(unsigned groups);

// Whether what `thread` did at `warp_epoch`, since the block's last barrier, is ordered before what self does now.
inline bool ordered(unsigned thread, uint32_t warp_epoch) {
  const Thread& self = *machine.self;
  return thread == self.number || (thread / kLanes == self.warp && warp_epoch < machine.warps[self.warp].epoch);
}

inline void SharedMemory::observe(Cell& cell, uint32_t granule, Access access, const Where& where) {
  const Thread& self = *machine.self;
  const uint32_t now = machine.epoch, warp_now = machine.warps[self.warp].epoch;
  if (cell.in_flight)
    machine.fault("shared memory is touched while an asynchronous copy to it has not been waited for", where);
  if (access != Access::kWrite && cell.written < machine.first_epoch)
    machine.fault("shared memory is read before it was written", where);
  if (cell.written == now && !ordered(cell.writer, cell.written_warp_epoch) &&
      !(cell.atomic && access == Access::kAtomic))
    conflict(granule, "wrote", cell.writer, access, where);

  if (access == Access::kRead) {
    if (cell.read != now) {
      cell.readers = Cell::kOne;
    } else if (cell.reader / kLanes != self.warp) {
      cell.readers = Cell::kWarps;
    } else if (cell.readers != Cell::kWarps) {
      // Earlier reads of the warp that a barrier has ordered matter to no one in it.
      if (cell.read_warp_epoch != warp_now)
        cell.readers = Cell::kOne;
      else if (cell.reader != self.number)
        cell.readers = Cell::kLanes;
    }
    cell.read = now;
    cell.read_warp_epoch = warp_now;
    cell.reader = static_cast<uint16_t>(self.number);
    return;
  }
  if (cell.read == now) {
    const bool others =
        cell.readers == Cell::kWarps || cell.reader / kLanes != self.warp ||
        (cell.read_warp_epoch == warp_now && (cell.readers == Cell::kLanes || cell.reader != self.number));
    if (others) conflict(granule, "read", cell.reader, access, where);
  }
  cell.written = now;
  cell.written_warp_epoch = warp_now;
  cell.writer = static_cast<uint16_t>(self.number);
  cell.atomic = access == Access::kAtomic;
}

// An index and the line that it stands in.
struct Index {
  int64_t value;
  Where where;
  template <std::integral I>
  Index(I i, Where w = Where::current()) : value(static_cast<int64_t>(i)), where(w) {}
};

template <typename T>
class Shared;

// What s[i] yields: read and written on the spot. `auto x = s[i]` does not compile where x is used; name the type.
template <typename T>
class Element {
  using Value = std::remove_const_t<T>;

 public:
  Element(const Shared<T>& array, const Index& index) : array_(array), index_(index) {}
  Element(const Element&) = delete;

  operator Value() const&& { return array_.read(index_); }
  void operator=(const Value& value) && { array_.write(index_, value); }
  void operator=(Element&& other) && { array_.write(index_, static_cast<Value>(std::move(other))); }
  void operator+=(const Value& value) && { array_.write(index_, array_.read(index_) + value); }
  void operator-=(const Value& value) && { array_.write(index_, array_.read(index_) - value); }
  void operator*=(const Value& value) && { array_.write(index_, array_.read(index_) * value); }

 private:
  const Shared<T>& array_;
  const Index& index_;
};

// Stands for T* into shared memory.
template <typename T>
class Shared {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % kGranule == 0);

 public:
  using Value = std::remove_const_t<T>;

  Shared() = default;  // every access is out of bounds
  Shared(uint32_t begin, size_t bytes) : Shared(begin, static_cast<int64_t>(begin + bytes), begin) {}
  operator Shared<const T>() const { return {begin_, end_, at_}; }

  Element<T> operator[](const Index& index) const { return {*this, index}; }
  Shared operator+(int64_t count) const { return {begin_, end_, at_ + count * int64_t{sizeof(T)}}; }

  // Bounds of [begin, begin + count) alone, within the present ones.
  Shared slice(int64_t begin, int64_t count, const Where& where) const {
    const int64_t from = at_ + begin * int64_t{sizeof(T)}, to = from + count * int64_t{sizeof(T)};
    if (begin < 0 || count < 0 || from < begin_ || to > end_)
      machine.fault("slice [" + std::to_string(begin) + ", " + std::to_string(begin + count) + ") of " + bounds(),
                    where);
    return {from, to, from};
  }
  template <typename To>
  Shared<To> cast() const {
    return Shared<To>(begin_, end_, at_);
  }

  Value read(const Index& index) const {
    Value value;
    std::memcpy(&value, shared_memory.access(offset(index), sizeof(T), Access::kRead, index.where), sizeof(T));
    return value;
  }
  void write(const Index& index, const Value& value) const {
    static_assert(!std::is_const_v<T>);
    std::memcpy(shared_memory.access(offset(index), sizeof(T), Access::kWrite, index.where), &value, sizeof(T));
  }
  // What lies there, after which operate(value) lies there.
  template <typename F>
  Value atomic(F operate, const Where& where) const {
    unsigned char* to = shared_memory.access(offset({0, where}), sizeof(T), Access::kAtomic, where);
    Value before;
    std::memcpy(&before, to, sizeof(T));
    const Value after = operate(before);
    std::memcpy(to, &after, sizeof(T));
    return before;
  }

  // The checked offset of the `bytes` bytes from element `index` on.
  uint32_t offset(const Index& index, size_t bytes = sizeof(T), size_t alignment = alignof(T)) const {
    const int64_t from = at_ + index.value * int64_t{sizeof(T)};
    if (from < begin_ || from + static_cast<int64_t>(bytes) > end_)
      machine.fault("element " + std::to_string(index.value) + " of " + bounds(), index.where);
    if (from % static_cast<int64_t>(alignment)) machine.fault("misaligned access to shared memory", index.where);
    return static_cast<uint32_t>(from);
  }

 private:
  template <typename>
  friend class Shared;
  Shared(int64_t begin, int64_t end, int64_t at) : begin_(begin), end_(end), at_(at) {}

  int64_t begin_ = 0, end_ = 0, at_ = 0;  // bytes

  std::string bounds() const {
    const int64_t size = sizeof(T);
    return "shared memory that holds elements [" + std::to_string((begin_ - at_) / size) + ", " +
           std::to_string((end_ - at_) / size) + ")";
  }
};

}  // namespace dpk::simt
