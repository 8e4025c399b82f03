#include "torch_vtable.h"

#include "core/pool_id.h"
#include "torch_error.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <stdexcept>

namespace {

constexpr size_t MAX_WORDS = 512;

/* The machine code of "return" and "return true", optionally after a landing pad for indirect calls. */
#if defined(__aarch64__)
constexpr unsigned char LANDING[] = {0x5f, 0x24, 0x03, 0xd5}; /* bti c */
constexpr unsigned char RETURN[] = {0xc0, 0x03, 0x5f, 0xd6};  /* ret */
constexpr unsigned char RETURN_TRUE[] = {0x20, 0x00, 0x80, 0x52, 0xc0, 0x03, 0x5f, 0xd6}; /* mov */
#else
constexpr unsigned char LANDING[] = {0xf3, 0x0f, 0x1e, 0xfa}; /* endbr64 */
constexpr unsigned char RETURN[] = {0xc3};
constexpr unsigned char RETURN_TRUE[] = {0xb8, 1, 0, 0, 0, 0xc3};
#endif

bool
has_code(const void *method, const unsigned char *code, size_t bytes) {
    const auto *at = static_cast<const unsigned char *>(method);
    if (memcmp(at, LANDING, sizeof LANDING) == 0) {
        at += sizeof LANDING;
    }
    return memcmp(at, code, bytes) == 0;
}

} // namespace

/* Uses the size of the vtable's symbol.  The loader searches all symbols of the library for it, which takes as long as a
 * hundred requests, so the result is kept. */
size_t
pya_torch_vtable_words(void **vtable) {
    static std::atomic<size_t> known{0};
    Dl_info where;
    void *entry = nullptr;
    size_t words = known.load(std::memory_order_relaxed);
    if (words == 0 && dladdr1(vtable, &where, &entry, RTLD_DL_SYMENT) != 0 && entry != nullptr) {
        words = static_cast<const ElfW(Sym) *>(entry)->st_size / sizeof(void *);
        words = words > PYA_VTABLE_HEADER_WORDS && words <= MAX_WORDS ? words : 0;
        known.store(words, std::memory_order_relaxed);
    }
    return words;
}

size_t
pya_torch_slot_find(void *const *vtable, size_t words, const void *address) {
    size_t found = 0;
    for (size_t i = PYA_VTABLE_HEADER_WORDS; i < words; i++) {
        if (vtable[i] == address && address != nullptr) {
            if (found != 0) {
                return 0;
            }
            found = i;
        }
    }
    return found;
}

std::string
pya_torch_probe(void *object, void *method) {
    /* The object stands first and second, because a method that returns a class in memory gets `this` second (x86-64). */
    using probed = void (*)(void *self, void *again, pya_pool_id id, void *pointer);
    alignas(16) unsigned char nothing[128] = {};
    try {
        reinterpret_cast<probed>(method)(object, object, {0, 0}, nothing);
    } catch (const std::exception &error) {
        return pya_torch_text(error);
    }
    return "";
}

bool
pya_torch_does_nothing(const void *method) {
    return has_code(method, RETURN, sizeof RETURN);
}

bool
pya_torch_returns_true(const void *method) {
    return has_code(method, RETURN_TRUE, sizeof RETURN_TRUE);
}
