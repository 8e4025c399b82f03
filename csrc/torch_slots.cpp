/* torch's CUDAPluggableAllocator wrapper raises in methods it has no hook for.  Its vtable is exported, and most of its
 * methods: we copy the vtable, replace slots that were found, and point the one live object at the copy.
 *
 * A slot is found, never assumed.  An exported method by comparing addresses; a method inherited from a base class that
 * is not exported by calling it: those stand between two exported neighbours and do nothing but raise "... does not yet
 * support <name>".  A slot that is not found is left as it is, and `pyalloc doctor` says so.
 *
 * Signatures are fixed by the mangled names, or, for inherited methods, by torch's public header since they exist; only
 * integers, pointers and libstdc++ types appear in them. */
#include "torch_slots.h"

#include "core/pyalloc.h"
#include "torch_bridge.h"
#include "torch_fast.h"
#include "torch_ipc.h"
#include "torch_symbols.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <stdexcept>
#include <string>
#include <vector>

#define WRAPPER "N5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator"
#define VTABLE "_ZTV" WRAPPER "E"
#define METHOD(rest) "_Z" WRAPPER rest
#define LIVE_OBJECT "_ZN3c104cuda20CUDACachingAllocator9allocatorE"
#define POOL_ID "St4pairIyyE"

namespace {

/* Itanium C++ ABI: offset to top and typeinfo stand before the first slot. */
constexpr size_t HEADER_WORDS = 2;
constexpr size_t MAX_WORDS = 512;
/* Inherited methods between the two neighbours: five in 2.15; more would mean another layout. */
constexpr size_t MAX_GAP = 8;

using any_function = void (*)();

/* Native's contract: *largest is raised to the largest block a request could get without waiting, and where the caller
 * passes 0, the device's free memory counts too.  cudnn.benchmark sizes its workspaces by it. */
void
slot_cache_info(void *self, int8_t device, size_t *largest) {
    (void)self;
    pya_heap *heap = pya_torch_heap();
    struct pya_memory_info info = {};
    if (heap == nullptr || pya_memory_info(heap, device, &info) != PYA_OK) {
        return; /* the caller's own guess stands */
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

/* Statistics of a device that was never used are zero already: nothing to report to the caller. */
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

void
check_pool(pya_status status, const char *what) {
    if (status != PYA_OK) {
        throw std::runtime_error(std::string("pyalloc: ") + what + ": " + pya_status_text(status));
    }
}

/* Graphs and MemPools that hold the pool; 0 for one that is gone. */
int
slot_pool_users(void *self, int8_t device, pya_pool_id id) {
    (void)self;
    pya_heap *heap = pya_torch_heap();
    if (heap == nullptr) {
        return 0;
    }
    std::vector<pya_pool_info> infos(pya_pool_list(heap, device, nullptr, 0));
    const size_t n = pya_pool_list(heap, device, infos.data(), infos.size());
    for (size_t i = 0; i < n && i < infos.size(); i++) {
        if (infos[i].id.first == id.first && infos[i].id.second == id.second) {
            return static_cast<int>(infos[i].n_users);
        }
    }
    return 0;
}

/* torch.cuda.MemPool(): one more user.  The last argument is an allocator of the pool's own: a plain pointer in older
 * versions, NULL for none; since then a shared_ptr, which arrives as the address of one whose first word is NULL for
 * none.  One reading serves both. */
void
slot_create_pool(void *self, int8_t device, pya_pool_id id, void *const *allocator) {
    (void)self;
    if (allocator != nullptr && *allocator != nullptr) {
        throw std::runtime_error(
            "pyalloc: a MemPool with an allocator of its own is not supported; use MemPool() without one");
    }
    check_pool(pya_pool_retain(pya_torch_heap(), device, id, false), "making a pool failed");
}

/* Older versions have no flag, and no setNoSplit either: there the call means true. */
std::atomic<bool> use_on_oom_has_flag{false};

void
slot_use_on_oom(void *self, int8_t device, pya_pool_id id, bool flag) {
    (void)self;
    const bool use_on_oom = !use_on_oom_has_flag.load() || flag;
    check_pool(
        pya_pool_retain(pya_torch_heap(), device, id, use_on_oom), "setting use_on_oom failed");
    check_pool(pya_pool_release(pya_torch_heap(), device, id), "setting use_on_oom failed");
}

/* Asks that segments be handed out whole.  pyalloc has no such segments; the memory is usable all the same. */
void
slot_no_split(void *self, int8_t device, pya_pool_id id) {
    (void)self;
    (void)device;
    (void)id;
}

struct slot {
    const char *feature;
    const char *symbol; /* exported name, or NULL */
    const char *method; /* without an exported name: what its exception calls it */
    any_function replacement;
    const char *detail; /* NULL: not tried yet */
    bool taken;
};

template <typename F>
any_function
as_any(F *function) {
    return reinterpret_cast<any_function>(function);
}

slot slots[] = {
    {"cudnn.benchmark (slot cacheInfo)", METHOD("9cacheInfoEaPm"), nullptr, as_any(slot_cache_info),
     nullptr, false},
    {"slot getMemoryFraction", METHOD("17getMemoryFractionEa"), nullptr,
     as_any(slot_memory_fraction), nullptr, false},
    {"slot resetPeakStats", METHOD("14resetPeakStatsEa"), nullptr, as_any(slot_reset_peak), nullptr,
     false},
    {"slot resetAccumulatedStats", METHOD("21resetAccumulatedStatsEa"), nullptr,
     as_any(slot_reset_accumulated), nullptr, false},
    {"torch.cuda.MemPool (slot createOrIncrefPool)", nullptr, "createOrIncrefPool",
     as_any(slot_create_pool), nullptr, false},
    {"MemPool.use_count() (slot getPoolUseCount)", nullptr, "getPoolUseCount",
     as_any(slot_pool_users), nullptr, false},
    {"MemPool(use_on_oom=True) (slot setUseOnOOM)", nullptr, "setUseOnOOM", as_any(slot_use_on_oom),
     nullptr, false},
    {"MemPool(no_split=True) (slot setNoSplit)", nullptr, "setNoSplit", as_any(slot_no_split),
     nullptr, false},
    {"CUDA IPC (slot shareIpcHandle)", METHOD("14shareIpcHandleEPv"), nullptr,
     as_any(pya_torch_ipc_share), nullptr, false},
    {"CUDA IPC (slot getIpcDevPtr)",
     METHOD("12getIpcDevPtrENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"), nullptr,
     as_any(pya_torch_ipc_open), nullptr, false},
    {"fast path (slot raw_alloc)", METHOD("9raw_allocEm"), nullptr,
     as_any(pya_torch_fast_raw_alloc), nullptr, false},
    {"fast path (slot raw_alloc_with_stream)", METHOD("21raw_alloc_with_streamEmP11CUstream_st"),
     nullptr, as_any(pya_torch_fast_raw_alloc_with_stream), nullptr, false},
    {"fast path (slot raw_delete)", METHOD("10raw_deleteEPv"), nullptr,
     as_any(pya_torch_fast_raw_delete), nullptr, false},
    {"fast path (slot allocate)", METHOD("8allocateEm"), nullptr, as_any(pya_torch_fast_allocate),
     nullptr, false},
};
/* The last ones belong together: memory that one of them made must come back to ours. */
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

/* Words in the vtable by the symbol's own size; 0 when unknown. */
size_t
vtable_words(void **vtable) {
    Dl_info where;
    void *entry = nullptr;
    if (dladdr1(vtable, &where, &entry, RTLD_DL_SYMENT) == 0 || entry == nullptr) {
        return 0;
    }
    const size_t words = static_cast<const ElfW(Sym) *>(entry)->st_size / sizeof(void *);
    return words > HEADER_WORDS && words <= MAX_WORDS ? words : 0;
}

/* The only slot that holds address, or 0 (a header word) when there is none or more than one. */
size_t
slot_find(void *const *vtable, size_t words, const void *address) {
    size_t found = 0;
    for (size_t i = HEADER_WORDS; i < words; i++) {
        if (vtable[i] == address && address != nullptr) {
            if (found != 0) {
                return 0;
            }
            found = i;
        }
    }
    return found;
}

/* What an inherited method says when it is called with nothing: the text of its exception, "" when it raises none. */
std::string
probe(void *object, void *method) {
    using probed = void (*)(void *self, int8_t device, pya_pool_id id, void *pointer);
    alignas(16) unsigned char nothing[128] = {};
    try {
        reinterpret_cast<probed>(method)(object, 0, {0, 0}, nothing);
    } catch (const std::exception &error) {
        return error.what();
    }
    return "";
}

void
slot_put(slot &each, void **copy, size_t index) {
    memcpy(&copy[index], &each.replacement, sizeof copy[index]);
    each.detail = "taken";
    each.taken = true;
}

void
take_exported(slot &each, void **copy, size_t words) {
    const void *method = pya_torch_symbol(each.symbol);
    if (method == nullptr) {
        each.detail = "libtorch_cuda does not export the method";
        return;
    }
    const size_t index = slot_find(copy, words, method);
    if (index == 0) {
        each.detail = "the method is not in the wrapper's vtable exactly once";
        return;
    }
    slot_put(each, copy, index);
}

/* All or none.  PYALLOC_FAST_PATH=0 leaves torch's own way in place, to compare. */
bool
fast_slots_are_there(void *const *copy, size_t words) {
    const char *wish = getenv("PYALLOC_FAST_PATH");
    bool good = (wish == nullptr || strcmp(wish, "0") != 0) && pya_torch_fast_prepare();
    for (size_t i = N_SLOTS - N_FAST; i < N_SLOTS; i++) {
        good = good && slot_find(copy, words, pya_torch_symbol(slots[i].symbol)) != 0;
    }
    return good;
}

slot *
slot_named_in(const std::string &text) {
    for (slot &each : slots) {
        if (each.method != nullptr &&
            text.find(std::string(" support ") + each.method + ".") != std::string::npos) {
            return &each;
        }
    }
    return nullptr;
}

/* Between releasePool and shareIpcHandle stand, in every version that has them, the inherited methods about pools. */
void
take_inherited(void *object, void **copy, size_t words) {
    const size_t first =
        slot_find(copy, words, pya_torch_symbol(METHOD("11releasePoolEa" POOL_ID)));
    const size_t last = slot_find(copy, words, pya_torch_symbol(METHOD("14shareIpcHandleEPv")));
    for (slot &each : slots) {
        if (each.method != nullptr) {
            each.detail = "torch has no such method where it was looked for";
        }
    }
    if (first == 0 || last <= first || last - first > MAX_GAP) {
        return;
    }
    for (size_t i = first + 1; i < last; i++) {
        slot *named = slot_named_in(probe(object, copy[i]));
        if (named != nullptr && !named->taken) {
            slot_put(*named, copy, i);
            use_on_oom_has_flag = use_on_oom_has_flag || strcmp(named->method, "setNoSplit") == 0;
        }
    }
}

} // namespace

extern "C" void
pya_torch_remember_allocator(void) {
    std::atomic<void *> *live = live_allocator();
    if (native_allocator == nullptr && live != nullptr) {
        native_allocator = live->load();
    }
}

extern "C" bool
pya_torch_restore_allocator(void) {
    std::atomic<void *> *live = live_allocator();
    if (live == nullptr || native_allocator == nullptr) {
        return false;
    }
    live->store(native_allocator);
    return true;
}

extern "C" void
pya_torch_take_slots(void) {
    void **vtable = static_cast<void **>(pya_torch_symbol(VTABLE));
    std::atomic<void *> *live = live_allocator();
    if (vtable == nullptr || live == nullptr || live->load() == nullptr) {
        say_all("libtorch_cuda does not export the wrapper's vtable");
        return;
    }
    void ***object = static_cast<void ***>(live->load());
    if (*object != vtable + HEADER_WORDS) {
        say_all("the active allocator is not torch's plain wrapper");
        return;
    }
    const size_t words = vtable_words(vtable);
    /* Never freed: torch's object points at it until the process ends. */
    void **copy = words == 0 ? nullptr : static_cast<void **>(malloc(words * sizeof *copy));
    if (copy == nullptr) {
        say_all("the size of the wrapper's vtable is not known");
        return;
    }
    memcpy(copy, vtable, words * sizeof *copy);
    take_inherited(object, copy, words);
    const bool is_fast = fast_slots_are_there(copy, words);
    for (size_t i = 0; i < N_SLOTS; i++) {
        if (i >= N_SLOTS - N_FAST && !is_fast) {
            slots[i].detail = "off, or torch lacks one of the methods and functions it needs";
        } else if (slots[i].symbol != nullptr) {
            take_exported(slots[i], copy, words);
        }
    }
    __atomic_store_n(object, copy + HEADER_WORDS, __ATOMIC_RELEASE);
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
