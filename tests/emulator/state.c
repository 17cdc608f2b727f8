/* SPDX-License-Identifier: Apache-2.0
 *
 * The emulated machine: devices and what fills them, contexts, counted calls with their pauses and failures,
 * and the address ranges handed out. Device memory is host address space that costs nothing until touched. */
#define _GNU_SOURCE
#include "emulator.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

pthread_mutex_t emu_lock = PTHREAD_MUTEX_INITIALIZER;

static struct device devices[MAX_DEVICES];
static int physical_count;
static int visible[MAX_DEVICES], device_count; /* what CUDA_VISIBLE_DEVICES leaves, in its order */
static bool started; /* cuInit has happened */
static bool forked;  /* ... in a process that this one was forked from */
static unsigned long contexts_made;
static __thread int current_device;
static __thread bool context_is_current;

/* ---- settings ---- */

static void complain(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("emulated CUDA: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

static void refuse(const char *variable, const char *value, const char *allowed) {
    complain("%s=%s is not understood; allowed: %s", variable, value, allowed);
    _exit(78); /* a test that runs on other terms than it asked for would prove nothing */
}

/* "4GiB", "512 MiB", "1000000"; advances past what it read; 0 when there is no size. */
static size_t read_size(const char **text) {
    char *end;
    double number = strtod(*text, &end);
    if (end == *text || number <= 0) return 0;
    while (*end == ' ') end++;
    static const struct { const char *unit; size_t bytes; } units[] = {
        {"KiB", (size_t)1 << 10}, {"MiB", (size_t)1 << 20}, {"GiB", (size_t)1 << 30}, {"TiB", (size_t)1 << 40},
        {"B", 1},
    };
    size_t bytes = 1;
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        size_t length = strlen(units[i].unit);
        if (strncasecmp(end, units[i].unit, length) == 0) {
            bytes = units[i].bytes;
            end += length;
            break;
        }
    }
    *text = end;
    return (size_t)(number * (double)bytes);
}

static void read_memory(void) {
    const char *value = getenv("EMULATED_GPU_MEMORY");
    const char *text = value && *value ? value : "4GiB";
    size_t size = 0;
    for (int i = 0; i < MAX_DEVICES; i++) {
        /* "4GiB,2GiB": the last one stands for all further devices. */
        if (*text) {
            size = read_size(&text);
            if (!size || (*text && *text != ',')) refuse("EMULATED_GPU_MEMORY", value, "sizes such as 4GiB or 4GiB,2GiB");
            if (*text == ',') text++;
        }
        devices[i].total = size;
    }
}

/* Which device of the machine an entry of CUDA_VISIBLE_DEVICES names: a number, or a UUID or its beginning. */
static int named_device(const char *entry, size_t length) {
    char name[64];
    char *end;
    long number = strtol(entry, &end, 10);
    if (end == entry + length && length && number >= 0 && number < physical_count) return (int)number;
    for (int i = 0; i < physical_count && length >= 4; i++) {
        emu_uuid_text(&devices[i], name, sizeof name);
        if (strncmp(name, entry, length) == 0) return i;
    }
    return -1;
}

static void read_devices(void) {
    const char *value = getenv("EMULATED_GPU_DEVICES");
    char *end = "";
    physical_count = value && *value ? (int)strtol(value, &end, 10) : 1;
    if (physical_count < 0 || physical_count > MAX_DEVICES || *end) refuse("EMULATED_GPU_DEVICES", value, "0 to 16");
    for (int i = 0; i < MAX_DEVICES; i++) devices[i].number = i;
    const char *entry = getenv("CUDA_VISIBLE_DEVICES");
    if (!entry)
        for (; device_count < physical_count; device_count++) visible[device_count] = device_count;
    while (entry && *entry && device_count < physical_count) {
        size_t length = strcspn(entry, ",");
        int number = named_device(entry, length);
        if (number < 0) break; /* as CUDA does: the list ends where an entry names no device */
        visible[device_count++] = number;
        entry += length + (entry[length] == ',');
    }
}

static void read_external(void) {
    const char *value = getenv("EMULATED_GPU_EXTERNAL");
    if (!value || !*value) return;
    const char *text = value;
    size_t size = read_size(&text);
    if (!size || *text) refuse("EMULATED_GPU_EXTERNAL", value, "a size such as 1GiB, taken on every device");
    for (int i = 0; i < MAX_DEVICES; i++) devices[i].external = size < devices[i].total ? size : devices[i].total;
}

/* ---- pauses and failures ---- */

struct rule {
    char name[64];
    unsigned long nth; /* counted from when the rule was made; 0 stands for every call */
    unsigned long seen;
    int milliseconds; /* a pause, or */
    int error;        /* a failure */
};

static struct rule rules[64];
static int rule_count;
static struct call *calls;

static int default_error(const char *name) {
    return strstr(name, "lloc") || strcmp(name, "cuMemCreate") == 0 ? EMU_OUT_OF_MEMORY : EMU_UNKNOWN;
}

static int add_rule(const char *name, unsigned long nth, int milliseconds, int error) {
    if (rule_count == sizeof rules / sizeof *rules) return -1;
    struct rule *rule = &rules[rule_count];
    memset(rule, 0, sizeof *rule);
    snprintf(rule->name, sizeof rule->name, "%s", name);
    rule->nth = nth;
    rule->milliseconds = milliseconds;
    rule->error = error;
    rule_count++;
    return 0;
}

/* "cudaMalloc:3:300,cudaFree:0:50": call, nth (0 for every), and for a pause its milliseconds. */
static void read_rules(const char *variable, bool pause) {
    const char *value = getenv(variable);
    for (const char *text = value; text && *text;) {
        char name[64];
        unsigned long nth = 0;
        int number = 0, read = 0;
        int fields = sscanf(text, "%63[A-Za-z0-9_]:%lu%n:%d%n", name, &nth, &read, &number, &read);
        if (fields < (pause ? 3 : 2) || (text[read] && text[read] != ','))
            refuse(variable, value, pause ? "call:nth:milliseconds,..." : "call:nth[:error],...");
        add_rule(name, nth, pause ? number : 0, pause ? 0 : number ? number : default_error(name));
        text += read;
        if (*text == ',') text++;
    }
}

/* ---- life of the process ---- */

static void before_fork(void) { pthread_mutex_lock(&emu_lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&emu_lock); }

/* A CUDA that was initialised before a fork is dead in the child. A raw system call passes this handler by:
 * that is what emu_fork and the "would it fit" oracle rely on. */
static void after_fork_in_child(void) {
    forked = started;
    pthread_mutex_init(&emu_lock, NULL);
}

static void read_settings(void) {
    read_memory();
    read_devices();
    read_external();
    read_rules("EMULATED_GPU_PAUSE", true);
    read_rules("EMULATED_GPU_FAIL", false);
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static void read_settings_once(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_settings);
}

static void start(void) {
    read_settings_once();
    if (started) return;
    pthread_mutex_lock(&emu_lock);
    bool first = !started;
    started = true;
    pthread_mutex_unlock(&emu_lock);
    /* Only a process that asks for a GPU hears it: shells and other children of a test stay silent. */
    if (first)
        complain("this is no GPU but an emulation of the CUDA runtime (pid %d, %d device%s of %.0f MiB): "
                 "memory is real, kernels do nothing",
                 getpid(), device_count, device_count == 1 ? "" : "s", (double)devices[visible[0]].total / (double)MiB);
}

static void pause_for(int milliseconds) {
    struct timespec left = {milliseconds / 1000, (milliseconds % 1000) * 1000000L};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

int emu_enter(struct call **cache, const char *name, int kind) {
    start();
    if (forked) return EMU_NOT_INITIALIZED;
    int milliseconds = 0, error = 0;
    pthread_mutex_lock(&emu_lock);
    struct call *call = *cache;
    if (!call) {
        for (call = calls; call && strcmp(call->name, name) != 0; call = call->next) {
        }
        if (!call) {
            call = calloc(1, sizeof *call);
            call->name = name;
            call->next = calls;
            calls = call;
        }
        *cache = call;
    }
    call->count++;
    for (int i = 0; i < rule_count; i++) {
        struct rule *rule = &rules[i];
        if (strcmp(rule->name, name) != 0) continue;
        rule->seen++;
        if (rule->nth && rule->nth != rule->seen) continue;
        milliseconds += rule->milliseconds;
        if (rule->error) error = rule->error;
    }
    if (milliseconds) call->inside++;
    pthread_mutex_unlock(&emu_lock);
    if (milliseconds) {
        /* A plain blocking sleep: the caller's locks (the allocator's, Python's) stay as the caller has them. */
        pause_for(milliseconds);
        pthread_mutex_lock(&emu_lock);
        call->inside--;
        pthread_mutex_unlock(&emu_lock);
    }
    if (error) return error;
    if (kind == IN_CONTEXT) {
        if (device_count == 0) return EMU_NO_DEVICE;
        emu_make_context(current_device);
    }
    return EMU_SUCCESS;
}

/* ---- devices ---- */

int emu_device_count(void) {
    read_settings_once();
    return device_count;
}

struct device *emu_device(int device) {
    read_settings_once();
    return device >= 0 && device < device_count ? &devices[visible[device]] : NULL;
}

int emu_physical_count(void) {
    read_settings_once();
    return physical_count;
}

struct device *emu_physical_device(int number) {
    return number >= 0 && number < emu_physical_count() ? &devices[number] : NULL;
}

int emu_current_device(void) { return current_device; }

void emu_set_current_device(int device) {
    current_device = device;
    context_is_current = emu_device(device)->context;
}

bool emu_context_is_current(void) { return context_is_current; }

void emu_make_context(int device) {
    struct device *d = emu_device(device);
    if (device == current_device) context_is_current = true;
    if (d->context) return;
    pthread_mutex_lock(&emu_lock);
    if (!d->context) contexts_made++;
    d->context = true;
    pthread_mutex_unlock(&emu_lock);
}

void emu_uuid(const struct device *device, unsigned char uuid[16]) {
    static const unsigned char pattern[16] = {0xe3, 0x01, 0xa7, 0xed, 0x00, 0x00, 0x40, 0x00, 0x80};
    memcpy(uuid, pattern, 16);
    uuid[15] = (unsigned char)device->number;
}

void emu_uuid_text(const struct device *device, char *text, size_t size) {
    unsigned char id[16];
    emu_uuid(device, id);
    snprintf(text, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", id[0], id[1], id[2],
             id[3], id[4], id[5], id[6], id[7], id[8], id[9], id[10], id[11], id[12], id[13], id[14], id[15]);
}

void emu_pci_bus_id(const struct device *device, char *text, size_t size) {
    snprintf(text, size, "00000000:%02X:00.0", device->number + 1);
}

/* cudaDeviceAttr and CUdevice_attribute use the same numbers. What is not named is not there: 0. */
int emu_attribute(int attribute, int device) {
    switch (attribute) {
    case 1: return 1024;               /* MaxThreadsPerBlock */
    case 2: case 3: return 1024;       /* MaxBlockDimX, Y */
    case 4: return 64;                 /* MaxBlockDimZ */
    case 5: return 0x7fffffff;         /* MaxGridDimX */
    case 6: case 7: return 65535;      /* MaxGridDimY, Z */
    case 8: return 49152;              /* MaxSharedMemoryPerBlock */
    case 9: return 65536;              /* TotalConstantMemory */
    case 10: return 32;                /* WarpSize */
    case 12: return 65536;             /* MaxRegistersPerBlock */
    case 13: return 1410000;           /* ClockRate, kHz */
    case 16: return 108;               /* MultiProcessorCount */
    case 19: return 1;                 /* CanMapHostMemory */
    case 31: return 1;                 /* ConcurrentKernels */
    case 33: return emu_device(device)->number + 1; /* PciBusId */
    case 36: return 1215000;           /* MemoryClockRate, kHz */
    case 37: return 5120;              /* GlobalMemoryBusWidth */
    case 38: return 40 << 20;          /* L2CacheSize */
    case 39: return 2048;              /* MaxThreadsPerMultiProcessor */
    case 40: return 3;                 /* AsyncEngineCount */
    case 41: return 1;                 /* UnifiedAddressing */
    case 75: return 8;                 /* ComputeCapabilityMajor */
    case 76: return 0;                 /* ComputeCapabilityMinor */
    case 78: return 1;                 /* StreamPrioritiesSupported */
    case 81: return 167936;            /* MaxSharedMemoryPerMultiprocessor */
    case 82: return 65536;             /* MaxRegistersPerMultiprocessor */
    case 83: return 1;                 /* ManagedMemory */
    case 89: return 1;                 /* ConcurrentManagedAccess */
    case 91: return 1;                 /* CanUseHostPointerForRegisteredMem */
    case 95: return 1;                 /* CooperativeLaunch */
    case 97: return 166912;            /* MaxSharedMemoryPerBlockOptin */
    case 99: return 1;                 /* HostRegisterSupported */
    case 102: return 1;                /* VirtualMemoryManagementSupported: expandable segments */
    case 103: return 1;                /* HandleTypePosixFileDescriptorSupported */
    case 106: return 32;               /* MaxBlocksPerMultiprocessor */
    case 115: return 1;                /* MemoryPoolsSupported: cudaMallocAsync */
    default: return 0;
    }
}

size_t emu_used(const struct device *device) {
    return device->malloced + device->created + device->pooled + device->external;
}

bool emu_charge(struct device *device, size_t *figure, size_t bytes) {
    size_t used = emu_used(device);
    if (used > device->total || bytes > device->total - used) return false;
    *figure += bytes;
    return true;
}

/* ---- address ranges, sorted by where they start ---- */

static struct range *ranges;
static size_t range_count, range_room;

void *emu_map(size_t size, size_t alignment, bool accessible) {
    /* Private, so that a forked child (the oracle) has device memory of its own. */
    size_t room = size + alignment;
    char *start = mmap(NULL, room, accessible ? PROT_READ | PROT_WRITE : PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NULL;
    char *aligned = (char *)(((uintptr_t)start + alignment - 1) / alignment * alignment);
    size_t page = (size_t)sysconf(_SC_PAGESIZE), kept = (size + page - 1) / page * page;
    if (aligned > start) munmap(start, (size_t)(aligned - start));
    if (start + room > aligned + kept) munmap(aligned + kept, (size_t)(start + room - aligned - kept));
    return aligned;
}

void emu_unmap(void *start, size_t size) { munmap(start, size); }

/* The index of the last range that starts at or before the address, or -1. */
static ssize_t range_before(const void *address) {
    ssize_t low = 0, high = (ssize_t)range_count - 1;
    while (low <= high) {
        ssize_t middle = (low + high) / 2;
        if (ranges[middle].start <= (const char *)address)
            low = middle + 1;
        else
            high = middle - 1;
    }
    return high;
}

void emu_range_add(struct range range) {
    if (range_count == range_room) {
        range_room = range_room ? 2 * range_room : 256;
        ranges = realloc(ranges, range_room * sizeof *ranges);
        if (!ranges) abort();
    }
    ssize_t at = range_before(range.start) + 1;
    memmove(&ranges[at + 1], &ranges[at], (range_count - (size_t)at) * sizeof *ranges);
    ranges[at] = range;
    range_count++;
}

bool emu_range_find(const void *address, struct range *found) {
    ssize_t at = range_before(address);
    if (at < 0 || (const char *)address >= ranges[at].start + (ranges[at].size ? ranges[at].size : 1)) return false;
    *found = ranges[at];
    return true;
}

void emu_range_remove(const void *start_address) {
    ssize_t at = range_before(start_address);
    if (at < 0 || ranges[at].start != (const char *)start_address) return;
    range_count--;
    memmove(&ranges[at], &ranges[at + 1], (range_count - (size_t)at) * sizeof *ranges);
}

void emu_copy(void *to, const void *from, size_t size) {
    if (size) memmove(to, from, size);
}

/* Zeros are made by giving the pages back: torch.zeros of gigabytes must not cost gigabytes of this machine. */
void emu_fill(void *to, int value, size_t size) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t start = (uintptr_t)to, end = start + size;
    uintptr_t first = (start + page - 1) / page * page, last = end / page * page;
    struct range range;
    pthread_mutex_lock(&emu_lock);
    bool known = emu_range_find(to, &range);
    pthread_mutex_unlock(&emu_lock);
    if (value == 0 && known && range.kind != RANGE_REGISTERED && last > first &&
        madvise((void *)first, last - first, MADV_DONTNEED) == 0) {
        memset(to, 0, first - start);
        memset((void *)last, 0, end - last);
    } else if (size) {
        memset(to, value, size);
    }
}

/* ---- control: what tests call (control.py) ---- */

EXPORT int emu_external_malloc(int device, size_t bytes) {
    struct device *d = emu_device(device);
    if (!d) return EMU_BAD_DEVICE;
    pthread_mutex_lock(&emu_lock);
    bool fits = emu_charge(d, &d->external, bytes);
    pthread_mutex_unlock(&emu_lock);
    return fits ? EMU_SUCCESS : EMU_OUT_OF_MEMORY;
}

EXPORT int emu_external_free(int device, size_t bytes) {
    struct device *d = emu_device(device);
    if (!d) return EMU_BAD_DEVICE;
    pthread_mutex_lock(&emu_lock);
    bool held = bytes <= d->external;
    if (held) d->external -= bytes;
    pthread_mutex_unlock(&emu_lock);
    return held ? EMU_SUCCESS : EMU_INVALID;
}

/* What fills a device: 0 all, 1 cudaMalloc, 2 cuMemCreate, 3 memory pools, 4 external, 5 the total. */
EXPORT size_t emu_bytes(int device, int what) {
    struct device *d = emu_device(device);
    if (!d) return 0;
    pthread_mutex_lock(&emu_lock);
    size_t figures[] = {emu_used(d), d->malloced, d->created, d->pooled, d->external, d->total};
    pthread_mutex_unlock(&emu_lock);
    return what >= 0 && what < 6 ? figures[what] : 0;
}

EXPORT int emu_pause(const char *name, unsigned long nth, int milliseconds) {
    read_settings_once();
    pthread_mutex_lock(&emu_lock);
    int answer = add_rule(name, nth, milliseconds, 0);
    pthread_mutex_unlock(&emu_lock);
    return answer;
}

EXPORT int emu_fail(const char *name, unsigned long nth, int error) {
    read_settings_once();
    pthread_mutex_lock(&emu_lock);
    int answer = add_rule(name, nth, 0, error ? error : default_error(name));
    pthread_mutex_unlock(&emu_lock);
    return answer;
}

EXPORT void emu_forgive(void) {
    read_settings_once();
    pthread_mutex_lock(&emu_lock);
    rule_count = 0;
    pthread_mutex_unlock(&emu_lock);
}

static struct call *find_call(const char *name) {
    struct call *call = calls;
    while (call && strcmp(call->name, name) != 0) call = call->next;
    return call;
}

EXPORT unsigned long emu_count(const char *name) {
    pthread_mutex_lock(&emu_lock);
    struct call *call = find_call(name);
    unsigned long count = call ? call->count : 0;
    pthread_mutex_unlock(&emu_lock);
    return count;
}

EXPORT int emu_inside(const char *name) {
    pthread_mutex_lock(&emu_lock);
    struct call *call = find_call(name);
    int inside = call ? call->inside : 0;
    pthread_mutex_unlock(&emu_lock);
    return inside;
}

/* The name of the index-th function that was called so far, or NULL. */
EXPORT const char *emu_call_name(int index) {
    pthread_mutex_lock(&emu_lock);
    struct call *call = calls;
    while (call && index-- > 0) call = call->next;
    pthread_mutex_unlock(&emu_lock);
    return call ? call->name : NULL;
}

EXPORT int emu_has_context(int device) {
    struct device *d = emu_device(device);
    return d ? d->context : 0;
}

EXPORT unsigned long emu_contexts_made(void) { return contexts_made; }

/* fork without anyone's fork handlers: the child's CUDA goes on working on a copy of all memory. */
EXPORT pid_t emu_fork(void) { return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); }
