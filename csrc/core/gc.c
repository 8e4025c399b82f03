/* Garbage collection.  Floor 9. */
#include "gc.h"

#include <stdlib.h>

#include "debug.h"

#ifdef PYA_TEST_TINY
enum { GC_WAIT_LEAST = 32, GC_WAIT_MOST = 1 << 10, GC_RECOVERY_PAGES = 4 };
#else
enum { GC_WAIT_LEAST = 1 << 14, GC_WAIT_MOST = 1 << 24, GC_RECOVERY_PAGES = 64 };
#endif
/* Kept beyond what was needed, as a share of it and in pages: pieces between live blocks are needed anyway. */
enum { GC_SLACK_SHARE = 32, GC_SLACK_PAGES = 4 };
/* A shortage is over when this share of the largest live total is available. */
enum { GC_RECOVERY_SHARE = 8 };

/* A candidate of an arena: a free run, or grains at its high end. */
struct gc_run {
    struct pya_arena *arena;
    struct pya_block *run;
    /* Bit length of the number of requests since its last use, so that small differences of age do not count. */
    unsigned age_bits;
    bool is_shown; /* some page has a second address, which would be lost too */
    size_t n_pages;
};

void
pya_gc_init(struct pya_card *card) {
    const struct pya_options *options = &card->options;
    card->usage.wait = GC_WAIT_LEAST;
    card->usage.level_bytes = SIZE_MAX;
    card->is_timed = options->trim_after > 0;
}

static size_t
smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static size_t
larger(size_t a, size_t b) {
    return a > b ? a : b;
}

static unsigned
bits_of(uint64_t value) {
    return value == 0 ? 0 : 64U - (unsigned)__builtin_clzll(value);
}

static unsigned
run_age_bits(const struct pya_arena *arena, const struct pya_block *run, uint64_t requests) {
    /* An arena counts its own frees; add what happened elsewhere since it was last used. */
    return bits_of(arena->seq - run->seq + (requests - arena->seen_requests));
}

static bool
run_is_shown(const struct pya_card *card, const struct pya_block *run) {
    const struct pya_range *range = run->range;
    size_t slot = pya_block_first_slot(run);
    size_t n = pya_run_pages(run->addr, run->bytes);
    for (size_t i = 0; i < n; i++) {
        if (card->pages.items[range->slots[slot + i].page].n_mappings > 1) {
            return true;
        }
    }
    return false;
}

/* Best candidate first. */
static int
gc_compare(const void *a, const void *b) {
    const struct gc_run *left = a;
    const struct gc_run *right = b;
    if (left->age_bits != right->age_bits) {
        return left->age_bits > right->age_bits ? -1 : 1;
    }
    if (left->is_shown != right->is_shown) {
        return left->is_shown ? 1 : -1;
    }
    if (left->n_pages != right->n_pages) {
        return left->n_pages > right->n_pages ? -1 : 1;
    }
    return (left->run->addr < right->run->addr) - (left->run->addr > right->run->addr);
}

/* Called once for all arenas, because each call queries every stream. */
static void
card_ask(struct pya_card *card) {
    const struct pya_arena *arena = card->common;
    while (arena != NULL && arena->free_bytes < PYA_PAGE) {
        arena = arena->next_common;
    }
    if (arena != NULL) {
        pya_card_poll(card, NULL);
    }
}

static void
arena_see(struct pya_arena *arena, uint64_t requests) {
    if (arena->seen_seq != arena->seq) {
        arena->seen_seq = arena->seq;
        arena->seen_requests = requests;
    }
}

/* Idle runs with whole pages in the default pool's arenas.  NULL: none, or no host memory. */
static struct gc_run *
gc_gather(struct pya_card *card, size_t *n_out) {
    size_t n_room = 0;
    size_t n = 0;
    for (const struct pya_arena *a = card->common; a != NULL; a = a->next_common) {
        n_room += smaller(a->fit.n_runs, a->free_pages);
    }
    struct gc_run *runs = n_room == 0 ? NULL : malloc(n_room * sizeof *runs);
    if (runs == NULL) {
        return NULL;
    }
    uint64_t requests = pya_card_requests(card);
    for (struct pya_arena *a = card->common; a != NULL; a = a->next_common) {
        struct pya_block *run = pya_fit_find(&a->fit, PYA_PAGE);
        for (; run != NULL; run = pya_fit_next(&a->fit, run)) {
            size_t n_pages = pya_run_pages(run->addr, run->bytes);
            if (n_pages > 0 && run->seq <= a->idle_seq) {
                runs[n++] = (struct gc_run){
                    a, run, run_age_bits(a, run, requests), run_is_shown(card, run), n_pages};
            }
        }
    }
    qsort(runs, n, sizeof *runs, gc_compare);
    *n_out = n;
    return runs;
}

/* Its highest grains in address order, at most n_most pages. */
static size_t
run_high_end(const struct pya_block *run, size_t n_most, pya_page_id *ids) {
    const struct pya_slot *slots = run->range->slots;
    const struct pya_pages *pages = &run->arena->card->pages;
    const size_t first = pya_block_first_slot(run);
    size_t end = pya_block_end_slot(run);
    size_t place = pages->items[slots[end - 1].page].place + (size_t)1;
    if (place < pya_page_n(pages, slots[end - 1].page)) { /* the last grain is not wholly free */
        end -= smaller(place, end - first);
    }
    size_t slot = end;
    while (slot > first) {
        const size_t n = pya_page_n(pages, slots[slot - 1].page);
        if (n > slot - first || end - slot + n > n_most) {
            break;
        }
        slot -= n;
    }
    for (size_t i = slot; i < end; i++) {
        ids[i - slot] = slots[i].page;
    }
    return end - slot;
}

static size_t
collect_pages(struct pya_card *card, size_t n_most, const struct pya_arena *keep, size_t n_keep) {
    size_t n_spare = keep != NULL && keep->free_pages > n_keep ? keep->free_pages - n_keep : 0;
    size_t n_runs = 0;
    size_t n = 0;
    size_t n_bytes = 0;
    n_most = smaller(n_most, card->pages.n_live);
    struct gc_run *runs = gc_gather(card, &n_runs);
    pya_page_id *ids = runs == NULL ? NULL : malloc((n_most + 1) * sizeof *ids);
    for (size_t i = 0; ids != NULL && i < n_runs && n < n_most; i++) {
        /* The high end, because best fit takes from the low one. */
        const struct pya_block *run = runs[i].run;
        size_t k = smaller(runs[i].n_pages, n_most - n);
        k = runs[i].arena == keep ? smaller(k, n_spare) : k;
        size_t n_here = run_high_end(run, k, ids + n);
        n_spare -= runs[i].arena == keep ? n_here : 0;
        n += n_here;
    }
    if (n > 0) {
        n_bytes = pya_trim_pages(card, ids, n, false);
    }
    free(ids);
    free(runs);
    return n_bytes;
}

/* Gives back segments, starting with the arena that was unused longest. */
static size_t
collect_plain(struct pya_card *card, size_t n_bytes) {
    size_t n_freed = 0;
    for (unsigned age = 65; age > 0; age--) {
        for (struct pya_arena *a = card->common; a != NULL && n_freed < n_bytes;
             a = a->next_common) {
            uint64_t unused = pya_card_requests(card) - a->seen_requests;
            size_t n_here = 0;
            if (bits_of(unused) != age - 1) {
                continue;
            }
            pya_status st = pya_plain_trim_idle(a, n_bytes - n_freed, &n_here);
            n_freed += n_here;
            if (st != PYA_OK) {
                return n_freed;
            }
        }
    }
    return n_freed;
}

size_t
pya_gc_collect(struct pya_card *card, size_t n_bytes, const struct pya_arena *keep, size_t n_keep) {
    if (card->n_active > 0) { /* events may not be recorded, so nothing is known to be idle */
        return 0;
    }
    pya_card_unpark(card);
    pya_nest_open(card);
    card_ask(card);
    size_t n_pages = n_bytes / PYA_PAGE + (n_bytes % PYA_PAGE != 0);
    size_t n_freed = pya_card_has_vmm(card) ? collect_pages(card, n_pages, keep, n_keep)
                                            : collect_plain(card, n_bytes);
    if (n_freed > 0) {
        card->stats.scalar[PYA_STAT_pyalloc_collections]++;
        card->stats.scalar[PYA_STAT_pyalloc_pages_collected] += (int64_t)(n_freed / PYA_PAGE);
    }
    return n_freed;
}

/* ---- the level ---- */

static size_t
gc_level(struct pya_card *card) {
    const struct pya_options *options = &card->options;
    size_t level = options->soft_limit > 0 ? options->soft_limit : SIZE_MAX;
    if (options->garbage_collection_threshold > 0) {
        size_t most = smaller(card->limit_bytes, card->caps.total_bytes);
        level = smaller(level, (size_t)(options->garbage_collection_threshold * (double)most));
    }
    size_t free_bytes;
    size_t total_bytes;
    if (options->keep_free > 0 &&
        pya_device_mem_info(card->dev, &free_bytes, &total_bytes) == PYA_OK) {
        size_t missing = options->keep_free > free_bytes ? options->keep_free - free_bytes : 0;
        size_t spare = free_bytes > options->keep_free ? free_bytes - options->keep_free : 0;
        size_t reserved = card->reserved_bytes + spare;
        level = smaller(level, reserved > missing ? reserved - missing : 0);
    }
    return level == SIZE_MAX ? SIZE_MAX : larger(level, card->keep_bytes);
}

/* The part of `reserved` above the window's largest live total and some slack, which may be given back. */
static size_t
gc_excess(
    const struct pya_card *card, const struct pya_window *window, size_t live, size_t reserved) {
    size_t needed = larger(live, pya_window_peak(window));
    needed += larger(needed / GC_SLACK_SHARE, GC_SLACK_PAGES * PYA_PAGE);
    needed = larger(needed, card->keep_bytes);
    return reserved > needed ? reserved - needed : 0;
}

/* The last collection took nothing that was needed, so the next one may come sooner. */
static void
gc_forgive(struct pya_usage *usage, uint64_t requests) {
    if (requests - usage->collected_at >= 4 * usage->wait) {
        usage->wait = usage->wait / 2 > GC_WAIT_LEAST ? usage->wait / 2 : GC_WAIT_LEAST;
    }
}

void
pya_gc_before_growth(struct pya_arena *arena, size_t bytes, size_t n_pages) {
    struct pya_card *card = arena->card;
    struct pya_usage *usage = &card->usage;
    uint64_t requests = pya_card_requests(card);
    for (struct pya_arena *a = card->common; a != NULL; a = a->next_common) {
        PYA_STEP();
        arena_see(a, requests);
    }
    pya_usage_fold(usage, card->live_bytes);
    (void)pya_window_roll(&usage->by_requests, requests, usage->wait, card->live_bytes);
    usage->level_bytes = gc_level(card);
    if (!pya_gc_is_pressed(card, n_pages)) {
        return;
    }
    card->stats.scalar[PYA_STAT_pyalloc_pressed]++;
    if (usage->collected_at > 0 && requests - usage->collected_at < usage->wait) {
        return;
    }
    gc_forgive(usage, requests);
    size_t over = card->reserved_bytes + n_pages * PYA_PAGE - usage->level_bytes;
    /* A segment is added whole, whatever is free beside it. */
    size_t coming = arena->small_fit != NULL ? n_pages * PYA_PAGE : 0;
    size_t excess = gc_excess(
        card, &usage->by_requests, card->live_bytes + bytes, card->reserved_bytes + coming);
    if (excess < PYA_PAGE) {
        return;
    }
    size_t n_keep = bytes / PYA_PAGE + (bytes % PYA_PAGE != 0);
    /* The last grain is given back whole. */
    size_t n_grain = card->pages.n_grained > 0 ? pya_grain_pages(PYA_N_GRAINS - 1) : 1;
    size_t n_most = smaller(over + (n_grain - 1) * PYA_PAGE, excess);
    size_t n_freed = pya_gc_collect(card, n_most, arena, n_keep);
    if (n_freed > 0) {
        usage->collected_at = requests > 0 ? requests : 1;
        usage->collected_pages = n_freed / PYA_PAGE;
        usage->owed_pages = usage->collected_pages;
    }
}

/* Memory is no longer short once as much is available as programs of this size request in one go. */
static void
gc_recover(struct pya_card *card, uint64_t requests) {
    size_t free_bytes;
    size_t total_bytes;
    if (requests - card->usage.recovery_at < GC_WAIT_LEAST) {
        return;
    }
    card->usage.recovery_at = requests;
    size_t wanted = larger(card->peak_live_bytes / GC_RECOVERY_SHARE, GC_RECOVERY_PAGES * PYA_PAGE);
    if (pya_card_room(card) < wanted ||
        pya_device_mem_info(card->dev, &free_bytes, &total_bytes) != PYA_OK ||
        free_bytes < wanted) {
        return;
    }
    card->is_short = false;
    card->fits_carefully = card->fits_carefully && card->options.memory == PYA_MEMORY_TIGHT;
    card->stats.scalar[PYA_STAT_pyalloc_recoveries]++;
}

bool
pya_gc_would_press(struct pya_card *card, size_t n_pages) {
    card->usage.level_bytes = gc_level(card);
    return pya_gc_is_pressed(card, n_pages);
}

void
pya_gc_after_growth(struct pya_card *card, size_t reserved_before) {
    struct pya_usage *usage = &card->usage;
    uint64_t requests = pya_card_requests(card);
    size_t reserved = card->reserved_bytes;
    size_t n_made = reserved > reserved_before ? (reserved - reserved_before) / PYA_PAGE : 0;
    /* Not by the request that it was collected for. */
    bool was_lately =
        requests > usage->collected_at && requests - usage->collected_at < 2 * usage->wait;
    if (PYA_UNLIKELY(usage->owed_pages > 0 && n_made > 0 && was_lately)) {
        size_t n = smaller(n_made, usage->owed_pages);
        if (usage->owed_pages == usage->collected_pages) {
            usage->wait = usage->wait * 2 < GC_WAIT_MOST ? usage->wait * 2 : GC_WAIT_MOST;
        }
        card->stats.scalar[PYA_STAT_pyalloc_pages_regretted] += (int64_t)n;
        usage->owed_pages -= n;
    }
    if (PYA_UNLIKELY(card->is_short)) {
        gc_recover(card, requests);
    }
}

/* ---- time ---- */

void
pya_gc_note_request(struct pya_card *card) {
    struct pya_usage *usage = &card->usage;
    struct pya_window *window = &usage->by_time;
    uint64_t now = pya_device_clock_ns(card->dev);
    uint64_t length = (uint64_t)(card->options.trim_after * 1e9);
    bool was_away = now > usage->last_call_ns && now - usage->last_call_ns >= length;
    bool is_due = now - window->began >= length || was_away; /* also if the clock was set back */
    usage->last_call_ns = now;
    if (!is_due) {
        return;
    }
    pya_usage_fold(usage, card->live_bytes);
    if (was_away) { /* in all that time only live memory was needed */
        window->peak[0] = card->live_bytes;
        window->peak[1] = card->live_bytes;
        window->began = now;
    } else if (!pya_window_roll(window, now, length, card->live_bytes)) {
        return;
    }
    size_t excess = gc_excess(card, window, card->live_bytes, card->reserved_bytes);
    if (excess >= PYA_PAGE && pya_gc_collect(card, excess, NULL, 0) > 0) {
        card->stats.scalar[PYA_STAT_pyalloc_idle_trims]++;
    }
}
