/* What the fuzz targets share: taking numbers from the input, and checks that stop at the first violation.
 *
 * A target defines LLVMFuzzerTestOneInput(), so that libFuzzer, AFL++ and main.c all drive the same code. */
#pragma once

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* An input that is used up gives zeros. */
struct fuzz_input {
    const uint8_t *at;
    const uint8_t *end;
};

static inline size_t
fuzz_left(const struct fuzz_input *in) {
    return (size_t)(in->end - in->at);
}

static inline uint64_t
fuzz_number(struct fuzz_input *in, unsigned n_bytes) {
    uint64_t value = 0;
    for (unsigned i = 0; i < n_bytes; i++) {
        value |= (uint64_t)(in->at < in->end ? *in->at++ : 0) << (8 * i);
    }
    return value;
}

static inline uint8_t
fuzz_byte(struct fuzz_input *in) {
    return (uint8_t)fuzz_number(in, 1);
}

/* Every engine takes abort() for a finding and keeps the input. */
static inline void
fuzz_require(bool good, const char *file, int line, const char *text) {
    if (!good) {
        fprintf(stderr, "%s:%d: failed: %s\n", file, line, text);
        abort();
    }
}

static inline void
fuzz_require_equal(int64_t a, int64_t b, const char *file, int line, const char *text) {
    if (a != b) {
        fprintf(stderr, "%s:%d: left %" PRId64 ", right %" PRId64 "\n", file, line, a, b);
        fuzz_require(false, file, line, text);
    }
}

#define REQUIRE(condition) fuzz_require((condition), __FILE__, __LINE__, #condition)
#define REQUIRE_EQ(a, b)                                                                           \
    fuzz_require_equal((int64_t)(a), (int64_t)(b), __FILE__, __LINE__, #a " == " #b)
