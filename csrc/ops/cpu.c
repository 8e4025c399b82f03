#include "cpu.h"

#include <stdatomic.h>

/* -1: not narrowed */
static _Atomic int cpu_selected = -1;

int
pya_ops_isa_best(void) {
#if defined(PYA_HAVE_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
        return PYA_OPS_ISA_AVX512;
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
