#pragma once
/* The part of CUDA's binary interface that the host-memory runtime needs, declared here so that it
 * builds without the toolkit.  Floor 0: includes nothing of ours.
 *
 * Numbers and layouts are CUDA's published ones; runtime and driver share the error numbers. */

#include <stddef.h>
#include <stdint.h>

enum pya_cu {
    CU_OK = 0,
    CU_INVALID_VALUE = 1,
    CU_OUT_OF_MEMORY = 2,
    CU_NOT_INITIALIZED = 3,
    CU_INVALID_CONFIGURATION = 9,
    CU_INVALID_SYMBOL = 13,
    CU_INVALID_MEMCPY_DIRECTION = 21,
    CU_NO_DEVICE = 100,
    CU_INVALID_DEVICE = 101,
    CU_INVALID_CONTEXT = 201,
    CU_ECC = 214,
    CU_INVALID_HANDLE = 400,
    CU_ILLEGAL_STATE = 401,
    CU_NOT_FOUND = 500,
    CU_NOT_READY = 600,
    CU_ILLEGAL_ADDRESS = 700,
    CU_LAUNCH_OUT_OF_RESOURCES = 701,
    CU_PEER_ALREADY_ENABLED = 704,
    CU_PEER_NOT_ENABLED = 705,
    CU_ASSERT = 710,
    CU_HOST_ALREADY_REGISTERED = 712,
    CU_HOST_NOT_REGISTERED = 713,
    CU_LAUNCH_FAILURE = 719,
    CU_NOT_PERMITTED = 800,
    CU_NOT_SUPPORTED = 801,
    CU_CAPTURE_UNSUPPORTED = 900,
    CU_CAPTURE_INVALIDATED = 901,
    CU_CAPTURE_MERGE = 902,
    CU_CAPTURE_UNMATCHED = 903,
    CU_CAPTURE_UNJOINED = 904,
    CU_CAPTURE_ISOLATION = 905,
    CU_CAPTURE_IMPLICIT = 906,
    CU_CAPTURED_EVENT = 907,
    CU_CAPTURE_WRONG_THREAD = 908,
    CU_UNKNOWN = 999,
};

enum {
    COPY_H2H,
    COPY_H2D,
    COPY_D2H,
    COPY_D2D,
    COPY_DEFAULT,
    COPY_PEER /* ours: between any two devices */
};
enum { CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED };
enum { CAPTURE_NONE, CAPTURE_ACTIVE, CAPTURE_INVALID };
enum { STREAM_NON_BLOCKING = 1 };
enum { EVENT_DISABLE_TIMING = 2, EVENT_INTERPROCESS = 4 };
enum { NODE_KERNEL = 0, NODE_MEMCPY = 1, NODE_MEMSET = 2, NODE_HOST = 3, NODE_GRAPH = 4 };
enum { NODE_EMPTY = 5, NODE_EVENT_WAIT = 6, NODE_EVENT_RECORD = 7 };
enum { NODE_ALLOC = 10, NODE_FREE = 11, NODE_CONDITIONAL = 13 };

struct cuda_dim3 {
    unsigned x, y, z;
};

/* cudaLaunchConfig_t */
struct cuda_launch_config {
    struct cuda_dim3 grid, block;
    size_t shared_bytes;
    void *stream;
    void *attrs;
    unsigned n_attrs;
};

/* CUlaunchConfig */
struct cu_launch_config {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    void *attrs;
    unsigned n_attrs;
};

struct cuda_location {
    int type; /* 1: device */
    int id;
};

struct cuda_access_desc {
    struct cuda_location location;
    int flags; /* 0 none, 1 read, 3 read and write */
};

/* CUmemAllocationProp */
struct cuda_vmm_prop {
    int type; /* 1: pinned */
    int handle_types;
    struct cuda_location location;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};

/* cudaMemPoolProps */
struct cuda_pool_props {
    int type;
    int handle_types;
    struct cuda_location location;
    void *win32;
    size_t max_size;
    unsigned short usage;
    unsigned char reserved[54];
};

struct cuda_pointer_attributes {
    int type; /* 0 unregistered, 1 host, 2 device, 3 managed */
    int device;
    void *device_pointer;
    void *host_pointer;
};

struct cuda_func_attributes {
    size_t shared_bytes, const_bytes, local_bytes;
    int max_threads_per_block, n_regs, ptx_version, binary_version, cache_mode_ca;
    int max_dynamic_shared_bytes, preferred_carveout;
    int cluster_must_be_set, cluster_width, cluster_height, cluster_depth;
    int cluster_policy, non_portable_cluster;
    int reserved[16];
};

struct cuda_ipc_handle {
    char bytes[64];
};

struct cuda_uuid {
    char bytes[16];
};

/* cudaGraphNodeParams: only the type and the words that we read. */
struct cuda_node_params {
    int type;
    int reserved[3];
    long long words[29];
    long long reserved2;
};

typedef void (*pya_hc_host_fn)(void *data);
typedef void (*pya_hc_stream_callback)(void *stream, int status, void *data);
