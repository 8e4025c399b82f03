/* Symbols of the torch libraries this process has loaded.  Floor 5. */
#pragma once

#include <stddef.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* In libc10, libc10_cuda, libtorch_cuda or libcudart, whichever has it; NULL where none does.  Loads nothing. */
void *pya_torch_symbol(const char *name);
/* The same, but first what the whole process would find, as calls of the CUDA runtime do: another may be preloaded. */
void *pya_torch_runtime_symbol(const char *name);

#ifdef __cplusplus
}

/* False and NULL where there is none. */
template <typename F>
bool
pya_torch_find(F *&function, const char *name) {
    void *symbol = pya_torch_runtime_symbol(name);
    memcpy(&function, &symbol, sizeof function);
    return symbol != nullptr;
}
#endif
