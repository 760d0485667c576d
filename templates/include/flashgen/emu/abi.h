// What a kernel built for the CPU asks of the emulator's runtime library. Both sides include this file.
#pragma once

// Where a call stands in the kernel's text; filled in by hidden default arguments.
struct FlashgenEmuSite {
  const char* file;
  int line;
};

// What the runtime tells the kernel of the CUDA thread that is running.
struct FlashgenEmuThread {
  int thread_idx;
  int block_idx_x;
  int block_idx_y;
  int block_idx_z;
  unsigned char* shared_memory;
};

enum FlashgenEmuElement { kFlashgenEmuHalf, kFlashgenEmuBfloat16 };

#pragma GCC visibility push(default)
extern "C" {

extern FlashgenEmuThread* flashgen_emu_thread;

unsigned flashgen_emu_shared_address(const void* pointer, FlashgenEmuSite);

void flashgen_emu_block_sync(FlashgenEmuSite);
int flashgen_emu_block_any(int condition, FlashgenEmuSite);
void flashgen_emu_warp_sync(FlashgenEmuSite);
int flashgen_emu_warp_any(int condition, FlashgenEmuSite);
unsigned flashgen_emu_shuffle(unsigned value, int source_lane, FlashgenEmuSite);

// `count` 8x8 matrices of 16-bit elements into registers[count].
void flashgen_emu_ldmatrix(unsigned* registers, unsigned address, int count, int transposed, FlashgenEmuSite);
// d[4] += a[depth / 4] * b[depth / 8] for the shapes m16n8k8 and m16n8k16.
void flashgen_emu_mma(float* d, const unsigned* a, const unsigned* b, int depth, FlashgenEmuElement,
                      FlashgenEmuSite);

void flashgen_emu_cp_async(unsigned destination, const void* source, unsigned bytes, unsigned valid_bytes,
                           FlashgenEmuSite);
void flashgen_emu_cp_async_commit(FlashgenEmuSite);
void flashgen_emu_cp_async_wait(int pending, FlashgenEmuSite);
void flashgen_emu_reduce_add(float* address, const float* values, int count, FlashgenEmuSite);

}  // extern "C"
#pragma GCC visibility pop
