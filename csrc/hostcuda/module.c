#define _GNU_SOURCE
#include "module.h"

#include "memory.h"

#include <stdlib.h>
#include <string.h>

#define SM_THREADS 2048
#define SM_BLOCKS 32
#define SM_SHARED ((size_t)233472)
#define BLOCK_SHARED_RESERVED ((size_t)1024)

struct variable {
    const void *host;
    size_t size;
    void *device[PYA_HC_MAX_DEVICES];
};

static struct variable *variables;
static size_t n_variables, variables_capacity;

void *
pya_hc_function(const char *name) {
    /* Never freed: a handle may outlive its module in a program's table, and there are few. */
    return strdup(name == NULL ? "" : name);
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
        *value = 1024;
        break;
    case FUNC_REGS:
        *value = 32;
        break;
    case FUNC_PTX:
    case FUNC_BINARY:
        *value = 90;
        break;
    case FUNC_DYNAMIC_SHARED:
        *value = 49152;
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
    if (block_threads <= 0 || block_threads > 1024) {
        return 0;
    }
    size_t blocks = (size_t)(SM_THREADS / block_threads);
    size_t by_shared = SM_SHARED / (shared_bytes + BLOCK_SHARED_RESERVED);
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
        /* On a card these lie in the module's image, not in the program's memory: not charged. */
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
