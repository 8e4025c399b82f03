/* torch's CUDAPluggableAllocator wrapper raises in methods that it has no hook for.  Its vtable and most of its methods are
 * exported.  We copy the vtable, replace the slots we can identify, and point the one live object at the copy.
 *
 * A slot is found, never assumed.  Exported methods are found by comparing addresses.  Methods inherited from a base class that
 * is not exported are found by calling them: those between two exported neighbours do nothing but raise "... does not yet
 * support <name>".  A few do nothing at all, or return true: they are recognised by their code, next to an exported method.
 * A slot that is not found is left alone, and `pyalloc doctor` says so.
 *
 * Signatures follow from the mangled names, or for inherited methods from torch's public header, since the version that
 * introduced them.  Only integers, pointers and libstdc++ types appear in them. */
#include "torch_slots.h"

#include "core/pyalloc.h"
#include "torch_bridge.h"
#include "torch_fast.h"
#include "torch_ipc.h"
#include "torch_native.h"
#include "torch_old_string.h"
#include "torch_peers.h"
#include "torch_pools.h"
#include "torch_symbols.h"
#include "torch_uncached.h"
#include "torch_vtable.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#define VTABLE "_ZTV" PYA_TORCH_WRAPPER "E"
#define METHOD(rest) PYA_TORCH_METHOD(rest)
#define LIVE_OBJECT "_ZN3c104cuda20CUDACachingAllocator9allocatorE"
#define POOL_ID "St4pairIyyE"

namespace {

/* Number of inherited methods between the two neighbours: five in 2.15; more than this would mean another layout. */
constexpr size_t MAX_GAP = 8;

using any_function = void (*)();

/* Contract of the native method: raise *largest to the largest block that a request could get without waiting; if the caller
 * passes 0, count the device's free memory too.  cudnn.benchmark sizes its workspaces by it. */
void
slot_cache_info(void *self, int8_t device, size_t *largest) {
    (void)self;
    pya_heap *heap = pya_torch_heap();
    struct pya_memory_info info = {};
    if (heap == nullptr || pya_memory_info(heap, device, &info) != PYA_OK) {
        return; /* leave the caller's own guess */
    }
    const size_t free_bytes = *largest == 0 ? info.free_bytes : 0;
    const size_t most = info.largest_free_bytes > free_bytes ? info.largest_free_bytes : free_bytes;
    *largest = most > *largest ? most : *largest;
}

double
slot_memory_fraction(void *self, int8_t device) {
    (void)self;
    pya_heap *heap = pya_torch_heap();
    return heap == nullptr ? 1.0 : pya_get_fraction(heap, device);
}

/* A device that was never used has only zeros: no error to report. */
void
slot_reset_peak(void *self, int8_t device) {
    (void)self;
    pya_heap *heap = pya_torch_heap();
    if (heap != nullptr && pya_stats_reset_peak(heap, device) != PYA_OK) {
        return;
    }
}

void
slot_reset_accumulated(void *self, int8_t device) {
    (void)self;
    pya_heap *heap = pya_torch_heap();
    if (heap != nullptr && pya_stats_reset_accumulated(heap, device) != PYA_OK) {
        return;
    }
}

/* An older torch, such as 2.6, does not say which pool. */
void
slot_empty_cache_oldest(void *self) {
    pya_torch_empty_cache(self, pya_torch_pool_in_use());
}

struct slot {
    const char *feature;
    const char *symbol; /* exported name; NULL: identified by other means */
    const char *older;  /* in older versions; oldest: in still older ones; may be NULL */
    const char *oldest;
    const char
        *method; /* if not exported: its name in its exception (oldest: the same in old versions) */
    any_function replacement;
    /* Replacements for a torch that has the oldest name, and for one with old strings (the mangled name does not include the
     * return type).  NULL: `replacement` fits there too. */
    any_function of_oldest, of_old_strings;
    const char *detail; /* NULL: not tried yet */
    bool taken;
};

template <typename F>
any_function
as_any(F *function) {
    return reinterpret_cast<any_function>(function);
}

template <typename F>
slot
silent(const char *feature, F *function) {
    slot each = {};
    each.feature = feature;
    each.replacement = as_any(function);
    return each;
}

template <typename F>
slot
inherited(const char *feature, const char *method, F *function) {
    slot each = silent(feature, function);
    each.method = method;
    return each;
}

template <typename F>
slot
exported(const char *feature, const char *symbol, F *function, const char *older = nullptr) {
    slot each = silent(feature, function);
    each.symbol = symbol;
    each.older = older;
    return each;
}

template <typename F>
slot
with_oldest(slot each, const char *oldest, F *function) {
    each.oldest = oldest;
    each.of_oldest = as_any(function);
    return each;
}

template <typename F>
slot
with_old_strings(slot each, F *function) {
    each.of_old_strings = as_any(function);
    return each;
}

#define HISTORY_FRONT "13recordHistoryEbPFSt10shared_ptrIN3c1015GatheredContextEEvEmNS4_"
#define HISTORY                                                                                    \
    METHOD(HISTORY_FRONT                                                                           \
           "22CachingDeviceAllocator13RecordContextEb"                                             \
           "RKSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaISH_EE")
#define HISTORY_OLDEST METHOD(HISTORY_FRONT "4cuda20CUDACachingAllocator13RecordContextE")
#define HISTORY_OLDER HISTORY_OLDEST "b"
#define SNAPSHOT METHOD("8snapshotE" POOL_ID "b")
#define SNAPSHOT_OLDER METHOD("8snapshotE" POOL_ID)
#define SNAPSHOT_OLDEST METHOD("8snapshotEv")
#define STATE_POINTER "St10shared_ptrIN3c104cuda20CUDACachingAllocator14AllocatorStateEE"
#define TRACKER(room)                                                                              \
    METHOD("27attachAllocatorTraceTrackerESt8functionIFvRKN3c10" room "10TraceEntryEEE")
#define OBSERVER METHOD("25attachOutOfMemoryObserverESt8functionIFvlmmmEE")

/* Exported neighbours of methods that are inherited. */
struct gap {
    const char *first, *last;
};
#define CHECKPOINT_SET METHOD("22setCheckpointPoolStateEa" STATE_POINTER)
constexpr gap POOL_METHODS = {METHOD("11releasePoolEa" POOL_ID), METHOD("14shareIpcHandleEPv")};
constexpr gap ADDRESS_METHODS = {CHECKPOINT_SET, METHOD("4nameB5cxx11Ev")};

slot slots[] = {
    exported("cudnn.benchmark (slot cacheInfo)", METHOD("9cacheInfoEaPm"), slot_cache_info),
    exported("slot getMemoryFraction", METHOD("17getMemoryFractionEa"), slot_memory_fraction),
    exported("slot resetPeakStats", METHOD("14resetPeakStatsEa"), slot_reset_peak),
    exported(
        "slot resetAccumulatedStats", METHOD("21resetAccumulatedStatsEa"), slot_reset_accumulated),
    with_oldest(
        exported("slot emptyCache", METHOD("10emptyCacheE" POOL_ID), pya_torch_empty_cache),
        METHOD("10emptyCacheEv"), slot_empty_cache_oldest),
    with_oldest(
        inherited(
            "torch.cuda.MemPool (slot createOrIncrefPool)", "createOrIncrefPool",
            pya_torch_pool_create),
        "ensureExistsAndIncrefPool", pya_torch_pool_create_without),
    inherited(
        "MemPool.use_count() (slot getPoolUseCount)", "getPoolUseCount", pya_torch_pool_users),
    inherited(
        "MemPool(use_on_oom=True) (slot setUseOnOOM)", "setUseOnOOM", pya_torch_pool_use_on_oom),
    inherited("MemPool(no_split=True) (slot setNoSplit)", "setNoSplit", pya_torch_pool_no_split),
    inherited(
        "CUDA-graph trees (slot checkPoolLiveAllocations)", "checkPoolLiveAllocations",
        pya_torch_pool_has_exactly),
    exported(
        "CUDA-graph trees (slot getCheckpointState)", METHOD("18getCheckpointStateEa" POOL_ID),
        pya_torch_checkpoint_get),
    exported(
        "CUDA-graph trees (slot setCheckpointPoolState)", CHECKPOINT_SET, pya_torch_checkpoint_set),
    inherited(
        "memory at a given address (slot allocateWithAddress)", "allocateWithAddress",
        pya_torch_fast_allocate_at),
    with_oldest(
        exported(
            "memory history (slot recordHistory)", HISTORY, pya_torch_record_history,
            HISTORY_OLDER),
        HISTORY_OLDEST, pya_torch_record_history_oldest),
    silent("record_function in snapshots (slot recordAnnotation)", pya_torch_record_annotation),
    silent("compile_context (slot pushCompileContext)", pya_torch_push_compile_context),
    silent("compile_context (slot popCompileContext)", pya_torch_pop_compile_context),
    with_oldest(
        exported(
            "pinned memory in snapshots (slot snapshot)", SNAPSHOT, pya_torch_snapshot,
            SNAPSHOT_OLDER),
        SNAPSHOT_OLDEST, pya_torch_snapshot_oldest),
    exported("observers (slot attachOutOfMemoryObserver)", OBSERVER, pya_torch_observe_oom),
    exported(
        "observers (slot attachOomRejectionObserver)",
        METHOD("26attachOomRejectionObserverESt8functionIFvlmmmEE"), pya_torch_observe_rejections),
    exported(
        "a clear error for C++ (slot getDeviceStats)", METHOD("14getDeviceStatsEa"),
        pya_torch_refuse_stats),
    exported(
        "NCCL process groups (slot attachAllocatorTraceTracker)",
        TRACKER("22CachingDeviceAllocator"), pya_torch_drop_tracker,
        TRACKER("4cuda20CUDACachingAllocator")),
    silent("caching_allocator_enable (slot enable)", pya_torch_slot_enable),
    silent("caching_allocator_enable (slot isEnabled)", pya_torch_slot_is_enabled),
    exported(
        "streams of other libraries (slot recordStream)",
        METHOD("12recordStreamERKN3c107DataPtrENS3_4cuda10CUDAStreamE"),
        pya_torch_fast_record_stream),
    exported("peer access (slot enablePeerAccess)", PYA_TORCH_ENABLE_PEER, pya_torch_enable_peer),
    exported(
        "copies between devices (slot memcpyAsync)",
        METHOD("11memcpyAsyncEPviPKvimP11CUstream_stb"), pya_torch_copy),
    with_old_strings(
        exported(
            "CUDA IPC (slot shareIpcHandle)", METHOD("14shareIpcHandleEPv"), pya_torch_ipc_share),
        pya_torch_ipc_share_old),
    with_old_strings(
        exported(
            "CUDA IPC (slot getIpcDevPtr)",
            METHOD("12getIpcDevPtrENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"),
            pya_torch_ipc_open, METHOD("12getIpcDevPtrESs")),
        pya_torch_ipc_open_old),
    exported("fast path (slot raw_alloc)", METHOD("9raw_allocEm"), pya_torch_fast_raw_alloc),
    exported(
        "fast path (slot raw_alloc_with_stream)", METHOD("21raw_alloc_with_streamEmP11CUstream_st"),
        pya_torch_fast_raw_alloc_with_stream),
    exported("fast path (slot raw_delete)", METHOD("10raw_deleteEPv"), pya_torch_fast_raw_delete),
    exported("fast path (slot allocate)", METHOD("8allocateEm"), pya_torch_fast_allocate),
};
/* The last N_FAST are taken together or not at all: memory allocated by one of them must be freed by ours. */
constexpr size_t N_FAST = 4;
constexpr size_t N_SLOTS = sizeof slots / sizeof slots[0];

/* torch's own allocator, for uninstall(); NULL before pyalloc was registered. */
void *native_allocator = nullptr;

std::atomic<void *> *
live_allocator() {
    return static_cast<std::atomic<void *> *>(pya_torch_symbol(LIVE_OBJECT));
}

void
say_all(const char *detail) {
    for (slot &each : slots) {
        each.detail = detail;
    }
}

any_function
replacement_here(const slot &each) {
    if (each.of_oldest != nullptr && pya_torch_symbol(each.oldest) != nullptr) {
        return each.of_oldest;
    }
    if (each.of_old_strings != nullptr && pya_torch_has_old_strings()) {
        return each.of_old_strings;
    }
    return each.replacement;
}

void
slot_put(slot &each, void **copy, size_t index) {
    const any_function replacement = replacement_here(each);
    memcpy(&copy[index], &replacement, sizeof copy[index]);
    each.detail = "taken";
    each.taken = true;
}

const char *
first_found(const char *name, const char *older, const char *oldest) {
    const char *found = name;
    for (const char *each : {oldest, older, name}) {
        found = each != nullptr && pya_torch_symbol(each) != nullptr ? each : found;
    }
    return found;
}

const char *
name_here(const slot &each) {
    return first_found(each.symbol, each.older, each.oldest);
}

void
take_exported(slot &each, void **copy, size_t words) {
    const void *method = pya_torch_symbol(name_here(each));
    if (method == nullptr) {
        each.detail = "libtorch_cuda does not export the method";
        return;
    }
    const size_t index = pya_torch_slot_find(copy, words, method);
    if (index == 0) {
        each.detail = "the method is not in the wrapper's vtable exactly once";
        return;
    }
    slot_put(each, copy, index);
}

/* Takes all or none.  PYALLOC_FAST_PATH=0 keeps torch's own methods, for comparison. */
bool
fast_slots_are_there(void *const *copy, size_t words) {
    const char *wish = getenv("PYALLOC_FAST_PATH");
    bool good = (wish == nullptr || strcmp(wish, "0") != 0) && pya_torch_fast_prepare();
    for (size_t i = N_SLOTS - N_FAST; i < N_SLOTS; i++) {
        good = good && pya_torch_slot_find(copy, words, pya_torch_symbol(slots[i].symbol)) != 0;
    }
    return good;
}

/* torch's own raw_delete only knows blocks from its own raw_alloc, not those that a checkpoint brings back. */
bool
needs_fast(const slot &each) {
    return each.replacement == as_any(pya_torch_checkpoint_get) ||
           each.replacement == as_any(pya_torch_checkpoint_set);
}

/* Without pya_torch_fast_knows_streams(), torch's own method does: it calls the hook. */
bool
needs_streams(const slot &each) {
    return each.replacement == as_any(pya_torch_fast_record_stream);
}

bool
is_named_in(const char *method, const std::string &text) {
    return method != nullptr &&
           text.find(std::string(" support ") + method + ".") != std::string::npos;
}

slot *
slot_named_in(const std::string &text) {
    for (slot &each : slots) {
        if (each.method != nullptr && is_named_in(each.oldest, text)) {
            each.replacement = each.of_oldest;
            return &each;
        }
        if (is_named_in(each.method, text)) {
            return &each;
        }
    }
    return nullptr;
}

/* Takes those of the inherited methods between two exported ones that we have. */
void
take_between(const gap &gap, void *object, void **copy, size_t words) {
    const size_t first = pya_torch_slot_find(copy, words, pya_torch_symbol(gap.first));
    const size_t last = pya_torch_slot_find(copy, words, pya_torch_symbol(gap.last));
    if (first == 0 || last <= first || last - first > MAX_GAP) {
        return;
    }
    for (size_t i = first + 1; i < last; i++) {
        slot *named = slot_named_in(pya_torch_probe(object, copy[i]));
        if (named != nullptr && !named->taken) {
            slot_put(*named, copy, i);
            if (strcmp(named->method, "setNoSplit") == 0) {
                pya_torch_pool_has_no_split();
            }
        }
    }
}

/* In every version that has them, the inherited methods about pools are between releasePool and shareIpcHandle, and
 * allocateWithAddress is between setCheckpointPoolState and name. */
void
take_inherited(void *object, void **copy, size_t words, bool is_fast) {
    for (slot &each : slots) {
        if (each.method != nullptr) {
            each.detail = "torch has no such method where it was looked for";
        }
    }
    take_between(POOL_METHODS, object, copy, words);
    if (is_fast) {
        take_between(ADDRESS_METHODS, object, copy, words);
    }
}

template <typename F>
void
put_silent(F *function, void **copy, size_t index) {
    for (slot &each : slots) {
        if (each.replacement == as_any(function)) {
            slot_put(each, copy, index);
        }
    }
}

/* The number of consecutive methods from `first` on that do nothing. */
size_t
count_silent(void *const *copy, size_t words, size_t first) {
    size_t n = 0;
    while (first + n < words && pya_torch_does_nothing(copy[first + n])) {
        n++;
    }
    return n;
}

/* recordAnnotation, pushCompileContext and popCompileContext follow recordHistory and do nothing.  Returns how many of the
 * three there are.  In 2.11 a metadata setter, which does nothing either, its getter and attachOutOfMemoryObserver follow
 * them; before 2.8 attachOutOfMemoryObserver follows recordAnnotation. */
size_t
count_silent_history(void *const *copy, size_t words, size_t history) {
    const size_t n = count_silent(copy, words, history + 1);
    const size_t observer = pya_torch_slot_find(copy, words, pya_torch_symbol(OBSERVER));
    const bool has_all = n == 3 || (n == 4 && observer == history + 6);
    return has_all ? 3 : n == 1 && observer == history + 2 ? 1 : 0;
}

/* enable (does nothing) and isEnabled (returns true) are right before cacheInfo.  The methods after recordHistory take
 * strings, so they are left alone in a torch with old strings. */
void
take_silent(void **copy, size_t words) {
    for (slot &each : slots) {
        if (each.symbol == nullptr && each.method == nullptr) {
            each.detail = "torch has no such method where it was looked for";
        }
    }
    const size_t history =
        pya_torch_slot_find(copy, words, pya_torch_symbol(pya_torch_record_history_name()));
    const size_t n_silent = history == 0 || pya_torch_has_old_strings()
                                ? 0
                                : count_silent_history(copy, words, history);
    if (n_silent > 0) {
        put_silent(pya_torch_record_annotation, copy, history + 1);
    }
    if (n_silent == 3) {
        put_silent(pya_torch_push_compile_context, copy, history + 2);
        put_silent(pya_torch_pop_compile_context, copy, history + 3);
    }
    const size_t info =
        pya_torch_slot_find(copy, words, pya_torch_symbol(METHOD("9cacheInfoEaPm")));
    if (info > PYA_VTABLE_HEADER_WORDS + 2 && pya_torch_does_nothing(copy[info - 2]) &&
        pya_torch_returns_true(copy[info - 1])) {
        put_silent(pya_torch_slot_enable, copy, info - 2);
        put_silent(pya_torch_slot_is_enabled, copy, info - 1);
    }
}

} // namespace

void *
pya_torch_native_allocator(void) {
    return native_allocator;
}

void *
pya_torch_current_allocator(void) {
    std::atomic<void *> *live = live_allocator();
    return live == nullptr ? nullptr : live->load();
}

void *
pya_torch_virtual(void *object, const char *method, size_t after) {
    void **vtable = static_cast<void **>(pya_torch_symbol(VTABLE));
    const size_t words = vtable == nullptr ? 0 : pya_torch_vtable_words(vtable);
    const size_t index =
        words == 0 ? 0 : pya_torch_slot_find(vtable, words, pya_torch_symbol(method));
    if (index == 0 || index + after >= words) {
        return nullptr;
    }
    return (*static_cast<void ***>(object))[index + after - PYA_VTABLE_HEADER_WORDS];
}

const char *
pya_torch_record_history_name(void) {
    return first_found(HISTORY, HISTORY_OLDER, HISTORY_OLDEST);
}

const char *
pya_torch_snapshot_name(void) {
    return first_found(SNAPSHOT, SNAPSHOT_OLDER, SNAPSHOT_OLDEST);
}

extern "C" bool
pya_torch_has_slots(const char *feature) {
    bool has_all = true;
    for (const slot &each : slots) {
        has_all = has_all && (strncmp(each.feature, feature, strlen(feature)) != 0 || each.taken);
    }
    return has_all;
}

extern "C" void
pya_torch_remember_allocator(void) {
    std::atomic<void *> *live = live_allocator();
    if (live != nullptr) {
        native_allocator = live->load();
    }
}

extern "C" bool
pya_torch_restore_allocator(void) {
    if (pya_torch_heap() == nullptr) {
        return true; /* nothing was replaced; another library's allocator stays */
    }
    std::atomic<void *> *live = live_allocator();
    if (live == nullptr || native_allocator == nullptr) {
        return false;
    }
    live->store(native_allocator);
    return true;
}

extern "C" void
pya_torch_take_slots(void) {
    for (slot &each : slots) {
        each.taken = false; /* an earlier installation had another object and its own copy */
    }
    void **vtable = static_cast<void **>(pya_torch_symbol(VTABLE));
    std::atomic<void *> *live = live_allocator();
    if (vtable == nullptr || live == nullptr || live->load() == nullptr) {
        say_all("libtorch_cuda does not export the wrapper's vtable");
        return;
    }
    void ***object = static_cast<void ***>(live->load());
    if (*object != vtable + PYA_VTABLE_HEADER_WORDS) {
        say_all("the active allocator is not torch's plain wrapper");
        return;
    }
    const size_t words = pya_torch_vtable_words(vtable);
    /* Never freed: torch's object uses it until the process ends. */
    void **copy = words == 0 ? nullptr : static_cast<void **>(malloc(words * sizeof *copy));
    if (copy == nullptr) {
        say_all("the size of the wrapper's vtable is not known");
        return;
    }
    memcpy(copy, vtable, words * sizeof *copy);
    const bool is_fast = fast_slots_are_there(copy, words);
    take_inherited(object, copy, words, is_fast);
    take_silent(copy, words);
    pya_torch_record_history_has_skip(pya_torch_symbol(HISTORY) != nullptr);
    const bool knows_streams = pya_torch_fast_knows_streams();
    for (size_t i = 0; i < N_SLOTS; i++) {
        const bool is_of_fast = i >= N_SLOTS - N_FAST || needs_fast(slots[i]);
        if ((!is_fast && is_of_fast) || (!knows_streams && needs_streams(slots[i]))) {
            slots[i].detail = "off, or torch lacks one of the methods and functions it needs";
        } else if (slots[i].symbol != nullptr) {
            take_exported(slots[i], copy, words);
        }
    }
    __atomic_store_n(object, copy + PYA_VTABLE_HEADER_WORDS, __ATOMIC_RELEASE);
}

extern "C" bool
pya_torch_slot_feature(size_t index, const char **name, bool *works, const char **detail) {
    if (index >= N_SLOTS) {
        return false;
    }
    *name = slots[index].feature;
    *works = slots[index].taken;
    *detail = slots[index].detail == nullptr ? "not installed yet" : slots[index].detail;
    return true;
}
