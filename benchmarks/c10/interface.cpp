#include "interface.hpp"

#include <dlfcn.h>
#include <link.h>

#include <string>

#define WRAPPER "N5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator"
#define METHOD(rest) "_Z" WRAPPER rest

c10_allocator c10_it;

namespace {

constexpr size_t HEADER_WORDS = 2; /* Itanium C++ ABI: offset to top and typeinfo */

std::string trouble;

bool
find_slot(void *const *vtable, size_t n_words, const char *symbol, size_t *out) {
    void *address = dlsym(RTLD_DEFAULT, symbol);
    for (size_t i = 0; address != nullptr && i < n_words; i++) {
        if (vtable[i] == address) {
            *out = i;
            return true;
        }
    }
    trouble = std::string("no slot for ") + symbol;
    return false;
}

bool
find_slots() {
    void *vtable = dlsym(RTLD_DEFAULT, "_ZTV" WRAPPER "E");
    Dl_info info;
    void *found = nullptr;
    if (vtable == nullptr || dladdr1(vtable, &info, &found, RTLD_DL_SYMENT) == 0 ||
        found == nullptr) {
        trouble = "torch's pluggable allocator is not exported";
        return false;
    }
    void *const *words = static_cast<void *const *>(vtable) + HEADER_WORDS;
    size_t n = static_cast<const ElfW(Sym) *>(found)->st_size / sizeof(void *) - HEADER_WORDS;
    return find_slot(
               words, n, METHOD("21raw_alloc_with_streamEmP11CUstream_st"),
               &c10_it.raw_alloc_with_stream) &&
           find_slot(words, n, METHOD("10raw_deleteEPv"), &c10_it.raw_delete) &&
           find_slot(
               words, n, METHOD("12recordStreamERKN3c107DataPtrENS3_4cuda10CUDAStreamE"),
               &c10_it.record_stream) &&
           find_slot(words, n, METHOD("8allocateEm"), &c10_it.allocate) &&
           find_slot(words, n, METHOD("10emptyCacheESt4pairIyyE"), &c10_it.empty_cache);
}

/* What recordStream looks at besides the address: the deleter of a DataPtr of this allocator. */
bool
learn_data_ptr() {
    c10_data_ptr sample;
    c10_method<c10_allocate_fn>(c10_it.allocate)(&sample, c10_it.object, 512);
    c10_it.deleter_is_third = sample.second == sample.data;
    c10_it.deleter = c10_it.deleter_is_third ? sample.third : sample.second;
    bool known =
        (c10_it.deleter_is_third || sample.third == sample.data) && (sample.device & 0xFF) == 1;
    c10_method<c10_delete_fn>(c10_it.raw_delete)(c10_it.object, sample.data);
    if (!known) {
        trouble = "the layout of DataPtr is not known";
    }
    return known;
}

} // namespace

/* Finds the allocator torch uses.  Returns nullptr, or why it cannot. */
EXPORT const char *
c10_open() {
    void **live =
        static_cast<void **>(dlsym(RTLD_DEFAULT, "_ZN3c104cuda20CUDACachingAllocator9allocatorE"));
    if (live == nullptr || *live == nullptr) {
        return "torch's CUDA allocator is not loaded";
    }
    c10_it.object = static_cast<void **>(*live);
    return find_slots() && learn_data_ptr() ? nullptr : trouble.c_str();
}
