/* SPDX-License-Identifier: Apache-2.0
 *
 * What the parts of the emulation share. The preloaded library (state.c, work.c, runtime.c) owns all state;
 * the stubs of libcuda.so.1 (driver.c) and libnvidia-ml.so.1 (nvml.c) link against it and keep none. */
#ifndef EMULATOR_H
#define EMULATOR_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 16
#define MAX_CAPTURES 16
#define MiB ((size_t)1 << 20)

/* The stubs link against what is declared here; all names begin with emu_. */
#pragma GCC visibility push(default)

/* Error numbers that the runtime, the driver and (but for its own few) this emulation have in common. */
enum {
    EMU_SUCCESS = 0,
    EMU_INVALID = 1,
    EMU_OUT_OF_MEMORY = 2,
    EMU_NOT_INITIALIZED = 3,
    EMU_NO_DEVICE = 100,
    EMU_BAD_DEVICE = 101,
    EMU_BAD_HANDLE = 400,
    EMU_NOT_READY = 600,
    EMU_NOT_SUPPORTED = 801,
    EMU_CAPTURE_UNSUPPORTED = 900,
    EMU_CAPTURE_INVALIDATED = 901,
    EMU_CAPTURED_EVENT = 907,
    EMU_UNKNOWN = 999,
};

/* ---- devices, contexts, calls (state.c) ---- */

/* Everything below that says "locked" is called with this mutex held. It is never held during a pause. */
extern pthread_mutex_t emu_lock;

struct device {
    size_t total;      /* bytes */
    size_t malloced;   /* cudaMalloc, cudaMallocManaged */
    size_t created;    /* cuMemCreate */
    size_t pooled;     /* reserved by stream-ordered memory pools */
    size_t external;   /* other processes and libraries, by emu_external_malloc */
    int number;        /* its place in the machine, before CUDA_VISIBLE_DEVICES */
    bool context;      /* the primary context exists */
};

struct call {
    const char *name;
    unsigned long count;
    int inside; /* threads that sit in a pause injected into this call */
    struct call *next;
};

enum { BARE, IN_CONTEXT };

/* Counts a call, waits or fails as told, and makes the current device's primary context if the real call
 * would (IN_CONTEXT). Returns 0 or the error that the call has to return. */
int emu_enter(struct call **cache, const char *name, int kind);
int emu_device_count(void);            /* those that CUDA_VISIBLE_DEVICES shows */
struct device *emu_device(int device); /* NULL when there is no such device */
int emu_physical_count(void);
struct device *emu_physical_device(int number); /* as NVML counts: all of the machine */
int emu_current_device(void);
void emu_set_current_device(int device);
bool emu_context_is_current(void);
void emu_make_context(int device);
void emu_uuid(const struct device *device, unsigned char uuid[16]);
void emu_uuid_text(const struct device *device, char *text, size_t size);
void emu_pci_bus_id(const struct device *device, char *text, size_t size);
int emu_attribute(int attribute, int device);
size_t emu_used(const struct device *device); /* locked */
/* Locked. Adds the bytes to one of the device's figures, or returns false when it is full. */
bool emu_charge(struct device *device, size_t *figure, size_t bytes);

/* ---- address ranges (state.c) ---- */

enum range_kind { RANGE_DEVICE, RANGE_HOST, RANGE_REGISTERED, RANGE_MANAGED, RANGE_POOL, RANGE_RESERVED };

struct range {
    char *start;
    size_t size;   /* as asked */
    size_t charge; /* counted against the device */
    int device;
    enum range_kind kind;
    void *owner; /* the pool of a RANGE_POOL */
};

void *emu_map(size_t size, size_t alignment, bool accessible);
void emu_unmap(void *start, size_t size);
void emu_range_add(struct range range);                       /* locked */
bool emu_range_find(const void *address, struct range *found); /* locked */
void emu_range_remove(const void *start);                     /* locked */
void emu_copy(void *to, const void *from, size_t size);
void emu_fill(void *to, int value, size_t size);

/* ---- streams, events, captures (work.c) ---- */

struct event;
struct stream;
struct capture;
struct graph;

struct stream *emu_stream(void *handle); /* the handles 0, 1 and 2 are the current device's default stream */
struct stream *emu_stream_create(int device, int priority, unsigned flags);
void emu_stream_destroy(struct stream *stream);
int emu_stream_device(struct stream *stream);
int emu_stream_priority(struct stream *stream);
unsigned emu_stream_flags(struct stream *stream);
unsigned long long emu_stream_id(struct stream *stream);
bool emu_stream_idle(struct stream *stream);
int emu_stream_synchronize(struct stream *stream);
int emu_device_synchronize(int device);
int emu_stream_wait(struct stream *stream, struct event *event);
int emu_submit(struct stream *stream); /* a kernel */
int emu_submit_copy(struct stream *stream, void *to, const void *from, size_t size);
int emu_submit_fill(struct stream *stream, void *to, int value, size_t size);

struct event *emu_event_create(void);
void emu_event_destroy(struct event *event);
int emu_event_record(struct event *event, struct stream *stream);
int emu_event_query(struct event *event);
int emu_event_synchronize(struct event *event);
int emu_event_elapsed(float *milliseconds, struct event *from, struct event *to);

int emu_capture_begin(struct stream *stream, int mode, struct graph *into);
int emu_capture_end(struct stream *stream, struct graph **graph);
/* 0 none, 1 active, 2 invalidated: cudaStreamCaptureStatus */
int emu_capture_state(struct stream *stream, unsigned long long *id, struct graph **graph);
int emu_capture_exchange_mode(int mode);
/* A call that must not be made while a capture is under way invalidates it. Returns 0 or the error. */
int emu_capture_forbids(void);

struct graph *emu_graph_create(void);
struct graph *emu_graph_retain(struct graph *graph);
void emu_graph_release(struct graph *graph);
size_t emu_graph_nodes(struct graph *graph);
int emu_graph_launch(struct graph *graph, struct stream *stream);

#pragma GCC visibility pop

#endif
