/* What the kernels of a captured graph hold: addresses of its pool.  While the pool is in use, they show the same
 * pages, which stay the pool's whatever was freed there, unless it lends memory before out of memory. */
#include "core/stitch.h"
#include "core_model.h"

/* The page mapped at an address; NULL: none. */
static const struct pya_page *
page_at(const struct pya_card *card, pya_dptr addr) {
    for (const struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        for (const struct pya_range *r = arena->ranges; r != NULL; r = r->next) {
            if (r->slots != NULL && addr >= r->base && addr < pya_range_addr(r, r->n_slots)) {
                pya_page_id id = r->slots[pya_range_slot(r, addr)].page;
                return id == PYA_NO_PAGE ? NULL : &card->pages.items[id];
            }
        }
        const struct pya_stitch *s = arena->stitches == NULL ? NULL : arena->stitches->newest;
        for (; s != NULL; s = s->older) {
            if (addr >= s->base && addr < s->base + s->n_pages * PYA_PAGE) {
                return &card->pages.items[s->pages[(addr - s->base) / PYA_PAGE]];
            }
        }
    }
    return NULL;
}

void
kernels_add(struct world *world, const struct live *live) {
    struct pya_block *block;
    struct pya_card *card = pya_heap_find(world->heap, live->ptr, &block);
    const struct pya_pool *pool = block->arena->pool;
    bool is_kept = pool != NULL && pool->n_users > 0 && !pool->on_oom &&
                   block->arena->small_fit == NULL && world->n_kernels < MAX_KERNELS;
    if (is_kept) {
        world->kernels[world->n_kernels++] =
            (struct kernel){live->device, pool->id, live->ptr, page_at(card, live->ptr)->handle};
    }
    pya_lock_release(&card->lock);
}

void
kernels_forget(struct world *world, int device, struct pya_pool_id id) {
    size_t n = 0;
    for (size_t i = 0; i < world->n_kernels; i++) {
        const struct kernel kernel = world->kernels[i];
        world->kernels[n] = kernel;
        n += kernel.device != device || kernel.pool.second != id.second;
    }
    world->n_kernels = n;
}

void
kernels_check(const struct world *world) {
    for (size_t i = 0; i < world->n_kernels; i++) {
        const struct kernel *kernel = &world->kernels[i];
        const struct pya_card *card = pya_heap_open_card(world->heap, kernel->device);
        const struct pya_page *page = page_at(card, kernel->ptr);
        REQUIRE(page != NULL && page->handle == kernel->page && page->range != NULL);
        const struct pya_block *home =
            pya_range_block_at(page->range, pya_range_addr(page->range, page->slot), SIZE_MAX);
        REQUIRE(home->arena->pool != NULL && home->arena->pool->id.second == kernel->pool.second);
    }
}
