/* Symbols of the torch libraries this process has loaded.  Floor 5. */
#pragma once

#include <stddef.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Looks in libc10, libc10_cuda, libtorch_cuda and libtorch_python; NULL if none has it.  Loads nothing. */
void *pya_torch_symbol(const char *name);
/* The same, but tries the process's global scope first, as calls of the CUDA runtime do: a runtime may be preloaded. */
void *pya_torch_runtime_symbol(const char *name);

#ifdef __cplusplus
}

/* If there is no such symbol, false and function = NULL. */
template <typename F>
bool
pya_torch_find(F *&function, const char *name) {
    void *symbol = pya_torch_runtime_symbol(name);
    memcpy(&function, &symbol, sizeof function);
    return symbol != nullptr;
}
#endif
