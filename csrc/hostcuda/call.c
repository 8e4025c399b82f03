/* Counting, injected failures and last errors.
 *
 * Counters are lock-free.  The settings of an injected failure have their own mutex; no other lock is taken
 * while it is held. */

#define _GNU_SOURCE
#include "call.h"

#include "state.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static _Atomic(struct pya_hc_call *) calls_head;

static pthread_mutex_t fail_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t fail_left; /* calls left until the failure; 0: none requested */
static char fail_name[96];         /* "" matches every call */
static int fail_error;

static _Thread_local int last_error;

/* A tick's length is known well after TICK_KNOWN_NS.  The rest: numbers of tries and rounds of the measurements below. */
enum { TICK_KNOWN_NS = 10 * 1000 * 1000, MOMENT_TRIES = 8, TIMER_TRIES = 16, TIMER_ROUNDS = 256 };

static void
call_count(struct pya_hc_call *call) {
    /* Some calls come with every allocation; they pay for a single locked instruction. */
    bool is_first = !atomic_load_explicit(&call->listed, memory_order_acquire) &&
                    !atomic_exchange(&call->listed, true);
    if (is_first) {
        struct pya_hc_call *head = atomic_load(&calls_head);
        do {
            call->next = head;
        } while (!atomic_compare_exchange_weak(&calls_head, &head, call));
    }
    atomic_fetch_add_explicit(&call->n_calls, 1, memory_order_relaxed);
}

static int
call_injected_error(const char *name) {
    if (atomic_load_explicit(&fail_left, memory_order_relaxed) == 0) {
        return CU_OK;
    }
    int error = CU_OK;
    pthread_mutex_lock(&fail_lock);
    uint64_t left = atomic_load(&fail_left);
    if (left > 0 && (fail_name[0] == '\0' || strcmp(fail_name, name) == 0)) {
        bool is_every = left == PYA_HC_FAIL_EVERY;
        atomic_store(&fail_left, is_every ? left : left - 1);
        if (left == 1 || is_every) {
            error = fail_error;
        }
    }
    pthread_mutex_unlock(&fail_lock);
    return error;
}

int
pya_hc_enter_quiet(struct pya_hc_call *call) {
    call_count(call);
    return CU_OK;
}

int
pya_hc_enter(struct pya_hc_call *call) {
    call_count(call);
    int error = pya_hc_state_use();
    if (error != CU_OK) {
        return error;
    }
    return call_injected_error(call->name);
}

int
pya_hc_enter_context(struct pya_hc_call *call) {
    int error = pya_hc_enter(call);
    return error == CU_OK && pya_hc_current() < 0 ? CU_INVALID_CONTEXT : error;
}

int
pya_hc_enter_stream(struct pya_hc_call *call, const void *stream) {
    bool is_default = (uintptr_t)stream <= 2;
    return is_default ? pya_hc_enter_context(call) : pya_hc_enter(call);
}

int
pya_hc_runtime(int error) {
    if (error != CU_OK) {
        last_error = error;
    }
    return error;
}

int
pya_hc_last_error(bool clear) {
    int error = last_error;
    if (clear) {
        last_error = CU_OK;
    }
    return error;
}

int
pya_hc_unknown(struct pya_hc_call *call, const char *library) {
    bool first = !atomic_load(&call->listed);
    call_count(call);
    if (first) {
        (void)fprintf(
            stderr,
            "pyalloc hostcuda: %s (%s) is not provided by the host-memory CUDA runtime; "
            "it returns \"not supported\"\n",
            call->name, library);
    }
    return CU_NOT_SUPPORTED;
}

void
pya_hc_fail_nth(uint64_t n, const char *name, int error) {
    pthread_mutex_lock(&fail_lock);
    (void)snprintf(fail_name, sizeof fail_name, "%s", name == NULL ? "" : name);
    fail_error = error;
    atomic_store(&fail_left, n);
    pthread_mutex_unlock(&fail_lock);
}

/* The error number after the name; CU_OUT_OF_MEMORY if there is none; 0 if malformed. */
static int
fail_parse_error(const char *rest) {
    if (*rest == '\0') {
        return CU_OUT_OF_MEMORY;
    }
    char *end = NULL;
    long error = strtol(rest + 1, &end, 10);
    bool is_good = end != rest + 1 && *end == '\0' && error > 0 && error <= CU_UNKNOWN;
    return is_good ? (int)error : 0;
}

bool
pya_hc_fail_parse(const char *text) {
    const char *end = text + strcspn(text, ":");
    char *read = NULL;
    unsigned long long n = strtoull(text, &read, 10);
    if (end - text == 5 && memcmp(text, "every", 5) == 0) {
        n = PYA_HC_FAIL_EVERY;
    } else if (read == text || read != end) {
        return false;
    }
    const char *start = end + (*end == ':');
    size_t length = strcspn(start, ":");
    int error = fail_parse_error(start + length);
    char name[sizeof fail_name] = "";
    if (length >= sizeof name || error == 0) {
        return false;
    }
    memcpy(name, start, length);
    pya_hc_fail_nth(n, name, error);
    return true;
}

uint64_t
pya_hc_calls_total(void) {
    uint64_t n = 0;
    for (struct pya_hc_call *c = atomic_load(&calls_head); c != NULL; c = c->next) {
        n += atomic_load(&c->n_calls);
    }
    return n;
}

uint64_t
pya_hc_calls_of(const char *name) {
    uint64_t n = 0;
    for (struct pya_hc_call *c = atomic_load(&calls_head); c != NULL; c = c->next) {
        /* A name may be defined in two libraries (a runtime of each CUDA major). */
        if (strcmp(c->name, name) == 0) {
            n += atomic_load(&c->n_calls);
        }
    }
    return n;
}

uint64_t
pya_hc_clock_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

struct moment {
    uint64_t ticks;
    uint64_t ns;
};

/* Reads ticks and clock at the same moment.  Keeps the fastest of several tries, because a thread may lose its processor
 * between the two for longer than everything we measure. */
static struct moment
call_moment(void) {
    struct moment best = {0};
    uint64_t least = UINT64_MAX;
    for (int try = 0; try < MOMENT_TRIES; try++) {
        uint64_t began = pya_hc_ticks();
        uint64_t ns = pya_hc_clock_ns();
        uint64_t took = pya_hc_ticks() - began;
        if (took < least) {
            least = took;
            best = (struct moment){began + took / 2, ns};
        }
    }
    return best;
}

/* When the library was loaded: a tick's length is derived from the time since then. */
static struct moment loaded;

__attribute__((constructor)) static void
call_at_load(void) {
    loaded = call_moment();
}

/* Cached once it is known well, so that the same count gives the same time in later queries. */
static double
call_tick_ns(void) {
    static _Atomic double known;
    double tick_ns = atomic_load(&known);
    if (tick_ns > 0) {
        return tick_ns;
    }
    struct moment now = call_moment();
    uint64_t ns = now.ns - loaded.ns;
    uint64_t ticks = now.ticks - loaded.ticks;
    tick_ns = ticks > 0 ? (double)ns / (double)ticks : 0;
    if (ns >= TICK_KNOWN_NS) {
        atomic_store(&known, tick_ns);
    }
    return tick_ns;
}

/* The ticks that a timer costs outside of what it counts: most of reading the clock twice and of adding up, which is not the
 * caller's time either.  The least of several tries with warm caches, so rather too little. */
static double
call_timer_ticks(void) {
    static _Atomic double known;
    double least = atomic_load(&known);
    if (least > 0) {
        return least;
    }
    for (int try = 0; try < TIMER_TRIES; try++) {
        struct pya_hc_call call = {.name = ""};
        uint64_t began = pya_hc_ticks();
        for (int i = 0; i < TIMER_ROUNDS; i++) {
            struct pya_hc_timer timer = {&call, pya_hc_ticks()};
            pya_hc_timer_stop(&timer);
        }
        double ticks =
            (double)(pya_hc_ticks() - began - atomic_load(&call.n_ticks)) / (double)TIMER_ROUNDS;
        least = try == 0 || ticks < least ? ticks : least;
    }
    atomic_store(&known, least);
    return least;
}

uint64_t
pya_hc_calls_ns(const char *name) {
    double ticks = 0;
    double timer_ticks = call_timer_ticks();
    for (struct pya_hc_call *c = atomic_load(&calls_head); c != NULL; c = c->next) {
        uint64_t n_ticks = atomic_load(&c->n_ticks);
        if (n_ticks > 0 && (name == NULL || strcmp(c->name, name) == 0)) {
            ticks += (double)n_ticks + timer_ticks * (double)atomic_load(&c->n_calls);
        }
    }
    return (uint64_t)(ticks * call_tick_ns());
}

void
pya_hc_calls_reset(void) {
    for (struct pya_hc_call *c = atomic_load(&calls_head); c != NULL; c = c->next) {
        atomic_store(&c->n_calls, 0);
        atomic_store(&c->n_ticks, 0);
    }
}

void
pya_hc_calls_each(void (*fn)(const char *name, uint64_t n, void *data), void *data) {
    for (struct pya_hc_call *c = atomic_load(&calls_head); c != NULL; c = c->next) {
        uint64_t n = atomic_load(&c->n_calls);
        if (n > 0) {
            fn(c->name, n, data);
        }
    }
}
