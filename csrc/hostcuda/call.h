#pragma once
/* What every entry point does first: count itself, refuse in a forked child, fail where a test asked
 * for it.  Floor 1 (uses abi.h). */

#include "abi.h"

#include <stdatomic.h>
#include <stdbool.h>

/* One per entry point, static in it; linked into a global list by its first call. */
struct pya_hc_call {
    const char *name;
    _Atomic uint64_t n_calls;
    atomic_bool listed;
    struct pya_hc_call *next; /* written once, before the record is published */
};

/* Entry points that no program reaches by itself and that create no context. */
int pya_hc_enter_quiet(struct pya_hc_call *call);
/* Returns 0, or the error the entry point must return at once. */
int pya_hc_enter(struct pya_hc_call *call);

/* Driver entry points return errors; runtime ones also remember them for cudaGetLastError. */
#define HC_DRIVER()                                                                                \
    static struct pya_hc_call hc_call_ = {.name = __func__};                                       \
    int hc_entered_ = pya_hc_enter(&hc_call_);                                                     \
    if (hc_entered_ != CU_OK) {                                                                    \
        return hc_entered_;                                                                        \
    }
#define HC_RUNTIME()                                                                               \
    static struct pya_hc_call hc_call_ = {.name = __func__};                                       \
    int hc_entered_ = pya_hc_enter(&hc_call_);                                                     \
    if (hc_entered_ != CU_OK) {                                                                    \
        return pya_hc_runtime(hc_entered_);                                                        \
    }
#define HC_QUIET()                                                                                 \
    static struct pya_hc_call hc_call_ = {.name = __func__};                                       \
    (void)pya_hc_enter_quiet(&hc_call_)

/* Remembers an error as the thread's last one and returns it. */
int pya_hc_runtime(int error);
int pya_hc_last_error(bool clear);

/* Says once per name that the runtime has no such entry point; returns CU_NOT_SUPPORTED. */
int pya_hc_unknown(struct pya_hc_call *call, const char *library);

/* Makes call number n from now (1 is the next) return `error`; only calls of `name` count unless it
 * is NULL.  n = 0 switches it off.  The name is copied. */
void pya_hc_fail_nth(uint64_t n, const char *name, int error);
/* Parses "n", "n:name" or "n:name:code"; false when malformed. */
bool pya_hc_fail_parse(const char *text);

uint64_t pya_hc_calls_total(void);
uint64_t pya_hc_calls_of(const char *name);
void pya_hc_calls_reset(void);
/* Calls back for every entry point that was called, in no particular order. */
void pya_hc_calls_each(void (*fn)(const char *name, uint64_t n, void *data), void *data);

const char *pya_hc_error_name(int error);
const char *pya_hc_error_text(int error);
