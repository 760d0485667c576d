// Findings: what happened, where, and in which thread. A finding ends the launch.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <dlfcn.h>

#include "model.h"

namespace flashgen::emu {

void force_yield();

inline void set_code(FlashgenEmuPlace& place, const void* code) {
  place.code_offset = 0;
  Dl_info info;
  if (code == nullptr || dladdr(code, &info) == 0 || info.dli_fname == nullptr) return;
  snprintf(place.library, sizeof place.library, "%s", info.dli_fname);
  place.code_offset = static_cast<const char*>(code) - static_cast<const char*>(info.dli_fbase);
}

// The byte before a return address belongs to the call.
inline const void* call_before(const void* return_address) {
  return return_address != nullptr ? static_cast<const char*>(return_address) - 1 : nullptr;
}

inline void set_place(FlashgenEmuPlace& place, i64 block, i32 thread, Site site, const void* code) {
  snprintf(place.file, sizeof place.file, "%s", site.file != nullptr ? site.file : "");
  place.line = site.file != nullptr ? site.line : -1;
  place.block = block;
  place.thread = thread;
  set_code(place, code);
}

// Fills in the report for `thread`, or for no thread if it is null.
inline void write_report(const Thread* thread, const char* kind, Site site, const void* code,
                         const char* format, va_list arguments) {
  FlashgenEmuReport& report = *runtime.report;
  runtime.failed = true;
  snprintf(report.kind, sizeof report.kind, "%s", kind);
  vsnprintf(report.what, sizeof report.what, format, arguments);
  report.other_role[0] = '\0';
  set_place(report.place, thread != nullptr ? thread->block->index : -1,
            thread != nullptr ? thread->thread_idx : -1, site, code);
}

// Ends the launch from inside an emulated thread, whose stack is abandoned.
[[noreturn]] inline void leave() {
  switch_context(runtime.current->context, runtime.main);
  __builtin_unreachable();
}

// A finding about a block as a whole. It returns.
__attribute__((format(printf, 3, 4))) inline void report_for_block(const Block& block, const char* kind,
                                                                   const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write_report(nullptr, kind, {nullptr, 0}, nullptr, format, arguments);
  va_end(arguments);
  runtime.report->place.block = block.index;
}

// A finding about a thread, at its last primitive.
[[noreturn]] __attribute__((format(printf, 3, 4))) inline void fail_for(const Thread& thread,
                                                                        const char* kind, const char* format,
                                                                        ...) {
  va_list arguments;
  va_start(arguments, format);
  write_report(&thread, kind, thread.site, call_before(thread.code), format, arguments);
  va_end(arguments);
  leave();
}

// A finding about the running thread.
[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(const char* kind, const char* format,
                                                                    ...) {
  va_list arguments;
  va_start(arguments, format);
  write_report(&self(), kind, self().site, call_before(self().code), format, arguments);
  va_end(arguments);
  leave();
}

inline const char* base_name(const char* file) {
  const char* slash = strrchr(file, '/');
  return slash != nullptr ? slash + 1 : file;
}

// A batch of products must be finished before any other collective operation.
inline void require_no_products(const Thread& thread) {
  if (thread.issued == 0) return;
  fail_for(thread, "unfinished products",
           "%u matrix products are in a batch without mma_finish, so their sums are not available yet",
           thread.issued);
}

inline bool same_site(const Site& a, const Site& b) {
  return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

}  // namespace flashgen::emu

// Every primitive starts with this. It records the thread's place, and makes the thread yield now and then.
#define FLASHGEN_EMU_NOTE_SITE()                            \
  flashgen::emu::self().site = site;                        \
  flashgen::emu::self().code = __builtin_return_address(0); \
  if (--flashgen::emu::runtime.calls_left < 0) flashgen::emu::force_yield()
