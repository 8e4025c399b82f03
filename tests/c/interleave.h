/* A model of memory that runs every order of the steps of some threads (interleave.c says how).  Code that is compiled
 * after this header has its atomic operations and futex calls turned into steps of the model. */
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
    bool is_torn;  /* a mutant's: not one step, the read may be of an older value */
    bool is_blind; /* a mutant's: the caller is told 0, a sleeper does not look */
};

struct interleave_scenario {
    const char *name;
    int n_threads, n_rounds;
    int n_spurious;        /* wakes and failures of weak exchanges for no reason, in all */
    void (*declare)(void); /* every place the threads use */
    void (*run)(int thread, int round);
    void (*check_end)(void);
};

/* A mistake: changes the next operation of a thread whose last one was of that kind.  May ask interleave_newest(). */
typedef void interleave_mutate(struct interleave_op *op, enum interleave_kind last);

struct interleave_result {
    const char *why;   /* what is wrong; NULL: nothing */
    bool is_too_large; /* why says what the model lacks room for: nothing is known then */
    size_t n_states, n_ends, n_sleeps;
};

struct interleave_result
interleave_try(const struct interleave_scenario *scenario, interleave_mutate *mutate);

/* In declare(). */
void interleave_place(const volatile void *address, uint64_t value);
/* In run() and check_end(): what must hold. */
void interleave_expect(bool good, const char *what);
/* In check_end() and mutants. */
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
