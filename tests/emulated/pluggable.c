// SPDX-License-Identifier: Apache-2.0
// Allocators for torch.cuda.CUDAPluggableAllocator: a plain one, and one that needs the interpreter on its way,
// as those written in Python do (vLLM's sleep mode).
#include <stddef.h>
#include <sys/types.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);
int PyGILState_Ensure(void);
void PyGILState_Release(int);

void *take(ssize_t size, int device, void *stream) {
    void *place = NULL;
    return cudaMalloc(&place, (size_t)size) ? NULL : place;
}

void give(void *place, ssize_t size, int device, void *stream) { cudaFree(place); }

void *take_with_interpreter(ssize_t size, int device, void *stream) {
    int state = PyGILState_Ensure();
    void *place = take(size, device, stream);
    PyGILState_Release(state);
    return place;
}

void give_with_interpreter(void *place, ssize_t size, int device, void *stream) {
    int state = PyGILState_Ensure();
    give(place, size, device, stream);
    PyGILState_Release(state);
}
