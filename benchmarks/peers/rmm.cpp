/* RMM's pool behind the two functions that torch's pluggable allocator wants.
 *
 * As RMM's own module for torch, but linked with the CUDA runtime that torch uses: RMM's wheels carry one of their own,
 * which knows the real driver only.  RMM has nothing to say about record_stream(), empty_cache() and private pools. */
#include <rmm/mr/device/cuda_memory_resource.hpp>
#include <rmm/mr/device/pool_memory_resource.hpp>

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using upstream_resource = rmm::mr::cuda_memory_resource;
using pool_resource = rmm::mr::pool_memory_resource<upstream_resource>;

constexpr int MOST_DEVICES = 16;
constexpr std::size_t LEAST_POOL = 2U << 20;

upstream_resource upstream;
std::unique_ptr<pool_resource> pools[MOST_DEVICES];

/* A pool that grows as RMM's does, or, with PYALLOC_BENCH_WHOLE_CARD, one of all that is free at first use. */
pool_resource &
pool_of(int device) {
    if (pools[device] == nullptr) {
        std::size_t free_bytes = LEAST_POOL, total = 0;
        if (std::getenv("PYALLOC_BENCH_WHOLE_CARD") != nullptr &&
            cudaMemGetInfo(&free_bytes, &total) != cudaSuccess) {
            throw std::runtime_error("the device does not tell its memory");
        }
        pools[device] =
            std::make_unique<pool_resource>(&upstream, rmm::align_down(free_bytes, LEAST_POOL));
    }
    return *pools[device];
}

} // namespace

EXPORT void *
foreign_alloc(ssize_t bytes, int device, cudaStream_t stream) {
    try {
        return pool_of(device).allocate(
            static_cast<std::size_t>(bytes), rmm::cuda_stream_view{stream});
    } catch (const rmm::bad_alloc &error) {
        throw std::runtime_error(std::string("RMM: out of memory: ") + error.what());
    }
}

EXPORT void
foreign_free(void *block, ssize_t bytes, int device, cudaStream_t stream) {
    pool_of(device).deallocate(
        block, static_cast<std::size_t>(bytes), rmm::cuda_stream_view{stream});
}
