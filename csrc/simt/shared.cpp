#include "simt/shared.h"

#include <algorithm>

namespace dpk::simt {
namespace {

constexpr uint32_t kAlignment = 16;
constexpr unsigned char kPoison = 0xff;  // as floating point, not a number

}  // namespace

void SharedMemory::start(size_t dynamic) {
  bytes_.resize(kMaxSharedBytes);
  cells_.resize(kMaxSharedBytes / kGranule);
  if (dynamic > kMaxSharedBytes)
    machine.fault("asks for " + std::to_string(dynamic) + " bytes of dynamic shared memory, above " +
                  std::to_string(kMaxSharedBytes));
  std::fill_n(bytes_.begin(), used_, kPoison);
  std::for_each_n(cells_.begin(), used_ / kGranule, [](Cell& cell) { cell.in_flight = false; });
  sites_.clear();
  dynamic_ = static_cast<uint32_t>(dynamic);
  used_ = (dynamic_ + kAlignment - 1) / kAlignment * kAlignment;
}

uint32_t SharedMemory::place(const void* site, size_t bytes) {
  for (const auto& [known, at] : sites_)
    if (known == site) return at;
  const uint32_t at = used_;
  if (at + bytes > kMaxSharedBytes)
    machine.fault("needs more than " + std::to_string(kMaxSharedBytes) + " bytes of shared memory");
  used_ += static_cast<uint32_t>((bytes + kAlignment - 1) / kAlignment * kAlignment);
  sites_.emplace_back(site, at);
  return at;
}

void SharedMemory::begin(const Copy& copy, const Where& where) {
  access(copy.to, copy.bytes, Access::kWrite, where);
  for (uint32_t g = copy.to / kGranule; g < (copy.to + copy.bytes) / kGranule; ++g) cells_[g].in_flight = true;
}

void SharedMemory::land(const Copy& copy) {
  if (copy.from)
    std::memcpy(bytes_.data() + copy.to, copy.from, copy.bytes);
  else
    std::memset(bytes_.data() + copy.to, 0, copy.bytes);
}

// The copied bytes count as written now by the thread that waited.
void SharedMemory::finish(const Copy& copy) {
  for (uint32_t g = copy.to / kGranule; g < (copy.to + copy.bytes) / kGranule; ++g) cells_[g].in_flight = false;
  access(copy.to, copy.bytes, Access::kWrite, Where::current());
}

void copy_async(uint32_t to, uint32_t bytes, const void* from, const Where& where) {
  Thread& self = *machine.self;
  if (reinterpret_cast<uintptr_t>(from) % bytes) machine.fault("misaligned source of an asynchronous copy", where);
  const Copy& copy = self.copies.emplace_back(Copy{to, bytes, from, self.groups});
  shared_memory.begin(copy, where);
  if (machine.schedule.eager) shared_memory.land(copy);
}

void copy_async_wait(unsigned groups) {
  Thread& self = *machine.self;
  const auto waits = [&](const Copy& copy) { return copy.group + groups < self.groups; };
  for (const Copy& copy : self.copies)
    if (waits(copy)) {
      if (!machine.schedule.eager) shared_memory.land(copy);
      shared_memory.finish(copy);
    }
  std::erase_if(self.copies, waits);
}

void SharedMemory::conflict(uint32_t granule, const char* before, unsigned thread, Access access,
                            const Where& where) const {
  machine.fault("conflict in shared memory at byte " + std::to_string(granule * kGranule) + ": thread number " +
                    std::to_string(thread) + " " + before + " it before, and this one " +
                    (access == Access::kRead ? "reads" : "writes") + " it with no barrier between",
                where);
}

}  // namespace dpk::simt
