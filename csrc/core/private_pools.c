/* Private pools: from begin to release.  Floor 12.  For special pools see claim.c. */
#include "private_pools.h"

#include <string.h>

#include "fence.h"
#include "heap.h"

pya_status
pya_pool_begin(
    struct pya_heap *heap, int device, struct pya_pool_id id, struct pya_stream_filter filter) {
    struct pya_card *card;
    struct pya_pool *pool;
    struct pya_fence *fence;
    pya_status st = pya_heap_lock_card(heap, device, &card);
    if (st != PYA_OK) {
        return st;
    }
    (void)!pya_trim_settle_meanwhile(card); /* while queries are allowed; it needs no room itself */
    pya_fences_pass(card);
    st = pya_pool_get(card, id, &pool);
    if (st == PYA_OK && pool->is_active) {
        st = PYA_E_INVAL;
    }
    st = st == PYA_OK ? pya_fences_add(card, filter.began_on, &fence) : st;
    if (st == PYA_OK) {
        pya_pool_add_user(card, pool);
        pool->is_active = true;
        pool->order = __atomic_add_fetch(&heap->pool_order, 1, __ATOMIC_RELAXED);
        pool->filter = filter;
        pool->is_announced = filter.match != NULL && !filter.match(filter.arg, filter.began_on);
        pool->began_at = pya_device_clock_ns(card->dev);
        card->n_active++;
    }
    pya_lock_release(&card->lock);
    return st;
}

pya_status
pya_pool_end(struct pya_heap *heap, int device, struct pya_pool_id id) {
    struct pya_card *card;
    struct pya_pool *pool;
    struct pya_stream_filter filter = {0};
    pya_status st = pya_heap_lock_pool(heap, device, id, &card, &pool);
    if (st != PYA_OK) {
        return st;
    }
    if (!pool->is_active) {
        st = PYA_E_INVAL;
    } else {
        filter = pool->filter;
        pool->is_active = false;
        pool->filter = (struct pya_stream_filter){0};
        if (--card->n_active == 0) {
            pya_pending_resume(card);
        }
        if (pool->n_users == 0) { /* its last user left while requests were routed here */
            pya_pool_offer(card, pool);
            pya_pools_sweep(card);
        }
    }
    pya_lock_release(&card->lock);
    if (filter.drop != NULL) {
        filter.drop(filter.arg);
    }
    return st;
}

pya_status
pya_pool_retain(struct pya_heap *heap, int device, struct pya_pool_id id, bool on_oom) {
    struct pya_card *card;
    struct pya_pool *pool;
    pya_status st = pya_heap_lock_card(heap, device, &card);
    if (st != PYA_OK) {
        return st;
    }
    st = pya_pool_get(card, id, &pool);
    if (st == PYA_OK) {
        pya_pool_add_user(card, pool);
        pool->on_oom = pool->on_oom || on_oom;
    }
    pya_lock_release(&card->lock);
    return st;
}

pya_status
pya_pool_set_on_oom(struct pya_heap *heap, int device, struct pya_pool_id id, bool on_oom) {
    struct pya_card *card;
    struct pya_pool *pool;
    pya_status st = pya_heap_lock_pool(heap, device, id, &card, &pool);
    if (st == PYA_OK) {
        pool->on_oom = on_oom;
        pya_lock_release(&card->lock);
    }
    return st;
}

size_t
pya_pool_list(struct pya_heap *heap, int device, struct pya_pool_info *infos, size_t n_room) {
    size_t n = 0;
    struct pya_card *card = pya_heap_open_card(heap, device);
    if (card == NULL) {
        return 0;
    }
    pya_lock_acquire(&card->lock);
    for (const struct pya_pool *pool = card->pools; pool != NULL; pool = pool->next) {
        if (n < n_room) {
            infos[n] = (struct pya_pool_info){pool->id, pool->n_users, pool->is_active, {{0}}};
            memcpy(infos[n].reserved_bytes, pool->reserved, sizeof pool->reserved);
        }
        n++;
    }
    pya_lock_release(&card->lock);
    return n;
}

/* In a forked child torch goes on counting, but the memory is the parent's. */
static pya_status
pool_release_forked(struct pya_heap *heap, int device, struct pya_pool_id id) {
    struct pya_card *card = pya_heap_open_card(heap, device);
    if (card != NULL) {
        pya_lock_acquire(&card->lock);
        struct pya_pool *pool = pya_pool_find(card, id);
        if (pool != NULL && pool->n_users > 0) {
            pya_pool_drop_user(card, pool);
        }
        pya_lock_release(&card->lock);
    }
    return PYA_E_FORKED;
}

pya_status
pya_pool_release(struct pya_heap *heap, int device, struct pya_pool_id id) {
    struct pya_card *card;
    struct pya_pool *pool;
    pya_status st = pya_heap_lock_pool(heap, device, id, &card, &pool);
    if (st != PYA_OK) {
        return st == PYA_E_FORKED ? pool_release_forked(heap, device, id) : st;
    }
    if (pool->n_users == 0) {
        st = PYA_E_INVAL;
    } else {
        pya_pool_drop_user(card, pool);
        if (pool->n_users == 0) {
            pya_history_note(
                card->history, PYA_ACTION_POOL_RELEASE, 0, 0, (struct pya_place){.pool = id});
        }
        pya_pools_sweep(card);
    }
    pya_lock_release(&card->lock);
    return st;
}
