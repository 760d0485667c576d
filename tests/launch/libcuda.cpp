// A libcuda.so.1 that keeps books instead of computing: two devices of compute capability 9.0, whose calls are
// printed one per line.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>

namespace {
thread_local long contexts[16] = {0};
thread_local int depth = 0;
int nothing() { return 0; }
}  // namespace

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 75 ? 9 : 0, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  printf("retain %d\n", device);
  return *context = reinterpret_cast<void*>(0xC0L + device), 0;
}
int cuCtxGetCurrent(void** context) { return *context = reinterpret_cast<void*>(contexts[depth]), 0; }
int cuCtxPushCurrent_v2(void* context) { return contexts[++depth] = reinterpret_cast<long>(context), 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = reinterpret_cast<void*>(contexts[depth--]), 0; }
int cuCtxGetDevice(int* device) { return *device = static_cast<int>(contexts[depth] - 0xC0), 0; }
int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  if (strcmp(static_cast<const char*>(code), "cubin") != 0) return 200;
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
int cuEventCreate(void** event, unsigned flags) {
  return printf("event with flags %u\n", flags), *event = reinterpret_cast<void*>(0x44L), 0;
}
int cuEventRecord(void* event, void* stream) { return printf("record %p on %p\n", event, stream), 0; }
int cuStreamWaitEvent(void* stream, void* event, unsigned) { return printf("%p waits for %p\n", stream, event), 0; }
int cuEventDestroy_v2(void*) { return 0; }
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
