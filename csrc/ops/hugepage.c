#include "hugepage.h"

#include <stdint.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

static const uintptr_t page_bytes = 2u << 20;
static const size_t least_bytes = 8u << 20;

void
pya_hugepage_advise(void *p, size_t n_bytes) {
#ifdef MADV_HUGEPAGE
    if (p == NULL || n_bytes < least_bytes) {
        return;
    }
    uintptr_t begin = ((uintptr_t)p + page_bytes - 1) / page_bytes * page_bytes;
    uintptr_t end = ((uintptr_t)p + n_bytes) / page_bytes * page_bytes;
    /* Only advice: a kernel without large pages answers with an error that changes nothing. */
    (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)p;
    (void)n_bytes;
    (void)page_bytes;
    (void)least_bytes;
#endif
}
