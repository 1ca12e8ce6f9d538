// The extension module: importing it registers the operators of `torch.ops.seqpar_native`.
#include <Python.h>
#include <dlfcn.h>

#include "api/api.h"

namespace seqpar {

void parallel_for(int64_t begin, int64_t end, int64_t grain, sp_task task, void* context) {
  if (begin >= end) return;
  STD_TORCH_CHECK(torch_parallel_for(begin, end, grain, task, context) == 0, "seqpar: a parallel loop of torch failed");
}

// Looked up by name: a library linked with libtorch_cuda does not load with a CPU-only torch.
void* current_stream(int32_t device) {
  using Shim = int32_t (*)(int32_t, void**);
  static Shim shim = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library ? reinterpret_cast<Shim>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  STD_TORCH_CHECK(shim != nullptr, "seqpar: this torch has no CUDA streams");
  void* stream = nullptr;
  STD_TORCH_CHECK(shim(device, &stream) == 0, "seqpar: torch has no stream for device ", device);
  return stream;
}

bool with_cuda() {
#ifdef SEQPAR_WITH_CUDA
  return true;
#else
  return false;
#endif
}

}  // namespace seqpar

STABLE_TORCH_LIBRARY_FRAGMENT(seqpar_native, m) { m.def("with_cuda() -> bool"); }

STABLE_TORCH_LIBRARY_IMPL(seqpar_native, CompositeExplicitAutograd, m) {
  m.impl("with_cuda", TORCH_BOX(&seqpar::with_cuda));
}

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
