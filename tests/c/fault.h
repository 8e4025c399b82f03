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
/* As fault_arm, and every later one too. */
void fault_arm_sticky(unsigned long nth);
/* Nothing fails any more.  True: one did. */
bool fault_disarm(void);
/* Heap blocks alive now (mmap not counted: parts of one can be unmapped). */
size_t fault_live(void);
/* Allocations asked for so far, mmap too. */
unsigned long fault_calls(void);
/* Bytes that malloc() and calloc() were asked for so far. */
size_t fault_bytes(void);
