// A libcuda.so.1 that records calls instead of computing: two devices of compute capability 9.0, whose calls are
// printed one per line.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {
thread_local long contexts[16] = {0};
thread_local int depth = 0;
int nothing() { return 0; }
}  // namespace

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  const char* const text = getenv("DRIVER_VERSION");
  return *version = text == nullptr ? 13000 : atoi(text), 0;
}
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 75 ? 9 : attribute == 16 ? 132 : 0, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  printf("retain %d\n", device);
  return *context = reinterpret_cast<void*>(0xC0L + device), 0;
}
int cuCtxGetCurrent(void** context) { return *context = reinterpret_cast<void*>(contexts[depth]), 0; }
int cuCtxPushCurrent_v2(void* context) { return contexts[++depth] = reinterpret_cast<long>(context), 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = reinterpret_cast<void*>(contexts[depth--]), 0; }
int cuCtxGetDevice(int* device) { return *device = static_cast<int>(contexts[depth] - 0xC0), 0; }
int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  const char* const text = static_cast<const char*>(code);
  if (strcmp(text, "cubin") != 0 && strncmp(text, "\x7f" "ELF", 4) != 0) return 200;
  printf("load %.5s\n", text + (*text == 0x7f));
  return *library = reinterpret_cast<void*>(0x11L), 0;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  printf("kernel %s of %p\n", name, library);
  return *kernel = reinterpret_cast<void*>(0x22L), 0;
}
int cuKernelGetFunction(void** function, void* kernel) {
  return *function = reinterpret_cast<void*>(reinterpret_cast<long>(kernel) + contexts[depth]), 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  return printf("attribute %d of %p is %d\n", attribute, function, value), 0;
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                   unsigned shared, void* stream, void** params, void** extra) {
  long first;
  memcpy(&first, params[0], sizeof first);
  printf("launch %p grid %u %u %u threads %u shared %u stream %p context %lx first %lx extra %p\n", function, x, y, z,
         threads, shared, stream, contexts[depth], first, static_cast<void*>(extra));
  return threads == 7 ? 719 : 0;
}
struct Attribute {
  int id, unused, value[16];
};
struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  const Attribute* attributes;
  unsigned count;
};
int cuLaunchKernelEx(const Config* config, void* function, void** params, void** extra) {
  long first;
  memcpy(&first, params[0], sizeof first);
  printf("launch %p grid %u %u %u block %u %u %u shared %u stream %p first %lx extra %p", function, config->grid[0],
         config->grid[1], config->grid[2], config->block[0], config->block[1], config->block[2], config->shared,
         config->stream, first, static_cast<void*>(extra));
  for (unsigned i = 0; i < config->count; ++i) {
    const int* value = config->attributes[i].value;
    printf(" attribute %d is %d %d %d", config->attributes[i].id, value[0], value[1], value[2]);
  }
  printf("\n");
  return config->block[0] == 7 ? 719 : 0;
}
int cuStreamIsCapturing(void* stream, int* status) {
  const long handle = reinterpret_cast<long>(stream);
  if (handle == 1) return 906;
  return *status = handle == 0x33 ? 1 : 0, 0;
}
int cuPointerGetAttribute(void* data, int attribute, unsigned long long pointer) {
  if (attribute != 9) return 1;
  return *static_cast<int*>(data) = static_cast<int>(pointer >> 40), 0;
}
int cuMemAllocAsync(unsigned long long* pointer, size_t bytes, void* stream) {
  return printf("allocate %zu on %p\n", bytes, stream), *pointer = 0x5000, 0;
}
int cuMemFreeAsync(unsigned long long pointer, void* stream) { return printf("free %llx on %p\n", pointer, stream), 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) {
  static thread_local int current = 0;
  printf("capture mode %d, not %d\n", *mode, current);
  const int before = current;
  current = *mode;
  return *mode = before, 0;
}
int cuMemAlloc_v2(unsigned long long* pointer, size_t bytes) {
  if (bytes == 7) return 2;
  return printf("allocate %zu\n", bytes), *pointer = 0x6000, 0;
}
int cuStreamCreate(void** stream, unsigned flags) {
  return printf("stream with flags %u\n", flags), *stream = reinterpret_cast<void*>(0x55L), 0;
}
int cuMemsetD8Async(unsigned long long pointer, unsigned char value, size_t bytes, void* stream) {
  return printf("%zu times %d to %llx on %p\n", bytes, value, pointer, stream), 0;
}
int cuStreamSynchronize(void* stream) { return printf("wait for %p\n", stream), 0; }
int cuStreamDestroy_v2(void* stream) { return printf("destroy %p\n", stream), 0; }
int cuEventCreate(void** event, unsigned flags) {
  return printf("event with flags %u\n", flags), *event = reinterpret_cast<void*>(0x44L), 0;
}
int cuEventRecord(void* event, void* stream) { return printf("record %p on %p\n", event, stream), 0; }
int cuStreamWaitEvent(void* stream, void* event, unsigned) { return printf("%p waits for %p\n", stream, event), 0; }
int cuEventDestroy_v2(void*) { return 0; }
int cuTensorMapEncodeTiled(unsigned long long* map, int type, unsigned rank, void* address, const long* dims,
                           const long* strides, const int* box, const int* steps, int interleave, int swizzle,
                           int promotion, int fill) {
  if (address == reinterpret_cast<void*>(0xbad0)) return 1;
  printf("encode type %d rank %u address %p interleave %d swizzle %d promotion %d fill %d dims", type, rank, address,
         interleave, swizzle, promotion, fill);
  for (unsigned i = 0; i < rank; ++i) printf(" %ld", dims[i]);
  printf(" strides");
  for (unsigned i = 0; i + 1 < rank; ++i) printf(" %ld", strides[i]);
  printf(" box");
  for (unsigned i = 0; i < rank; ++i) printf(" %d", box[i]);
  printf(" steps");
  for (unsigned i = 0; i < rank; ++i) printf(" %d", steps[i]);
  printf("\n");
  map[0] = reinterpret_cast<unsigned long long>(address);
  for (int i = 1; i < 16; ++i) map[i] = static_cast<unsigned long long>(16 + i);
  return 0;
}
int cuGetErrorName(int error, const char** text) { return *text = error == 200 ? "BAD_IMAGE" : "LAUNCH_FAILED", 0; }
int cuGetErrorString(int, const char** text) { return *text = "in words", 0; }
int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int* status) {
  Dl_info here;
  dladdr(reinterpret_cast<void*>(cuInit), &here);
  void* self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  void* found = dlsym(self, name);
  if (found == nullptr) found = dlsym(self, (std::string(name) + "_v2").c_str());
  *function = found != nullptr ? found : reinterpret_cast<void*>(nothing);
  if (status != nullptr) *status = 0;
  return 0;
}
}
