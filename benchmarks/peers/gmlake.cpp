/* GMLake's own allocator behind the two functions that torch's pluggable allocator wants.
 *
 * GMLake is a changed CUDACachingAllocator.cpp of torch 2.0.  It is compiled here as it is (GMLAKE_SOURCE, from a clone
 * of its repository), against just enough of what torch 2.0's headers would give it; statistics are kept, history,
 * profiling and graphs are not used.  Long because these declarations are many. */
/* Of torch's own headers those that are nothing but containers and arithmetic. */
#include <c10/util/flat_hash_map.h>
#include <c10/util/irange.h>
#include <c10/util/llvmMathExtras.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace peer {

template <typename... Parts>
std::string
text(const Parts &...parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

inline void
check_cuda(cudaError_t code, const char *call) {
    if (code != cudaSuccess) {
        throw std::runtime_error(text(call, ": ", cudaGetErrorName(code)));
    }
}

} // namespace peer

#define C10_CUDA_CHECK(call) peer::check_cuda((call), #call)
#define C10_CUDA_CHECK_WARN(call) peer::check_cuda((call), #call)
#define C10_CUDA_ERROR_HANDLED(call) (call)
#define C10_DEFINE_REGISTRY(...)
#define AT_ASSERT(good, ...) TORCH_INTERNAL_ASSERT(good)
#define TORCH_WARN(...)
#define TORCH_WARN_ONCE(...)
#define TORCH_CHECK(good, ...)                                                                     \
    do {                                                                                           \
        if (!(good)) {                                                                             \
            throw std::runtime_error(peer::text(__VA_ARGS__));                                     \
        }                                                                                          \
    } while (0)
#define TORCH_CHECK_WITH(kind, good, ...) TORCH_CHECK(good, __VA_ARGS__)
#define TORCH_INTERNAL_ASSERT(good, ...)                                                           \
    do {                                                                                           \
        if (!(good)) {                                                                             \
            throw std::logic_error("GMLake: " #good);                                              \
        }                                                                                          \
    } while (0)
#define TORCH_INTERNAL_ASSERT_DEBUG_ONLY(good, ...) assert(good)

namespace c10 {

enum class DeviceType : int8_t { CPU, CUDA };
using DeviceIndex = int8_t;

struct Device {
    Device(DeviceType, DeviceIndex index) : index_(index) {}
    DeviceIndex index() const {
        return index_;
    }
    DeviceIndex index_;
};

using DeleterFnPtr = void (*)(void *);

struct DataPtr {
    DataPtr(void *data, void *, DeleterFnPtr deleter, Device) : data_(data), deleter_(deleter) {}
    void *get() const {
        return data_;
    }
    DeleterFnPtr get_deleter() const {
        return deleter_;
    }
    void *data_;
    DeleterFnPtr deleter_;
};

struct Allocator {
    virtual ~Allocator() = default;
    virtual DataPtr allocate(size_t bytes) const = 0;
    virtual DeleterFnPtr raw_deleter() const = 0;
};

template <typename... Ignored>
void
reportMemoryUsageToProfiler(Ignored &&...) {}
template <typename... Ignored>
void
reportOutOfMemoryToProfiler(Ignored &&...) {}

inline const char *
get_backtrace(...) {
    return "";
}

namespace impl {
struct PyInterpreter {
    const PyInterpreter *operator->() const {
        return this;
    }
    template <typename... Ignored> void trace_gpu_memory_allocation(Ignored &&...) const {}
    template <typename... Ignored> void trace_gpu_memory_deallocation(Ignored &&...) const {}
};
struct GPUTrace {
    static PyInterpreter *get_trace() {
        return nullptr;
    }
};
} // namespace impl

namespace cuda {

using CaptureId_t = unsigned long long;
using MempoolId_t = std::pair<CaptureId_t, CaptureId_t>;

inline int
device_count() {
    int n = 0;
    peer::check_cuda(cudaGetDeviceCount(&n), "cudaGetDeviceCount");
    return n;
}

struct CUDAStream {
    CUDAStream(cudaStream_t stream = nullptr) : handle(stream) {}
    cudaStream_t stream() const {
        return handle;
    }
    operator cudaStream_t() const {
        return handle;
    }
    DeviceIndex device_index() const {
        int device = 0;
        peer::check_cuda(cudaGetDevice(&device), "cudaGetDevice");
        return static_cast<DeviceIndex>(device);
    }
    bool operator==(const CUDAStream &other) const {
        return handle == other.handle;
    }
    cudaStream_t handle;
};

inline CUDAStream
getCurrentCUDAStream(int = -1) {
    return {};
}

/* One device is replayed on. */
struct CUDAGuard {
    explicit CUDAGuard(int) {}
};

struct CUDAStreamCaptureModeGuard {
    explicit CUDAStreamCaptureModeGuard(cudaStreamCaptureMode) {}
};

enum class CaptureStatus { None };
inline CaptureStatus
currentStreamCaptureStatusMayInitCtx() {
    return CaptureStatus::None;
}

inline std::string
get_cuda_check_suffix() {
    return "";
}

namespace CUDACachingAllocator {

struct Stat {
    int64_t current = 0, peak = 0, allocated = 0, freed = 0;
};
enum struct StatType : uint64_t { AGGREGATE, SMALL_POOL, LARGE_POOL, NUM_TYPES };
using StatArray = std::array<Stat, static_cast<size_t>(StatType::NUM_TYPES)>;

struct DeviceStats {
    StatArray allocation, segment, active, inactive_split;
    StatArray allocated_bytes, reserved_bytes, active_bytes, inactive_split_bytes, requested_bytes;
    int64_t num_alloc_retries = 0, num_ooms = 0, max_split_size = 0;
    Stat oversize_allocations, oversize_segments;
};

struct Context {
    virtual ~Context() = default;
};
using CreateContextFn = std::shared_ptr<Context> (*)();

struct History {
    void *addr;
    size_t real_size;
    std::shared_ptr<Context> context;
};

struct BlockInfo {
    int64_t size = 0, requested_size = 0;
    int32_t gc_counter = 0;
    bool allocated = false, active = false;
    std::vector<History> history;
};

struct SegmentInfo {
    int64_t device = 0, address = 0, total_size = 0, requested_size = 0, allocated_size = 0,
            active_size = 0;
    cudaStream_t stream = nullptr;
    bool is_large = false;
    std::vector<BlockInfo> blocks;
};

struct TraceEntry {
    enum Action {
        ALLOC,
        FREE_REQUESTED,
        FREE_COMPLETED,
        SEGMENT_ALLOC,
        SEGMENT_FREE,
        SNAPSHOT,
        OOM
    };
    TraceEntry(Action, int64_t, size_t, cudaStream_t, std::shared_ptr<Context> = nullptr) {}
};

struct SnapshotInfo {
    std::vector<SegmentInfo> segments;
    std::vector<std::vector<TraceEntry>> device_traces;
};

using OutOfMemoryObserver = std::function<void(int64_t, int64_t, int64_t, int64_t)>;

struct CUDAAllocator : Allocator {
    virtual void *raw_alloc(size_t) = 0;
    virtual void *raw_alloc_with_stream(size_t, cudaStream_t) = 0;
    virtual void raw_delete(void *) = 0;
    virtual void init(int) = 0;
    virtual bool initialized() = 0;
    virtual void setMemoryFraction(double, int) = 0;
    virtual void emptyCache() = 0;
    virtual void cacheInfo(int, size_t *) = 0;
    virtual void *getBaseAllocation(void *, size_t *) = 0;
    virtual void recordStream(const DataPtr &, CUDAStream) = 0;
    virtual DeviceStats getDeviceStats(int) = 0;
    virtual void resetAccumulatedStats(int) = 0;
    virtual void resetPeakStats(int) = 0;
    virtual SnapshotInfo snapshot() = 0;
    virtual void notifyCaptureBegin(int, CaptureId_t, MempoolId_t) = 0;
    virtual void notifyCaptureAboutToEnd(int, CaptureId_t) = 0;
    virtual void notifyCaptureEnded(int, CaptureId_t) = 0;
    virtual void notifyCaptureDestroy(int, MempoolId_t) = 0;
    virtual std::shared_ptr<void> getIpcDevPtr(std::string) = 0;
    virtual void recordHistory(bool, CreateContextFn, size_t, bool) = 0;
    virtual void attachOutOfMemoryObserver(OutOfMemoryObserver) = 0;
    virtual bool needsPoolSpecificPeerAccess() = 0;
    virtual std::string name() = 0;
};

struct FreeMemoryCallback {
    virtual bool Execute() = 0;
};
struct no_callbacks {
    no_callbacks *operator->() {
        return this;
    }
    std::vector<std::string> Keys() {
        return {};
    }
    std::unique_ptr<FreeMemoryCallback> Create(const std::string &) {
        return nullptr;
    }
};

inline no_callbacks
FreeCudaMemoryCallbacksRegistry() {
    return {};
}

extern std::atomic<CUDAAllocator *> allocator;
inline CUDAAllocator *
get() {
    return allocator.load();
}
namespace CudaMallocAsync {
CUDAAllocator *
allocator() {
    return nullptr;
}
} // namespace CudaMallocAsync
std::string format_size(uint64_t bytes);

} // namespace CUDACachingAllocator
} // namespace cuda
} // namespace c10

template <> struct std::hash<c10::cuda::CUDAStream> {
    size_t operator()(const c10::cuda::CUDAStream &stream) const {
        return std::hash<void *>()(stream.handle);
    }
};

#include GMLAKE_SOURCE

namespace {

c10::cuda::CUDACachingAllocator::CUDAAllocator &
gmlake() {
    auto &it = *c10::cuda::CUDACachingAllocator::allocator.load();
    if (!it.initialized()) {
        it.init(c10::cuda::device_count());
    }
    return it;
}

} // namespace

EXPORT void *
foreign_alloc(ssize_t bytes, int, cudaStream_t stream) {
    return gmlake().raw_alloc_with_stream(static_cast<size_t>(bytes), stream);
}

EXPORT void
foreign_free(void *block, ssize_t, int, cudaStream_t) {
    gmlake().raw_delete(block);
}
