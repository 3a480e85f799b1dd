// Fibers: stacks of their own, between which one thread of the CPU switches by hand.
#pragma once

#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace dpk::simt {

// Where a suspended fiber goes on.
struct Context {
#ifdef __x86_64__
  void* stack_pointer;
#else
  ucontext_t state;
#endif
};

// Suspends what runs, noting in `from` where, and goes on at `to`.
void switch_fiber(Context& from, Context& to);

// Stacks of a fixed size, each with an inaccessible page below it.
class Stacks {
 public:
  ~Stacks();
  void reserve(size_t count);
  // Makes `context` a fiber that runs entry() on stack `index`; entry must not return.
  void prepare(size_t index, Context& context, void (*entry)());

 private:
  char* base_ = nullptr;
  size_t count_ = 0;
};

}  // namespace dpk::simt
