/* A model of memory that runs the steps of several threads in every order (see interleave.c).  In code compiled after
 * this header, atomic operations and futex calls become steps of the model. */
#pragma once

#include <linux/futex.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum interleave_kind { LOAD, STORE, EXCHANGE, COMPARE, ADD, OR, WAIT, WAKE };

struct interleave_op {
    enum interleave_kind kind;
    const volatile void *address;
    int order;
    int order_failed; /* of COMPARE */
    uint64_t value;
    uint64_t expected; /* of COMPARE and WAIT */
    bool is_weak;
    bool is_torn;  /* in a mutant: not one step; the read may see an older value */
    bool is_blind; /* in a mutant: the caller is told 0, a sleeper does not look */
};

struct interleave_scenario {
    const char *name;
    int n_threads, n_rounds;
    int n_spurious;        /* spurious wakes and failures of weak exchanges, in all */
    void (*declare)(void); /* declares every location that the threads use */
    void (*run)(int thread, int round);
    void (*check_end)(void);
};

/* A mutant: changes the next operation of a thread if its last operation was of kind `last`.  May call
 * interleave_newest(). */
typedef void interleave_mutate(struct interleave_op *op, enum interleave_kind last);

struct interleave_result {
    const char *why;   /* the violation; NULL: none */
    bool is_too_large; /* the model is too small, see why: nothing is proved */
    size_t n_states, n_ends, n_sleeps;
};

struct interleave_result
interleave_try(const struct interleave_scenario *scenario, interleave_mutate *mutate);

/* Call in declare(). */
void interleave_place(const volatile void *address, uint64_t value);
/* Call in run() and check_end(): states what must hold. */
void interleave_expect(bool good, const char *what);
/* Call in check_end() and mutants. */
uint64_t interleave_newest(const volatile void *address);

uint64_t interleave_step(struct interleave_op op);
bool interleave_compare(struct interleave_op op, uint64_t *was);
long interleave_futex(const uint32_t *address, int what, uint32_t value);

#define INTERLEAVE_STEP(kind_, p, v, o)                                                            \
    ((__typeof__(*(p)))(uintptr_t)interleave_step((struct interleave_op){                          \
        .kind = (kind_), .address = (p), .value = (uint64_t)(uintptr_t)(v), .order = (o)}))
#define __atomic_load_n(p, o) INTERLEAVE_STEP(LOAD, p, 0, o)
#define __atomic_store_n(p, v, o) ((void)INTERLEAVE_STEP(STORE, p, v, o))
#define __atomic_exchange_n(p, v, o) INTERLEAVE_STEP(EXCHANGE, p, v, o)
#define __atomic_fetch_add(p, v, o) INTERLEAVE_STEP(ADD, p, v, o)
#define __atomic_fetch_sub(p, v, o) INTERLEAVE_STEP(ADD, p, -(intptr_t)(v), o)
#define __atomic_fetch_or(p, v, o) INTERLEAVE_STEP(OR, p, v, o)
#define __atomic_compare_exchange_n(p, e, v, weak, o, failed)                                      \
    ({                                                                                             \
        uint64_t was_ = (uint64_t)(uintptr_t) * (e);                                               \
        bool done_ = interleave_compare(                                                           \
            (struct interleave_op){                                                                \
                .kind = COMPARE,                                                                   \
                .address = (p),                                                                    \
                .value = (uint64_t)(uintptr_t)(v),                                                 \
                .expected = was_,                                                                  \
                .order = (o),                                                                      \
                .order_failed = (failed),                                                          \
                .is_weak = (weak)},                                                                \
            &was_);                                                                                \
        *(e) = (__typeof__(*(e)))(uintptr_t)was_;                                                  \
        done_;                                                                                     \
    })
#define syscall(number, address, what, value, ...) interleave_futex(address, what, value)
