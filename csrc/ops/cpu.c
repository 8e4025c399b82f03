#include "cpu.h"

#include <stdatomic.h>
#include <stdbool.h>

#ifdef PYA_HAVE_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* -1: not narrowed */
static _Atomic int cpu_selected = -1;

#ifdef PYA_HAVE_AMX
/* Tiles are large, so Linux keeps room for them only for a process that has asked; it may refuse. */
static bool
cpu_ask_for_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) && (d & AMX_TILE) &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}
#endif

#ifdef PYA_HAVE_AVX512
/* Asked once: the answer stays. */
static bool
cpu_has_tiles(void) {
#ifdef PYA_HAVE_AMX
    static _Atomic int known = -1;
    int has = atomic_load_explicit(&known, memory_order_relaxed);
    if (has < 0) {
        has = cpu_ask_for_tiles();
        atomic_store_explicit(&known, has, memory_order_relaxed);
    }
    return has != 0;
#else
    return false;
#endif
}
#endif

int
pya_ops_isa_best(void) {
#ifdef PYA_AMX_EMULATED /* for tests, which choose among what there is */
    return PYA_OPS_ISA_AMX;
#endif
#if defined(PYA_HAVE_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
        return cpu_has_tiles() ? PYA_OPS_ISA_AMX : PYA_OPS_ISA_AVX512;
    }
#endif
#if defined(PYA_HAVE_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return PYA_OPS_ISA_AVX2;
    }
#endif
    return PYA_OPS_ISA_SCALAR;
}

pya_ops_isa
pya_cpu_isa(void) {
    int selected = atomic_load_explicit(&cpu_selected, memory_order_relaxed);
    return (pya_ops_isa)(selected < 0 ? pya_ops_isa_best() : selected);
}

int
pya_ops_isa_current(void) {
    return (int)pya_cpu_isa();
}

int
pya_ops_isa_select(int isa) {
    if (isa < PYA_OPS_ISA_SCALAR || isa > pya_ops_isa_best()) {
        return PYA_OPS_E_INVAL;
    }
    atomic_store_explicit(&cpu_selected, isa, memory_order_relaxed);
    return PYA_OPS_OK;
}
