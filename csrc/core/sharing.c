/* Memory shared between processes: pages under a live block are exported as descriptors, and arrive as an import. */
#include <unistd.h>

#include "debug.h"
#include "fence.h"
#include "heap.h"
#include "import.h"
#include "stitch.h"

/* The pages under a block, whose card is locked. */
struct extent {
    const struct pya_slot *slots; /* at home, else NULL */
    const pya_page_id *ids;       /* stitched */
    size_t offset;
    size_t n_pages;
};

static pya_page_id
extent_page(const struct extent *extent, size_t i) {
    return extent->slots != NULL ? extent->slots[i].page : extent->ids[i];
}

/* Extends to whole grains, because the other process maps each grain as a whole. */
static void
extent_widen(const struct pya_pages *pages, struct extent *extent) {
    const size_t n_before = pages->items[extent_page(extent, 0)].place;
    const pya_page_id last = extent_page(extent, extent->n_pages - 1);
    const size_t n_behind = pya_page_n(pages, last) - 1 - pages->items[last].place;
    if (extent->slots != NULL) {
        extent->slots -= n_before;
    } else {
        extent->ids -= n_before;
    }
    extent->offset += n_before * PYA_PAGE;
    extent->n_pages += n_before + n_behind;
}

static pya_status
extent_of(const struct pya_block *block, struct extent *out) {
    if (block->is_pending) {
        return PYA_E_FOREIGN; /* its user has freed it */
    }
    if (block->state == PYA_BLOCK_STITCHED) {
        *out = (struct extent){.ids = block->stitch->pages + pya_stitch_first(block->stitch)};
    } else if (block->range->slots == NULL) {
        return PYA_E_NOTSUP; /* a plain segment */
    } else {
        size_t first = pya_range_slot(block->range, block->addr);
        *out = (struct extent){.slots = block->range->slots + first};
    }
    out->offset = (size_t)(block->addr & (PYA_PAGE - 1));
    out->n_pages = pya_pages_for(out->offset + block->bytes);
    extent_widen(&block->arena->card->pages, out);
    return PYA_OK;
}

/* FNV-1a of the handles (http://www.isthe.com/chongo/tech/comp/fnv). */
static uint64_t
extent_key(const struct pya_card *card, const struct extent *extent) {
    uint64_t key = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < extent->n_pages; i++) {
        pya_page_handle handle = card->pages.items[extent_page(extent, i)].handle;
        for (int byte = 0; byte < 8; byte++) {
            key = (key ^ (handle >> (8 * byte) & 0xff)) * UINT64_C(0x100000001b3);
        }
    }
    return key;
}

/* Finds the card of the block at ptr; on success the card is LOCKED. */
static pya_status
extent_find(struct pya_heap *heap, pya_dptr ptr, struct pya_card **out, struct extent *extent) {
    struct pya_block *block;
    if (pya_heap_is_forked(heap)) {
        return PYA_E_FORKED;
    }
    struct pya_card *card = pya_heap_find(heap, ptr, &block);
    if (card == NULL) {
        return PYA_E_FOREIGN;
    }
    pya_status st = extent_of(block, extent);
    if (st != PYA_OK) {
        pya_lock_release(&card->lock);
        return st;
    }
    *out = card;
    return PYA_OK;
}

static pya_status
extent_export(
    const struct pya_card *card, const struct extent *extent, size_t first, size_t n, int *fds,
    uint32_t *n_pages, size_t *n_out) {
    size_t done = 0;
    pya_status st = PYA_OK;
    pya_device_begin(card->dev);
    while (st == PYA_OK && done < n && first < extent->n_pages) {
        const pya_page_id id = extent_page(extent, first);
        st = pya_device_page_export(card->dev, card->pages.items[id].handle, &fds[done]);
        n_pages[done] = (uint32_t)pya_page_n(&card->pages, id);
        first += n_pages[done];
        done += st == PYA_OK;
    }
    pya_device_end(card->dev);
    while (st != PYA_OK && done > 0) {
        (void)close(fds[--done]);
    }
    *n_out = done;
    return st;
}

pya_status
pya_share(struct pya_heap *heap, pya_dptr ptr, struct pya_shared *out) {
    struct pya_card *card;
    struct extent extent;
    pya_status st = extent_find(heap, ptr, &card, &extent);
    if (st != PYA_OK) {
        return st;
    }
    st = card->caps.has_export ? PYA_OK : PYA_E_NOTSUP;
    if (st == PYA_OK) {
        *out = (struct pya_shared){
            .ptr = ptr,
            .offset = extent.offset,
            .n_pages = extent.n_pages,
            .key = extent_key(card, &extent),
        };
    }
    pya_lock_release(&card->lock);
    return st;
}

pya_status
pya_share_export(
    struct pya_heap *heap, const struct pya_shared *shared, size_t first, size_t n, int *fds,
    uint32_t *n_pages, size_t *n_out) {
    struct pya_card *card;
    struct extent extent;
    pya_status st = extent_find(heap, shared->ptr, &card, &extent);
    if (st != PYA_OK) {
        return st;
    }
    if (extent.n_pages != shared->n_pages || first >= extent.n_pages ||
        card->pages.items[extent_page(&extent, first)].place != 0 ||
        extent_key(card, &extent) != shared->key) {
        st = PYA_E_FOREIGN; /* a block with other pages lies there now */
    } else {
        st = extent_export(card, &extent, first, n, fds, n_pages, n_out);
    }
    pya_lock_release(&card->lock);
    return st;
}

/* Waits for all work of all devices, because each may be reading an import.  False: a capture forbids it, or it
 * failed. */
static bool
heap_is_idle(struct pya_heap *heap) {
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        struct pya_card *card = pya_heap_open_card(heap, i);
        if (card != NULL && pya_fences_wait_unlocked(card) != PYA_OK) {
            return false;
        }
    }
    return true;
}

/* Notes that a wait of this round begins after the imports were closed.  False: no import is closed. */
static bool
card_begin_wait(struct pya_card *card, uint64_t round) {
    bool is_any = false;
    pya_lock_acquire(&card->lock);
    for (struct pya_import *each = card->imports; each != NULL; each = each->next) {
        each->waited = each->is_over ? round : 0;
        is_any = is_any || each->is_over;
    }
    pya_lock_release(&card->lock);
    return is_any;
}

static void
card_end_wait(struct pya_card *card, uint64_t round) {
    pya_lock_acquire(&card->lock);
    struct pya_import **link = &card->imports;
    while (*link != NULL) {
        struct pya_import *import = *link;
        struct pya_import *next = import->next;
        if (import->waited == round && pya_import_unmap(card, import) == PYA_OK) {
            *link = next;
        } else {
            link = &import->next;
        }
    }
    pya_lock_release(&card->lock);
}

void
pya_heap_unmap_imports(struct pya_heap *heap) {
    uint64_t round = __atomic_add_fetch(&heap->import_round, 1, __ATOMIC_RELAXED);
    bool is_any = false;
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        struct pya_card *card = pya_heap_open_card(heap, i);
        is_any = (card != NULL && card_begin_wait(card, round)) || is_any;
    }
    if (!is_any || !heap_is_idle(heap)) {
        return;
    }
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        struct pya_card *card = pya_heap_open_card(heap, i);
        if (card != NULL) {
            card_end_wait(card, round);
        }
    }
}

pya_status
pya_import_open(
    struct pya_heap *heap, int device, size_t n_pages, const struct pya_import_source *source,
    pya_dptr *out) {
    struct pya_card *card;
    struct pya_import *import;
    pya_status st = pya_heap_card(heap, device, &card);
    if (st != PYA_OK) {
        return st;
    }
    pya_heap_unmap_imports(heap);
    st = pya_import_map(card, n_pages, source, &import);
    pya_lock_acquire(&card->lock); /* from here on new peers get access too */
    if (st == PYA_OK) {
        st = pya_device_set_access(card->dev, import->base, n_pages * PYA_PAGE);
        if (st != PYA_OK && pya_import_unmap(card, import) == PYA_OK) {
            import = NULL;
        }
    }
    if (import != NULL) {
        import->is_over = st != PYA_OK;
        import->next = card->imports;
        card->imports = import;
        *out = st == PYA_OK ? import->base : *out;
    }
    pya_lock_release(&card->lock);
    return st;
}

pya_status
pya_import_close(struct pya_heap *heap, pya_dptr base) {
    bool is_found = false;
    if (pya_heap_is_forked(heap)) {
        return PYA_E_FORKED;
    }
    for (int i = 0; i < PYA_MAX_DEVICES && !is_found; i++) {
        struct pya_card *card = pya_heap_open_card(heap, i);
        if (card == NULL) {
            continue;
        }
        pya_lock_acquire(&card->lock);
        for (struct pya_import *each = card->imports; each != NULL; each = each->next) {
            if (each->base == base && !each->is_over) {
                each->is_over = is_found = true;
            }
        }
        pya_lock_release(&card->lock);
    }
    pya_heap_unmap_imports(heap);
    return is_found ? PYA_OK : PYA_E_FOREIGN;
}
