#define _GNU_SOURCE
#include "module.h"

#include "memory.h"

#include <stdlib.h>
#include <string.h>

#define SM_THREADS 2048
#define SM_BLOCKS 32
#define SM_SHARED ((size_t)233472)
#define BLOCK_SHARED_RESERVED ((size_t)1024)
#define BLOCK_THREADS 1024
#define BLOCK_SHARED 49152       /* without opting in to more */
#define BLOCK_SHARED_MOST 232448 /* after opting in */

enum {
    DYNAMIC_SHARED = 8, /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
    /* The last one in CUDA 12 and 13.0.  Triton tries 16 and copes if it is refused. */
    LAST_ATTRIBUTE = 15
};

struct variable {
    const void *host;
    size_t size;
    void *device[PYA_HC_MAX_DEVICES];
};

struct kernel {
    struct kernel *next;
    const void *module;
    size_t shared_most;
    char name[];
};

static struct kernel *kernels; /* never freed, like modules */
static struct variable *variables;
static size_t n_variables, variables_capacity;

void *
pya_hc_function(const char *name) {
    /* Never freed: a handle in a program's table may outlive its module, and there are few. */
    return strdup(name == NULL ? "" : name);
}

static struct kernel *
kernel_new(const void *module, const char *name) {
    struct kernel *kernel = malloc(sizeof *kernel + strlen(name) + 1);
    if (kernel != NULL) {
        *kernel = (struct kernel){.next = kernels, .module = module, .shared_most = BLOCK_SHARED};
        memcpy(kernel->name, name, strlen(name) + 1);
        kernels = kernel;
    }
    return kernel;
}

void *
pya_hc_kernel(const void *module, const char *name) {
    name = name == NULL ? "" : name;
    pya_hc_lock();
    struct kernel *kernel = kernels;
    while (kernel != NULL && (kernel->module != module || strcmp(kernel->name, name) != 0)) {
        kernel = kernel->next;
    }
    kernel = kernel == NULL ? kernel_new(module, name) : kernel;
    pya_hc_unlock();
    return kernel;
}

/* NULL for functions compiled into the program. */
static struct kernel *
kernel_find_locked(const void *function) {
    struct kernel *kernel = kernels;
    while (kernel != NULL && (const void *)kernel != function) {
        kernel = kernel->next;
    }
    return kernel;
}

static int
kernel_allow(const void *function, int shared_bytes) {
    if (shared_bytes < 0 || shared_bytes > BLOCK_SHARED_MOST) {
        return CU_INVALID_VALUE;
    }
    pya_hc_lock();
    struct kernel *kernel = kernel_find_locked(function);
    if (kernel != NULL) {
        kernel->shared_most = (size_t)shared_bytes;
    }
    pya_hc_unlock();
    return CU_OK;
}

int
pya_hc_kernel_set(const void *function, int attribute, int value) {
    if (attribute < 0 || attribute > LAST_ATTRIBUTE) {
        return CU_INVALID_VALUE;
    }
    return attribute == DYNAMIC_SHARED ? kernel_allow(function, value) : CU_OK;
}

bool
pya_hc_launch_fits(const unsigned *grid, const unsigned *block) {
    static const unsigned grid_most[3] = {INT32_MAX, UINT16_MAX, UINT16_MAX};
    static const unsigned block_most[3] = {BLOCK_THREADS, BLOCK_THREADS, 64};
    uint64_t n_threads = 1;
    for (int i = 0; i < 3; i++) {
        if (grid[i] - 1 >= grid_most[i] || block[i] - 1 >= block_most[i]) {
            return false; /* also for 0 */
        }
        n_threads *= block[i];
    }
    return n_threads <= BLOCK_THREADS;
}

int
pya_hc_launch_check(
    const void *function, const unsigned *grid, const unsigned *block, size_t shared_bytes) {
    size_t shared_most = BLOCK_SHARED;
    if (shared_bytes > BLOCK_SHARED) {
        pya_hc_lock();
        const struct kernel *kernel = kernel_find_locked(function);
        shared_most = kernel == NULL ? BLOCK_SHARED_MOST : kernel->shared_most;
        pya_hc_unlock();
    }
    bool is_fit = pya_hc_launch_fits(grid, block) && shared_bytes <= shared_most;
    return function != NULL && is_fit ? CU_OK : CU_INVALID_VALUE;
}

enum {
    FUNC_MAX_THREADS = 0,
    FUNC_REGS = 4,
    FUNC_PTX = 5,
    FUNC_BINARY = 6,
    FUNC_DYNAMIC_SHARED = 8
};

int
pya_hc_function_attribute(int attribute, int *value) {
    if (value == NULL) {
        return CU_INVALID_VALUE;
    }
    switch (attribute) {
    case FUNC_MAX_THREADS:
        *value = BLOCK_THREADS;
        break;
    case FUNC_REGS:
        *value = 32;
        break;
    case FUNC_PTX:
    case FUNC_BINARY:
        *value = 90;
        break;
    case FUNC_DYNAMIC_SHARED:
        *value = BLOCK_SHARED;
        break;
    default:
        *value = 0;
    }
    return CU_OK;
}

void
pya_hc_function_attributes(struct cuda_func_attributes *out) {
    *out = (struct cuda_func_attributes){.preferred_carveout = -1};
    (void)pya_hc_function_attribute(FUNC_MAX_THREADS, &out->max_threads_per_block);
    (void)pya_hc_function_attribute(FUNC_REGS, &out->n_regs);
    (void)pya_hc_function_attribute(FUNC_PTX, &out->ptx_version);
    (void)pya_hc_function_attribute(FUNC_BINARY, &out->binary_version);
    (void)pya_hc_function_attribute(FUNC_DYNAMIC_SHARED, &out->max_dynamic_shared_bytes);
}

int
pya_hc_occupancy(int block_threads, size_t shared_bytes) {
    if (block_threads <= 0 || block_threads > BLOCK_THREADS) {
        return 0;
    }
    size_t blocks = (size_t)(SM_THREADS / block_threads);
    size_t by_shared =
        shared_bytes < SM_SHARED ? SM_SHARED / (shared_bytes + BLOCK_SHARED_RESERVED) : 0;
    blocks = blocks < by_shared ? blocks : by_shared;
    return (int)(blocks < SM_BLOCKS ? blocks : SM_BLOCKS);
}

void
pya_hc_variable_register(const void *host, size_t size) {
    pya_hc_lock();
    if (n_variables == variables_capacity) {
        size_t capacity = variables_capacity == 0 ? 256 : 2 * variables_capacity;
        struct variable *grown = realloc(variables, capacity * sizeof *grown);
        if (grown != NULL) {
            variables = grown;
            variables_capacity = capacity;
        }
    }
    if (n_variables < variables_capacity) {
        variables[n_variables++] = (struct variable){.host = host, .size = size};
    }
    pya_hc_unlock();
}

int
pya_hc_variable_address(const void *host, void **address, size_t *size) {
    struct pya_hc_device *dev = pya_hc_current_device();
    if (dev == NULL) {
        return CU_NO_DEVICE;
    }
    int error = CU_INVALID_SYMBOL;
    pya_hc_lock();
    for (size_t i = 0; i < n_variables && error == CU_INVALID_SYMBOL; i++) {
        struct variable *variable = &variables[i];
        if (variable->host != host) {
            continue;
        }
        /* Not charged: on a card variables are in the module's image, not in the program's memory. */
        void **slot = &variable->device[dev->ordinal];
        if (*slot == NULL) {
            *slot = calloc(1, variable->size == 0 ? 1 : variable->size);
        }
        *address = *slot;
        *size = variable->size;
        error = *slot == NULL ? CU_OUT_OF_MEMORY : CU_OK;
    }
    pya_hc_unlock();
    return error;
}
