/* Replays a program through torch's own c10 interface: the virtual methods of whatever allocator torch uses now, without
 * torch's headers and without its Python functions in between.
 *
 * Slots are found in the exported vtable of the pluggable wrapper, by the addresses of its exported methods: native has
 * the same base class, so the same slots.  What is not found is reported and nothing is called. */
#include <dlfcn.h>
#include <link.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

extern "C" {
#include "../../csrc/replay/program.h"
#include "../../csrc/replay/program_internal.h"
}

#define EXPORT extern "C" __attribute__((visibility("default")))
#define WRAPPER "N5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator"
#define METHOD(rest) "_Z" WRAPPER rest

namespace {

constexpr size_t HEADER_WORDS = 2; /* Itanium C++ ABI: offset to top and typeinfo */

/* c10::DataPtr as torch makes one; the order of the middle words is checked at run time. */
struct data_ptr {
    void *data;
    void *second;
    void *third;
    uint16_t device; /* type 1 is CUDA, index in the upper byte */
};

/* c10::cuda::CUDAStream: device, then the stream's number, which for a raw stream is its address. */
struct cuda_stream {
    uint64_t device;
    uint64_t number;
};

struct allocator {
    void **object;
    size_t raw_alloc_with_stream;
    size_t raw_delete;
    size_t record_stream;
    size_t allocate;
    size_t empty_cache;
    void *deleter; /* of DataPtrs that allocate() makes */
    bool deleter_is_third;
};

allocator it;
std::string trouble;

template <typename Function>
Function
method(size_t slot) {
    Function function;
    void **vtable = *reinterpret_cast<void ***>(it.object);
    std::memcpy(&function, &vtable[slot], sizeof function);
    return function;
}

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
    if (vtable == nullptr || dladdr1(vtable, &info, &found, RTLD_DL_SYMENT) == 0 || found == nullptr) {
        trouble = "torch's pluggable allocator is not exported";
        return false;
    }
    void *const *words = static_cast<void *const *>(vtable) + HEADER_WORDS;
    size_t n = static_cast<const ElfW(Sym) *>(found)->st_size / sizeof(void *) - HEADER_WORDS;
    return find_slot(words, n, METHOD("21raw_alloc_with_streamEmP11CUstream_st"), &it.raw_alloc_with_stream)
           && find_slot(words, n, METHOD("10raw_deleteEPv"), &it.raw_delete)
           && find_slot(words, n, METHOD("12recordStreamERKN3c107DataPtrENS3_4cuda10CUDAStreamE"), &it.record_stream)
           && find_slot(words, n, METHOD("8allocateEm"), &it.allocate)
           && find_slot(words, n, METHOD("10emptyCacheESt4pairIyyE"), &it.empty_cache);
}

/* What recordStream looks at besides the address: the deleter of a DataPtr of this allocator. */
bool
learn_data_ptr() {
    data_ptr sample;
    method<data_ptr *(*)(data_ptr *, void *, size_t)>(it.allocate)(&sample, it.object, 512);
    it.deleter_is_third = sample.second == sample.data;
    it.deleter = it.deleter_is_third ? sample.third : sample.second;
    bool known = (it.deleter_is_third || sample.third == sample.data) && (sample.device & 0xFF) == 1;
    method<void (*)(void *, void *)>(it.raw_delete)(it.object, sample.data);
    if (!known) {
        trouble = "the layout of DataPtr is not known";
    }
    return known;
}

void
record_stream(void *ptr, void *stream) {
    data_ptr fake = {ptr, it.deleter_is_third ? ptr : it.deleter, it.deleter_is_third ? it.deleter : ptr, 1};
    cuda_stream where = {1, reinterpret_cast<uint64_t>(stream)};
    method<void (*)(void *, const data_ptr *, cuda_stream)>(it.record_stream)(it.object, &fake, where);
}

} // namespace

/* Private pools are rare: Python does them. */
using c10_pool = void (*)(int kind, int device, uint64_t first, uint64_t second);

struct c10_result {
    uint64_t n_done; /* operations; n_ops when it completed */
    uint64_t half_calls;
    double ns;
    char trouble[256]; /* "" or the text of the exception */
};

/* Finds the allocator torch uses.  Returns nullptr, or why it cannot. */
EXPORT const char *
c10_open() {
    void **live = static_cast<void **>(dlsym(RTLD_DEFAULT, "_ZN3c104cuda20CUDACachingAllocator9allocatorE"));
    if (live == nullptr || *live == nullptr) {
        return "torch's CUDA allocator is not loaded";
    }
    it.object = static_cast<void **>(*live);
    return find_slots() && learn_data_ptr() ? nullptr : trouble.c_str();
}

EXPORT pya_program *
c10_load(const char *path, char *message, size_t bytes) {
    pya_program *program = nullptr;
    return pya_program_load(path, &program, message, bytes) == PYA_OK ? program : nullptr;
}

EXPORT void
c10_info(const pya_program *program, uint64_t *n_ops, uint64_t *live, uint64_t *n_streams, uint64_t *n_devices, uint64_t *n_pools) {
    pya_program_info info;
    pya_program_query(program, &info);
    *n_ops = info.n_ops;
    *live = info.peak_live_bytes;
    *n_streams = info.n_streams;
    *n_devices = info.n_devices;
    *n_pools = info.n_pools;
}

/* One pass.  streams: raw cudaStream_t by number.  At half the operations half() is called.  What is alive at the end
 * (or at a failure) is freed when tidy. */
EXPORT void
c10_run(
    const pya_program *program, void *const *streams, int tidy, uint64_t (*half)(), c10_pool pool, c10_result *out) {
    std::vector<void *> blocks(program->info.n_blocks + 1, nullptr);
    auto alloc = method<void *(*)(void *, size_t, void *)>(it.raw_alloc_with_stream);
    auto free_block = method<void (*)(void *, void *)>(it.raw_delete);
    auto empty = method<void (*)(void *, uint64_t, uint64_t)>(it.empty_cache);
    int (*set_device)(int) = nullptr;
    void *symbol = dlsym(RTLD_DEFAULT, "cudaSetDevice");
    std::memcpy(&set_device, &symbol, sizeof set_device);
    int device = 0;
    *out = c10_result{};
    uint64_t i = 0;
    auto began = std::chrono::steady_clock::now();
    try {
        for (; i < program->info.n_ops; i++) {
            if (half != nullptr && i == program->info.n_ops / 2) {
                out->half_calls = half();
            }
            const program_op &op = program->ops[i];
            if (op.device != device) {
                device = op.device;
                set_device(device);
            }
            void *&block = blocks[op.block];
            if (op.kind == PROGRAM_ALLOC) {
                block = alloc(it.object, op.bytes, streams[op.stream]);
            } else if (op.kind == PROGRAM_FREE) {
                free_block(it.object, block);
                block = nullptr;
            } else if (op.kind == PROGRAM_RECORD_STREAM) {
                record_stream(block, streams[op.stream]);
            } else if (op.kind == PROGRAM_EMPTY_CACHE) {
                empty(it.object, 0, 0);
            } else {
                pool(op.kind - PROGRAM_POOL_BEGIN, op.device, program->pools[op.block].first,
                     program->pools[op.block].second);
            }
        }
    } catch (const std::exception &error) {
        std::snprintf(out->trouble, sizeof out->trouble, "%s", error.what());
    }
    std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
    out->ns = took.count();
    out->n_done = i;
    set_device(0);
    for (size_t k = 0; tidy != 0 && k < blocks.size(); k++) {
        if (blocks[k] != nullptr) {
            free_block(it.object, blocks[k]);
        }
    }
}
