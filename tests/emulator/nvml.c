/* SPDX-License-Identifier: Apache-2.0
 *
 * A stub of libnvidia-ml.so.1: devices by number, UUID and bus address, their memory, and this process as the
 * one that uses it. As on a real machine all devices are seen, whatever CUDA_VISIBLE_DEVICES says. */
#define _GNU_SOURCE
#include "emulator.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum { NVML_SUCCESS = 0, NVML_INVALID = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_TOO_SMALL = 7 };

typedef struct device *handle_t;

typedef struct {
    char legacy_bus_id[16];
    unsigned int domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} pci_t;

typedef struct {
    unsigned long long total, free, used;
} memory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} memory_v2_t;

typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
} process_t;

static bool known(handle_t handle) { return handle && emu_physical_device(handle->number) == handle; }

static size_t used_of(const struct device *device) {
    pthread_mutex_lock(&emu_lock);
    size_t used = emu_used(device);
    pthread_mutex_unlock(&emu_lock);
    return used;
}

#pragma GCC visibility push(default)

int nvmlInit_v2(void) { return NVML_SUCCESS; }
int nvmlInit(void) { return NVML_SUCCESS; }
int nvmlInitWithFlags(unsigned int flags) { return (void)flags, NVML_SUCCESS; }
int nvmlShutdown(void) { return NVML_SUCCESS; }
const char *nvmlErrorString(int error) { return error ? "not available in the emulation" : "success"; }

int nvmlSystemGetDriverVersion(char *text, unsigned int size) {
    snprintf(text, size, "emulated");
    return NVML_SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13020;
    return NVML_SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = (unsigned int)emu_physical_count();
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, handle_t *handle) {
    *handle = emu_physical_device((int)index);
    return *handle ? NVML_SUCCESS : NVML_INVALID;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, handle_t *handle) {
    for (int i = 0; i < emu_physical_count(); i++) {
        char text[64];
        *handle = emu_physical_device(i);
        emu_uuid_text(*handle, text, sizeof text);
        if (strcasecmp(text, uuid) == 0) return NVML_SUCCESS;
    }
    return NVML_NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, handle_t *handle) {
    for (int i = 0; i < emu_physical_count(); i++) {
        char text[32];
        *handle = emu_physical_device(i);
        emu_pci_bus_id(*handle, text, sizeof text);
        /* Callers write the domain with four digits or eight. */
        if (strcasecmp(text, bus_id) == 0 || strcasecmp(text + 4, bus_id) == 0) return NVML_SUCCESS;
    }
    return NVML_NOT_FOUND;
}

int nvmlDeviceGetIndex(handle_t handle, unsigned int *index) {
    if (!known(handle)) return NVML_INVALID;
    *index = (unsigned int)handle->number;
    return NVML_SUCCESS;
}

int nvmlDeviceGetUUID(handle_t handle, char *text, unsigned int size) {
    if (!known(handle)) return NVML_INVALID;
    emu_uuid_text(handle, text, size);
    return NVML_SUCCESS;
}

int nvmlDeviceGetName(handle_t handle, char *text, unsigned int size) {
    (void)handle;
    snprintf(text, size, "Emulated GPU (no hardware)");
    return NVML_SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(handle_t handle, pci_t *pci) {
    if (!known(handle)) return NVML_INVALID;
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned int)handle->number + 1;
    emu_pci_bus_id(handle, pci->bus_id, sizeof pci->bus_id);
    snprintf(pci->legacy_bus_id, sizeof pci->legacy_bus_id, "%s", pci->bus_id + 4);
    return NVML_SUCCESS;
}

int nvmlDeviceGetMemoryInfo(handle_t handle, memory_t *memory) {
    if (!known(handle)) return NVML_INVALID;
    memory->total = handle->total;
    memory->used = used_of(handle);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(handle_t handle, memory_v2_t *memory) {
    if (!known(handle)) return NVML_INVALID;
    memory->total = handle->total;
    memory->reserved = 0;
    memory->used = used_of(handle);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(handle_t handle, unsigned int *count, process_t *processes) {
    if (!known(handle)) return NVML_INVALID;
    unsigned int room = *count;
    *count = handle->context ? 1 : 0;
    if (*count > room) return NVML_TOO_SMALL;
    if (*count) {
        memset(processes, 0, sizeof *processes);
        processes->pid = (unsigned int)getpid();
        pthread_mutex_lock(&emu_lock);
        processes->used = emu_used(handle) - handle->external;
        pthread_mutex_unlock(&emu_lock);
    }
    return NVML_SUCCESS;
}

/* PyTorch declares the first version's shorter structure: a pid and a size. */
int nvmlDeviceGetComputeRunningProcesses(handle_t handle, unsigned int *count, void *processes) {
    process_t process;
    unsigned int room = *count, one = 1;
    int result = nvmlDeviceGetComputeRunningProcesses_v3(handle, &one, &process);
    *count = one;
    if (result) return result;
    if (one > room) return NVML_TOO_SMALL;
    if (one) {
        struct { unsigned int pid; unsigned long long used; } first = {process.pid, process.used};
        memcpy(processes, &first, sizeof first);
    }
    return NVML_SUCCESS;
}

/* Answered, with "no fabric": torch warns about a refusal each time expandable segments first grow. */
int nvmlDeviceGetGpuFabricInfoV(handle_t handle, void *info) {
    struct {
        unsigned int version;
        unsigned char cluster[16];
        int status;
        unsigned int clique;
        unsigned char state;
    } none = {0};
    (void)handle;
    memcpy((char *)info + sizeof none.version, (char *)&none + sizeof none.version, sizeof none - sizeof none.version);
    return NVML_SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(handle_t handle, unsigned int link, int *type) {
    return (void)handle, (void)link, (void)type, NVML_NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(handle_t handle, unsigned int link, pci_t *pci) {
    return (void)handle, (void)link, (void)pci, NVML_NOT_SUPPORTED;
}

int nvmlDeviceGetP2PStatus(handle_t handle, handle_t peer, int index, int *status) {
    (void)handle, (void)peer, (void)index;
    *status = 0;
    return NVML_SUCCESS;
}

#pragma GCC visibility pop
