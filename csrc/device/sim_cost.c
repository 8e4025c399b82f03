#include "sim_cost.h"

const struct pya_sim_call_info pya_sim_calls[PYA_SIM_N_CALLS] = {
#define X(kind, memory, cuda_name, f0, f1, f2, h0, h1, h2, p0, p1, p2, from)                       \
    [PYA_SIM_##kind] = {                                                                           \
        .name = cuda_name,                                                                         \
        .source = from,                                                                            \
        .is_memory = (memory) != 0,                                                                \
        .fixed_ns = {f0, f1, f2},                                                                  \
        .handle_ns = {h0, h1, h2},                                                                 \
        .page_ns = {p0, p1, p2},                                                                   \
    },
    PYA_SIM_CALL_TABLE(X)
#undef X
};
