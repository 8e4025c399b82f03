#pragma once
/* What every entry point does first: count itself, refuse to run in a forked child, fail if a test asked
 * for it.  Floor 1 (uses abi.h). */

#include "abi.h"

#include <stdatomic.h>
#include <stdbool.h>

/* One per entry point, static in it; linked into a global list by its first call. */
struct pya_hc_call {
    const char *name;
    _Atomic uint64_t n_calls;
    _Atomic uint64_t n_ticks; /* spent inside; only of timed entry points */
    atomic_bool listed;
    struct pya_hc_call *next; /* written once, before the record is published */
};

/* For entry points that create no context and cannot be made to fail. */
int pya_hc_enter_quiet(struct pya_hc_call *call);
/* Returns 0, or the error the entry point must return at once. */
int pya_hc_enter(struct pya_hc_call *call);
/* The same for a driver entry point that works in the thread's current context and fails without one; only the runtime
 * chooses a device by itself. */
int pya_hc_enter_context(struct pya_hc_call *call);
/* The same, but needs a context only if the stream is a default one, which belongs to the current context. */
int pya_hc_enter_stream(struct pya_hc_call *call, const void *stream);

uint64_t pya_hc_clock_ns(void);

/* The unit of time measurements: the processor's own counter, if reading it costs half of what a clock does. */
static inline uint64_t
pya_hc_ticks(void) {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    return pya_hc_clock_ns();
#endif
}

/* Measures from its declaration to the end of the entry point, however that is left. */
struct pya_hc_timer {
    struct pya_hc_call *call;
    uint64_t began;
};

static inline void
pya_hc_timer_stop(const struct pya_hc_timer *timer) {
    atomic_fetch_add_explicit(
        &timer->call->n_ticks, pya_hc_ticks() - timer->began, memory_order_relaxed);
}

/* Driver entry points return errors; runtime ones also remember them for cudaGetLastError.  The timed ones are those with
 * which an allocator gets, maps, returns or waits for memory, or asks whether it may, so that a benchmark can tell their
 * time from the allocator's own.  The others are not timed: some are called with every allocation, and reading the clock
 * costs more than they do. */
#define HC_CALL() static struct pya_hc_call hc_call_ = {.name = __func__}
#define HC_TIMER()                                                                                 \
    HC_CALL();                                                                                     \
    __attribute__((cleanup(pya_hc_timer_stop))) struct pya_hc_timer hc_timer_ = {                  \
        &hc_call_, pya_hc_ticks()};                                                                \
    (void)hc_timer_
#define HC_ENTER_BY(enter, ...)                                                                    \
    int hc_entered_ = enter(__VA_ARGS__);                                                          \
    if (hc_entered_ != CU_OK) {                                                                    \
        return hc_entered_;                                                                        \
    }
#define HC_ENTER_DRIVER() HC_ENTER_BY(pya_hc_enter, &hc_call_)
#define HC_ENTER_RUNTIME()                                                                         \
    int hc_entered_ = pya_hc_enter(&hc_call_);                                                     \
    if (hc_entered_ != CU_OK) {                                                                    \
        return pya_hc_runtime(hc_entered_);                                                        \
    }
#define HC_DRIVER()                                                                                \
    HC_CALL();                                                                                     \
    HC_ENTER_DRIVER()
#define HC_RUNTIME()                                                                               \
    HC_CALL();                                                                                     \
    HC_ENTER_RUNTIME()
#define HC_DRIVER_TIMED()                                                                          \
    HC_TIMER();                                                                                    \
    HC_ENTER_DRIVER()
#define HC_CONTEXT()                                                                               \
    HC_CALL();                                                                                     \
    HC_ENTER_BY(pya_hc_enter_context, &hc_call_)
#define HC_CONTEXT_TIMED()                                                                         \
    HC_TIMER();                                                                                    \
    HC_ENTER_BY(pya_hc_enter_context, &hc_call_)
#define HC_STREAM(stream)                                                                          \
    HC_CALL();                                                                                     \
    HC_ENTER_BY(pya_hc_enter_stream, &hc_call_, stream)
#define HC_STREAM_TIMED(stream)                                                                    \
    HC_TIMER();                                                                                    \
    HC_ENTER_BY(pya_hc_enter_stream, &hc_call_, stream)
#define HC_RUNTIME_TIMED()                                                                         \
    HC_TIMER();                                                                                    \
    HC_ENTER_RUNTIME()
#define HC_QUIET()                                                                                 \
    HC_CALL();                                                                                     \
    (void)pya_hc_enter_quiet(&hc_call_)

/* Remembers an error as the thread's last one and returns it. */
int pya_hc_runtime(int error);
int pya_hc_last_error(bool clear);

/* Reports once per name that the runtime has no such entry point; returns CU_NOT_SUPPORTED. */
int pya_hc_unknown(struct pya_hc_call *call, const char *library);

#define PYA_HC_FAIL_EVERY UINT64_MAX
/* Makes the n-th call from now (1 is the next) return `error`, or every call (PYA_HC_FAIL_EVERY).  Only calls of `name` count,
 * unless it is NULL.  n = 0 switches it off.  The name is copied. */
void pya_hc_fail_nth(uint64_t n, const char *name, int error);
/* Parses "n", "n:name" or "n:name:code", where n may be "every"; false if malformed. */
bool pya_hc_fail_parse(const char *text);

uint64_t pya_hc_calls_total(void);
uint64_t pya_hc_calls_of(const char *name);
/* Nanoseconds inside the timed entry points of that name (NULL: all), including the timer's own cost. */
uint64_t pya_hc_calls_ns(const char *name);
void pya_hc_calls_reset(void);
/* Calls fn for every entry point that was called, in no particular order. */
void pya_hc_calls_each(void (*fn)(const char *name, uint64_t n, void *data), void *data);

const char *pya_hc_error_name(int error);
const char *pya_hc_error_text(int error);
/* The driver's name and text; false and NULL for a number that it does not know. */
bool pya_hc_driver_error(int error, const char **name, const char **text);
