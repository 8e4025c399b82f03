/* Values that the bridge's threads share, each under its own lock.  Floor 5.
 *
 * A child of fork() has one thread.  If another thread of the parent held a lock, nobody releases it in the child, and its
 * value may be half changed.  Such a value is constructed anew in the child; the old one is leaked. */
#pragma once

#include "core/lock.h"

#include <new>
#include <pthread.h>

/* Must be constructed before there are threads; never destroyed. */
class pya_torch_fork_watch {
  public:
    pya_torch_fork_watch(const pya_torch_fork_watch &) = delete;
    pya_torch_fork_watch &operator=(const pya_torch_fork_watch &) = delete;

  protected:
    pya_torch_fork_watch() : next(all) {
        if (all == nullptr) {
            (void)pthread_atfork(nullptr, nullptr, after_fork);
        }
        all = this;
    }
    ~pya_torch_fork_watch() = default;

    virtual void begin_anew() = 0;

    struct pya_lock lock = {};
    bool is_torn = false; /* this process is a child in which it was constructed anew */

  private:
    static void after_fork() {
        for (pya_torch_fork_watch *each = all; each != nullptr; each = each->next) {
            if (pya_lock_is_held(&each->lock)) {
                each->lock = {};
                each->is_torn = true;
                each->begin_anew();
            }
        }
    }

    static inline pya_torch_fork_watch *all = nullptr;
    pya_torch_fork_watch *next;
};

template <typename T> class pya_torch_guarded final : pya_torch_fork_watch {
  public:
    pya_torch_guarded() {
        new (&value) T();
    }
    ~pya_torch_guarded() {} // NOLINT(modernize-use-equals-default): the value stays

    /* Returns use(value), called with the lock held. */
    template <typename F> auto with(F use) {
        struct hold {
            struct pya_lock *lock;
            ~hold() {
                pya_lock_release(lock);
            }
        };
        pya_lock_acquire(&lock);
        const hold held = {&lock};
        return use(value);
    }

    /* Was the parent's value lost in this process? */
    bool is_lost() const {
        return is_torn;
    }

  private:
    void begin_anew() override {
        new (&value) T();
    }

    union {
        T value;
    };
};
