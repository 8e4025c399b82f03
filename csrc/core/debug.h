/* Assertions.  CPython's flags define NDEBUG, so <assert.h> would be dead in an extension.  Floor 0.
 *
 * Level 0 (release): no checks.  Level 1: checks that cost O(1).  Level 2: also checks whole structures, and counts
 * the iterations of every loop on a request's path, so that tests can bound them. */
#pragma once

#ifndef PYA_ASSERT_LEVEL
#define PYA_ASSERT_LEVEL 0
#endif

#ifdef __cplusplus
extern "C" {
#endif

void pya_assert_failed(const char *text, const char *file, int line) __attribute__((noreturn));

#ifdef __cplusplus
}
#endif

#if PYA_ASSERT_LEVEL >= 1
#define PYA_ASSERT(cond) ((cond) ? (void)0 : pya_assert_failed(#cond, __FILE__, __LINE__))
#else
#define PYA_ASSERT(cond) ((void)0)
#endif

#if PYA_ASSERT_LEVEL >= 2
#define PYA_ASSERT_SLOW(cond) PYA_ASSERT(cond)
extern _Thread_local unsigned long pya_debug_steps;
#define PYA_STEP() ((void)pya_debug_steps++)
#else
#define PYA_ASSERT_SLOW(cond) ((void)0)
#define PYA_STEP() ((void)0)
#endif
