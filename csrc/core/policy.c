/* memory=tight|balanced|fast.  Floor 10.
 *
 * Most constants were chosen on replays of the recorded loops; docs/tried.md lists values that did worse. */
#include "policy.h"

#include "debug.h"
#include "gc.h"

/* What the policy assumes device calls to cost, close to figures published for an A100.  An H200 takes 9 us to create
 * a grain of any size, and 24 us to map it once more and make it accessible (csrc/device/sim_cost.h).  With those
 * figures programs would take 0.02 to 0.04 of peak live more memory, for a tenth less time in these calls. */
enum {
    COST_CREATE_NS = 30000,
    COST_MAP_NS = 1500,
    COST_ACCESS_NS = 20000,
    COST_ACCESS_PAGE_NS = 2000,
};

/* A growth that needs fewer pages creates 1/GROW_SHARE of the existing number, from GROW_PAGES to GROW_MOST, because
 * every growth takes a call that makes its pages accessible.  Below GROW_EARLY pages each page is a good part of the
 * total, so the minimum is GROW_FEW.  In a private pool the limit is 1/GROW_POOL_SHARE of the pool's own pages:
 * nobody else may use the spare ones, and each of many graphs may have a pool. */
#ifdef PYA_TEST_TINY
enum { GROW_PAGES = 2 };
#else
enum { GROW_PAGES = 4 };
#endif
enum { GROW_MOST = 16, GROW_SHARE = 128, GROW_EARLY = 32, GROW_FEW = 2, GROW_POOL_SHARE = 4 };

/* balanced: smaller requests are not worth a stitch. */
#define BALANCED_STITCH_FROM ((size_t)3 << 20)
/* balanced: with patience p, memory is stitched while debt + cost of this stitch < p x cost of the pages that it
 * saves.  The debt is what stitching has cost since it last exceeded this bound and memory grew instead.  Once all
 * stitching has cost BALANCED_EARLY_SHARE of creating all pages, patience falls to BALANCED_PATIENCE_LATE, so that
 * the total stays bounded however long a program runs.  Streams that share memory keep their patience longer
 * (thrift()): stitching serves them far better than memory of their own. */
#define BALANCED_PATIENCE 8.0
#define BALANCED_PATIENCE_LATE 2.0
#define BALANCED_EARLY_SHARE 0.3
/* If each large request is some percent of live memory, every single growth looks cheap beside stitching, but
 * together they once added a quarter of peak live.  So patience depends on all unused memory.  Once a growth would
 * bring memory to more than 1 + EXCESS_FREE times peak live, each further percent adds EXCESS_PATIENCE / 100 times
 * the patience, less once stitching has cost a lot (thrift()): sizes that never recur would be stitched for ever.
 * Growths then create only the pages that they need, in programs of at least EXCESS_FROM pages. */
#define EXCESS_FREE 0.02
#define EXCESS_FROM 64
#define EXCESS_PATIENCE 250.0
/* reuse() is how often a stitched range is reused on average, as if REUSE_PRIOR ranges had been reused once each at
 * the start.  Reused ranges are worth their cost, so late patience is multiplied by it, within 1 and REUSE_MOST.
 * Below REUSE_LEAST, a growth does not clear the debt, but reduces it by GROWTH_PAYS times the cost of the pages that
 * a stitch would have saved: a small growth must not buy much more stitching. */
#define REUSE_PRIOR 16.0
#define REUSE_LEAST 0.25
#define REUSE_MOST 2.0
#define GROWTH_PAYS 1.25
/* Pages are taken from other streams until this has cost TRANSFER_PATIENCE times what creating the pages would, since
 * the stream last grew instead. */
#define TRANSFER_PATIENCE 8.0
/* thrift() halves patience once stitching, moves and transfers have cost this many times the creation of all
 * pages. */
#define THRIFT_FROM 2.0
/* Patience above the level (gc.h), early and late; BALANCED_PATIENCE if streams share memory.  Twice as much made a
 * program whose sizes always change three times slower. */
#define PRESSED_PATIENCE 4.0
/* Requests of at least 1/BALANCED_MOVE_SHARE of peak live move pages to the end of the arena instead of stitching.
 * If streams share memory, all do: a stream can take over a part of adjacent pages, but a stitched range only whole. */
#define BALANCED_MOVE_SHARE 4
/* Large requests are stitched all the same if a tensor grows (arena.h), or if REPEATED_FROM in a row had the size of
 * the one before: a stitched range is then reused, a moved run never. */
#define REPEATED_FROM 2
/* A stitched block owns its pages whole.  If the live ones and this one leave more bytes of their pages unused than
 * WASTE_SHARE of what this stitch saves, new pages are better: they hold blocks of any size. */
#define WASTE_SHARE 0.8
/* While peak live rises, pages that a stitch saved must soon be created anyway, and its cost was in vain.  If this
 * happened RISING_FROM times in a row, requests of at least RISING_LEAST bytes grow at once, but only where a stitch
 * would save at most RISING_SHARE of peak live: what is created just before the rise ends stays. */
#define RISING_FROM 2
#define RISING_SHARE 0.005
#define RISING_LEAST ((size_t)8 << 20)
/* tight: physical memory may exceed peak live by TIGHT_SLACK of it before stitching starts.  Each stitch adds its
 * cost to a bucket, and every request drains a little.  Each time the bucket reaches TIGHT_BUCKET_NS, it is emptied,
 * and the slack grows by TIGHT_SLACK_STEP. */
#define TIGHT_SLACK 0.01
#define TIGHT_SLACK_STEP 0.02
#define TIGHT_BUCKET_NS 20e6
#define TIGHT_BUCKET_MOST_NS 60e3 /* a stitch adds at most this */
#define TIGHT_LEAK_NS 500.0       /* drained by each request */
/* tight: requests of this size or more move pages instead of stitching. */
#define TIGHT_MOVE_FROM ((size_t)1 << 30)

static double
stitch_cost_ns(size_t n_handles) {
    return (double)COST_ACCESS_NS + (double)n_handles * (COST_MAP_NS + COST_ACCESS_PAGE_NS);
}

static double
create_cost_ns(size_t n_pages) {
    return (double)n_pages * (COST_CREATE_NS + COST_MAP_NS + COST_ACCESS_PAGE_NS);
}

/* Adds a stitch to tight's bucket.  Because of it, tight allows more memory and simpler placement where saving the
 * last percent would cost too much of the program's time. */
static void
policy_fill_bucket(struct pya_card *card, double cost_ns) {
    int64_t n_requests = (int64_t)pya_card_requests(card);
    double leaked = TIGHT_LEAK_NS * (double)(n_requests - card->bucket_requests);
    card->bucket_requests = n_requests;
    card->bucket_ns = card->bucket_ns > leaked ? card->bucket_ns - leaked : 0;
    card->bucket_ns += cost_ns < TIGHT_BUCKET_MOST_NS ? cost_ns : TIGHT_BUCKET_MOST_NS;
    if (card->bucket_ns > TIGHT_BUCKET_NS) {
        card->bucket_ns = 0;
        card->slack += TIGHT_SLACK_STEP;
        card->fits_carefully = card->is_short;
    }
}

static size_t
peak_with(const struct pya_card *card, size_t bytes) {
    size_t live = card->live_bytes + bytes;
    return live > card->peak_live_bytes ? live : card->peak_live_bytes;
}

/* reserved / peak live - 1 - EXCESS_FREE, as they would be if n pages were created for a request of `bytes`. */
static double
excess_with(const struct pya_card *card, size_t bytes, size_t n) {
    double grown = (double)(card->reserved_bytes + n * PYA_PAGE);
    return grown / (double)peak_with(card, bytes) - 1 - EXCESS_FREE;
}

bool
pya_policy_spares_nest(const struct pya_card *card, size_t bytes, size_t n_pages) {
    return !card->is_short && excess_with(card, bytes, n_pages) <= 0;
}

size_t
pya_policy_step(const struct pya_arena *arena, size_t bytes, size_t n_pages) {
    const struct pya_card *card = arena->card;
    if (card->options.memory == PYA_MEMORY_TIGHT || pya_gc_is_pressed(card, n_pages)) {
        return 1;
    }
    bool is_alone = !pya_card_is_shared(card) && card->options.memory == PYA_MEMORY_BALANCED;
    if (is_alone && card->pages.n_live >= EXCESS_FROM && excess_with(card, bytes, n_pages) > 0) {
        return 1;
    }
    size_t n_share = card->pages.n_live / GROW_SHARE;
    n_share = n_share < GROW_MOST ? n_share : GROW_MOST;
    size_t n_least = card->pages.n_live < GROW_EARLY ? GROW_FEW : GROW_PAGES;
    size_t n = n_share > n_least ? n_share : n_least;
    const struct pya_pool *pool = arena->pool;
    if (pool == NULL) {
        return n;
    }
    size_t n_own = (size_t)pool->reserved[PYA_STAT_ALL].current / (GROW_POOL_SHARE * PYA_PAGE);
    return n_own < n ? n_own : n;
}

void
pya_policy_pay(struct pya_arena *arena, size_t n_handles) {
    struct pya_card *card = arena->card;
    double cost_ns = stitch_cost_ns(n_handles);
    arena->stitch_debt_ns += cost_ns;
    card->stitch_ns += cost_ns;
    if (card->options.memory == PYA_MEMORY_TIGHT) {
        policy_fill_bucket(card, cost_ns);
    }
}

/* A factor of patience: 1 at first, 1/2 at THRIFT_FROM times the cost of creating all pages, 1/9 at twice that.
 * Streams that share memory pay for it again and again, and so do sizes that never recur; in the end each gets memory
 * of its own, and calls become rare. */
static double
thrift(const struct pya_card *card) {
    double spent = card->stitch_ns / (THRIFT_FROM * create_cost_ns(card->pages.n_live + 1));
    return 1 / (1 + spent * spent * spent);
}

bool
pya_policy_may_transfer(struct pya_arena *arena, size_t n_pages) {
    double patience = TRANSFER_PATIENCE * thrift(arena->card);
    bool is_cheap = arena->transfer_debt_ns < patience * create_cost_ns(n_pages);
    if (!is_cheap) {
        arena->transfer_debt_ns = 0;
    }
    return is_cheap || arena->card->options.memory == PYA_MEMORY_TIGHT;
}

void
pya_policy_pay_transfer(struct pya_arena *arena, size_t n_handles) {
    double cost_ns = stitch_cost_ns(n_handles);
    arena->transfer_debt_ns += cost_ns;
    arena->card->stitch_ns += cost_ns;
}

/* How often a stitched range is used again, on average. */
static double
reuse(const struct pya_card *card) {
    return ((double)card->n_reused + REUSE_PRIOR) / ((double)card->n_stitched + REUSE_PRIOR);
}

/* The debt that remains when memory grows instead of saving n pages. */
static double
debt_after_growth(const struct pya_arena *arena, size_t n) {
    double left = arena->stitch_debt_ns - GROWTH_PAYS * create_cost_ns(n);
    return reuse(arena->card) < REUSE_LEAST && left > 0 ? left : 0;
}

/* Is this one tensor that grows, each large request slightly larger than the one before?  A stitched range is
 * extended by just what it lacks, whereas pages can be moved to the end of the arena for only one tensor.  Or does
 * the same request recur, so that it will find its range again? */
static bool
is_worth_a_range(struct pya_arena *arena, size_t bytes) {
    size_t n = pya_pages_for(bytes);
    size_t n_before = arena->large_pages;
    if (!pya_grows_to(n_before, n)) {
        arena->n_grown = 0;
    } else if (n > n_before) {
        arena->n_grown++;
    }
    arena->n_repeated = n == n_before ? arena->n_repeated + 1 : 0;
    arena->large_pages = n;
    return pya_arena_is_growing(arena) || arena->n_repeated >= REPEATED_FROM;
}

/* Has peak live repeatedly risen by as much as the choice before had saved? */
static bool
is_rising(struct pya_arena *arena, const struct pya_plea *plea) {
    const size_t peak_live = peak_with(arena->card, plea->bytes);
    bool is_in_vain = peak_live >= arena->spared_at_peak + arena->spared_bytes;
    arena->n_spared_in_vain = is_in_vain ? arena->n_spared_in_vain + 1 : 0;
    arena->spared_at_peak = peak_live;
    arena->spared_bytes = (plea->n - plea->n_missing) * PYA_PAGE;
    bool is_little = (double)arena->spared_bytes <= RISING_SHARE * (double)peak_live;
    return arena->n_spared_in_vain >= RISING_FROM && is_little && plea->bytes >= RISING_LEAST;
}

static enum pya_plan
plan_how(struct pya_arena *arena, const struct pya_plea *plea) {
    const size_t peak_live = peak_with(arena->card, plea->bytes);
    bool is_large = plea->bytes >= peak_live / BALANCED_MOVE_SHARE;
    bool moves =
        pya_card_is_shared(arena->card) || (is_large && !is_worth_a_range(arena, plea->bytes));
    return moves && plea->n_there == 0 ? PYA_PLAN_MOVE : PYA_PLAN_STITCH;
}

/* Stitches or moves, unless that would waste too much or patience has run out; then memory grows. */
static enum pya_plan
plan_save(struct pya_arena *arena, const struct pya_plea *plea, double patience) {
    enum pya_plan how = plan_how(arena, plea);
    size_t n_saved = plea->n - plea->n_missing;
    size_t waste = arena->wasted_bytes + pya_pages_for(plea->bytes) * PYA_PAGE - plea->bytes;
    double debt_ns = arena->stitch_debt_ns + stitch_cost_ns(plea->n_handles);
    if (how == PYA_PLAN_STITCH && (double)waste > WASTE_SHARE * (double)(n_saved * PYA_PAGE)) {
        return PYA_PLAN_GROW;
    }
    if (debt_ns >= patience * create_cost_ns(n_saved)) {
        arena->stitch_debt_ns = debt_after_growth(arena, n_saved);
        return PYA_PLAN_GROW;
    }
    return how;
}

static double
patience_late(const struct pya_card *card) {
    double times = reuse(card);
    times = times < 1 ? 1 : times;
    return BALANCED_PATIENCE_LATE * (times < REUSE_MOST ? times : REUSE_MOST);
}

static enum pya_plan
plan_balanced(struct pya_arena *arena, const struct pya_plea *plea) {
    const struct pya_card *card = arena->card;
    bool is_early = card->stitch_ns < BALANCED_EARLY_SHARE * create_cost_ns(card->pages.n_live);
    double patience = is_early ? BALANCED_PATIENCE : patience_late(card);
    if (pya_card_is_shared(card)) {
        patience = BALANCED_PATIENCE * thrift(card);
    } else if (is_rising(arena, plea)) {
        patience = 0;
    } else {
        double excess = excess_with(card, plea->bytes, plea->n - plea->n_missing);
        patience *= excess > 0 ? 1 + EXCESS_PATIENCE * excess * thrift(card) : 1;
    }
    return plan_save(arena, plea, patience);
}

/* Above the level a page is worth more: patience does not fall, however long the program runs. */
static enum pya_plan
plan_pressed(struct pya_arena *arena, const struct pya_plea *plea) {
    double patience = pya_card_is_shared(arena->card) ? BALANCED_PATIENCE : PRESSED_PATIENCE;
    return plan_save(arena, plea, patience);
}

static enum pya_plan
plan_tight(const struct pya_plea *plea) {
    bool moves = plea->bytes >= TIGHT_MOVE_FROM && plea->n_there == 0;
    return moves ? PYA_PLAN_MOVE : PYA_PLAN_STITCH;
}

static bool
is_worth_saving(const struct pya_card *card, size_t bytes, size_t n) {
    size_t grown = card->reserved_bytes + n * PYA_PAGE;
    if (pya_gc_is_pressed(card, n)) {
        return true;
    }
    if (card->options.memory == PYA_MEMORY_BALANCED) {
        return bytes >= BALANCED_STITCH_FROM && grown > peak_with(card, bytes);
    }
    double most = (1 + TIGHT_SLACK + card->slack) * (double)peak_with(card, bytes);
    return card->options.memory == PYA_MEMORY_TIGHT && (double)grown > most;
}

bool
pya_policy_may_save(
    const struct pya_arena *arena, size_t bytes, size_t n, struct pya_mosaic *mosaic) {
    if (!is_worth_saving(arena->card, bytes, n)) {
        return false;
    }
    *mosaic = pya_mosaic_plan(arena, bytes, false);
    return n > mosaic->n_lacking;
}

enum pya_plan
pya_policy_plan(struct pya_arena *arena, const struct pya_plea *plea) {
    const struct pya_card *card = arena->card;
    enum pya_plan plan;
    PYA_ASSERT(plea->n > plea->n_missing);
    if (pya_gc_is_pressed(card, plea->n)) {
        plan = plan_pressed(arena, plea);
    } else {
        plan = card->options.memory == PYA_MEMORY_TIGHT ? plan_tight(plea)
                                                        : plan_balanced(arena, plea);
    }
    /* Blocks of a pool in use may be claimed again at their addresses (pya_pool_claim), so its pages stay at home. */
    return plan == PYA_PLAN_MOVE && !pya_pool_is_open(arena) ? PYA_PLAN_STITCH : plan;
}
