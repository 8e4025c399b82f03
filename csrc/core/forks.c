/* Forked children: which heaps belong to their parent, and what of them may be read.  Floor 12.
 *
 * A child has a single thread.  A lock that another thread of the parent held is never released there, and what that
 * thread was changing is half changed.  So the child forgets such cards as it starts, while it is alone. */
#include <pthread.h>

#include "heap.h"

uint32_t pya_n_forks;
static pthread_once_t watch_once = PTHREAD_ONCE_INIT;
static struct pya_lock heaps_lock;
static struct pya_heap *heaps; /* all; one store links or unlinks, so a child finds a valid list */

static bool
lock_was_held(struct pya_lock *lock) {
    bool is_held = pya_lock_is_held(lock);
    __atomic_store_n(&lock->state, 0, __ATOMIC_RELAXED);
    return is_held;
}

static void
heap_forget_torn(struct pya_heap *heap) {
    (void)lock_was_held(&heap->lock); /* a card that was being opened is not in the table yet */
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        struct pya_card *card = pya_cards_get(&heap->cards, i);
        if (card == NULL) {
            continue;
        }
        (void)lock_was_held(&card->gate);
        card->n_waiting = 0;
        if (lock_was_held(&card->lock)) {
            heap->torn_cards |= UINT64_C(1) << i;
            pya_cards_forget(&heap->cards, i);
        }
    }
}

static void
after_fork(void) {
    pya_n_forks++;
    (void)lock_was_held(&heaps_lock);
    for (struct pya_heap *heap = heaps; heap != NULL; heap = heap->next) {
        heap_forget_torn(heap);
    }
}

static void
watch_forks(void) {
    (void)pthread_atfork(NULL, NULL, after_fork);
}

void
pya_heap_watch_forks(struct pya_heap *heap) {
    (void)pthread_once(&watch_once, watch_forks);
    pya_lock_acquire(&heaps_lock);
    heap->next = heaps;
    __atomic_store_n(&heaps, heap, __ATOMIC_RELEASE);
    pya_lock_release(&heaps_lock);
}

void
pya_heap_unwatch_forks(struct pya_heap *heap) {
    pya_lock_acquire(&heaps_lock);
    struct pya_heap **link = &heaps;
    while (*link != heap) {
        link = &(*link)->next;
    }
    __atomic_store_n(link, heap->next, __ATOMIC_RELEASE);
    pya_lock_release(&heaps_lock);
}
