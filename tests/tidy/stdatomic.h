/* For clang-tidy only: its wheel brings no headers, and gcc's stdatomic.h uses built-ins that clang does not accept on
 * _Atomic types.  The names our sources use, by clang's own built-ins. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    memory_order_relaxed = __ATOMIC_RELAXED,
    memory_order_consume = __ATOMIC_CONSUME,
    memory_order_acquire = __ATOMIC_ACQUIRE,
    memory_order_release = __ATOMIC_RELEASE,
    memory_order_acq_rel = __ATOMIC_ACQ_REL,
    memory_order_seq_cst = __ATOMIC_SEQ_CST,
} memory_order;

typedef _Atomic(bool) atomic_bool;
typedef _Atomic(int) atomic_int;
typedef _Atomic(unsigned) atomic_uint;
typedef _Atomic(size_t) atomic_size_t;
typedef _Atomic(uintptr_t) atomic_uintptr_t;
typedef _Atomic(unsigned long long) atomic_ullong;
typedef struct {
    atomic_bool value;
} atomic_flag;

#define ATOMIC_VAR_INIT(value) (value)
#define ATOMIC_FLAG_INIT                                                                           \
    { false }
#define atomic_init(object, value) __c11_atomic_init(object, value)
#define atomic_load_explicit(object, order) __c11_atomic_load(object, order)
#define atomic_load(object) atomic_load_explicit(object, memory_order_seq_cst)
#define atomic_store_explicit(object, value, order) __c11_atomic_store(object, value, order)
#define atomic_store(object, value) atomic_store_explicit(object, value, memory_order_seq_cst)
#define atomic_exchange_explicit(object, value, order) __c11_atomic_exchange(object, value, order)
#define atomic_exchange(object, value) atomic_exchange_explicit(object, value, memory_order_seq_cst)
#define atomic_fetch_add_explicit(object, value, order) __c11_atomic_fetch_add(object, value, order)
#define atomic_fetch_add(object, value)                                                            \
    atomic_fetch_add_explicit(object, value, memory_order_seq_cst)
#define atomic_fetch_sub_explicit(object, value, order) __c11_atomic_fetch_sub(object, value, order)
#define atomic_fetch_sub(object, value)                                                            \
    atomic_fetch_sub_explicit(object, value, memory_order_seq_cst)
#define atomic_fetch_or_explicit(object, value, order) __c11_atomic_fetch_or(object, value, order)
#define atomic_fetch_or(object, value) atomic_fetch_or_explicit(object, value, memory_order_seq_cst)
#define atomic_compare_exchange_strong_explicit(object, expected, value, good, bad)                \
    __c11_atomic_compare_exchange_strong(object, expected, value, good, bad)
#define atomic_compare_exchange_strong(object, expected, value)                                    \
    atomic_compare_exchange_strong_explicit(                                                       \
        object, expected, value, memory_order_seq_cst, memory_order_seq_cst)
#define atomic_compare_exchange_weak_explicit(object, expected, value, good, bad)                  \
    __c11_atomic_compare_exchange_weak(object, expected, value, good, bad)
#define atomic_compare_exchange_weak(object, expected, value)                                      \
    atomic_compare_exchange_weak_explicit(                                                         \
        object, expected, value, memory_order_seq_cst, memory_order_seq_cst)
#define atomic_thread_fence(order) __c11_atomic_thread_fence(order)
#define atomic_flag_test_and_set(flag) atomic_exchange(&(flag)->value, true)
#define atomic_flag_clear(flag) atomic_store(&(flag)->value, false)
