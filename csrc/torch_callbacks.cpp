/* In every version of torch so far, its registry of callbacks starts with a std::unordered_map of factories.  We read it
 * only if its words look like such a map and it contains torch's own callback under its name. */
#include "torch_callbacks.h"

#include "torch_symbols.h"

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

/* Declared as in torch, and not in an unnamed namespace: the compiler would then conclude that nobody implements it. */
namespace pya_torch {
class callback {
  public:
    callback() = default;
    callback(const callback &) = delete;
    callback &operator=(const callback &) = delete;
    virtual ~callback() = default;
    virtual bool execute() = 0;
};
} // namespace pya_torch

namespace {

using maker = std::function<std::unique_ptr<pya_torch::callback>()>;
using makers = std::unordered_map<std::string, maker>;

constexpr const char *REGISTRY = "_ZN3c1031FreeCudaMemoryCallbacksRegistryB5cxx11Ev";
/* Registered by libtorch_cuda since 1.4; the quotes are part of the name. */
constexpr const char *OF_TORCH = "\"cuda_ipc_collect\"";

/* The words of libstdc++'s map: buckets, bucket count, first node, node count, maximum load factor (1.0), next resize. */
bool
looks_like_map(const void *registry) {
    struct {
        uintptr_t buckets, n_buckets, first, n_nodes;
        float max_load;
        uintptr_t n_next, single;
    } words;
    constexpr uintptr_t MOST = 1U << 20U;
    static_assert(sizeof words == sizeof(makers), "not libstdc++'s map");
    memcpy(&words, registry, sizeof words);
    return words.buckets != 0 && words.buckets % alignof(void *) == 0 && words.first != 0 &&
           words.first % alignof(void *) == 0 && words.n_buckets <= MOST && words.n_nodes > 0 &&
           words.n_nodes <= words.n_buckets && words.max_load == 1.0F;
}

/* NULL: not found, or of a layout we do not know. */
const makers *
find_makers() {
    void *found = pya_torch_symbol(REGISTRY);
    const void *(*registry)() = nullptr;
    memcpy(&registry, &found, sizeof registry);
    const void *object = registry == nullptr ? nullptr : registry();
    if (object == nullptr || !looks_like_map(object)) {
        return nullptr;
    }
    const auto *map = static_cast<const makers *>(object);
    return map->count(OF_TORCH) == 1 ? map : nullptr;
}

} // namespace

bool
pya_torch_callbacks_run(void) {
    bool has_freed = false;
    try {
        const makers *all = find_makers();
        std::vector<maker> now; /* a copy: a callback may load a library that registers another */
        if (all != nullptr) {
            for (const auto &named : *all) {
                now.push_back(named.second);
            }
        }
        for (const maker &make : now) {
            has_freed = make()->execute() || has_freed;
        }
    } catch (...) { // NOLINT(bugprone-empty-catch): out of memory is what gets reported
    }
    return has_freed;
}
