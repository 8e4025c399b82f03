#pragma once
/* Driver entry points by name.  Floor 1 (uses call.h). */

/* The newest form of the entry point that `version` (13020 for 13.2) knows.  A name that the runtime
 * has not gets a stub that reports itself and answers "not supported"; NULL when stubs ran out. */
void *pya_hc_driver_lookup(const char *name, int version);
