/* For clang-tidy only: its wheel brings no headers, and gcc's stdatomic.h uses built-ins that clang does not accept on
 * _Atomic types.  The names our sources use, by clang's own built-ins. */
#pragma once

#include <stdbool.h>

typedef enum {
    memory_order_relaxed = __ATOMIC_RELAXED,
    memory_order_acquire = __ATOMIC_ACQUIRE,
    memory_order_release = __ATOMIC_RELEASE,
} memory_order;

typedef _Atomic(bool) atomic_bool;

#define atomic_load_explicit(object, order) __c11_atomic_load(object, order)
#define atomic_load(object) __c11_atomic_load(object, __ATOMIC_SEQ_CST)
#define atomic_store_explicit(object, value, order) __c11_atomic_store(object, value, order)
#define atomic_store(object, value) __c11_atomic_store(object, value, __ATOMIC_SEQ_CST)
#define atomic_exchange(object, value) __c11_atomic_exchange(object, value, __ATOMIC_SEQ_CST)
#define atomic_fetch_add_explicit(object, value, order) __c11_atomic_fetch_add(object, value, order)
#define atomic_fetch_add(object, value) __c11_atomic_fetch_add(object, value, __ATOMIC_SEQ_CST)
#define atomic_compare_exchange_weak(object, expected, value)                                      \
    __c11_atomic_compare_exchange_weak(object, expected, value, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)
