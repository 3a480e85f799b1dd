// The dispatch calls the body of the active instruction set, and that body was compiled for it.
#define DPK_BODY "../tests/cpp/test_isa.cpp"
#include "common/each_isa.h"

#ifdef DPK_ISA

namespace dpk::DPK_ISA {
#include "common/simd.h"

int64_t vector_bytes() { return sizeof(Vec<float>); }

// Sum of the squares of 0 .. n - 1 through vectors and their remainder.
double squares(int64_t n) {
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<float>(i);
  return sum_of_squares(values.data(), n);
}

}  // namespace dpk::DPK_ISA

#else

#include "check.h"

namespace dpk {
int64_t vector_bytes() { DPK_DISPATCH(vector_bytes); }
double squares(int64_t n) { DPK_DISPATCH(squares, n); }
}  // namespace dpk

int main() {
  CHECK(dpk::active_isa() == dpk::widest_isa());
  int isas = 0;
  check::for_each_isa([&] {
    ++isas;
    CHECK(dpk::vector_bytes() == 16 << static_cast<int>(dpk::active_isa().load()));
    for (int64_t n : {0, 1, 15, 16, 33, 100})
      CHECK_CLOSE(dpk::squares(n), static_cast<double>((n - 1) * n * (2 * n - 1)) / 6, 0);
  });
  CHECK(isas == static_cast<int>(dpk::widest_isa()) + 1);
  CHECK(dpk::active_isa() == dpk::widest_isa());
  return check::result();
}

#endif
