/* What each device call costs, in modelled nanoseconds: the one cost table of the project.  Floor 1.
 *
 * cost = fixed + per_page x pages of 2 MiB.  `low` and `high` are the ends of the ranges that were published for an A100
 * and 2 MiB; `typical`, with which all published figures of this project were made, is chosen within or near them.
 * Nobody published what cuMemSetAccess costs for many pages at once; torch's own comment on expandable segments says that
 * mapping costs as much for each piece of memory, which the high end takes at its word.
 * Calls whose cost nobody published are counted and cost nothing here. */
#pragma once

#include "../core/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum pya_sim_cost { PYA_SIM_TYPICAL, PYA_SIM_LOW, PYA_SIM_HIGH, PYA_SIM_N_COSTS };

/* kind, is it a memory call (counted as "device calls" in every report), CUDA's name,
 * fixed ns {typical, low, high}, ns per page {typical, low, high}, source */
#define PYA_SIM_CALL_TABLE(X)                                                                      \
    X(PLAIN_ALLOC, 1, "cudaMalloc", 20000, 32500, 966500, 33500, 33500, 33500,                     \
      "20 us + 33.5 per page; A100: 66-1000 us, the spread taken as fixed cost")                   \
    X(PLAIN_FREE, 1, "cudaFree", 50000, 50000, 50000, 12000, 12000, 26000,                         \
      "12 us per page + 50 for the wait; high end as cuMemUnmap")                                  \
    X(PAGE_CREATE, 1, "cuMemCreate", 0, 0, 0, 30000, 8000, 190000, "30 us; A100: 8-190")           \
    X(PAGE_RELEASE, 1, "cuMemRelease", 0, 0, 0, 0, 0, 0, "no source")                              \
    X(RANGE_RESERVE, 1, "cuMemAddressReserve", 0, 0, 0, 0, 0, 0, "no source")                      \
    X(RANGE_RELEASE, 1, "cuMemAddressFree", 0, 0, 0, 0, 0, 0, "no source")                         \
    X(MAP, 1, "cuMemMap", 0, 0, 0, 1500, 1100, 1500, "1.5 us; A100: 1.1-1.5")                      \
    X(UNMAP, 1, "cuMemUnmap", 0, 0, 0, 12000, 12000, 26000, "12 us; A100: 12-26")                  \
    X(SET_ACCESS, 1, "cuMemSetAccess", 20000, 19000, 2000, 2000, 2000, 34000,                      \
      "20 us + 2 per page; A100: 21-36 for one page; at the high end that for each")               \
    X(STREAM_SYNC, 1, "cuStreamSynchronize", 50000, 50000, 50000, 0, 0, 0, "50 us, chosen")        \
    X(DEVICE_SYNC, 1, "cuCtxSynchronize", 50000, 50000, 50000, 0, 0, 0, "50 us, chosen")           \
    X(EVENT_SYNC, 1, "cuEventSynchronize", 50000, 50000, 50000, 0, 0, 0, "50 us, chosen")          \
    X(EVENT_CREATE, 0, "cuEventCreate", 0, 0, 0, 0, 0, 0, "no source")                             \
    X(EVENT_RECORD, 0, "cuEventRecord", 0, 0, 0, 0, 0, 0, "no source")                             \
    X(EVENT_QUERY, 0, "cuEventQuery", 0, 0, 0, 0, 0, 0, "no source")                               \
    X(EVENT_DESTROY, 0, "cuEventDestroy", 0, 0, 0, 0, 0, 0, "no source")                           \
    X(MEM_INFO, 0, "cuMemGetInfo", 0, 0, 0, 0, 0, 0, "no source")                                  \
    X(IS_CAPTURING, 0, "cuStreamIsCapturing", 0, 0, 0, 0, 0, 0, "no source")                       \
    X(ENABLE_PEER, 0, "cuCtxEnablePeerAccess", 0, 0, 0, 0, 0, 0, "no source")                      \
    X(PAGE_EXPORT, 0, "cuMemExportToShareableHandle", 0, 0, 0, 0, 0, 0, "no source")               \
    X(PAGE_IMPORT, 0, "cuMemImportFromShareableHandle", 0, 0, 0, 0, 0, 0, "no source")             \
    X(CAPS, 0, "cuDeviceGetAttribute", 0, 0, 0, 0, 0, 0, "no source")

enum pya_sim_call {
#define X(kind, memory, name, f0, f1, f2, p0, p1, p2, source) PYA_SIM_##kind,
    PYA_SIM_CALL_TABLE(X)
#undef X
        PYA_SIM_N_CALLS
};

struct pya_sim_call_info {
    const char *name;   /* the CUDA call it stands for */
    const char *source; /* where the figures come from */
    bool is_memory;
    uint64_t fixed_ns[PYA_SIM_N_COSTS];
    uint64_t page_ns[PYA_SIM_N_COSTS];
};

extern const struct pya_sim_call_info pya_sim_calls[PYA_SIM_N_CALLS];

static inline uint64_t
pya_sim_call_ns(enum pya_sim_cost cost, enum pya_sim_call call, uint64_t n_pages) {
    return pya_sim_calls[call].fixed_ns[cost] + pya_sim_calls[call].page_ns[cost] * n_pages;
}

#ifdef __cplusplus
}
#endif
