/* torch's calls that create and free pools; exceptions reach the caller in Python. */
#include "torch_pools.h"

#include "core/pyalloc.h"
#include "core/snapshot.h"
#include "torch_fast.h"
#include "torch_slots.h"
#include "torch_symbols.h"

#include <atomic>
#include <cstring>
#include <dlfcn.h>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <unordered_map>

namespace {

[[noreturn]] void
raise(const char *what, pya_status status) {
    char text[512];
    (void)pya_heap_error_text(pya_torch_heap(), status, what, -1, text, sizeof text);
    throw std::runtime_error(std::string("pyalloc: ") + text);
}

void
check(pya_status status, const char *what) {
    if (status != PYA_OK) {
        raise(what, status);
    }
}

void *
pointer_of(pya_dptr address) {
    return reinterpret_cast<void *>(static_cast<uintptr_t>(address));
}

/* ---- a pool's own allocator ---- */

struct own_allocator {
    /* Empty if torch passes a plain pointer, which its caller keeps alive. */
    std::shared_ptr<void> held;
    void *object;
    void *(*raw_alloc)(void *self, size_t bytes);
    void (*raw_delete)(void *self, void *ptr);
};

/* Within this scope a capturing thread may do what captures forbid, such as cudaMalloc, as in torch's own allocator. */
class relaxed_capture {
  public:
    relaxed_capture() {
        if (!pya_torch_find(exchange, "cudaThreadExchangeStreamCaptureMode") ||
            exchange(&mode) != 0) {
            exchange = nullptr;
        }
    }
    ~relaxed_capture() {
        if (exchange != nullptr) {
            (void)exchange(&mode);
        }
    }
    relaxed_capture(const relaxed_capture &) = delete;
    relaxed_capture &operator=(const relaxed_capture &) = delete;

  private:
    int (*exchange)(int *mode) = nullptr;
    int mode = 2; /* cudaStreamCaptureModeRelaxed; after the exchange, the thread's previous mode */
};

/* The heap is C, so an exception becomes "no memory". */
pya_dptr
own_alloc(void *arg, size_t bytes) {
    const auto *own = static_cast<own_allocator *>(arg);
    const relaxed_capture scope;
    try {
        return static_cast<pya_dptr>(
            reinterpret_cast<uintptr_t>(own->raw_alloc(own->object, bytes)));
    } catch (...) {
        return 0;
    }
}

void
own_free(void *arg, pya_dptr address) {
    const auto *own = static_cast<own_allocator *>(arg);
    const relaxed_capture scope;
    try {
        own->raw_delete(own->object, pointer_of(address));
    } catch (...) {
        return; /* the segment was given to the allocator; what it does with it is its business */
    }
}

void
own_drop(void *arg) {
    delete static_cast<own_allocator *>(arg);
}

/* ---- a watched cudaMalloc ----
 * A preloaded library may replace cudaMalloc to know a pool's memory: to take it away for a while, as torch_memory_saver does,
 * or to count it.  It sees none of the driver's virtual memory calls. */

struct runtime_functions {
    int (*alloc)(void **out, size_t bytes);
    int (*release)(void *ptr);
    int (*last_error)();
    bool is_watched;
};

const void *
library_of(const char *name) {
    Dl_info info = {};
    const void *symbol = pya_torch_runtime_symbol(name);
    return symbol != nullptr && dladdr(symbol, &info) != 0 ? info.dli_fbase : nullptr;
}

const runtime_functions &
runtime() {
    static const runtime_functions found = [] {
        runtime_functions each = {};
        const bool is_there = pya_torch_find(each.alloc, "cudaMalloc") &&
                              pya_torch_find(each.release, "cudaFree") &&
                              pya_torch_find(each.last_error, "cudaGetLastError");
        each.is_watched = is_there && library_of("cudaMalloc") != library_of("cudaGetDevice");
        return each;
    }();
    return found;
}

void *
watched_alloc(void *self, size_t bytes) {
    (void)self;
    void *ptr = nullptr;
    if (runtime().alloc(&ptr, bytes) != 0) {
        (void)runtime().last_error(); /* clear our error, so that no later caller finds it */
        return nullptr;
    }
    return ptr;
}

void
watched_free(void *self, void *ptr) {
    (void)self;
    (void)runtime().release(ptr);
}

template <typename F>
bool
find_virtual(F *&function, void *object, const char *method) {
    void *found = pya_torch_virtual(object, method);
    memcpy(&function, &found, sizeof function);
    return found != nullptr;
}

/* Does MemPool take its allocator as a plain or a shared pointer?  Its constructor's name tells; 0 if neither name exists. */
enum how_passed { PASSED_UNKNOWN, PASSED_PLAIN, PASSED_SHARED };

#define PLAIN_CONSTRUCTOR "_ZN3c104cuda7MemPoolC1EPNS0_20CUDACachingAllocator13CUDAAllocatorE"
/* torch 2.10 only: the class had moved, but still took a plain pointer. */
#define MOVED_PLAIN_CONSTRUCTOR                                                                    \
    "_ZN2at4cuda7MemPoolC1EPN3c104cuda20CUDACachingAllocator13CUDAAllocatorE"
#define SHARED_CONSTRUCTOR                                                                         \
    "_ZN2at4cuda7MemPoolC1ESt10shared_ptrIN3c104cuda20CUDACachingAllocator13CUDAAllocatorEE"

how_passed
allocator_passed(void) {
    if (pya_torch_symbol(SHARED_CONSTRUCTOR "bbb") != nullptr) {
        return PASSED_SHARED;
    }
    const bool is_plain = pya_torch_symbol(PLAIN_CONSTRUCTOR "bb") != nullptr ||
                          pya_torch_symbol(PLAIN_CONSTRUCTOR "bbb") != nullptr || /* torch 2.8 */
                          pya_torch_symbol(MOVED_PLAIN_CONSTRUCTOR "bbb") != nullptr;
    return is_plain ? PASSED_PLAIN : PASSED_UNKNOWN;
}

#define UNKNOWN_ALLOCATOR                                                                          \
    "it is unknown how this torch passes a MemPool's allocator; use MemPool() without one"

std::unique_ptr<own_allocator>
own_allocator_of(void *const *allocator) {
    auto own = std::make_unique<own_allocator>();
    switch (allocator_passed()) {
    case PASSED_SHARED:
        own->held = *reinterpret_cast<const std::shared_ptr<void> *>(allocator);
        own->object = own->held.get();
        break;
    case PASSED_PLAIN:
        own->object = const_cast<void **>(allocator);
        break;
    case PASSED_UNKNOWN:
    default:
        own->object = nullptr;
        break;
    }
    if (own->object == nullptr ||
        !find_virtual(own->raw_alloc, own->object, PYA_TORCH_METHOD("9raw_allocEm")) ||
        !find_virtual(own->raw_delete, own->object, PYA_TORCH_METHOD("10raw_deleteEPv"))) {
        throw std::runtime_error("pyalloc: " UNKNOWN_ALLOCATOR);
    }
    return own;
}

std::atomic<bool> use_on_oom_has_flag{false};

/* torch 2.6 and 2.7 do not say which pool they mean: it is the one that this thread uses. */
std::atomic<bool> pools_are_untold{false};

void *
object_in_use(void) {
    void *(*in_use)(void) = nullptr;
    return pools_are_untold &&
                   pya_torch_find(in_use, "_ZN3c104cuda14MemPoolContext16getActiveMemPoolEv")
               ? in_use()
               : nullptr;
}

std::vector<pya_pool_info>
pools_of(int8_t device) {
    pya_heap *heap = pya_torch_heap();
    if (heap == nullptr) {
        return {};
    }
    std::vector<pya_pool_info> infos(pya_pool_list(heap, device, nullptr, 0));
    const size_t n = pya_pool_list(heap, device, infos.data(), infos.size());
    infos.resize(n < infos.size() ? n : infos.size());
    return infos;
}

/* The live blocks of a pool. */
std::vector<pya_claim>
live_blocks(int8_t device, pya_pool_id id) {
    std::vector<pya_claim> live;
    pya_snapshot snap;
    check(pya_snapshot_take(pya_torch_heap(), &id, false, &snap), "looking into a pool failed");
    for (size_t i = 0; i < snap.n_segments; i++) {
        const pya_snap_segment &segment = snap.segments[i];
        for (size_t k = 0; segment.device == device && k < segment.n_blocks; k++) {
            const pya_snap_block &block = snap.blocks[segment.first_block + k];
            if (block.state == PYA_SNAP_ACTIVE) {
                live.push_back({block.addr, block.bytes, block.requested, segment.stream});
            }
        }
    }
    pya_snapshot_fini(&snap);
    return live;
}

/* The same for a private pool; throws for one without user and memory, as torch's own allocator does. */
std::vector<pya_claim>
live_blocks_of_private(int8_t device, pya_pool_id id) {
    for (const pya_pool_info &info : pools_of(device)) { /* those with a user or memory */
        if (info.id.first == id.first && info.id.second == id.second) {
            return live_blocks(device, id);
        }
    }
    throw std::runtime_error(
        "pyalloc: there is no private pool (" + std::to_string(id.first) + ", " +
        std::to_string(id.second) + ") on GPU " + std::to_string(device));
}

} // namespace

int
pya_torch_pool_users(void *self, int8_t device, pya_pool_id id) {
    (void)self;
    for (const pya_pool_info &info : pools_of(device)) {
        if (info.id.first == id.first && info.id.second == id.second) {
            return static_cast<int>(info.n_users);
        }
    }
    return 0;
}

bool
pya_torch_pool_takes_allocator(const char **detail) {
    const how_passed passed = allocator_passed();
    *detail = passed == PASSED_SHARED  ? "passed as a shared pointer"
              : passed == PASSED_PLAIN ? "passed as a plain pointer"
                                       : UNKNOWN_ALLOCATOR;
    return passed != PASSED_UNKNOWN;
}

/* In older versions `allocator` is a plain pointer.  Since then it is a shared_ptr, which arrives as an address whose first
 * word is NULL for none.  Checking whether there is one reads the same for both. */
void
pya_torch_pool_create(void *self, int8_t device, pya_pool_id id, void *const *allocator) {
    (void)self;
    pya_heap *heap = pya_torch_heap();
    std::unique_ptr<own_allocator> own;
    if (allocator != nullptr && *allocator != nullptr) {
        own = own_allocator_of(allocator);
    }
    check(pya_pool_retain(heap, device, id, false), "making a pool failed");
    if (own != nullptr) {
        /* The heap owns it from here on, and drops it with the pool. */
        const pya_segment_source source = {own_alloc, own_free, own_drop, own.release()};
        // NOLINTNEXTLINE(clang-analyzer-cplusplus.NewDeleteLeaks)
        const pya_status status = pya_pool_set_source(heap, device, id, source);
        if (status != PYA_OK) {
            (void)!pya_pool_release(heap, device, id);
            throw std::runtime_error(
                "pyalloc: a pool that already holds memory cannot get an allocator of its own");
        }
    }
}

void
pya_torch_pool_note_begun(int8_t device, pya_pool_id id) {
    if (runtime().is_watched) {
        auto own = std::make_unique<own_allocator>();
        own->raw_alloc = watched_alloc;
        own->raw_delete = watched_free;
        /* Refused, and dropped, if the pool already has memory or an allocator. */
        // NOLINTNEXTLINE(clang-analyzer-cplusplus.NewDeleteLeaks)
        const pya_segment_source source = {own_alloc, own_free, own_drop, own.release()};
        (void)!pya_pool_set_source(pya_torch_heap(), device, id, source);
    }
}

void
pya_torch_pool_create_without(void *self, int8_t device, pya_pool_id id) {
    pya_torch_pool_create(self, device, id, nullptr);
    pools_are_untold = true;
}

pya_pool_id
pya_torch_pool_in_use(void) {
    pya_pool_id (*id_of)(void *pool) = nullptr;
    void *pool = object_in_use();
    return pool != nullptr && pya_torch_find(id_of, "_ZN3c104cuda7MemPool2idEv")
               ? id_of(pool)
               : pya_pool_id{0, 0};
}

void
pya_torch_pool_check_allocator(void) {
    void *(*allocator_of)(void *pool) = nullptr;
    void *pool = object_in_use();
    if (pool != nullptr && pya_torch_find(allocator_of, "_ZN3c104cuda7MemPool9allocatorEv") &&
        allocator_of(pool) != nullptr) {
        throw std::runtime_error(
            "pyalloc: a MemPool's own allocator needs torch 2.8 or newer; use MemPool() without one");
    }
}

void
pya_torch_pool_has_no_split(void) {
    use_on_oom_has_flag = true;
}

/* ~MemPool() calls this with false, so it must not throw: in a forked child the pool belongs to the parent. */
void
pya_torch_pool_use_on_oom(void *self, int8_t device, pya_pool_id id, bool flag) {
    (void)self;
    const bool use_on_oom = !use_on_oom_has_flag.load() || flag;
    const pya_status status = pya_pool_set_on_oom(pya_torch_heap(), device, id, use_on_oom);
    if (use_on_oom) {
        check(status, "setting use_on_oom failed");
    }
}

void
pya_torch_pool_no_split(void *self, int8_t device, pya_pool_id id) {
    (void)self;
    check(pya_pool_set_no_split(pya_torch_heap(), device, id), "setting no_split failed");
}

void
pya_torch_empty_cache(void *self, pya_pool_id id) {
    (void)self;
    pya_heap *heap = pya_torch_heap();
    if (heap == nullptr) {
        return;
    }
    if (id.first == 0 && id.second == 0) {
        check(pya_empty_cache(heap, -1), "emptying the cache failed");
        return;
    }
    /* Here the caller is ~MemPool(): nothing may be thrown; what could not be released is tried again later. */
    for (int device = 0; device < PYA_MAX_DEVICES; device++) {
        if (pya_pool_list(heap, device, nullptr, 0) > 0) {
            (void)!pya_pool_trim(heap, device, id);
        }
    }
}

bool
pya_torch_pool_has_exactly(
    void *self, int8_t device, pya_pool_id id, const std::unordered_set<void *> &expected) {
    (void)self;
    const std::vector<pya_claim> live = live_blocks_of_private(device, id);
    for (const pya_claim &block : live) {
        if (expected.count(pointer_of(block.addr)) == 0) {
            return false;
        }
    }
    return live.size() == expected.size();
}

/* ---- checkpoints ---- */

struct pya_torch_pool_state {
    virtual ~pya_torch_pool_state() = default;
    pya_pool_id id = {0, 0};
    std::vector<pya_claim> live;
};

std::shared_ptr<pya_torch_pool_state>
pya_torch_checkpoint_get(void *self, int8_t device, pya_pool_id id) {
    (void)self;
    auto state = std::make_shared<pya_torch_pool_state>();
    state->id = id;
    state->live = live_blocks_of_private(device, id);
    return state;
}

/* As in torch's own allocator: every live block is reported as freed and every block of the checkpoint as allocated, although
 * those in both stay where they are. */
pya_torch_delta
pya_torch_checkpoint_set(void *self, int8_t device, std::shared_ptr<pya_torch_pool_state> state) {
    pya_heap *heap = pya_torch_heap();
    pya_torch_delta delta;
    std::unordered_map<pya_dptr, size_t> stays;
    const pya_torch_pool_state *mine = state.get();
    if (mine == nullptr || typeid(*mine) != typeid(pya_torch_pool_state)) {
        throw std::runtime_error("pyalloc: this checkpoint belongs to another allocator");
    }
    for (const pya_claim &block : state->live) {
        stays[block.addr] = block.bytes;
    }
    for (const pya_claim &block : live_blocks(device, state->id)) {
        delta.freed.push_back(pointer_of(block.addr));
        const auto found = stays.find(block.addr);
        if (found != stays.end() && found->second == block.bytes) {
            stays.erase(found);
        } else {
            check(pya_free(heap, block.addr), "leaving a pool's state failed");
        }
    }
    for (const pya_claim &block : state->live) {
        if (stays.count(block.addr) != 0) { /* already gone */
            check(
                pya_pool_claim(heap, device, state->id, &block),
                "returning to a pool's state failed");
        }
        pya_torch_data_ptr made;
        if (!pya_torch_fast_data_ptr(made.words, self, pointer_of(block.addr), device)) {
            throw std::runtime_error("pyalloc: the layout of this torch's DataPtr is not known");
        }
        delta.allocated.push_back(made);
    }
    return delta;
}
