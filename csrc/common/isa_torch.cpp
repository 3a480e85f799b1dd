// Control of the CPU dispatch: it lives in this library because the kernels do.
#include "common/isa.h"
#include "common/torch.h"

namespace dpk {
namespace {

int64_t get_cpu_isa() { return static_cast<int64_t>(active_isa().load()); }

void set_cpu_isa(int64_t isa) {
  STD_TORCH_CHECK(0 <= isa && isa <= static_cast<int64_t>(widest_isa()), "isa must be one that this CPU runs, got ",
                  isa);
  active_isa().store(static_cast<Isa>(isa));
}

STABLE_TORCH_LIBRARY_FRAGMENT(dpkernels, m) {
  m.def("get_cpu_isa() -> int");
  m.def("set_cpu_isa(int isa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dpkernels, CompositeExplicitAutograd, m) {
  m.impl("get_cpu_isa", TORCH_BOX(&get_cpu_isa));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
}

}  // namespace
}  // namespace dpk
