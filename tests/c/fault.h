/* Host allocations under test: every malloc, calloc, realloc, aligned_alloc, posix_memalign, strdup and
 * anonymous mmap of the program goes through here (linker option --wrap), is counted and can be made to fail.
 *
 *   for (unsigned n = 1;; n++) {
 *       size_t live = fault_live();
 *       fault_arm(n);
 *       st = thing_create(&t);
 *       bool fired = fault_disarm();
 *       if (!fired) { break; }                     // n outlived every allocation
 *       CHECK_EQ(st, PYA_E_HOST_NOMEM);
 *       CHECK_EQ(fault_live(), live);
 *   } */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* The nth host allocation from now (1: the next) fails, once. */
void fault_arm(unsigned long nth);
/* Like fault_arm(), and every later allocation fails too. */
void fault_arm_sticky(unsigned long nth);
/* Stops failing allocations.  True: one has failed. */
bool fault_disarm(void);
/* Live heap blocks, without mmap, because parts of a mapping can be unmapped. */
size_t fault_live(void);
/* Allocations requested so far, including mmap. */
unsigned long fault_calls(void);
/* Bytes requested from malloc() and calloc() so far. */
size_t fault_bytes(void);
