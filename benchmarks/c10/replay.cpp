/* Replays a program through torch's own c10 interface. */
#include "interface.hpp"

#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <vector>

extern "C" {
#include "../../csrc/replay/program.h"
#include "../../csrc/replay/program_internal.h"
}

/* A stream of torch's: its cudaStream_t and its number. */
struct c10_stream {
    void *handle;
    uint64_t number;
};

namespace {

/* c10::cuda::CUDAStream: device (as a DataPtr has it), then torch's number of the stream; a handle there would make it
 * another library's. */
struct cuda_stream {
    uint16_t device;
    uint64_t number;
};

cuda_stream
stream_of(const c10_stream &stream, int index) {
    return {static_cast<uint16_t>(1 | index << 8), stream.number};
}

void
record_stream(void *ptr, const c10_stream &stream, int index) {
    const cuda_stream where = stream_of(stream, index);
    c10_data_ptr fake = {
        ptr, c10_it.deleter_is_third ? ptr : c10_it.deleter,
        c10_it.deleter_is_third ? c10_it.deleter : ptr, where.device};
    c10_method<void (*)(void *, const c10_data_ptr *, cuda_stream)>(c10_it.record_stream)(
        c10_it.object, &fake, where);
}

} // namespace

/* Private pools are rare: Python does them. */
using c10_pool = void (*)(int kind, int device, uint64_t first, uint64_t second);

struct c10_result {
    uint64_t n_done; /* operations; n_ops when it completed */
    uint64_t half_calls;
    double ns;
    double device_ns;  /* of those, inside calls of the host-memory runtime */
    char trouble[256]; /* "" or the text of the exception */
};

namespace {

template <typename F>
F *
find(const char *name) {
    F *function = nullptr;
    void *symbol = dlsym(RTLD_DEFAULT, name);
    std::memcpy(&function, &symbol, sizeof function);
    return function;
}

} // namespace

EXPORT pya_program *
c10_load(const char *path, char *message, size_t bytes) {
    pya_program *program = nullptr;
    return pya_program_load(path, nullptr, &program, message, bytes) == PYA_OK ? program : nullptr;
}

EXPORT void
c10_info(
    const pya_program *program, uint64_t *n_ops, uint64_t *live, uint64_t *n_streams,
    uint64_t *n_devices, uint64_t *n_pools) {
    pya_program_info info;
    pya_program_query(program, &info);
    *n_ops = info.n_ops;
    *live = info.peak_live_bytes;
    *n_streams = info.n_streams;
    *n_devices = info.n_devices;
    *n_pools = info.n_pools;
}

/* One pass.  streams: as the program numbers them, of each device after those of the one before.  At half the operations
 * half() is called.  What is alive at the end (or at a failure) is freed when tidy. */
EXPORT void
c10_run(
    const pya_program *program, const c10_stream *streams, int tidy, uint64_t (*half)(),
    c10_pool pool, c10_result *out) {
    std::vector<void *> blocks(program->info.n_blocks + 1, nullptr);
    auto alloc = c10_method<c10_alloc_fn>(c10_it.raw_alloc_with_stream);
    auto free_block = c10_method<c10_delete_fn>(c10_it.raw_delete);
    auto empty = c10_method<c10_empty_fn>(c10_it.empty_cache);
    auto set_device = find<int(int)>("cudaSetDevice");
    auto set_stream =
        find<void(cuda_stream)>("_ZN3c104cuda20setCurrentCUDAStreamENS0_10CUDAStreamE");
    auto device_ns = find<uint64_t(const char *)>("pya_hostcuda_device_ns");
    int device = 0;
    /* A stream that torch does not use where it is asked of may be another library's. */
    std::vector<const c10_stream *> current(program->info.n_devices + 1, nullptr);
    *out = c10_result{};
    uint64_t i = 0;
    op_reader reader = {&program->ops, nullptr, 0};
    uint64_t device_before = device_ns(nullptr);
    auto began = std::chrono::steady_clock::now();
    try {
        for (; i < program->info.n_ops; i++) {
            if (half != nullptr && i == program->info.n_ops / 2) {
                out->half_calls = half();
            }
            const program_op *next = nullptr;
            if (op_reader_get(&reader, i, &next) != PYA_OK) {
                throw std::runtime_error("reading the program failed");
            }
            const program_op &op = *next;
            if (op.device != device) {
                device = op.device;
                set_device(device);
            }
            void *&block = blocks[op.block];
            const c10_stream &stream = streams[op.device * program->info.n_streams + op.stream];
            if (op.kind == PROGRAM_ALLOC) {
                if (current[op.device] != &stream) {
                    current[op.device] = &stream;
                    set_stream(stream_of(stream, op.device));
                }
                block = alloc(c10_it.object, op.bytes, stream.handle);
            } else if (op.kind == PROGRAM_FREE) {
                free_block(c10_it.object, block);
                block = nullptr;
            } else if (op.kind == PROGRAM_RECORD_STREAM) {
                record_stream(block, stream, op.device);
            } else if (op.kind == PROGRAM_EMPTY_CACHE) {
                empty(c10_it.object, 0, 0);
            } else {
                pool(
                    op.kind - PROGRAM_POOL_BEGIN, op.device, program->pools[op.block].first,
                    program->pools[op.block].second);
            }
        }
    } catch (const std::exception &error) {
        std::snprintf(out->trouble, sizeof out->trouble, "%s", error.what());
    }
    std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
    out->device_ns = static_cast<double>(device_ns(nullptr) - device_before);
    op_reader_fini(&reader);
    out->ns = took.count();
    out->n_done = i;
    for (uint32_t k = 0; k < program->info.n_devices; k++) {
        if (current[k] != nullptr) {
            set_stream(stream_of(streams[k * program->info.n_streams], static_cast<int>(k)));
        }
    }
    set_device(0);
    for (size_t k = 0; tidy != 0 && k < blocks.size(); k++) {
        if (blocks[k] != nullptr) {
            free_block(c10_it.object, blocks[k]);
        }
    }
}
