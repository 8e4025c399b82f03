/* A kernel that reads lines of 128 bytes anywhere, one a warp at a time: what misses the card's translation caches as no
 * fill or copy does.  The driver compiles it; where it cannot, there is none. */
#include <stdio.h>

#include "costs.h"

/* Registers: r1 thread of all, then sum; r2 mask of lines; r3 reads; r4 state; r5 line; rd1 base; rd2 bytes from one page
 * to the next.  A page has 2^14 lines. */
#define READ                                                                                       \
    "mad.lo.u32 %r4, %r4, 1664525, 1013904223;\n"                                                  \
    "shr.u32 %r5, %r4, 7;\n"                                                                       \
    "and.b32 %r5, %r5, %r2;\n"                                                                     \
    "shr.u32 %r6, %r5, 14;\n"                                                                      \
    "cvt.u64.u32 %rd3, %r6;\n"                                                                     \
    "mul.lo.u64 %rd3, %rd3, %rd2;\n"                                                               \
    "and.b32 %r5, %r5, 16383;\n"                                                                   \
    "shl.b32 %r5, %r5, 7;\n"                                                                       \
    "or.b32 %r5, %r5, %r7;\n"                                                                      \
    "cvt.u64.u32 %rd4, %r5;\n"                                                                     \
    "add.u64 %rd3, %rd3, %rd4;\n"                                                                  \
    "add.u64 %rd3, %rd3, %rd1;\n"                                                                  \
    "ld.global.cg.u32 %r8, [%rd3];\n"                                                              \
    "add.u32 %r1, %r1, %r8;\n"
static const char PTX[] = ".version 6.3\n"
                          ".target sm_75\n"
                          ".address_size 64\n"
                          ".visible .entry gather(.param .u64 base, .param .u64 step,\n"
                          "    .param .u32 mask, .param .u32 times, .param .u32 word,\n"
                          "    .param .u64 wrong) {\n"
                          ".reg .pred %p;\n"
                          ".reg .b32 %r<12>;\n"
                          ".reg .b64 %rd<6>;\n"
                          "ld.param.u64 %rd1, [base];\n"
                          "cvta.to.global.u64 %rd1, %rd1;\n"
                          "ld.param.u64 %rd2, [step];\n"
                          "ld.param.u32 %r2, [mask];\n"
                          "ld.param.u32 %r3, [times];\n"
                          "ld.param.u32 %r9, [word];\n"
                          "mul.lo.u32 %r9, %r9, %r3;\n"
                          "mov.u32 %r10, %tid.x;\n"
                          "mov.u32 %r4, %ctaid.x;\n"
                          "mov.u32 %r5, %ntid.x;\n"
                          "mad.lo.u32 %r4, %r4, %r5, %r10;\n"
                          "shr.u32 %r4, %r4, 5;\n"
                          "mad.lo.u32 %r4, %r4, 2654435761, 12345;\n"
                          "and.b32 %r7, %r10, 31;\n"
                          "shl.b32 %r7, %r7, 2;\n"
                          "mov.u32 %r1, 0;\n"
                          "again:\n" READ READ READ READ "sub.u32 %r3, %r3, 4;\n"
                          "setp.ne.u32 %p, %r3, 0;\n"
                          "@%p bra again;\n"
                          "setp.eq.u32 %p, %r1, %r9;\n"
                          "@%p bra done;\n"
                          "ld.param.u64 %rd5, [wrong];\n"
                          "cvta.to.global.u64 %rd5, %rd5;\n"
                          "mov.u32 %r11, 1;\n"
                          "st.global.u32 [%rd5], %r11;\n"
                          "done:\n"
                          "ret;\n"
                          "}\n";

enum { THREADS = 256, BLOCKS = 1056, TIMES = 2048 }; /* 8 blocks for each of 132 processors */

static void *kernel;
static pya_dptr wrong; /* one word there */

bool
costs_gather_load(void) {
    void *module = NULL;
    cuda_result result = CUDA_NOT_SUPPORTED;
    if (kernel != NULL) {
        return true;
    }
    if (bench.more.cuModuleLoadData != NULL && bench.more.cuModuleGetFunction != NULL &&
        bench.more.cuLaunchKernel != NULL) {
        result = bench.more.cuModuleLoadData(&module, PTX);
    }
    if (result == CUDA_OK) {
        result = bench.more.cuModuleGetFunction(&kernel, module, "gather");
    }
    if (result != CUDA_OK) {
        printf("no random reads: the driver does not compile (%d)\n\n", result);
        return false;
    }
    wrong = costs_alloc(PYA_PAGE);
    WANT_MORE(cuMemsetD32Async, wrong, 0, 1, NULL);
    WANT(cuStreamSynchronize, NULL);
    return true;
}

double
costs_gather(pya_dptr addr, size_t n_pages, size_t step, unsigned word, cuda_stream stream) {
    const unsigned blocks = bench.is_small ? 8 : BLOCKS;
    uint64_t base = addr;
    uint64_t bytes_on = step;
    unsigned mask = (unsigned)(n_pages << 14) - 1;
    unsigned times = TIMES;
    void *arguments[] = {&base, &bytes_on, &mask, &times, &word, &wrong};
    WANT_MORE(cuLaunchKernel, kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, NULL);
    return (double)blocks * THREADS / 32 * TIMES * 128;
}

bool
costs_gather_was_right(void) {
    unsigned found = 1;
    costs_want(bench.cu->cuCtxSynchronize(), "cuCtxSynchronize");
    WANT_MORE(cuMemcpyDtoH, &found, wrong, sizeof found);
    WANT_MORE(cuMemsetD32Async, wrong, 0, 1, NULL);
    WANT(cuStreamSynchronize, NULL);
    return found == 0;
}
