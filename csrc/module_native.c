/* dladdr() walks the symbols of a whole library, some 0.2 ms for one of torch's, and the stacks of a history name the same
 * few thousand addresses over and over.  So we cache its answers in a hash table with open addressing.
 *
 * If a library is unloaded and another one is loaded at its address, the old names stay: wrong names in a stack, no harm. */
#define _GNU_SOURCE /* dladdr */
#include "module_native.h"

#include "core/lock.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    FIRST_SLOTS = 1024,
    /* When full, the table is emptied.  An entry takes a few hundred bytes; large programs have some thousands. */
    MOST_KNOWN = 1 << 15,
};

struct known {
    void *address; /* NULL: empty */
    enum pya_native_owner owner;
    struct pya_native_texts texts; /* owned */
};

/* A leaf lock, apart from the loader's own: no Python code runs under it. */
static struct pya_lock table_lock;
static struct known *slots; /* owned */
static size_t n_slots;      /* power of two, or 0 */
static size_t n_known;      /* <= n_slots / 2 and <= MOST_KNOWN */

/* From the C++ runtime, which is linked because of the bridge. */
extern char *__cxa_demangle(const char *mangled, char *buffer, size_t *bytes, int *status);

static struct known *
slot_of(const void *address) {
    const uint64_t hash = (uint64_t)(uintptr_t)address * UINT64_C(0x9E3779B97F4A7C15);
    size_t at = (size_t)(hash >> 32) & (n_slots - 1);
    while (slots[at].address != NULL && slots[at].address != address) {
        at = (at + 1) & (n_slots - 1);
    }
    return &slots[at];
}

static void
table_forget(void) {
    for (size_t i = 0; i < n_slots; i++) {
        free(slots[i].texts.name);
        free(slots[i].texts.file);
    }
    free(slots);
    slots = NULL;
    n_slots = 0;
    n_known = 0;
}

/* Makes room for one more entry; false if host memory is out. */
static bool
table_grow(void) {
    if (n_known >= MOST_KNOWN) {
        table_forget();
    }
    if (n_known < n_slots / 2) {
        return true;
    }
    struct known *old = slots;
    const size_t n_old = n_slots;
    const size_t n = n_old == 0 ? FIRST_SLOTS : n_old * 2;
    struct known *more = calloc(n, sizeof *more);
    if (more == NULL) {
        return false;
    }
    slots = more;
    n_slots = n;
    for (size_t i = 0; i < n_old; i++) {
        if (old[i].address != NULL) {
            *slot_of(old[i].address) = old[i];
        }
    }
    free(old);
    return true;
}

/* The base of the file with Python's own functions: a library, or the program. */
static const void *
python_base(void) {
    static const void *base;
    if (base == NULL) {
        Dl_info where;
        const void *function = dlsym(RTLD_DEFAULT, "PyEval_EvalCode");
        base = function != NULL && dladdr(function, &where) != 0 ? where.dli_fbase : NULL;
    }
    return base;
}

/* From 3.14 on the interpreter loop may be many static functions that tail-call one another, so that
 * _PyEval_EvalFrameDefault() is not in the stack.  Other static functions of Python only pass calls to it or from it. */
static bool
is_of_interpreter(const Dl_info *where) {
    return where->dli_sname == NULL
               ? where->dli_fbase == python_base()
               : strncmp(where->dli_sname, "_PyEval_", strlen("_PyEval_")) == 0;
}

static enum pya_native_owner
owner_of(const Dl_info *where) {
    static void *own_base;
    if (own_base == NULL) {
        Dl_info own;
        own_base = dladdr(&own_base, &own) != 0 ? own.dli_fbase : NULL;
    }
    if (where->dli_fbase == own_base) {
        return PYA_NATIVE_OWN;
    }
    return is_of_interpreter(where) ? PYA_NATIVE_INTERPRETER : PYA_NATIVE_OTHER;
}

/* Owned; NULL if host memory is out.  A static function has no name here, so its offset in the library stands for it: that
 * is the same in every process, and addr2line understands it. */
static char *
name_of(const void *address, const Dl_info *where) {
    char text[300];
    if (where == NULL) {
        (void)snprintf(text, sizeof text, "%p", address);
        return strdup(text);
    }
    if (where->dli_sname == NULL) {
        const char *slash = strrchr(where->dli_fname, '/');
        const size_t offset = (size_t)((const char *)address - (const char *)where->dli_fbase);
        (void)snprintf(
            text, sizeof text, "%.255s+0x%zx", slash == NULL ? where->dli_fname : slash + 1,
            offset);
        return strdup(text);
    }
    char *demangled = __cxa_demangle(where->dli_sname, NULL, NULL, NULL);
    return demangled != NULL ? demangled : strdup(where->dli_sname);
}

/* Fills all of a slot except its address; false if host memory is out. */
static bool
describe(const void *address, struct known *out) {
    Dl_info where;
    const bool is_known = dladdr(address, &where) != 0;
    out->owner = is_known ? owner_of(&where) : PYA_NATIVE_OTHER;
    out->texts.file = strdup(is_known ? where.dli_fname : "??");
    out->texts.name = name_of(address, is_known ? &where : NULL);
    if (out->texts.file == NULL || out->texts.name == NULL) {
        free(out->texts.file);
        free(out->texts.name);
        return false;
    }
    return true;
}

/* NULL if host memory is out; the lock is held. */
static const struct known *
look_up_locked(void *address) {
    struct known found = {.address = address};
    struct known *slot = n_slots == 0 ? NULL : slot_of(address);
    if (slot != NULL && slot->address == address) {
        return slot;
    }
    if (!table_grow() || !describe(address, &found)) {
        return NULL;
    }
    n_known++;
    slot = slot_of(address);
    *slot = found;
    return slot;
}

enum pya_native_owner
pya_native_owner_of(void *address) {
    pya_lock_acquire(&table_lock);
    const struct known *known = look_up_locked(address);
    const enum pya_native_owner owner = known == NULL ? PYA_NATIVE_OTHER : known->owner;
    pya_lock_release(&table_lock);
    return owner;
}

bool
pya_native_texts_of(void *address, struct pya_native_texts *out) {
    struct pya_native_texts copy = {NULL, NULL};
    pya_lock_acquire(&table_lock);
    const struct known *known = look_up_locked(address);
    if (known != NULL) {
        copy = (struct pya_native_texts){strdup(known->texts.name), strdup(known->texts.file)};
    }
    pya_lock_release(&table_lock);
    if (copy.name == NULL || copy.file == NULL) {
        free(copy.name);
        free(copy.file);
        return false;
    }
    *out = copy;
    return true;
}
