/* DLPack's table of C functions, through which torch shows a tensor without giving ownership.  Floor 6. */
#pragma once

#include <Python.h>

#include <stdint.h>

/* The layouts of DLPack 1.x: a view of a tensor, and the functions that a library offers. */
struct pya_dlpack_view {
    void *data;
    int32_t device_kind, device_index;
    int32_t n_dims;
    uint8_t dtype_kind, dtype_bits;
    uint16_t dtype_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
struct pya_dlpack_api {
    uint32_t major, minor;
    void *older;
    void (*unused[3])(void);
    int (*view)(void *tensor, struct pya_dlpack_view *out); /* may be NULL */
};
enum { PYA_DLPACK_CPU = 1, PYA_DLPACK_FLOAT = 2, PYA_DLPACK_BOOL = 6 };

/* The table of a tensor class, with `view` set; NULL without an exception if the class has none that we know. */
const struct pya_dlpack_api *pya_module_dlpack(PyObject *tensor_type);
