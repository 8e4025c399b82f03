#define _GNU_SOURCE
#include "lookup.h"

#include "call.h"
#include "state.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* Forms whose parameters changed, with the version that introduced them.  For all other names a suffix names the only
 * form there is. */
static const struct {
    const char *name;
    int version;
    const char *symbol;
} lookup_forms[] = {
    {"cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"},
    {"cuGraphAddNode", 12030, "cuGraphAddNode_v2"},
    {"cuGraphAddNode", 0, "cuGraphAddNode"},
    {"cuGraphNodeGetDependencies", 12030, "cuGraphNodeGetDependencies_v2"},
    {"cuGraphNodeGetDependencies", 0, "cuGraphNodeGetDependencies"},
    {"cuStreamUpdateCaptureDependencies", 12030, "cuStreamUpdateCaptureDependencies_v2"},
    {"cuStreamUpdateCaptureDependencies", 0, "cuStreamUpdateCaptureDependencies"},
    {"cuCtxGetDevice", 0, "cuCtxGetDevice"},
    {"cuCtxSynchronize", 0, "cuCtxSynchronize"},
    {"cuLaunchHostFunc", 0, "cuLaunchHostFunc"},
    {"cuStreamGetCtx", 0, "cuStreamGetCtx"},
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    {"cuGetProcAddress", 0, "cuGetProcAddress"},
};

/* Stubs for names that are unknown at build time: a row of functions, each assigned to one name. */
#define N_STUBS 64
static struct pya_hc_call stub_calls[N_STUBS];
static char stub_names[N_STUBS][96];
static int n_stubs;

#define STUB(i)                                                                                    \
    static int lookup_stub_##i(void) {                                                             \
        return pya_hc_unknown(&stub_calls[i], "libcuda.so.1");                                     \
    }
/* clang-format off */
#define STUBS(F) \
    F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11) F(12) \
    F(13) F(14) F(15) F(16) F(17) F(18) F(19) F(20) F(21) F(22) F(23) F(24) F(25) \
    F(26) F(27) F(28) F(29) F(30) F(31) F(32) F(33) F(34) F(35) F(36) F(37) F(38) \
    F(39) F(40) F(41) F(42) F(43) F(44) F(45) F(46) F(47) F(48) F(49) F(50) F(51) \
    F(52) F(53) F(54) F(55) F(56) F(57) F(58) F(59) F(60) F(61) F(62) F(63)
/* clang-format on */
STUBS(STUB)
#define STUB_NAME(i) lookup_stub_##i,
static int (*const stubs[N_STUBS])(void) = {STUBS(STUB_NAME)};

static void *
lookup_stub(const char *name) {
    void *found = NULL;
    pya_hc_lock();
    int i = 0;
    while (i < n_stubs && strcmp(stub_names[i], name) != 0) {
        i++;
    }
    if (i == n_stubs && n_stubs < N_STUBS) {
        (void)snprintf(stub_names[i], sizeof stub_names[i], "%s", name);
        stub_calls[i].name = stub_names[i];
        n_stubs++;
    }
    if (i < n_stubs) {
        memcpy(&found, &stubs[i], sizeof found);
    }
    pya_hc_unlock();
    return found;
}

static void *
lookup_own(const char *symbol) {
    static void *_Atomic own;
    if (own == NULL) {
        Dl_info info;
        if (dladdr(&lookup_forms, &info) == 0) {
            return NULL;
        }
        own = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    return own == NULL ? NULL : dlsym(own, symbol);
}

void *
pya_hc_driver_lookup(const char *name, int version) {
    for (size_t i = 0; i < sizeof lookup_forms / sizeof lookup_forms[0]; i++) {
        if (strcmp(lookup_forms[i].name, name) == 0 && version >= lookup_forms[i].version) {
            return lookup_own(lookup_forms[i].symbol);
        }
    }
    static const char *const suffixes[] = {"_v4", "_v3", "_v2", ""};
    for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
        char symbol[128];
        (void)snprintf(symbol, sizeof symbol, "%s%s", name, suffixes[i]);
        void *found = lookup_own(symbol);
        if (found != NULL) {
            return found;
        }
    }
    return lookup_stub(name);
}
