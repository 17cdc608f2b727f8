/* SPDX-License-Identifier: Apache-2.0
 *
 * A stub of libcuda.so.1: what PyTorch asks of the driver itself, chiefly virtual memory management, on which
 * expandable segments stand. Releases built for CUDA 12 look these functions up here by name, later ones
 * through the runtime's cudaGetDriverEntryPointByVersion, which looks here too. */
#define _GNU_SOURCE
#include "emulator.h"

#include <cuda.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ENTER(name, kind)                                                    \
    do {                                                                     \
        static struct call *call;                                            \
        int injected = emu_enter(&call, #name, kind);                        \
        if (injected) return (CUresult)injected;                             \
    } while (0)

#define PAGE (2 * MiB) /* the granularity of device memory */

#pragma GCC visibility push(default)

CUresult cuInit(unsigned int flags) {
    (void)flags;
    ENTER(cuInit, BARE);
    return emu_device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_SUCCESS                ? "no error"
            : error == CUDA_ERROR_OUT_OF_MEMORY  ? "out of memory"
            : error == CUDA_ERROR_INVALID_VALUE  ? "invalid argument"
            : error == CUDA_ERROR_INVALID_DEVICE ? "invalid device ordinal"
            : error == CUDA_ERROR_NOT_SUPPORTED  ? "operation not supported"
                                                 : "unknown error";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = error == CUDA_SUCCESS               ? "CUDA_SUCCESS"
            : error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
                                                : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    (void)version, (void)flags;
    *function = dlsym(RTLD_DEFAULT, symbol);
    if (!*function) {
        void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        *function = self ? dlsym(self, symbol) : NULL;
    }
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* ---- devices and contexts ---- */

CUresult cuDeviceGetCount(int *count) {
    ENTER(cuDeviceGetCount, BARE);
    *count = emu_device_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(cuDeviceGet, BARE);
    if (!emu_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER(cuDeviceGetAttribute, BARE);
    if (!emu_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *value = emu_attribute((int)attribute, device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER(cuDeviceGetUuid, BARE);
    if (!emu_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    emu_uuid(emu_device(device), (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTER(cuDeviceTotalMem, BARE);
    if (!emu_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = emu_device(device)->total;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    ENTER(cuDevicePrimaryCtxGetState, BARE);
    if (!emu_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = emu_device(device)->context;
    return CUDA_SUCCESS;
}

static CUcontext context_of(int device) { return (CUcontext)emu_device(device); }

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(cuDevicePrimaryCtxRetain, BARE);
    if (!emu_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    emu_make_context(device);
    *context = context_of(device);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER(cuDevicePrimaryCtxRelease, BARE);
    return emu_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(cuCtxGetCurrent, BARE);
    *context = emu_context_is_current() ? context_of(emu_current_device()) : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(cuCtxSetCurrent, BARE);
    for (int i = 0; i < emu_device_count(); i++)
        if (context == context_of(i)) emu_set_current_device(i);
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }

CUresult cuCtxPopCurrent_v2(CUcontext *context) { return cuCtxGetCurrent(context); }

CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(cuCtxGetDevice, BARE);
    if (!emu_context_is_current()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = emu_current_device();
    return CUDA_SUCCESS;
}

/* ---- virtual memory: address ranges, physical pages, and the mapping of one to the other ---- */

struct pages {
    int device;
    size_t size;
    int references; /* the handle itself, and each mapping */
    CUmemAllocationProp properties;
};

struct mapping {
    char *start;
    size_t size;
    struct pages *pages;
    struct mapping *next;
};

#define BUCKETS 4096

static struct mapping *mappings[BUCKETS]; /* by start address: a 10 GiB pool has thousands of pages */

static struct mapping **bucket(const void *start) { return &mappings[(uintptr_t)start / PAGE % BUCKETS]; }

/* Locked. Pages go back to the device when neither a handle nor a mapping is left. */
static void drop_pages(struct pages *pages) {
    if (--pages->references) return;
    emu_device(pages->device)->created -= pages->size;
    free(pages);
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    (void)properties, (void)option;
    ENTER(cuMemGetAllocationGranularity, BARE);
    *granularity = PAGE;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    (void)wanted, (void)flags;
    ENTER(cuMemAddressReserve, BARE);
    if (!size || size % PAGE) return CUDA_ERROR_INVALID_VALUE;
    char *start = emu_map(size, alignment > PAGE ? alignment : PAGE, false);
    if (!start) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&emu_lock);
    emu_range_add((struct range){start, size, 0, emu_current_device(), RANGE_RESERVED, NULL});
    pthread_mutex_unlock(&emu_lock);
    *pointer = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    ENTER(cuMemAddressFree, BARE);
    pthread_mutex_lock(&emu_lock);
    emu_range_remove((void *)pointer);
    pthread_mutex_unlock(&emu_lock);
    emu_unmap((void *)pointer, size);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    (void)flags;
    ENTER(cuMemCreate, BARE);
    int device = properties->location.id;
    if (!emu_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!size || size % PAGE) return CUDA_ERROR_INVALID_VALUE;
    struct pages *pages = calloc(1, sizeof *pages);
    if (!pages) return CUDA_ERROR_OUT_OF_MEMORY;
    *pages = (struct pages){device, size, 1, *properties};
    pthread_mutex_lock(&emu_lock);
    bool fits = emu_charge(emu_device(device), &emu_device(device)->created, size);
    pthread_mutex_unlock(&emu_lock);
    if (!fits) {
        free(pages);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)pages;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(cuMemRelease, BARE);
    pthread_mutex_lock(&emu_lock);
    drop_pages((struct pages *)(uintptr_t)handle);
    pthread_mutex_unlock(&emu_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    (void)offset, (void)flags;
    ENTER(cuMemMap, BARE);
    struct mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping) return CUDA_ERROR_OUT_OF_MEMORY;
    *mapping = (struct mapping){(char *)pointer, size, (struct pages *)(uintptr_t)handle, NULL};
    pthread_mutex_lock(&emu_lock);
    struct range range;
    CUresult result = CUDA_SUCCESS;
    if (!emu_range_find((void *)pointer, &range) || range.kind != RANGE_RESERVED) result = CUDA_ERROR_INVALID_VALUE;
    for (struct mapping *other = *bucket(mapping->start); other; other = other->next)
        if (other->start == mapping->start) result = CUDA_ERROR_INVALID_VALUE; /* already mapped */
    if (result == CUDA_SUCCESS) {
        mapping->pages->references++;
        mapping->next = *bucket(mapping->start);
        *bucket(mapping->start) = mapping;
    }
    pthread_mutex_unlock(&emu_lock);
    if (result != CUDA_SUCCESS) free(mapping);
    return result;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access, size_t count) {
    ENTER(cuMemSetAccess, BARE);
    int rights = count && access->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE ? PROT_READ | PROT_WRITE : PROT_NONE;
    return mprotect((void *)pointer, size, rights) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    ENTER(cuMemUnmap, BARE);
    char *start = (char *)pointer, *end = start + size;
    bool any = false;
    pthread_mutex_lock(&emu_lock);
    for (char *at = start; at < end; at += PAGE) {
        for (struct mapping **link = bucket(at); *link; link = &(*link)->next) {
            struct mapping *mapping = *link;
            if (mapping->start != at) continue;
            *link = mapping->next;
            drop_pages(mapping->pages);
            free(mapping);
            any = true;
            break;
        }
    }
    pthread_mutex_unlock(&emu_lock);
    if (!any) return CUDA_ERROR_INVALID_VALUE;
    /* The pages' contents are gone, and a touch of the address is a fault, as on a device. */
    madvise(start, size, MADV_DONTNEED);
    mprotect(start, size, PROT_NONE);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
    ENTER(cuMemGetAllocationPropertiesFromHandle, BARE);
    *properties = ((struct pages *)(uintptr_t)handle)->properties;
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER(cuMemRetainAllocationHandle, BARE);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&emu_lock);
    for (struct mapping *mapping = *bucket(address); mapping; mapping = mapping->next) {
        if (mapping->start != address) continue;
        mapping->pages->references++;
        *handle = (CUmemGenericAllocationHandle)(uintptr_t)mapping->pages;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&emu_lock);
    return result;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *size, CUdeviceptr pointer) {
    ENTER(cuMemGetAddressRange, BARE);
    struct range range;
    pthread_mutex_lock(&emu_lock);
    bool known = emu_range_find((void *)pointer, &range);
    pthread_mutex_unlock(&emu_lock);
    if (!known) return CUDA_ERROR_NOT_FOUND;
    if (start) *start = (CUdeviceptr)range.start;
    if (size) *size = range.size;
    return CUDA_SUCCESS;
}

CUresult cuMemsetD32Async(CUdeviceptr pointer, unsigned int value, size_t count, CUstream stream) {
    (void)stream;
    ENTER(cuMemsetD32Async, IN_CONTEXT);
    for (size_t i = 0; i < count; i++) ((unsigned int *)pointer)[i] = value;
    return CUDA_SUCCESS;
}

#pragma GCC visibility pop
