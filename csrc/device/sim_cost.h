/* The cost of each device call in modelled nanoseconds: the only cost table of the project.  Floor 1.
 *
 * cost = fixed + per_handle x handles + per_page x pages of 2 MiB.  A handle is what one cuMemCreate made, of one or
 * more pages.  Calls on several mappings (cuMemUnmap, cuMemSetAccess) cost the same for each mapping, whatever its
 * size, and almost nothing per page.
 * `typical` was measured on an H200 (driver 580.159, 2026-11-26, idle, medians; benchmarks/c/driver_costs).  The
 * exception is synchronising, which waits for work that is not modelled: 50 us were chosen; an idle card answers in
 * 1.3 us.
 * `low` and `high` are the ends of the ranges published for an A100 with handles of 2 MiB, where these extend beyond
 * the measured value; without published values they equal the measured one.
 * Calls without known costs are counted and cost nothing here. */
#pragma once

#include "../core/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum pya_sim_cost { PYA_SIM_TYPICAL, PYA_SIM_LOW, PYA_SIM_HIGH, PYA_SIM_N_COSTS };

/* kind; 1 if it is a memory call (counted as "device calls" in every report); CUDA's name; then ns {typical, low,
 * high} for the call itself, for each handle and for each page; and the source. */
#define PYA_SIM_CALL_TABLE(X)                                                                       \
    X(PLAIN_ALLOC, 1, "cudaMalloc", 40000, 40000, 966500, 0, 0, 0, 250, 250, 33500,                 \
      "H200: 40 us + 0.25 per page; A100: 66-1000 for 2 MiB, the high end's spread taken as fixed") \
    X(PLAIN_FREE, 1, "cudaFree", 30000, 30000, 50000, 0, 0, 0, 800, 800, 26000,                     \
      "H200: 30 us + 0.8 per page; high end 50 for the wait and as cuMemUnmap")                     \
    X(PAGE_CREATE, 1, "cuMemCreate", 0, 0, 0, 8700, 8000, 190000, 60, 0, 60,                        \
      "H200: 8.7 us + 0.06 per page; A100: 8-190")                                                  \
    X(PAGE_RELEASE, 1, "cuMemRelease", 0, 0, 0, 9700, 9700, 9700, 800, 800, 800,                    \
      "H200: 9.7 us + 0.8 per page")                                                                \
    X(RANGE_RESERVE, 1, "cuMemAddressReserve", 1900, 1900, 1900, 0, 0, 0, 0, 0, 0, "H200: 1.9 us")  \
    X(RANGE_RELEASE, 1, "cuMemAddressFree", 900, 900, 900, 0, 0, 0, 0, 0, 0, "H200: 0.9 us")        \
    X(MAP, 1, "cuMemMap", 0, 0, 0, 700, 700, 1500, 0, 0, 0, "H200: 0.7 us; A100: 1.1-1.5")          \
    X(UNMAP, 1, "cuMemUnmap", 0, 0, 0, 15000, 12000, 26000, 30, 0, 30,                              \
      "H200: 15 us + 0.03 per page; A100: 12-26")                                                   \
    X(SET_ACCESS, 1, "cuMemSetAccess", 0, 0, 0, 23000, 21000, 36000, 70, 0, 70,                     \
      "H200: 23 us + 0.07 per page; A100: 21-36")                                                   \
    X(STREAM_SYNC, 1, "cuStreamSynchronize", 50000, 50000, 50000, 0, 0, 0, 0, 0, 0,                 \
      "50 us, chosen")                                                                              \
    X(DEVICE_SYNC, 1, "cuCtxSynchronize", 50000, 50000, 50000, 0, 0, 0, 0, 0, 0, "50 us, chosen")   \
    X(EVENT_SYNC, 1, "cuEventSynchronize", 50000, 50000, 50000, 0, 0, 0, 0, 0, 0, "50 us, chosen")  \
    X(EVENT_CREATE, 0, "cuEventCreate", 0, 0, 0, 0, 0, 0, 0, 0, 0, "no source")                     \
    X(EVENT_RECORD, 0, "cuEventRecord", 3100, 3100, 3100, 0, 0, 0, 0, 0, 0, "H200: 3.1 us")         \
    X(EVENT_QUERY, 0, "cuEventQuery", 600, 600, 600, 0, 0, 0, 0, 0, 0, "H200: 0.6 us")              \
    X(EVENT_DESTROY, 0, "cuEventDestroy", 0, 0, 0, 0, 0, 0, 0, 0, 0, "no source")                   \
    X(MEM_INFO, 0, "cuMemGetInfo", 8400, 8400, 8400, 0, 0, 0, 0, 0, 0, "H200: 8.4 us")              \
    X(IS_CAPTURING, 0, "cuStreamIsCapturing", 600, 600, 600, 0, 0, 0, 0, 0, 0, "H200: 0.6 us")      \
    X(ENABLE_PEER, 0, "cuCtxEnablePeerAccess", 0, 0, 0, 0, 0, 0, 0, 0, 0, "no source")              \
    X(PAGE_EXPORT, 0, "cuMemExportToShareableHandle", 0, 0, 0, 0, 0, 0, 0, 0, 0, "no source")       \
    X(PAGE_IMPORT, 0, "cuMemImportFromShareableHandle", 0, 0, 0, 0, 0, 0, 0, 0, 0, "no source")     \
    X(CAPS, 0, "cuDeviceGetAttribute", 0, 0, 0, 0, 0, 0, 0, 0, 0, "no source")

enum pya_sim_call {
#define X(kind, memory, name, f0, f1, f2, h0, h1, h2, p0, p1, p2, source) PYA_SIM_##kind,
    PYA_SIM_CALL_TABLE(X)
#undef X
        PYA_SIM_N_CALLS
};

struct pya_sim_call_info {
    const char *name;   /* the CUDA call it stands for */
    const char *source; /* where the figures come from */
    bool is_memory;
    uint64_t fixed_ns[PYA_SIM_N_COSTS];
    uint64_t handle_ns[PYA_SIM_N_COSTS];
    uint64_t page_ns[PYA_SIM_N_COSTS];
};

extern const struct pya_sim_call_info pya_sim_calls[PYA_SIM_N_CALLS];

static inline uint64_t
pya_sim_call_ns(
    enum pya_sim_cost cost, enum pya_sim_call call, uint64_t n_handles, uint64_t n_pages) {
    const struct pya_sim_call_info *info = &pya_sim_calls[call];
    return info->fixed_ns[cost] + info->handle_ns[cost] * n_handles + info->page_ns[cost] * n_pages;
}

#ifdef __cplusplus
}
#endif
