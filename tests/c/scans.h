/* Scans one file repeatedly; each time a later host allocation fails, until none does. */
#pragma once

#include "check.h"
#include "fault.h"
#include "replay/scan.h"

/* Every failure is reported and loses nothing. */
static inline void
scans_sweep(const char *path, const struct pya_scan_settings *settings) {
    for (unsigned nth = 1;; nth++) {
        const size_t live = fault_live();
        struct pya_scan *scan = NULL;
        fault_arm(nth);
        const pya_status status = pya_scan_run(path, settings, &scan);
        const bool fired = fault_disarm();
        pya_scan_destroy(scan);
        CHECK_EQ(fault_live(), live);
        if (!fired) {
            CHECK_OK(status);
            break;
        }
        CHECK(status != PYA_OK);
    }
}
