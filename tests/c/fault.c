#include "fault.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static atomic_long fault_left; /* allocations up to the one that fails, inclusive; 0: not armed */
static atomic_bool fault_sticky;
static atomic_bool fault_fired;
static atomic_long fault_n_live;
static atomic_ulong fault_n_calls;
static atomic_size_t fault_n_bytes;

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *ptr, size_t bytes);
void __real_free(void *ptr);
void *__real_aligned_alloc(size_t unit, size_t bytes);
int __real_posix_memalign(void **out, size_t unit, size_t bytes);
char *__real_strdup(const char *text);
void *__real_mmap(void *addr, size_t bytes, int prot, int flags, int fd, off_t offset);

void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *ptr, size_t bytes);
void __wrap_free(void *ptr);
void *__wrap_aligned_alloc(size_t unit, size_t bytes);
int __wrap_posix_memalign(void **out, size_t unit, size_t bytes);
char *__wrap_strdup(const char *text);
void *__wrap_mmap(void *addr, size_t bytes, int prot, int flags, int fd, off_t offset);

static bool
fault_now(void) {
    atomic_fetch_add(&fault_n_calls, 1);
    long left = atomic_load(&fault_left);
    if (left == 0) {
        return false;
    }
    while (left > 1) {
        if (atomic_compare_exchange_weak(&fault_left, &left, left - 1)) {
            return false;
        }
    }
    if (left == 1 && !atomic_load(&fault_sticky)) {
        atomic_store(&fault_left, 0);
    }
    atomic_store(&fault_fired, true);
    errno = ENOMEM;
    return true;
}

static void *
fault_count(void *ptr) {
    if (ptr != NULL) {
        atomic_fetch_add(&fault_n_live, 1);
    }
    return ptr;
}

static void
fault_start(unsigned long nth, bool sticky) {
    atomic_store(&fault_sticky, sticky);
    atomic_store(&fault_fired, false);
    atomic_store(&fault_left, (long)nth);
}

void
fault_arm(unsigned long nth) {
    fault_start(nth, false);
}

void
fault_arm_sticky(unsigned long nth) {
    fault_start(nth, true);
}

bool
fault_disarm(void) {
    atomic_store(&fault_left, 0);
    return atomic_load(&fault_fired);
}

size_t
fault_live(void) {
    return (size_t)atomic_load(&fault_n_live);
}

unsigned long
fault_calls(void) {
    return atomic_load(&fault_n_calls);
}

size_t
fault_bytes(void) {
    return atomic_load(&fault_n_bytes);
}

void *
__wrap_malloc(size_t bytes) {
    atomic_fetch_add(&fault_n_bytes, bytes);
    return fault_now() ? NULL : fault_count(__real_malloc(bytes));
}

void *
__wrap_calloc(size_t n, size_t bytes) {
    atomic_fetch_add(&fault_n_bytes, n * bytes);
    return fault_now() ? NULL : fault_count(__real_calloc(n, bytes));
}

void *
__wrap_realloc(void *ptr, size_t bytes) {
    if (fault_now()) {
        return NULL;
    }
    void *out = __real_realloc(ptr, bytes);
    return ptr == NULL ? fault_count(out) : out;
}

void
__wrap_free(void *ptr) {
    if (ptr != NULL) {
        atomic_fetch_sub(&fault_n_live, 1);
    }
    __real_free(ptr);
}

void *
__wrap_aligned_alloc(size_t unit, size_t bytes) {
    return fault_now() ? NULL : fault_count(__real_aligned_alloc(unit, bytes));
}

int
__wrap_posix_memalign(void **out, size_t unit, size_t bytes) {
    if (fault_now()) {
        return ENOMEM;
    }
    int error = __real_posix_memalign(out, unit, bytes);
    if (error == 0) {
        fault_count(*out);
    }
    return error;
}

char *
__wrap_strdup(const char *text) {
    return fault_now() ? NULL : fault_count(__real_strdup(text));
}

void *
__wrap_mmap(void *addr, size_t bytes, int prot, int flags, int fd, off_t offset) {
    /* Only mappings that the kernel may place request host memory; MAP_FIXED fills a range that is already reserved. */
    if ((flags & MAP_FIXED) == 0 && fault_now()) {
        return MAP_FAILED;
    }
    return __real_mmap(addr, bytes, prot, flags, fd, offset);
}
