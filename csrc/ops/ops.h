#pragma once
/* The C interface of libpyalloc_ops: fused CPU ops.  Callers pass pointers and element strides; no framework type appears
 * here.  Every function is thread-safe, allocates only scratch whose size does not depend on the batch, and gives
 * bitwise equal results for equal inputs.  Floor 1. */
#include <stdbool.h>
#include <stdint.h>

#include "args.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PYA_OPS_API __attribute__((visibility("default")))

typedef enum pya_ops_status {
    PYA_OPS_OK = 0,
    PYA_OPS_E_NOMEM = 1,
    PYA_OPS_E_INVAL = 2,
    PYA_OPS_E_DRIVER = 3,
} pya_ops_status;

typedef enum pya_ops_isa {
    PYA_OPS_ISA_SCALAR = 0,
    PYA_OPS_ISA_AVX2 = 1,
    PYA_OPS_ISA_AVX512 = 2,
    PYA_OPS_ISA_AMX = 3, /* scaled attention only; else AVX-512 */
} pya_ops_isa;

typedef enum pya_ops_dtype {
    PYA_OPS_F32 = 0,
    PYA_OPS_F64 = 1,
} pya_ops_dtype;

PYA_OPS_API int pya_ops_ps_forward(const struct pya_ops_ps *ps);
PYA_OPS_API int pya_ops_ps_backward(const struct pya_ops_ps *ps);
/* The mixture's backward reads out; nothing else of the forward is kept. */
PYA_OPS_API int pya_ops_ps_mixture_forward(const struct pya_ops_ps *ps);
PYA_OPS_API int pya_ops_ps_mixture_backward(const struct pya_ops_ps *ps);

PYA_OPS_API int pya_ops_additive_forward(const struct pya_ops_additive *a);
PYA_OPS_API int pya_ops_additive_backward(const struct pya_ops_additive *a);

PYA_OPS_API int pya_ops_attention_forward(const struct pya_ops_attention *a);
PYA_OPS_API int pya_ops_attention_backward(const struct pya_ops_attention *a);

/* --- CUDA, through the driver; nothing is linked, libcuda is opened on request ----------------- */

/* Where kernels run: a module, the context that it was loaded in, and a stream of that context. */
struct pya_ops_target {
    uint64_t module;
    void *stream;
    void *context;
};

/* path NULL: libcuda.so.1.  A second call with another path switches to that library. */
PYA_OPS_API int pya_ops_cuda_open(const char *path);
/* image: a fatbin, cubin or PTX, loaded in the thread's context.  On success sets module and context of *to; otherwise *to
 * is unchanged.  Launches work from any thread, whatever its context is. */
PYA_OPS_API int pya_ops_cuda_load(const void *image, struct pya_ops_target *to);
/* Does the module have this kernel?  Those for tensor cores are not built for every device.  With lazy loading, asking also
 * loads the kernel, which the driver may not do while a stream is captured. */
PYA_OPS_API bool pya_ops_cuda_has(const struct pya_ops_target *to, const char *kernel);
/* The driver's last error in this thread, for messages: its number and the call. */
PYA_OPS_API const char *pya_ops_cuda_error(void);

PYA_OPS_API int
pya_ops_cuda_ps_forward(const struct pya_ops_ps *ps, const struct pya_ops_target *to);
/* How many numbers the backward's workspace needs; 0: none. */
PYA_OPS_API int64_t pya_ops_cuda_ps_room(const struct pya_ops_ps *ps);
PYA_OPS_API int64_t pya_ops_cuda_additive_room(const struct pya_ops_additive *a);
PYA_OPS_API int
pya_ops_cuda_ps_backward(const struct pya_ops_ps *ps, const struct pya_ops_target *to);
PYA_OPS_API int
pya_ops_cuda_additive_forward(const struct pya_ops_additive *a, const struct pya_ops_target *to);
PYA_OPS_API int
pya_ops_cuda_additive_backward(const struct pya_ops_additive *a, const struct pya_ops_target *to);
PYA_OPS_API int
pya_ops_cuda_attention_forward(const struct pya_ops_attention *a, const struct pya_ops_target *to);
PYA_OPS_API int
pya_ops_cuda_attention_backward(const struct pya_ops_attention *a, const struct pya_ops_target *to);

/* best: the widest instruction set that both this machine and this build have; current: the one in use; select: chooses a
 * narrower one (for tests and measurements). */
PYA_OPS_API int pya_ops_isa_best(void);
PYA_OPS_API int pya_ops_isa_current(void);
PYA_OPS_API int pya_ops_isa_select(int isa);

#ifdef __cplusplus
}
#endif
