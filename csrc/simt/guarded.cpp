#include "simt/guarded.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

namespace dpk::simt {

Guarded::Guarded(const void* from, size_t bytes, bool guard_end) {
  constexpr size_t kAlignment = 16;  // of the widest access
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t inner = (bytes + page - 1) / page * page;
  mapped_ = inner + 2 * page;
  mapping_ = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  unsigned char* first = static_cast<unsigned char*>(mapping_) + page;
  data_ = guard_end ? first + (inner - bytes) / kAlignment * kAlignment : first;
  if (inner == 0) return;
  mprotect(first, inner, PROT_READ | PROT_WRITE);
  std::memset(first, 0xff, inner);
  if (!from) return;
  std::memcpy(data_, from, bytes);
  mprotect(first, inner, PROT_READ);
}

Guarded::~Guarded() { munmap(mapping_, mapped_); }

}  // namespace dpk::simt
