#include "simt/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace dpk::simt {
namespace {

constexpr size_t kStackBytes = 64 << 10;  // a kernel's frames are small; writing an error message takes some 10 KiB

size_t page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
size_t stride() { return kStackBytes + page(); }

}  // namespace

#ifdef __x86_64__

// swapcontext saves the signal mask by a system call; a switch needs only what the calling convention preserves.
asm(R"(
  .text
  .p2align 4
  .type dpk_simt_switch, @function
dpk_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size dpk_simt_switch, .-dpk_simt_switch
)");
extern "C" void dpk_simt_switch(void** from, void* to);

void switch_fiber(Context& from, Context& to) { dpk_simt_switch(&from.stack_pointer, to.stack_pointer); }

void Stacks::prepare(size_t index, Context& context, void (*entry)()) {
  // The first switch pops six registers and returns into entry, which finds its stack as after a call.
  void** top = reinterpret_cast<void**>(base_ + (index + 1) * stride());
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}

#else

void switch_fiber(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

void Stacks::prepare(size_t index, Context& context, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = base_ + index * stride() + page();
  context.state.uc_stack.ss_size = kStackBytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

#endif

Stacks::~Stacks() {
  if (base_) munmap(base_, count_ * stride());
}

void Stacks::reserve(size_t count) {
  if (count <= count_) return;
  if (base_) munmap(base_, count_ * stride());
  void* base = mmap(nullptr, count * stride(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(base);
  count_ = count;
  for (size_t i = 0; i < count; ++i) mprotect(base_ + i * stride(), page(), PROT_NONE);
}

}  // namespace dpk::simt
