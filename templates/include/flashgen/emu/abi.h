// The interface between a kernel built for the CPU and the emulator's runtime library. Both sides include it.
#pragma once

// The place of a call in the kernel's text. Hidden default arguments fill it in.
struct FlashgenEmuSite {
  const char* file;
  int line;
};

// The CUDA thread that is running, set by the runtime.
struct FlashgenEmuThread {
  int thread_idx;
  int block_idx_x;
  int block_idx_y;
  int block_idx_z;
  int grid_dim_x;
  unsigned char* shared_memory;
};

// Products, by shape and type of the operands.
enum FlashgenEmuProduct {
  kFlashgenEmuM16N8K8Half,
  kFlashgenEmuM16N8K16Half,
  kFlashgenEmuM16N8K16Bfloat16,
  kFlashgenEmuM16N8K32E4m3,
  kFlashgenEmuM16N8K32E5m2
};

enum FlashgenEmuElement { kFlashgenEmuHalf, kFlashgenEmuBfloat16, kFlashgenEmuE4m3, kFlashgenEmuE5m2 };

// One wgmma. `a` is null where the left operand is in shared memory.
struct FlashgenEmuWgmma {
  FlashgenEmuElement element;
  int columns;
  int a_is_mn_major;
  int b_is_mn_major;
  int accumulate;
  const unsigned* a;
  unsigned long long a_descriptor;
  unsigned long long b_descriptor;
};

#pragma GCC visibility push(default)
extern "C" {

extern FlashgenEmuThread* flashgen_emu_thread;

unsigned flashgen_emu_shared_address(const void* pointer, FlashgenEmuSite);

void flashgen_emu_block_sync(FlashgenEmuSite);
int flashgen_emu_block_any(int condition, FlashgenEmuSite);
void flashgen_emu_warp_sync(FlashgenEmuSite);
int flashgen_emu_warp_any(int condition, FlashgenEmuSite);
unsigned flashgen_emu_warp_ballot(int condition, FlashgenEmuSite);
unsigned flashgen_emu_shuffle(unsigned value, int source_lane, FlashgenEmuSite);

// `count` 8x8 matrices of 16-bit elements into registers[count].
void flashgen_emu_ldmatrix(unsigned* registers, unsigned address, int count, int transposed, FlashgenEmuSite);
void flashgen_emu_stmatrix(unsigned address, const unsigned* registers, int count, int transposed,
                           FlashgenEmuSite);
// d[4] += a[depth / 4] * b[depth / 8]. d has the sums only after mma_finish; a and b may change earlier.
void flashgen_emu_mma(float* d, const unsigned* a, const unsigned* b, FlashgenEmuProduct, FlashgenEmuSite);
void flashgen_emu_mma_finish(FlashgenEmuSite);
// counts[4] += the number of bits that both the row of a[2] and the column of b have set.
void flashgen_emu_count(int* counts, const unsigned* a, unsigned b, FlashgenEmuSite);

void flashgen_emu_cp_async(unsigned destination, const void* source, unsigned bytes, unsigned valid_bytes,
                           FlashgenEmuSite);
void flashgen_emu_cp_async_commit(FlashgenEmuSite);
void flashgen_emu_cp_async_wait(int pending, FlashgenEmuSite);
void flashgen_emu_reduce_add(float* address, const float* values, int count, FlashgenEmuSite);
void flashgen_emu_reduce_add_u64(unsigned long long* address, unsigned long long value, FlashgenEmuSite);

void flashgen_emu_named_barrier(int barrier, int threads, int waits, FlashgenEmuSite);
int flashgen_emu_named_barrier_any(int barrier, int threads, int condition, FlashgenEmuSite);
void flashgen_emu_mbarrier_init(unsigned barrier, unsigned count, FlashgenEmuSite);
void flashgen_emu_mbarrier_invalidate(unsigned barrier, FlashgenEmuSite);
// `in_cluster`: the barrier may be another block's.
void flashgen_emu_mbarrier_arrive(unsigned barrier, int in_cluster, FlashgenEmuSite);
void flashgen_emu_mbarrier_expect_tx(unsigned barrier, unsigned bytes, int arrives, FlashgenEmuSite);
// Returns whether the phase has ended. Only with `may_fail`, as in try_wait, can it be false.
int flashgen_emu_mbarrier_wait(unsigned barrier, unsigned parity, int may_fail, FlashgenEmuSite);
void flashgen_emu_fence_mbarrier_init(FlashgenEmuSite);
// `global`: for global memory too, not only for shared memory.
void flashgen_emu_fence_proxy_async(int global, FlashgenEmuSite);

// `at`: `rank` coordinates. `blocks`: a bit for each rank of the cluster that receives the box; 0: no
// multicast.
void flashgen_emu_tma_load(unsigned destination, const void* map, unsigned barrier, unsigned blocks,
                           const int* at, int rank, FlashgenEmuSite);
void flashgen_emu_tma_store(const void* map, unsigned source, int adds, const int* at, int rank,
                            FlashgenEmuSite);
void flashgen_emu_prefetch_tensormap(const void* map, FlashgenEmuSite);
void flashgen_emu_bulk_load(unsigned destination, const void* source, unsigned bytes, unsigned barrier,
                            FlashgenEmuSite);
void flashgen_emu_bulk_store(void* destination, unsigned source, unsigned bytes, int adds, FlashgenEmuSite);
void flashgen_emu_bulk_commit(FlashgenEmuSite);
void flashgen_emu_bulk_wait(int pending, int reads_only, FlashgenEmuSite);

void flashgen_emu_check_descriptor(unsigned address, unsigned leading_bytes, unsigned stride_bytes,
                                   FlashgenEmuSite);
// d[columns / 2] is NaN until the wait.
void flashgen_emu_wgmma(float* d, const FlashgenEmuWgmma*, FlashgenEmuSite);
void flashgen_emu_wgmma_fence(FlashgenEmuSite);
void flashgen_emu_wgmma_commit(FlashgenEmuSite);
void flashgen_emu_wgmma_wait(int pending, FlashgenEmuSite);
void flashgen_emu_setmaxnreg(int registers, int increase, FlashgenEmuSite);

unsigned flashgen_emu_cluster_rank(FlashgenEmuSite);
unsigned flashgen_emu_cluster_size(FlashgenEmuSite);
unsigned flashgen_emu_map_to_rank(unsigned address, unsigned rank, FlashgenEmuSite);
void flashgen_emu_cluster_arrive(int release, FlashgenEmuSite);
void flashgen_emu_cluster_wait(FlashgenEmuSite);
void flashgen_emu_cluster_load(unsigned* values, unsigned address, int count, FlashgenEmuSite);
void flashgen_emu_cluster_store(unsigned address, const unsigned* values, int count, FlashgenEmuSite);

unsigned flashgen_emu_atomic_add_u32(unsigned* address, unsigned value, int release, FlashgenEmuSite);
unsigned flashgen_emu_atomic_inc_acq_rel(unsigned* address, unsigned last, FlashgenEmuSite);
float flashgen_emu_atomic_add_f32(float* address, float value, FlashgenEmuSite);
void flashgen_emu_atomic_or(unsigned* address, unsigned bits, FlashgenEmuSite);
void flashgen_emu_store_release(unsigned* address, unsigned value, FlashgenEmuSite);
unsigned flashgen_emu_load_acquire(const unsigned* address, FlashgenEmuSite);
void flashgen_emu_expect_cooperative_launch(FlashgenEmuSite);
void flashgen_emu_griddep_wait(FlashgenEmuSite);
void flashgen_emu_griddep_launch_dependents(FlashgenEmuSite);

}  // extern "C"
#pragma GCC visibility pop
