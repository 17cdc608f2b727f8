/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA runtime's functions that PyTorch calls. Compiled against the headers of the installed torch's CUDA
 * (12 and 13 differ in structures and signatures) and preloaded, so that these definitions answer instead of
 * libcudart's. What is not defined here falls through to the real runtime, which finds no GPU. */
#define _GNU_SOURCE
#include "emulator.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static __thread cudaError_t last_error;

static cudaError_t answer(int error) {
    if (error && error != EMU_NOT_READY) last_error = (cudaError_t)error;
    return (cudaError_t)error;
}

/* Opens every function below: count it, pause or fail as a test has asked, make a context if the real one does. */
#define ENTER(name, kind)                                       \
    do {                                                        \
        static struct call *call;                               \
        int injected = emu_enter(&call, #name, kind);           \
        if (injected) return answer(injected);                  \
    } while (0)
/* ... and those that CUDA does not allow while a graph is being captured. */
#define ENTER_UNCAPTURED(name, kind)                            \
    do {                                                        \
        ENTER(name, kind);                                      \
        int forbidden = emu_capture_forbids();                  \
        if (forbidden) return answer(forbidden);                \
    } while (0)

#pragma GCC visibility push(default)

/* ---- versions, errors ---- */

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

static const char *error_text(cudaError_t error, bool name) {
    switch ((int)error) {
    case EMU_SUCCESS: return name ? "cudaSuccess" : "no error";
    case EMU_INVALID: return name ? "cudaErrorInvalidValue" : "invalid argument";
    case EMU_OUT_OF_MEMORY: return name ? "cudaErrorMemoryAllocation" : "out of memory";
    case EMU_NOT_INITIALIZED: return name ? "cudaErrorInitializationError" : "initialization error";
    case EMU_NO_DEVICE: return name ? "cudaErrorNoDevice" : "no CUDA-capable device is detected";
    case EMU_BAD_DEVICE: return name ? "cudaErrorInvalidDevice" : "invalid device ordinal";
    case EMU_BAD_HANDLE: return name ? "cudaErrorInvalidResourceHandle" : "invalid resource handle";
    case EMU_NOT_READY: return name ? "cudaErrorNotReady" : "device not ready";
    case 704: return name ? "cudaErrorPeerAccessAlreadyEnabled" : "peer access is already enabled";
    case EMU_NOT_SUPPORTED: return name ? "cudaErrorNotSupported" : "operation not supported";
    case EMU_CAPTURE_UNSUPPORTED:
        return name ? "cudaErrorStreamCaptureUnsupported" : "operation not permitted when stream is capturing";
    case EMU_CAPTURE_INVALIDATED:
        return name ? "cudaErrorStreamCaptureInvalidated" : "operation failed due to a previous error during capture";
    case EMU_CAPTURED_EVENT:
        return name ? "cudaErrorCapturedEvent" : "operation not permitted on an event last recorded in a capturing stream";
    default: return name ? "cudaErrorUnknown" : "unknown error";
    }
}

const char *cudaGetErrorName(cudaError_t error) { return error_text(error, true); }
const char *cudaGetErrorString(cudaError_t error) { return error_text(error, false); }

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    ENTER(cudaGetDeviceCount, BARE);
    *count = emu_device_count();
    return answer(*count ? EMU_SUCCESS : EMU_NO_DEVICE);
}

cudaError_t cudaGetDevice(int *device) {
    ENTER(cudaGetDevice, BARE);
    *device = emu_current_device();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    ENTER(cudaSetDevice, BARE);
    if (!emu_device(device)) return answer(EMU_BAD_DEVICE);
    emu_set_current_device(device);
    if (CUDART_VERSION >= 12000) emu_make_context(device); /* since CUDA 12 it is no longer lazy */
    return cudaSuccess;
}

cudaError_t cudaSetDeviceFlags(unsigned int flags) {
    (void)flags;
    ENTER(cudaSetDeviceFlags, BARE);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceFlags(unsigned int *flags) {
    ENTER(cudaGetDeviceFlags, BARE);
    *flags = 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device) {
    ENTER(cudaGetDeviceProperties, BARE);
    if (!emu_device(device)) return answer(EMU_BAD_DEVICE);
    memset(prop, 0, sizeof *prop);
    snprintf(prop->name, sizeof prop->name, "Emulated GPU (no hardware)");
    emu_uuid(emu_device(device), (unsigned char *)prop->uuid.bytes);
    prop->totalGlobalMem = emu_device(device)->total;
    prop->sharedMemPerBlock = (size_t)emu_attribute(8, device);
    prop->regsPerBlock = emu_attribute(12, device);
    prop->warpSize = emu_attribute(10, device);
    prop->memPitch = 0x7fffffff;
    prop->maxThreadsPerBlock = emu_attribute(1, device);
    for (int i = 0; i < 3; i++) {
        prop->maxThreadsDim[i] = emu_attribute(2 + i, device);
        prop->maxGridSize[i] = emu_attribute(5 + i, device);
    }
    prop->totalConstMem = (size_t)emu_attribute(9, device);
    prop->major = emu_attribute(75, device);
    prop->minor = emu_attribute(76, device);
    prop->textureAlignment = 512;
    prop->multiProcessorCount = emu_attribute(16, device);
    prop->canMapHostMemory = 1;
    prop->concurrentKernels = 1;
    prop->pciBusID = emu_attribute(33, device);
    prop->asyncEngineCount = emu_attribute(40, device);
    prop->unifiedAddressing = 1;
    prop->memoryBusWidth = emu_attribute(37, device);
    prop->l2CacheSize = emu_attribute(38, device);
    prop->maxThreadsPerMultiProcessor = emu_attribute(39, device);
    prop->streamPrioritiesSupported = 1;
    prop->sharedMemPerMultiprocessor = (size_t)emu_attribute(81, device);
    prop->regsPerMultiprocessor = emu_attribute(82, device);
    prop->managedMemory = 1;
    prop->concurrentManagedAccess = 1;
    prop->canUseHostPointerForRegisteredMem = 1;
    prop->cooperativeLaunch = 1;
    prop->sharedMemPerBlockOptin = (size_t)emu_attribute(97, device);
    prop->maxBlocksPerMultiProcessor = emu_attribute(106, device);
    prop->hostRegisterSupported = 1;
    prop->memoryPoolsSupported = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    ENTER(cudaDeviceGetAttribute, BARE);
    if (!emu_device(device)) return answer(EMU_BAD_DEVICE);
    *value = emu_attribute((int)attribute, device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    ENTER(cudaDeviceGetPCIBusId, BARE);
    if (!emu_device(device)) return answer(EMU_BAD_DEVICE);
    emu_pci_bus_id(emu_device(device), text, (size_t)size);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    ENTER_UNCAPTURED(cudaDeviceSynchronize, IN_CONTEXT);
    return answer(emu_device_synchronize(emu_current_device()));
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(cudaDeviceGetStreamPriorityRange, IN_CONTEXT);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    ENTER(cudaDeviceCanAccessPeer, BARE);
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
    (void)flags;
    ENTER(cudaDeviceEnablePeerAccess, IN_CONTEXT);
    if (!emu_device(peer)) return answer(EMU_BAD_DEVICE);
    emu_make_context(peer);
    return cudaSuccess;
}

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* ---- device memory ---- */

static cudaError_t allocate(void **pointer, size_t size, enum range_kind kind) {
    int device = emu_current_device();
    size_t charge = (size + 511) / 512 * 512;
    *pointer = NULL;
    if (!size) return cudaSuccess;
    pthread_mutex_lock(&emu_lock);
    bool fits = emu_charge(emu_device(device), &emu_device(device)->malloced, charge);
    pthread_mutex_unlock(&emu_lock);
    if (!fits) return answer(EMU_OUT_OF_MEMORY);
    char *start = emu_map(charge, 2 * MiB, true);
    pthread_mutex_lock(&emu_lock);
    if (start)
        emu_range_add((struct range){start, size, charge, device, kind, NULL});
    else
        emu_device(device)->malloced -= charge;
    pthread_mutex_unlock(&emu_lock);
    *pointer = start;
    return answer(start ? EMU_SUCCESS : EMU_OUT_OF_MEMORY);
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
    ENTER_UNCAPTURED(cudaMalloc, IN_CONTEXT);
    return allocate(pointer, size, RANGE_DEVICE);
}

cudaError_t cudaMallocManaged(void **pointer, size_t size, unsigned int flags) {
    (void)flags;
    ENTER_UNCAPTURED(cudaMallocManaged, IN_CONTEXT);
    return allocate(pointer, size, RANGE_MANAGED);
}

static void give_back_to_pool(const struct range *range);

cudaError_t cudaFree(void *pointer) {
    ENTER_UNCAPTURED(cudaFree, IN_CONTEXT); /* also cudaFree(0), the usual way to ask for a context */
    if (!pointer) return cudaSuccess;
    struct range range;
    pthread_mutex_lock(&emu_lock);
    bool ours = emu_range_find(pointer, &range) && range.start == pointer &&
                (range.kind == RANGE_DEVICE || range.kind == RANGE_MANAGED || range.kind == RANGE_POOL);
    if (ours) {
        emu_range_remove(pointer);
        if (range.kind == RANGE_POOL)
            give_back_to_pool(&range);
        else
            emu_device(range.device)->malloced -= range.charge;
    }
    pthread_mutex_unlock(&emu_lock);
    if (!ours) return answer(EMU_INVALID);
    emu_unmap(range.start, range.charge);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    ENTER(cudaMemGetInfo, IN_CONTEXT);
    struct device *device = emu_device(emu_current_device());
    pthread_mutex_lock(&emu_lock);
    size_t used = emu_used(device);
    *total = device->total;
    pthread_mutex_unlock(&emu_lock);
    *available = used < *total ? *total - used : 0;
    return cudaSuccess;
}

/* ---- stream-ordered memory: one pool grows and shrinks as a whole and never fragments ---- */

struct CUmemPoolHandle_st {
    int device;
    size_t reserved, reserved_high, used, used_high;
    unsigned long long threshold; /* what a synchronisation leaves reserved */
    int follow, opportunistic, internal;
};

#define POOL_STEP (32 * MiB)

static struct CUmemPoolHandle_st default_pools[MAX_DEVICES];
static cudaMemPool_t current_pools[MAX_DEVICES]; /* NULL: the default one */

static cudaMemPool_t default_pool(int device) {
    struct CUmemPoolHandle_st *pool = &default_pools[device];
    if (!pool->follow) {
        pool->device = device;
        pool->follow = pool->opportunistic = pool->internal = 1;
    }
    return pool;
}

static cudaMemPool_t current_pool(int device) {
    return current_pools[device] ? current_pools[device] : default_pool(device);
}

/* Locked. */
static void trim(cudaMemPool_t pool, size_t keep) {
    size_t needed = (pool->used + POOL_STEP - 1) / POOL_STEP * POOL_STEP;
    if (needed < keep) needed = keep;
    if (needed >= pool->reserved) return;
    emu_device(pool->device)->pooled -= pool->reserved - needed;
    pool->reserved = needed;
}

static void give_back_to_pool(const struct range *range) {
    cudaMemPool_t pool = range->owner;
    pool->used -= range->charge;
    trim(pool, pool->threshold > SIZE_MAX ? SIZE_MAX : (size_t)pool->threshold);
}

static cudaError_t allocate_from(cudaMemPool_t pool, void **pointer, size_t size) {
    size_t charge = (size + 511) / 512 * 512;
    *pointer = NULL;
    if (!size) return cudaSuccess;
    char *start = emu_map(charge, 512, true);
    if (!start) return answer(EMU_OUT_OF_MEMORY);
    bool fits = true;
    pthread_mutex_lock(&emu_lock);
    if (pool->used + charge > pool->reserved) {
        size_t missing = pool->used + charge - pool->reserved;
        size_t step = (missing + POOL_STEP - 1) / POOL_STEP * POOL_STEP;
        struct device *device = emu_device(pool->device);
        if (emu_charge(device, &device->pooled, step))
            pool->reserved += step;
        else if (emu_charge(device, &device->pooled, missing))
            pool->reserved += missing;
        else
            fits = false;
    }
    if (fits) {
        pool->used += charge;
        if (pool->used > pool->used_high) pool->used_high = pool->used;
        if (pool->reserved > pool->reserved_high) pool->reserved_high = pool->reserved;
        emu_range_add((struct range){start, size, charge, pool->device, RANGE_POOL, pool});
    }
    pthread_mutex_unlock(&emu_lock);
    if (!fits) {
        emu_unmap(start, charge);
        return answer(EMU_OUT_OF_MEMORY);
    }
    *pointer = start;
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) {
    ENTER(cudaMallocAsync, IN_CONTEXT);
    return allocate_from(current_pool(emu_stream_device(emu_stream(stream))), pointer, size);
}

cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t size, cudaMemPool_t pool, cudaStream_t stream) {
    (void)stream;
    ENTER(cudaMallocFromPoolAsync, IN_CONTEXT);
    return allocate_from(pool, pointer, size);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    (void)stream;
    ENTER(cudaFreeAsync, IN_CONTEXT);
    struct range range;
    pthread_mutex_lock(&emu_lock);
    bool ours = emu_range_find(pointer, &range) && range.start == pointer && range.kind == RANGE_POOL;
    if (ours) {
        emu_range_remove(pointer);
        give_back_to_pool(&range);
    }
    pthread_mutex_unlock(&emu_lock);
    if (!ours) return answer(EMU_INVALID);
    emu_unmap(range.start, range.charge);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    ENTER(cudaDeviceGetDefaultMemPool, BARE);
    if (!emu_device(device)) return answer(EMU_BAD_DEVICE);
    *pool = default_pool(device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int device) {
    ENTER(cudaDeviceGetMemPool, BARE);
    if (!emu_device(device)) return answer(EMU_BAD_DEVICE);
    *pool = current_pool(device);
    return cudaSuccess;
}

cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool) {
    ENTER(cudaDeviceSetMemPool, BARE);
    if (!emu_device(device)) return answer(EMU_BAD_DEVICE);
    current_pools[device] = pool;
    return cudaSuccess;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties) {
    ENTER(cudaMemPoolCreate, IN_CONTEXT);
    if (!emu_device(properties->location.id)) return answer(EMU_BAD_DEVICE);
    *pool = calloc(1, sizeof **pool);
    if (!*pool) return answer(EMU_OUT_OF_MEMORY);
    (*pool)->device = properties->location.id;
    (*pool)->follow = (*pool)->opportunistic = (*pool)->internal = 1;
    return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
    ENTER(cudaMemPoolDestroy, IN_CONTEXT);
    pthread_mutex_lock(&emu_lock);
    bool busy = pool->used != 0;
    if (!busy) trim(pool, 0);
    pthread_mutex_unlock(&emu_lock);
    if (busy) return answer(EMU_INVALID);
    free(pool);
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    ENTER(cudaMemPoolSetAttribute, BARE);
    pthread_mutex_lock(&emu_lock);
    switch (attribute) {
    case cudaMemPoolReuseFollowEventDependencies: pool->follow = *(int *)value; break;
    case cudaMemPoolReuseAllowOpportunistic: pool->opportunistic = *(int *)value; break;
    case cudaMemPoolReuseAllowInternalDependencies: pool->internal = *(int *)value; break;
    case cudaMemPoolAttrReleaseThreshold: pool->threshold = *(unsigned long long *)value; break;
    case cudaMemPoolAttrReservedMemHigh: pool->reserved_high = pool->reserved; break;
    case cudaMemPoolAttrUsedMemHigh: pool->used_high = pool->used; break;
    default: break;
    }
    pthread_mutex_unlock(&emu_lock);
    return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    ENTER(cudaMemPoolGetAttribute, BARE);
    pthread_mutex_lock(&emu_lock);
    switch (attribute) {
    case cudaMemPoolReuseFollowEventDependencies: *(int *)value = pool->follow; break;
    case cudaMemPoolReuseAllowOpportunistic: *(int *)value = pool->opportunistic; break;
    case cudaMemPoolReuseAllowInternalDependencies: *(int *)value = pool->internal; break;
    case cudaMemPoolAttrReleaseThreshold: *(unsigned long long *)value = pool->threshold; break;
    case cudaMemPoolAttrReservedMemCurrent: *(unsigned long long *)value = pool->reserved; break;
    case cudaMemPoolAttrReservedMemHigh: *(unsigned long long *)value = pool->reserved_high; break;
    case cudaMemPoolAttrUsedMemCurrent: *(unsigned long long *)value = pool->used; break;
    case cudaMemPoolAttrUsedMemHigh: *(unsigned long long *)value = pool->used_high; break;
    default: break;
    }
    pthread_mutex_unlock(&emu_lock);
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *list, size_t count) {
    (void)pool, (void)list, (void)count;
    ENTER(cudaMemPoolSetAccess, BARE);
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep) {
    ENTER(cudaMemPoolTrimTo, BARE);
    pthread_mutex_lock(&emu_lock);
    trim(pool, keep);
    pthread_mutex_unlock(&emu_lock);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute, void *value) {
    (void)device, (void)attribute;
    ENTER(cudaDeviceGetGraphMemAttribute, BARE);
    *(unsigned long long *)value = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceSetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute, void *value) {
    (void)device, (void)attribute, (void)value;
    ENTER(cudaDeviceSetGraphMemAttribute, BARE);
    return cudaSuccess;
}

/* ---- host memory ---- */

static cudaError_t allocate_host(void **pointer, size_t size) {
    *pointer = size ? emu_map(size, 4096, true) : NULL;
    if (!size) return cudaSuccess;
    if (!*pointer) return answer(EMU_OUT_OF_MEMORY);
    pthread_mutex_lock(&emu_lock);
    emu_range_add((struct range){*pointer, size, 0, emu_current_device(), RANGE_HOST, NULL});
    pthread_mutex_unlock(&emu_lock);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned int flags) {
    (void)flags;
    ENTER(cudaHostAlloc, IN_CONTEXT);
    return allocate_host(pointer, size);
}

cudaError_t cudaMallocHost(void **pointer, size_t size) {
    ENTER(cudaMallocHost, IN_CONTEXT);
    return allocate_host(pointer, size);
}

cudaError_t cudaFreeHost(void *pointer) {
    ENTER(cudaFreeHost, IN_CONTEXT);
    if (!pointer) return cudaSuccess;
    struct range range;
    pthread_mutex_lock(&emu_lock);
    bool ours = emu_range_find(pointer, &range) && range.start == pointer && range.kind == RANGE_HOST;
    if (ours) emu_range_remove(pointer);
    pthread_mutex_unlock(&emu_lock);
    if (!ours) return answer(EMU_INVALID);
    emu_unmap(range.start, range.size);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned int flags) {
    (void)flags;
    ENTER(cudaHostRegister, IN_CONTEXT);
    struct range range;
    pthread_mutex_lock(&emu_lock);
    bool known = emu_range_find(pointer, &range);
    if (!known) emu_range_add((struct range){pointer, size, 0, emu_current_device(), RANGE_REGISTERED, NULL});
    pthread_mutex_unlock(&emu_lock);
    return answer(known ? 712 : EMU_SUCCESS); /* cudaErrorHostMemoryAlreadyRegistered */
}

cudaError_t cudaHostUnregister(void *pointer) {
    ENTER(cudaHostUnregister, IN_CONTEXT);
    struct range range;
    pthread_mutex_lock(&emu_lock);
    bool ours = emu_range_find(pointer, &range) && range.start == pointer && range.kind == RANGE_REGISTERED;
    if (ours) emu_range_remove(pointer);
    pthread_mutex_unlock(&emu_lock);
    return answer(ours ? EMU_SUCCESS : 713); /* cudaErrorHostMemoryNotRegistered */
}

cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *host_pointer, unsigned int flags) {
    (void)flags;
    ENTER(cudaHostGetDevicePointer, IN_CONTEXT);
    *device_pointer = host_pointer;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    ENTER(cudaPointerGetAttributes, IN_CONTEXT);
    struct range range;
    pthread_mutex_lock(&emu_lock);
    bool known = emu_range_find(pointer, &range);
    pthread_mutex_unlock(&emu_lock);
    memset(attributes, 0, sizeof *attributes);
    attributes->device = known ? range.device : -2;
    if (!known) {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->hostPointer = (void *)pointer;
        return cudaSuccess;
    }
    bool host = range.kind == RANGE_HOST || range.kind == RANGE_REGISTERED;
    attributes->type = host ? cudaMemoryTypeHost
                            : range.kind == RANGE_MANAGED ? cudaMemoryTypeManaged : cudaMemoryTypeDevice;
    attributes->devicePointer = (void *)pointer;
    attributes->hostPointer = host || range.kind == RANGE_MANAGED ? (void *)pointer : NULL;
    return cudaSuccess;
}

/* ---- copies ---- */

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    (void)kind;
    ENTER_UNCAPTURED(cudaMemcpy, IN_CONTEXT);
    emu_copy(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    ENTER(cudaMemcpyAsync, IN_CONTEXT);
    return answer(emu_submit_copy(emu_stream(stream), to, from, size));
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                cudaStream_t stream) {
    (void)to_device, (void)from_device;
    ENTER(cudaMemcpyPeerAsync, IN_CONTEXT);
    return answer(emu_submit_copy(emu_stream(stream), to, from, size));
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    ENTER(cudaMemcpy2DAsync, IN_CONTEXT);
    for (size_t row = 0; row < height; row++) {
        int error = emu_submit_copy(emu_stream(stream), (char *)to + row * to_pitch,
                                    (const char *)from + row * from_pitch, width);
        if (error) return answer(error);
    }
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t size) {
    ENTER_UNCAPTURED(cudaMemset, IN_CONTEXT);
    emu_fill(to, value, size);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    ENTER(cudaMemsetAsync, IN_CONTEXT);
    return answer(emu_submit_fill(emu_stream(stream), to, value, size));
}

/* Device variables: nobody computes with them here; readers get zeros. */
static char device_variable[1 << 16];

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    (void)symbol;
    ENTER(cudaGetSymbolAddress, IN_CONTEXT);
    *pointer = device_variable;
    return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset,
                               enum cudaMemcpyKind kind) {
    (void)symbol, (void)from, (void)size, (void)offset, (void)kind;
    ENTER(cudaMemcpyToSymbol, IN_CONTEXT);
    return cudaSuccess;
}

/* ---- sharing with other processes: not emulated, and said so ---- */

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    (void)handle, (void)pointer;
    ENTER(cudaIpcGetMemHandle, IN_CONTEXT);
    return answer(EMU_NOT_SUPPORTED);
}

cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned int flags) {
    (void)pointer, (void)handle, (void)flags;
    ENTER(cudaIpcOpenMemHandle, IN_CONTEXT);
    return answer(EMU_NOT_SUPPORTED);
}

cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    (void)pointer;
    ENTER(cudaIpcCloseMemHandle, IN_CONTEXT);
    return answer(EMU_NOT_SUPPORTED);
}

/* ---- streams ---- */

static cudaError_t create_stream(cudaStream_t *stream, unsigned int flags, int priority) {
    *stream = (cudaStream_t)emu_stream_create(emu_current_device(), priority, flags);
    return answer(*stream ? EMU_SUCCESS : EMU_OUT_OF_MEMORY);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    ENTER(cudaStreamCreate, IN_CONTEXT);
    return create_stream(stream, 0, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    ENTER(cudaStreamCreateWithFlags, IN_CONTEXT);
    return create_stream(stream, flags, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
    ENTER(cudaStreamCreateWithPriority, IN_CONTEXT);
    return create_stream(stream, flags, priority);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    ENTER(cudaStreamDestroy, IN_CONTEXT);
    if ((uintptr_t)stream <= 2) return answer(EMU_BAD_HANDLE);
    emu_stream_destroy(emu_stream(stream));
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENTER_UNCAPTURED(cudaStreamQuery, IN_CONTEXT);
    return answer(emu_stream_idle(emu_stream(stream)) ? EMU_SUCCESS : EMU_NOT_READY);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER(cudaStreamSynchronize, IN_CONTEXT);
    return answer(emu_stream_synchronize(emu_stream(stream)));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    (void)flags;
    ENTER(cudaStreamWaitEvent, IN_CONTEXT);
    return answer(emu_stream_wait(emu_stream(stream), (struct event *)event));
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    ENTER(cudaStreamGetPriority, IN_CONTEXT);
    *priority = emu_stream_priority(emu_stream(stream));
    return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned int *flags) {
    ENTER(cudaStreamGetFlags, IN_CONTEXT);
    *flags = emu_stream_flags(emu_stream(stream));
    return cudaSuccess;
}

#if CUDART_VERSION >= 12000
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
    ENTER(cudaStreamGetId, IN_CONTEXT);
    *id = emu_stream_id(emu_stream(stream));
    return cudaSuccess;
}
#endif

/* Callbacks run at once, on the thread that submits them, also on a stream that is held. */
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned int flags) {
    (void)flags;
    ENTER(cudaStreamAddCallback, IN_CONTEXT);
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    (void)stream;
    ENTER(cudaLaunchHostFunc, IN_CONTEXT);
    function(data);
    return cudaSuccess;
}

/* ---- events ---- */

static cudaError_t create_event(cudaEvent_t *event) {
    *event = (cudaEvent_t)emu_event_create();
    return answer(*event ? EMU_SUCCESS : EMU_OUT_OF_MEMORY);
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    ENTER(cudaEventCreate, IN_CONTEXT);
    return create_event(event);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    (void)flags;
    ENTER(cudaEventCreateWithFlags, IN_CONTEXT);
    return create_event(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    ENTER(cudaEventDestroy, BARE);
    emu_event_destroy((struct event *)event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ENTER(cudaEventRecord, IN_CONTEXT);
    return answer(emu_event_record((struct event *)event, emu_stream(stream)));
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
    (void)flags;
    ENTER(cudaEventRecordWithFlags, IN_CONTEXT);
    return answer(emu_event_record((struct event *)event, emu_stream(stream)));
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    ENTER(cudaEventQuery, BARE);
    return answer(emu_event_query((struct event *)event));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ENTER(cudaEventSynchronize, BARE);
    return answer(emu_event_synchronize((struct event *)event));
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    ENTER(cudaEventElapsedTime, BARE);
    return answer(emu_event_elapsed(milliseconds, (struct event *)from, (struct event *)to));
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) {
    (void)handle, (void)event;
    ENTER(cudaIpcGetEventHandle, IN_CONTEXT);
    return answer(EMU_NOT_SUPPORTED);
}

/* ---- graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    ENTER(cudaStreamBeginCapture, IN_CONTEXT);
    return answer(emu_capture_begin(emu_stream(stream), (int)mode, NULL));
}

#if CUDART_VERSION >= 12030
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *dependencies,
                                          const cudaGraphEdgeData *data, size_t count,
                                          enum cudaStreamCaptureMode mode) {
    (void)dependencies, (void)data, (void)count;
    ENTER(cudaStreamBeginCaptureToGraph, IN_CONTEXT);
    return answer(emu_capture_begin(emu_stream(stream), (int)mode, (struct graph *)graph));
}
#endif

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    ENTER(cudaStreamEndCapture, IN_CONTEXT);
    return answer(emu_capture_end(emu_stream(stream), (struct graph **)graph));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    ENTER(cudaStreamIsCapturing, IN_CONTEXT);
    *status = (enum cudaStreamCaptureStatus)emu_capture_state(emu_stream(stream), NULL, NULL);
    return cudaSuccess;
}

static cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                cudaGraph_t *graph, const cudaGraphNode_t **dependencies, size_t *count) {
    *status = (enum cudaStreamCaptureStatus)emu_capture_state(emu_stream(stream), id, (struct graph **)graph);
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    ENTER(cudaStreamGetCaptureInfo, IN_CONTEXT);
    if (edges) *edges = NULL;
    return capture_info(stream, status, id, graph, dependencies, count);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *dependencies,
                                                const cudaGraphEdgeData *edges, size_t count, unsigned int flags) {
    (void)stream, (void)dependencies, (void)edges, (void)count, (void)flags;
    ENTER(cudaStreamUpdateCaptureDependencies, IN_CONTEXT);
    return cudaSuccess;
}
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **dependencies, size_t *count) {
    ENTER(cudaStreamGetCaptureInfo, IN_CONTEXT);
    return capture_info(stream, status, id, graph, dependencies, count);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *dependencies, size_t count,
                                                unsigned int flags) {
    (void)stream, (void)dependencies, (void)count, (void)flags;
    ENTER(cudaStreamUpdateCaptureDependencies, IN_CONTEXT);
    return cudaSuccess;
}
#endif

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    ENTER(cudaThreadExchangeStreamCaptureMode, BARE);
    *mode = (enum cudaStreamCaptureMode)emu_capture_exchange_mode((int)*mode);
    return cudaSuccess;
}

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned int flags) {
    (void)flags;
    ENTER(cudaGraphCreate, BARE);
    *graph = (cudaGraph_t)emu_graph_create();
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    (void)flags;
    ENTER(cudaGraphInstantiate, IN_CONTEXT);
    *executable = (cudaGraphExec_t)emu_graph_retain((struct graph *)graph);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    (void)flags;
    ENTER(cudaGraphInstantiateWithFlags, IN_CONTEXT);
    *executable = (cudaGraphExec_t)emu_graph_retain((struct graph *)graph);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    ENTER(cudaGraphLaunch, IN_CONTEXT);
    return answer(emu_graph_launch((struct graph *)executable, emu_stream(stream)));
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    ENTER(cudaGraphGetNodes, BARE);
    size_t there = emu_graph_nodes((struct graph *)graph);
    for (size_t i = 0; nodes && i < *count; i++) nodes[i] = NULL;
    if (!nodes || *count > there) *count = there;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    ENTER(cudaGraphDestroy, BARE);
    emu_graph_release((struct graph *)graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    ENTER(cudaGraphExecDestroy, BARE);
    emu_graph_release((struct graph *)executable);
    return cudaSuccess;
}

/* What a graph keeps alive is never let go: a few bytes for each graph of a test. */
cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *pointer, cudaHostFn_t destroy, unsigned int count,
                                 unsigned int flags) {
    (void)pointer, (void)destroy, (void)count, (void)flags;
    ENTER(cudaUserObjectCreate, BARE);
    *object = (cudaUserObject_t)device_variable;
    return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned int count) {
    (void)object, (void)count;
    ENTER(cudaUserObjectRelease, BARE);
    return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int count,
                                      unsigned int flags) {
    (void)graph, (void)object, (void)count, (void)flags;
    ENTER(cudaGraphRetainUserObject, BARE);
    return cudaSuccess;
}

/* ---- kernels: launched, counted, and done at once without computing anything ---- */

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    (void)function, (void)grid, (void)block, (void)arguments, (void)shared;
    ENTER(cudaLaunchKernel, IN_CONTEXT);
    return answer(emu_submit(emu_stream(stream)));
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    (void)function, (void)grid, (void)block, (void)arguments, (void)shared;
    ENTER(cudaLaunchKernel, IN_CONTEXT);
    return answer(emu_submit(emu_stream(stream)));
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    (void)function, (void)arguments;
    ENTER(cudaLaunchKernel, IN_CONTEXT);
    return answer(emu_submit(emu_stream(config->stream)));
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    (void)function;
    ENTER(cudaFuncGetAttributes, IN_CONTEXT);
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 80;
    attributes->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    (void)function, (void)attribute, (void)value;
    ENTER(cudaFuncSetAttribute, IN_CONTEXT);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                          size_t shared) {
    (void)function, (void)block_size, (void)shared;
    ENTER(cudaOccupancyMaxActiveBlocksPerMultiprocessor, IN_CONTEXT);
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int block_size,
                                                                   size_t shared, unsigned int flags) {
    (void)function, (void)block_size, (void)shared, (void)flags;
    ENTER(cudaOccupancyMaxActiveBlocksPerMultiprocessor, IN_CONTEXT);
    *blocks = 2;
    return cudaSuccess;
}

/* What nvcc generates calls these: registration at load time (nothing to register), and the <<<...>>> syntax,
 * which pushes a launch's shape and pops it in the kernel's stub. */

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed;

void **__cudaRegisterFatBinary(void *binary) {
    (void)binary;
    return calloc(1, sizeof(void *));
}

void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { free(handle); }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
                            void *bid, void *block, void *grid, int *size) {
    (void)handle, (void)host, (void)device, (void)name, (void)limit, (void)tid, (void)bid, (void)block, (void)grid,
        (void)size;
}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                       int constant, int global) {
    (void)handle, (void)host, (void)device, (void)name, (void)external, (void)size, (void)constant, (void)global;
}
char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(void **)stream = pushed.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)function;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

/* ---- the driver's functions, from the stub of libcuda.so.1 that stands beside this library ---- */

static cudaError_t driver_function(const char *symbol, void **function,
                                   enum cudaDriverEntryPointQueryResult *status) {
    static void *driver;
    char newer[128];
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    snprintf(newer, sizeof newer, "%s_v2", symbol); /* asked by version, the driver gives the newest that fits */
    *function = driver ? dlsym(driver, newer) : NULL;
    if (driver && !*function) *function = dlsym(driver, symbol);
    if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return answer(*function || status ? EMU_SUCCESS : 500); /* cudaErrorSymbolNotFound */
}

#if CUDART_VERSION >= 12000 && CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status) {
    (void)flags;
    ENTER(cudaGetDriverEntryPoint, BARE);
    return driver_function(symbol, function, status);
}
#endif

#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    (void)version, (void)flags;
    ENTER(cudaGetDriverEntryPointByVersion, BARE);
    return driver_function(symbol, function, status);
}
#elif CUDART_VERSION < 12000
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags) {
    (void)flags;
    ENTER(cudaGetDriverEntryPoint, BARE);
    return driver_function(symbol, function, NULL);
}
#endif

#pragma GCC visibility pop
