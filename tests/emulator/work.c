/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams, events and graph captures. Work is done when it is submitted (a kernel does nothing, a copy copies);
 * what a test controls is when it counts as complete. A stream that is held keeps a queue of marks: an event is
 * complete once the queue has moved past it, so a freed block waits for its event as on a GPU. */
#define _GNU_SOURCE
#include "emulator.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum item_kind { WORK, MARK, WAIT };

struct item {
    enum item_kind kind;
    struct event *event;
    unsigned long generation;
    struct item *next;
};

struct event {
    unsigned long recorded, done; /* generations: complete when equal */
    struct stream *stream;        /* where it was last recorded */
    unsigned long long capture;   /* the capture it was recorded in, or 0 */
    int references;               /* queue items that name it, and its handle */
    struct timespec at;
};

struct stream {
    int device, priority;
    unsigned flags;
    unsigned long long id;
    bool held;
    struct item *head, *tail;
    struct capture *capture;
    struct stream *next;
};

struct node {
    void *to;
    const void *from; /* NULL and size: a fill */
    int value;
    size_t size; /* 0: a kernel */
};

struct graph {
    int references;
    size_t count, room;
    struct node *nodes;
};

struct capture {
    unsigned long long id;
    int mode;
    bool invalid;
    pthread_t thread;
    struct stream *origin;
    struct graph *graph;
};

enum { CAPTURE_GLOBAL = 0, CAPTURE_THREAD_LOCAL = 1, CAPTURE_RELAXED = 2 };

static struct stream defaults[MAX_DEVICES];
static struct stream *streams; /* those created; the default ones are in defaults */
static struct capture *captures[MAX_CAPTURES];
static unsigned long long last_stream_id = 100, last_capture_id;
static bool hold_all, block_waits;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static __thread int capture_mode = CAPTURE_GLOBAL;

/* ---- the queue of a stream (all locked) ---- */

static bool held(const struct stream *stream) { return hold_all || stream->held; }

static void drop(struct event *event) {
    if (--event->references == 0) free(event);
}

static void push(struct stream *stream, enum item_kind kind, struct event *event, unsigned long generation) {
    if (kind == WORK && stream->tail && stream->tail->kind == WORK) return;
    struct item *item = calloc(1, sizeof *item);
    if (!item) abort();
    item->kind = kind;
    item->event = event;
    item->generation = generation;
    if (event) event->references++;
    if (stream->tail)
        stream->tail->next = item;
    else
        stream->head = item;
    stream->tail = item;
}

static void complete_event(struct event *event, unsigned long generation) {
    if (event->done >= generation) return;
    event->done = generation;
    clock_gettime(CLOCK_MONOTONIC, &event->at);
}

static void pop(struct stream *stream) {
    struct item *item = stream->head;
    stream->head = item->next;
    if (!stream->head) stream->tail = NULL;
    if (item->kind == MARK) complete_event(item->event, item->generation);
    if (item->event) drop(item->event);
    free(item);
}

static bool blocked(const struct stream *stream) {
    const struct item *item = stream->head;
    return item->kind == WAIT && item->event->done < item->generation;
}

static bool advance(struct stream *stream) {
    bool any = false;
    while (stream->head && !held(stream) && !blocked(stream)) {
        pop(stream);
        any = true;
    }
    return any;
}

static void advance_all(void) {
    for (bool any = true; any;) {
        any = false;
        for (int i = 0; i < MAX_DEVICES; i++) any |= advance(&defaults[i]);
        for (struct stream *stream = streams; stream; stream = stream->next) any |= advance(stream);
    }
    pthread_cond_broadcast(&moved);
}

/* Completes the stream's queue, held or not, up to the event's mark (all of it when there is none), and first
 * whatever it waits for on other streams. */
static void finish(struct stream *stream, const struct event *until, unsigned long generation) {
    while (stream->head && !(until && until->done >= generation)) {
        if (blocked(stream)) finish(stream->head->event->stream, stream->head->event, stream->head->generation);
        pop(stream);
    }
}

/* A call that waits for held work. By default the work then ends, as it always does on a GPU if one waits long
 * enough; with emu_hold(..., block) the caller sits until another thread releases. */
static void wait_for(struct stream *stream, const struct event *event, unsigned long generation) {
    if (block_waits) {
        while (event ? event->done < generation : stream->head != NULL) pthread_cond_wait(&moved, &emu_lock);
        return;
    }
    finish(stream, event, generation);
    advance_all();
}

/* ---- streams ---- */

struct stream *emu_stream(void *handle) {
    if ((uintptr_t)handle > 2) return handle;
    struct stream *stream = &defaults[emu_current_device()];
    stream->device = emu_current_device();
    return stream;
}

struct stream *emu_stream_create(int device, int priority, unsigned flags) {
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream) return NULL;
    stream->device = device;
    stream->priority = priority;
    stream->flags = flags;
    pthread_mutex_lock(&emu_lock);
    stream->id = ++last_stream_id;
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&emu_lock);
    return stream;
}

void emu_stream_destroy(struct stream *stream) {
    pthread_mutex_lock(&emu_lock);
    finish(stream, NULL, 0);
    struct stream **link = &streams;
    while (*link && *link != stream) link = &(*link)->next;
    if (*link) *link = stream->next;
    advance_all();
    pthread_mutex_unlock(&emu_lock);
    free(stream);
}

int emu_stream_device(struct stream *stream) { return stream->device; }
int emu_stream_priority(struct stream *stream) { return stream->priority; }
unsigned emu_stream_flags(struct stream *stream) { return stream->flags; }
unsigned long long emu_stream_id(struct stream *stream) {
    return stream->id ? stream->id : (unsigned long long)stream->device + 1;
}

bool emu_stream_idle(struct stream *stream) {
    pthread_mutex_lock(&emu_lock);
    bool idle = stream->head == NULL;
    pthread_mutex_unlock(&emu_lock);
    return idle;
}

static int stream_synchronize(struct stream *stream) {
    if (stream->capture) {
        stream->capture->invalid = true;
        return EMU_CAPTURE_UNSUPPORTED;
    }
    if (stream->head) wait_for(stream, NULL, 0);
    return EMU_SUCCESS;
}

int emu_stream_synchronize(struct stream *stream) {
    pthread_mutex_lock(&emu_lock);
    int error = stream_synchronize(stream);
    pthread_mutex_unlock(&emu_lock);
    return error;
}

int emu_device_synchronize(int device) {
    pthread_mutex_lock(&emu_lock);
    int error = stream_synchronize(&defaults[device]);
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->device == device && !error) error = stream_synchronize(stream);
    pthread_mutex_unlock(&emu_lock);
    return error;
}

/* ---- submitting ---- */

static int record_node(struct stream *stream, struct node node) {
    struct capture *capture = stream->capture;
    if (capture->invalid) return EMU_CAPTURE_INVALIDATED;
    struct graph *graph = capture->graph;
    if (graph->count == graph->room) {
        graph->room = graph->room ? 2 * graph->room : 64;
        graph->nodes = realloc(graph->nodes, graph->room * sizeof *graph->nodes);
        if (!graph->nodes) abort();
    }
    graph->nodes[graph->count++] = node;
    return EMU_SUCCESS;
}

/* Returns an error, or -1 when the node was recorded into a graph and must not be done now. */
static int submit(struct stream *stream, struct node node) {
    int error = EMU_SUCCESS;
    pthread_mutex_lock(&emu_lock);
    if (stream->capture) {
        error = record_node(stream, node);
        if (!error) error = -1;
    } else if (stream->head || held(stream)) {
        push(stream, WORK, NULL, 0);
    }
    pthread_mutex_unlock(&emu_lock);
    return error;
}

int emu_submit(struct stream *stream) {
    int error = submit(stream, (struct node){0});
    return error < 0 ? EMU_SUCCESS : error;
}

int emu_submit_copy(struct stream *stream, void *to, const void *from, size_t size) {
    int error = submit(stream, (struct node){to, from, 0, size});
    if (error) return error < 0 ? EMU_SUCCESS : error;
    emu_copy(to, from, size);
    return EMU_SUCCESS;
}

int emu_submit_fill(struct stream *stream, void *to, int value, size_t size) {
    int error = submit(stream, (struct node){to, NULL, value, size});
    if (error) return error < 0 ? EMU_SUCCESS : error;
    emu_fill(to, value, size);
    return EMU_SUCCESS;
}

/* ---- events ---- */

struct event *emu_event_create(void) {
    struct event *event = calloc(1, sizeof *event);
    if (event) event->references = 1;
    return event;
}

void emu_event_destroy(struct event *event) {
    pthread_mutex_lock(&emu_lock);
    drop(event);
    pthread_mutex_unlock(&emu_lock);
}

static struct capture *active_capture(unsigned long long id) {
    for (int i = 0; i < MAX_CAPTURES; i++)
        if (id && captures[i] && captures[i]->id == id) return captures[i];
    return NULL;
}

int emu_event_record(struct event *event, struct stream *stream) {
    pthread_mutex_lock(&emu_lock);
    event->stream = stream;
    if (stream->capture) {
        event->capture = stream->capture->id;
    } else {
        event->capture = 0;
        event->recorded++;
        if (stream->head || held(stream))
            push(stream, MARK, event, event->recorded);
        else
            complete_event(event, event->recorded);
    }
    pthread_mutex_unlock(&emu_lock);
    return EMU_SUCCESS;
}

int emu_event_query(struct event *event) {
    int error = emu_capture_forbids();
    if (error) return error;
    pthread_mutex_lock(&emu_lock);
    if (active_capture(event->capture))
        error = EMU_CAPTURED_EVENT;
    else if (event->done < event->recorded)
        error = EMU_NOT_READY;
    pthread_mutex_unlock(&emu_lock);
    return error;
}

int emu_event_synchronize(struct event *event) {
    int error = EMU_SUCCESS;
    pthread_mutex_lock(&emu_lock);
    struct capture *capture = active_capture(event->capture);
    if (capture) {
        capture->invalid = true;
        error = EMU_CAPTURED_EVENT;
    } else if (event->done < event->recorded) {
        event->references++; /* its owner may destroy it while this thread waits */
        wait_for(event->stream, event, event->recorded);
        drop(event);
    }
    pthread_mutex_unlock(&emu_lock);
    return error;
}

int emu_event_elapsed(float *milliseconds, struct event *from, struct event *to) {
    pthread_mutex_lock(&emu_lock);
    bool recorded = from->recorded && to->recorded;
    bool done = from->done == from->recorded && to->done == to->recorded;
    *milliseconds = (float)((double)(to->at.tv_sec - from->at.tv_sec) * 1e3 +
                            (double)(to->at.tv_nsec - from->at.tv_nsec) / 1e6);
    pthread_mutex_unlock(&emu_lock);
    return !recorded ? EMU_BAD_HANDLE : done ? EMU_SUCCESS : EMU_NOT_READY;
}

int emu_stream_wait(struct stream *stream, struct event *event) {
    pthread_mutex_lock(&emu_lock);
    struct capture *capture = active_capture(event->capture);
    if (capture)
        stream->capture = capture; /* the capture spreads to every stream that waits for a captured event */
    else if (event->done < event->recorded)
        push(stream, WAIT, event, event->recorded);
    pthread_mutex_unlock(&emu_lock);
    return EMU_SUCCESS;
}

/* ---- graphs ---- */

struct graph *emu_graph_create(void) {
    struct graph *graph = calloc(1, sizeof *graph);
    if (graph) graph->references = 1;
    return graph;
}

struct graph *emu_graph_retain(struct graph *graph) {
    pthread_mutex_lock(&emu_lock);
    graph->references++;
    pthread_mutex_unlock(&emu_lock);
    return graph;
}

void emu_graph_release(struct graph *graph) {
    pthread_mutex_lock(&emu_lock);
    bool last = --graph->references == 0;
    pthread_mutex_unlock(&emu_lock);
    if (!last) return;
    free(graph->nodes);
    free(graph);
}

size_t emu_graph_nodes(struct graph *graph) { return graph->count; }

int emu_graph_launch(struct graph *graph, struct stream *stream) {
    for (size_t i = 0; i < graph->count; i++) {
        struct node *node = &graph->nodes[i];
        if (node->size && node->from)
            emu_copy(node->to, node->from, node->size);
        else if (node->size)
            emu_fill(node->to, node->value, node->size);
    }
    return emu_submit(stream);
}

/* ---- captures ---- */

int emu_capture_begin(struct stream *stream, int mode, struct graph *into) {
    int error = EMU_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&emu_lock);
    for (int i = 0; i < MAX_CAPTURES && !stream->capture; i++) {
        if (captures[i]) continue;
        struct capture *capture = calloc(1, sizeof *capture);
        capture->id = ++last_capture_id;
        capture->mode = mode;
        capture->thread = pthread_self();
        capture->origin = stream;
        if (into) into->references++;
        capture->graph = into ? into : emu_graph_create();
        captures[i] = stream->capture = capture;
        error = EMU_SUCCESS;
    }
    pthread_mutex_unlock(&emu_lock);
    return error;
}

static void leave(struct stream *stream, const struct capture *capture) {
    if (stream->capture == capture) stream->capture = NULL;
}

int emu_capture_end(struct stream *stream, struct graph **graph) {
    int error = EMU_SUCCESS;
    pthread_mutex_lock(&emu_lock);
    struct capture *capture = stream->capture;
    struct graph *discarded = NULL;
    *graph = NULL;
    if (!capture) {
        error = EMU_INVALID;
    } else {
        for (int i = 0; i < MAX_DEVICES; i++) leave(&defaults[i], capture);
        for (struct stream *other = streams; other; other = other->next) leave(other, capture);
        for (int i = 0; i < MAX_CAPTURES; i++)
            if (captures[i] == capture) captures[i] = NULL;
        if (capture->invalid) {
            error = EMU_CAPTURE_INVALIDATED;
            discarded = capture->graph;
        } else {
            *graph = capture->graph;
        }
        free(capture);
    }
    pthread_mutex_unlock(&emu_lock);
    if (discarded) emu_graph_release(discarded);
    return error;
}

int emu_capture_state(struct stream *stream, unsigned long long *id, struct graph **graph) {
    pthread_mutex_lock(&emu_lock);
    struct capture *capture = stream->capture;
    int state = !capture ? 0 : capture->invalid ? 2 : 1;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture ? capture->graph : NULL;
    pthread_mutex_unlock(&emu_lock);
    return state;
}

int emu_capture_exchange_mode(int mode) {
    int before = capture_mode;
    capture_mode = mode;
    return before;
}

int emu_capture_forbids(void) {
    int error = EMU_SUCCESS;
    if (capture_mode == CAPTURE_RELAXED) return error;
    pthread_mutex_lock(&emu_lock);
    for (int i = 0; i < MAX_CAPTURES; i++) {
        struct capture *capture = captures[i];
        if (!capture || capture->mode == CAPTURE_RELAXED) continue;
        /* A global capture is hurt by any thread that has not relaxed, a thread-local one by its own only. */
        bool own = pthread_equal(capture->thread, pthread_self()) != 0;
        if (own || (capture->mode == CAPTURE_GLOBAL && capture_mode == CAPTURE_GLOBAL)) {
            capture->invalid = true;
            error = EMU_CAPTURE_UNSUPPORTED;
        }
    }
    pthread_mutex_unlock(&emu_lock);
    return error;
}

/* ---- control: what tests call (control.py) ---- */

/* Which stream a number from Python names: 0 on a device is that device's default stream. */
static struct stream *named(int device, unsigned long long handle) {
    if (handle > 2) return (struct stream *)(uintptr_t)handle;
    defaults[device].device = device;
    return &defaults[device];
}

EXPORT void emu_hold_all(bool hold, bool block) {
    pthread_mutex_lock(&emu_lock);
    hold_all = hold;
    block_waits = hold && block;
    if (!hold) {
        for (int i = 0; i < MAX_DEVICES; i++) defaults[i].held = false;
        for (struct stream *stream = streams; stream; stream = stream->next) stream->held = false;
    }
    advance_all();
    pthread_mutex_unlock(&emu_lock);
}

EXPORT void emu_hold(int device, unsigned long long handle, bool hold, bool block) {
    pthread_mutex_lock(&emu_lock);
    named(device, handle)->held = hold;
    if (hold) block_waits = block;
    advance_all();
    pthread_mutex_unlock(&emu_lock);
}

/* Completes what is queued now; what is held stays held for what comes after. */
EXPORT void emu_complete_all(void) {
    pthread_mutex_lock(&emu_lock);
    for (int i = 0; i < MAX_DEVICES; i++) finish(&defaults[i], NULL, 0);
    for (struct stream *stream = streams; stream; stream = stream->next) finish(stream, NULL, 0);
    advance_all();
    pthread_mutex_unlock(&emu_lock);
}

EXPORT void emu_complete(int device, unsigned long long handle) {
    pthread_mutex_lock(&emu_lock);
    finish(named(device, handle), NULL, 0);
    advance_all();
    pthread_mutex_unlock(&emu_lock);
}
