/* What every C test program uses: checks that count instead of dying, a seeded generator, a main.
 *
 *   static void test_split(void) { CHECK(x == 3); }
 *   static const struct check_case cases[] = {{"split", test_split}};
 *   int main(int argc, char **argv) { return check_main(argc, argv, cases, sizeof cases / sizeof *cases); }
 *
 * Arguments are names of cases (none: all).  PYA_TEST_SEED and PYA_TEST_BUDGET come from the environment;
 * the seed is printed, so that a failure can be run again. */
#pragma once

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sanitized.h"

struct check_case {
    const char *name;
    void (*run)(void);
};

static unsigned long check_count;
static unsigned long check_failures;

/* Further failures are only counted: an invariant broken in a loop of a million steps must not fill the disk. */
#define CHECK_MAX_PRINTED 50

static inline bool
check_that(bool good, const char *file, int line, const char *text) {
    __atomic_add_fetch(&check_count, 1, __ATOMIC_RELAXED);
    if (!good && __atomic_add_fetch(&check_failures, 1, __ATOMIC_RELAXED) <= CHECK_MAX_PRINTED) {
        fprintf(stderr, "%s:%d: failed: %s\n", file, line, text);
    }
    return good;
}

static inline bool
check_equal(int64_t a, int64_t b, const char *file, int line, const char *text) {
    bool good = check_that(a == b, file, line, text);
    if (!good && check_failures <= CHECK_MAX_PRINTED) {
        fprintf(stderr, "    left %" PRId64 ", right %" PRId64 "\n", a, b);
    }
    return good;
}

/* All are expressions that are true if the check held, so a test can stop where continuing makes no sense. */
#define CHECK(condition) check_that((condition), __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) check_equal((int64_t)(a), (int64_t)(b), __FILE__, __LINE__, #a " == " #b)
#define CHECK_OK(status) CHECK_EQ(status, 0)

/* splitmix64: every state is valid. */
static inline uint64_t
check_random(uint64_t *state) {
    uint64_t z = (*state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* 0 .. bound - 1. */
static inline uint64_t
check_below(uint64_t *state, uint64_t bound) {
    return check_random(state) % bound;
}

/* A number in lo .. hi; each power of two in between is about equally likely. */
static inline uint64_t
check_log_size(uint64_t *state, uint64_t lo, uint64_t hi) {
    int low = 63 - __builtin_clzll(lo);
    int high = 63 - __builtin_clzll(hi);
    uint64_t base = UINT64_C(1) << (low + (int)check_below(state, (uint64_t)(high - low + 1)));
    uint64_t value = base + check_below(state, base);
    return value < lo ? lo : value > hi ? hi : value;
}

static inline uint64_t
check_env(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? strtoull(text, NULL, 0) : otherwise;
}

static inline uint64_t
check_seed(void) {
    return check_env("PYA_TEST_SEED", 1);
}

/* Do operations take many times as long as usual?  Set PYA_TEST_SLOW=1 for valgrind. */
static inline bool
check_is_slow(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return true;
#else
    return check_env("PYA_TEST_SLOW", 0) != 0;
#endif
}

/* ThreadSanitizer runs only one in CHECK_ONE_IN of the single-threaded steps: it finds nothing there and takes
 * minutes. */
#ifdef __SANITIZE_THREAD__
enum { CHECK_ONE_IN = 4 };
#else
enum { CHECK_ONE_IN = 1 };
#endif

/* How often to do something that a quick run does `quick` times. */
static inline uint64_t
check_budget(uint64_t quick) {
    uint64_t share = check_env("PYA_TEST_SLOW", 0) != 0 ? 20 : 1;
    return quick * check_env("PYA_TEST_BUDGET", 1) / share + (share > 1);
}

static inline int
check_main(int argc, char **argv, const struct check_case *cases, size_t n) {
    printf("seed %" PRIu64 "\n", check_seed());
    for (size_t i = 0; i < n; i++) {
        bool wanted = argc <= 1;
        for (int a = 1; a < argc; a++) {
            wanted = wanted || strcmp(argv[a], cases[i].name) == 0;
        }
        if (!wanted) {
            continue;
        }
        unsigned long before = check_failures;
        cases[i].run();
        printf("%s %s\n", check_failures == before ? "ok    " : "FAILED", cases[i].name);
        fflush(stdout);
    }
    fflush(stderr);
    printf("%lu checks, %lu failed\n", check_count, check_failures);
    return check_failures != 0 || check_count == 0;
}

/* Like check_main(), with an empty file while the cases run.  path: its name, ending in six X. */
static inline int
check_main_with_file(int argc, char **argv, const struct check_case *cases, size_t n, char *path) {
    const int file = mkstemp(path);
    if (file < 0) {
        return 1;
    }
    close(file);
    const int result = check_main(argc, argv, cases, n);
    unlink(path);
    return result;
}
