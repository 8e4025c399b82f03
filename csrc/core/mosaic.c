/* Mosaics.  Floor 8. */
#include "mosaic.h"

#include <stdlib.h>

#include "debug.h"

/* The grain of the page at addr: its first page and that page's address. */
struct where {
    pya_page_id grain;
    pya_dptr addr;
    size_t bytes;
};

static struct where
where_is(const struct pya_block *run, pya_dptr addr) {
    const struct pya_pages *pages = &run->arena->card->pages;
    const pya_page_id id = pya_range_page(run->range, addr);
    const uint8_t place = pages->items[id].place;
    return (struct where){
        .grain = id - place,
        .addr = pya_round_down(addr, PYA_PAGE) - (pya_dptr)place * PYA_PAGE,
        .bytes = pya_page_n(pages, id) * PYA_PAGE,
    };
}

/* A run's free end of a grain that it covers only in part. */
static struct pya_part
part_begin(const struct pya_block *run, size_t unit) {
    struct pya_part part = {.bytes = 0};
    const pya_dptr start = pya_round_up(run->addr, unit);
    if (start < pya_block_end(run)) {
        const struct where at = where_is(run, start);
        const pya_dptr end = at.addr + at.bytes;
        bool is_there = start > at.addr && end <= pya_block_end(run);
        part = (struct pya_part){at.grain, is_there ? (size_t)(end - start) : 0};
    }
    return part;
}

/* A run's free start of such a grain. */
static struct pya_part
part_end(const struct pya_block *run, size_t unit) {
    struct pya_part part = {.bytes = 0};
    const pya_dptr end = pya_round_down(pya_block_end(run), unit);
    if (run->addr < end) {
        const struct where at = where_is(run, end - 1);
        bool is_there = end < at.addr + at.bytes && at.addr >= run->addr;
        part = (struct pya_part){at.grain, is_there ? (size_t)(end - at.addr) : 0};
    }
    return part;
}

/* The smallest parts of at least `least` bytes each, or the largest if all are smaller. */
struct parts {
    size_t unit;
    size_t least;
    struct pya_part begin;
    struct pya_part end;
};

static void
part_prefer(struct pya_part *best, struct pya_part part, size_t least) {
    bool was_enough = best->bytes >= least;
    bool is_better = part.bytes >= least ? !was_enough || part.bytes < best->bytes
                                         : !was_enough && part.bytes > best->bytes;
    if (is_better) {
        *best = part;
    }
}

static void
parts_add(void *arg, struct pya_block *run) {
    struct parts *parts = arg;
    PYA_STEP();
    part_prefer(&parts->begin, part_begin(run, parts->unit), parts->least);
    part_prefer(&parts->end, part_end(run, parts->unit), parts->least);
}

static struct parts
parts_find(const struct pya_arena *arena, size_t unit, size_t least) {
    struct parts parts = {.unit = unit, .least = least};
    if (unit == PYA_PAGE) {
        if (arena->card->pages.n_grained > 0) {
            pya_fit_visit_pages(&arena->fit, parts_add, &parts);
        }
        return parts;
    }
    struct pya_block *run = pya_fit_find(&arena->fit, PYA_ALIGN);
    for (; run != NULL; run = pya_fit_next(&arena->fit, run)) {
        parts_add(&parts, run);
    }
    return parts;
}

/* Cuts a grain of the smallest unused size; false: there is none. */
static bool
mosaic_cut(struct pya_mosaic *mosaic, const struct pya_grains *there, size_t bytes) {
    for (unsigned grain = 0; grain < PYA_N_GRAINS; grain++) {
        if (there->n[grain] > mosaic->grains.n[grain]) {
            PYA_ASSERT(bytes < pya_grain_pages(grain) * PYA_PAGE);
            mosaic->grains.n[grain]++;
            mosaic->cut = grain;
            mosaic->cut_bytes = bytes;
            return true;
        }
    }
    return false;
}

struct pya_mosaic
pya_mosaic_plan(const struct pya_arena *arena, size_t bytes, bool shares) {
    const size_t unit = shares ? PYA_ALIGN : PYA_PAGE;
    struct pya_mosaic mosaic = {.bytes = pya_round_up(bytes, unit)};
    const struct pya_grains there = pya_grains_count(arena, false);
    mosaic.grains = there;
    const size_t n_whole = pya_grains_choose(&mosaic.grains, mosaic.bytes / PYA_PAGE);
    size_t left = mosaic.bytes - n_whole * PYA_PAGE;
    if (left == 0) {
        return mosaic;
    }
    /* A whole grain is cut last, because it could be given back or go to another stream. */
    const struct parts parts = parts_find(arena, unit, left);
    bool is_begin = parts.begin.bytes >= left;
    bool is_end = parts.end.bytes >= left;
    if (is_begin && (!is_end || parts.begin.bytes <= parts.end.bytes)) {
        mosaic.begin = (struct pya_part){parts.begin.grain, left};
    } else if (is_end) {
        mosaic.end = (struct pya_part){parts.end.grain, left};
    } else if (parts.begin.bytes + parts.end.bytes >= left || !mosaic_cut(&mosaic, &there, left)) {
        mosaic.begin = parts.begin;
        mosaic.end = parts.end;
        left -= parts.begin.bytes;
        mosaic.end.bytes = mosaic.end.bytes < left ? mosaic.end.bytes : left;
        mosaic.n_lacking = pya_pages_for(left - mosaic.end.bytes);
    }
    return mosaic;
}

size_t
pya_mosaic_handles(const struct pya_mosaic *mosaic) {
    size_t n = mosaic->n_lacking + (mosaic->begin.bytes > 0) + (mosaic->end.bytes > 0);
    for (unsigned grain = 0; grain < PYA_N_GRAINS; grain++) {
        n += mosaic->grains.n[grain];
    }
    return n;
}

static size_t
list_grain(const struct pya_pages *pages, pya_page_id first, pya_page_id *ids) {
    const size_t n = pya_page_n(pages, first);
    for (size_t i = 0; i < n; i++) {
        ids[i] = first + (pya_page_id)i;
    }
    return n;
}

/* Moves the last grain of a size to the end of the list. */
static void
list_turn(const struct pya_pages *pages, unsigned grain, pya_page_id *ids, size_t n) {
    const size_t n_grain = pya_grain_pages(grain);
    size_t end = n;
    while (pages->items[ids[end - 1]].grain != grain) {
        end -= pya_page_n(pages, ids[end - 1]);
    }
    const pya_page_id first = ids[end - n_grain];
    for (; end < n; end++) {
        ids[end - n_grain] = ids[end];
    }
    (void)list_grain(pages, first, ids + n - n_grain);
}

pya_status
pya_mosaic_make(struct pya_arena *arena, const struct pya_mosaic *mosaic, struct pya_stitch **out) {
    const struct pya_pages *pages = &arena->card->pages;
    const size_t n_whole = pya_grains_pages(&mosaic->grains);
    if (mosaic->n_lacking > 0) {
        return PYA_E_NOMEM;
    }
    pya_page_id *ids = malloc((n_whole + 2 * pya_grain_pages(PYA_N_GRAINS - 1)) * sizeof *ids);
    if (ids == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    struct pya_stitch_plan plan = {.ids = ids, .bytes = mosaic->bytes};
    if (mosaic->begin.bytes > 0) {
        plan.n_pages = list_grain(pages, mosaic->begin.grain, ids);
        plan.offset = plan.n_pages * PYA_PAGE - mosaic->begin.bytes;
    }
    pya_status st = pya_grains_pick(arena, &mosaic->grains, ids + plan.n_pages);
    if (st == PYA_OK) {
        if (mosaic->cut_bytes > 0) {
            list_turn(pages, mosaic->cut, ids + plan.n_pages, n_whole);
        }
        plan.n_pages += n_whole;
        if (mosaic->end.bytes > 0) {
            plan.n_pages += list_grain(pages, mosaic->end.grain, ids + plan.n_pages);
        }
        st = pya_stitch_make(arena, &plan, out);
    }
    free(ids);
    return st;
}
