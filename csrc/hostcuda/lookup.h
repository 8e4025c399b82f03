#pragma once
/* Driver entry points by name.  Floor 1 (uses call.h). */

/* The newest form of the entry point that `version` (13020 for 13.2) knows.  A name unknown to us gets a stub that reports
 * itself and returns "not supported"; NULL if we ran out of stubs. */
void *pya_hc_driver_lookup(const char *name, int version);
