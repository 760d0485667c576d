// Switches between the stacks of emulated threads in about ten instructions. ucontext makes a system call
// instead.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__linux__) && defined(__x86_64__) && !defined(FLASHGEN_EMU_PORTABLE)

namespace flashgen::emu {
struct Context {
  void* stack_pointer = nullptr;
};
}  // namespace flashgen::emu

extern "C" void flashgen_emu_switch(void** save, void* resume);

// Pushes the callee-saved registers, and pops them from the other stack.
asm(R"(
  .text
  .hidden flashgen_emu_switch
  .globl flashgen_emu_switch
  .type flashgen_emu_switch, @function
flashgen_emu_switch:
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
  .size flashgen_emu_switch, . - flashgen_emu_switch
)");

namespace flashgen::emu {

// Makes `context` start `function` on the stack that ends at `top` (16-byte aligned) when first switched to.
inline void prepare(Context& context, void* /*bottom*/, void* top, void (*function)()) {
  auto* slot = static_cast<void**>(top);
  *--slot = nullptr;  // the return address of `function`, which never returns; also sets its stack alignment
  *--slot = reinterpret_cast<void*>(function);
  for (int saved = 0; saved < 6; ++saved) *--slot = nullptr;
  context.stack_pointer = slot;
}

inline void switch_context(Context& from, Context& to) {
  flashgen_emu_switch(&from.stack_pointer, to.stack_pointer);
}

}  // namespace flashgen::emu

#elif defined(__linux__) && defined(__aarch64__) && !defined(FLASHGEN_EMU_PORTABLE)

namespace flashgen::emu {
struct Context {
  void* stack_pointer = nullptr;
};
}  // namespace flashgen::emu

extern "C" void flashgen_emu_switch(void** save, void* resume);

asm(R"(
  .text
  .hidden flashgen_emu_switch
  .globl flashgen_emu_switch
  .type flashgen_emu_switch, %function
flashgen_emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size flashgen_emu_switch, . - flashgen_emu_switch
)");

namespace flashgen::emu {

inline void prepare(Context& context, void* /*bottom*/, void* top, void (*function)()) {
  auto* frame = static_cast<void**>(top) - 20;
  for (int slot = 0; slot < 20; ++slot) frame[slot] = nullptr;
  frame[11] = reinterpret_cast<void*>(function);  // x30, where `ret` goes
  context.stack_pointer = frame;
}

inline void switch_context(Context& from, Context& to) {
  flashgen_emu_switch(&from.stack_pointer, to.stack_pointer);
}

}  // namespace flashgen::emu

#else

#include <ucontext.h>

namespace flashgen::emu {

struct Context {
  ucontext_t machine;
};

inline void prepare(Context& context, void* bottom, void* top, void (*function)()) {
  getcontext(&context.machine);
  context.machine.uc_stack.ss_sp = bottom;
  context.machine.uc_stack.ss_size = static_cast<char*>(top) - static_cast<char*>(bottom);
  context.machine.uc_link = nullptr;
  makecontext(&context.machine, function, 0);
}

inline void switch_context(Context& from, Context& to) { swapcontext(&from.machine, &to.machine); }

}  // namespace flashgen::emu

#endif
