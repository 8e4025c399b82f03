/* What the parts of fuzz_core share: the operations, and the checks after them. */
#pragma once

#include "core_world.h"

/* PYA_FUZZ_VERBOSE=1 prints what an input does. */
extern bool is_verbose;

#define SAY(...) (is_verbose ? (void)fprintf(stderr, __VA_ARGS__) : (void)0)

/* ---- core_model.c ---- */

bool is_capturing(const struct world *world, int device);
bool stream_is_capturing(const struct world *world, int device, pya_stream stream);
/* Is there a reason for this status? */
void require_status(struct world *world, int device, pya_status st);
/* is_whole: every structure too, which takes as long as hundreds of operations. */
void check_all(struct world *world, bool is_whole);
/* A block was allocated. */
void live_add(struct world *world, struct live live);
/* Queues work that touches the block.  On another stream it first waits for the block's own stream, which is one of the
 * memory's device, as a program does with an event.  Captured work runs later. */
void live_use(struct world *world, struct live *live, pya_stream stream);
/* The stream is one of that device from now on. */
void stream_move(struct world *world, int device, pya_stream stream, int context);
/* A device was waited for: its streams have finished with the memory of others. */
void streams_finish_abroad(struct world *world, int device);
/* Contexts, as the heap's hooks make them, counted. */
void *context_capture(void *arg, bool with_stack);
void context_retain(void *arg, void *context);
void context_release(void *arg, void *context);
void *context_of_free(void *arg, void *here, void *allocation);
uint64_t context_key(void *arg, void *context);
bool context_describe(void *arg, void *context, char *text, size_t text_bytes);

/* ---- core_settings.c ---- */

/* What the first bytes of an input choose: options, devices, a layout. */
void settings_take(struct world *world);
/* The input runs twice: the second time with a plan of what it requested the first time. */
bool settings_want_plan(const uint8_t *data, size_t n);
void plan_note(struct world *world, struct live *live);
void plan_note_free(struct world *world, const struct live *live);
/* The places, and how far the program has drifted from them since. */
void plan_finish(struct plan *plan, const uint8_t *data);

/* ---- fuzz_core.c ---- */

/* Where the call in progress holds no lock, because it waits for the device or for a pool's own allocator, other threads
 * go on. */
void world_meanwhile(struct world *world);

/* ---- core_forks.c ---- */

/* Forks a child, which may look at the heap and give it up. */
void op_fork(struct world *world);
/* The same from within a call. */
void world_fork(struct world *world);

/* ---- core_graphs.c ---- */

/* A block was handed out. */
void kernels_add(struct world *world, const struct live *live);
/* The pool has no users, or lends its memory. */
void kernels_forget(struct world *world, int device, struct pya_pool_id id);
void kernels_check(const struct world *world);

/* ---- core_pools.c ---- */

struct pya_pool_id pool_id(int i);
void pool_end(struct world *world, int device, int i);
void pool_release(struct world *world, int device, int i);
void op_pool(struct world *world);
extern struct world *filter_world; /* whose filters are dropped */

/* ---- core_calls.c ---- */

void import_close(struct world *world, size_t i);
/* Captures begun by hand. */
void captures_end(struct world *world, int device);
void op_rare(struct world *world);

/* ---- core_ops.c: each operation takes what it needs from the input ---- */

/* Mostly a few sizes, as in real programs, so that exact fits and cached ranges occur; sometimes any size. */
size_t size_of(struct fuzz_input *in);
void alloc_on(struct world *world, int device, pya_stream stream, size_t bytes, bool uses);
void free_live(struct world *world, size_t i);
void op_alloc(struct world *world);
void op_free(struct world *world);
void op_record(struct world *world);
void op_bad_free(struct world *world);
void op_finish(struct world *world);
void op_give_back(struct world *world);
void op_limit(struct world *world);
void op_fault(struct world *world);
void op_history(struct world *world);
void op_snapshot(struct world *world);
void op_query(struct world *world);
void op_steer(struct world *world);
void op_check(struct world *world);
