// Global memory of a kernel under observation: a buffer between two inaccessible pages, so that an access beyond it
// ends the run without any cost for the others.
#pragma once

#include <cstddef>

namespace dpk::simt {

class Guarded {
 public:
  // A copy of `from` that cannot be written; or poison, where `from` is null. Its end lies at the upper page (but for
  // alignment to 16 bytes), or its start at the lower one.
  Guarded(const void* from, size_t bytes, bool guard_end);
  ~Guarded();
  Guarded(const Guarded&) = delete;

  unsigned char* data() { return data_; }

 private:
  void* mapping_;
  size_t mapped_;
  unsigned char* data_;
};

}  // namespace dpk::simt
