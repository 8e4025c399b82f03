#pragma once
/* Asks for huge pages for a result that is about to be written for the first time: faulting in a fresh 32 MiB result
 * 4 KiB at a time costs as much as computing it.  Floor 1. */
#include <stddef.h>

/* Does nothing for small ranges, or if the system has no such call. */
void pya_hugepage_advise(void *p, size_t n_bytes);
