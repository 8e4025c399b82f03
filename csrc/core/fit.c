/* Bins of rings and treaps.  Floor 3. */
#include "fit.h"

#include <stdio.h>

#include "debug.h"

_Static_assert(PYA_FIT_WORDS <= 64, "one summary word covers the bitmap");
_Static_assert((PYA_PAGE / PYA_ALIGN & (PYA_PAGE / PYA_ALIGN - 1)) == 0, "a page begins a bin");
_Static_assert(1 << PYA_FIT_RING_BITS == PYA_FIT_RINGS, "the rings are a power of two");

void
pya_fit_init(struct pya_fit *fit) {
    *fit = (struct pya_fit){0};
}

static inline unsigned
fit_bin(size_t bytes) {
    uint64_t units = bytes / PYA_ALIGN;
    PYA_ASSERT(units > 0);
    if (units <= PYA_FIT_RINGS) {
        return (unsigned)units - 1;
    }
    unsigned top = 63U ^ (unsigned)__builtin_clzll(units);
    if (PYA_UNLIKELY(top >= PYA_FIT_MAX_BITS)) {
        return PYA_FIT_BINS - 1;
    }
    unsigned sub = (unsigned)(units >> (top - PYA_FIT_SUB_BITS)) & ((1U << PYA_FIT_SUB_BITS) - 1);
    return PYA_FIT_RINGS + ((top - PYA_FIT_RING_BITS) << PYA_FIT_SUB_BITS) + sub;
}

static inline bool
fit_less(const struct pya_block *a, size_t bytes, pya_dptr addr) {
    return a->bytes < bytes || (a->bytes == bytes && a->addr < addr);
}

/* A treap's priority must look random but be constant for a node: the mixed address.  The address is folded first:
 * products of addresses at equal distances are at equal distances too, and the tree would be as deep as a list. */
static inline uint64_t
fit_priority(const struct pya_block *run) {
    uint64_t x = run->addr / PYA_ALIGN;
    return (x ^ (x >> 9)) * 0x9E3779B97F4A7C15U;
}

static inline void
fit_mark(struct pya_fit *fit, unsigned bin) {
    fit->filled[bin / 64] |= (uint64_t)1 << (bin % 64);
    fit->summary |= (uint64_t)1 << (bin / 64);
}

static inline void
fit_unmark(struct pya_fit *fit, unsigned bin) {
    uint64_t word = fit->filled[bin / 64] & ~((uint64_t)1 << (bin % 64));
    fit->filled[bin / 64] = word;
    fit->summary &= ~((uint64_t)(word == 0) << (bin / 64));
}

static void
fit_insert_below(struct pya_block **link, struct pya_block *run) {
    uint64_t priority = fit_priority(run);
    while (*link != NULL && fit_priority(*link) >= priority) {
        PYA_STEP();
        link = fit_less(*link, run->bytes, run->addr) ? &(*link)->right : &(*link)->left;
    }
    struct pya_block *rest = *link;
    struct pya_block **left = &run->left;
    struct pya_block **right = &run->right;
    *link = run;
    while (rest != NULL) {
        PYA_STEP();
        if (fit_less(rest, run->bytes, run->addr)) {
            *left = rest;
            left = &rest->right;
            rest = rest->right;
        } else {
            *right = rest;
            right = &rest->left;
            rest = rest->left;
        }
    }
    *left = NULL;
    *right = NULL;
}

static void
fit_remove_below(struct pya_block **link, struct pya_block *run) {
    while (*link != run) {
        PYA_STEP();
        PYA_ASSERT(*link != NULL);
        link = fit_less(*link, run->bytes, run->addr) ? &(*link)->right : &(*link)->left;
    }
    struct pya_block *left = run->left;
    struct pya_block *right = run->right;
    while (left != NULL && right != NULL) {
        PYA_STEP();
        if (fit_priority(left) >= fit_priority(right)) {
            *link = left;
            link = &left->right;
            left = left->right;
        } else {
            *link = right;
            link = &right->left;
            right = right->left;
        }
    }
    *link = left != NULL ? left : right;
}

/* A run alone in its bin has no links, in rings and treaps alike. */
static inline void
fit_link_alone(struct pya_fit *fit, unsigned bin, struct pya_block *run) {
    run->left = NULL;
    run->right = NULL;
    fit->heads[bin] = run;
}

static inline bool
fit_is_alone(const struct pya_fit *fit, unsigned bin, const struct pya_block *run) {
    return fit->heads[bin] == run && run->left == NULL && run->right == NULL;
}

static inline void
fit_enter_ring(struct pya_block **head, struct pya_block *run) {
    /* Usually the lowest address is in front, and the others are in any order: best fit packs low, and sorting the
     * rest would cost more than it gains. */
    struct pya_block *first = *head;
    struct pya_block *last = PYA_RANDOM(first->before != NULL) ? first->before : first;
    run->before = last;
    run->after = first;
    last->after = run;
    first->before = run;
    *head = PYA_RANDOM(run->addr <= first->addr) ? run : first;
}

static inline void
fit_leave_ring(struct pya_block **head, struct pya_block *run) {
    struct pya_block *before = run->before;
    struct pya_block *after = run->after;
    bool leaves_one = before == after;
    before->after = PYA_RANDOM(leaves_one) ? NULL : after;
    after->before = PYA_RANDOM(leaves_one) ? NULL : before;
    *head = PYA_RANDOM(*head == run) ? after : *head;
}

static inline void
fit_link(struct pya_fit *fit, unsigned bin, struct pya_block *run) {
    struct pya_block **head = &fit->heads[bin];
    if (*head == NULL) {
        fit_mark(fit, bin);
        fit_link_alone(fit, bin, run);
    } else if (bin < PYA_FIT_RINGS) {
        fit_enter_ring(head, run);
    } else {
        fit_insert_below(head, run);
    }
}

static inline void
fit_unlink(struct pya_fit *fit, unsigned bin, struct pya_block *run) {
    struct pya_block **head = &fit->heads[bin];
    if (fit_is_alone(fit, bin, run)) {
        *head = NULL;
        fit_unmark(fit, bin);
    } else if (bin < PYA_FIT_RINGS) {
        fit_leave_ring(head, run);
    } else {
        fit_remove_below(head, run);
    }
}

void
pya_fit_insert(struct pya_fit *fit, struct pya_block *run) {
    fit->n_runs++;
    fit_link(fit, fit_bin(run->bytes), run);
}

void
pya_fit_remove(struct pya_fit *fit, struct pya_block *run) {
    fit->n_runs--;
    fit_unlink(fit, fit_bin(run->bytes), run);
}

void
pya_fit_replace(
    struct pya_fit *fit, struct pya_block *run, struct pya_block *heir, pya_dptr addr,
    size_t bytes) {
    unsigned before = fit_bin(run->bytes);
    unsigned bin = fit_bin(bytes);
    bool stays = bin == before && fit_is_alone(fit, bin, run);
    if (!stays) {
        fit_unlink(fit, before, run);
    }
    heir->addr = addr;
    heir->bytes = bytes;
    if (stays) {
        fit_link_alone(fit, bin, heir);
    } else {
        fit_link(fit, bin, heir);
    }
}

static struct pya_block *
fit_leftmost(struct pya_block *node) {
    while (node->left != NULL) {
        PYA_STEP();
        node = node->left;
    }
    return node;
}

/* The first run of a bin, which has one. */
static struct pya_block *
fit_first(const struct pya_fit *fit, unsigned bin) {
    return bin < PYA_FIT_RINGS ? fit->heads[bin] : fit_leftmost(fit->heads[bin]);
}

/* The first run of the first filled bin at or above `bin`. */
static struct pya_block *
fit_from_bin(const struct pya_fit *fit, unsigned bin) {
    if (bin >= PYA_FIT_BINS) {
        return NULL;
    }
    unsigned word = bin / 64;
    uint64_t bits = fit->filled[word] & (~(uint64_t)0 << (bin % 64));
    uint64_t words = fit->summary & (~(uint64_t)1 << word);
    if (PYA_UNLIKELY((bits | words) == 0)) {
        return NULL;
    }
    /* Both words are loaded and one is selected: a branch on the first word would be mispredicted half of the time. */
    unsigned next = (unsigned)__builtin_ctzll(words | (uint64_t)1 << 63);
    uint64_t next_bits = fit->filled[next < PYA_FIT_WORDS ? next : 0];
    unsigned is_next = bits == 0;
    word ^= (word ^ next) & (0U - is_next);
    bits |= next_bits & (0U - (uint64_t)is_next);
    return fit_first(fit, word * 64 + (unsigned)__builtin_ctzll(bits));
}

/* The first node at or after (bytes, addr) in one bin. */
static struct pya_block *
fit_lower_bound(struct pya_block *node, size_t bytes, pya_dptr addr) {
    struct pya_block *best = NULL;
    while (node != NULL) {
        PYA_STEP();
        if (fit_less(node, bytes, addr)) {
            node = node->right;
        } else {
            best = node;
            node = node->left;
        }
    }
    return best;
}

struct pya_block *
pya_fit_find(const struct pya_fit *fit, size_t bytes) {
    unsigned bin = fit_bin(bytes);
    if (bin >= PYA_FIT_RINGS) {
        struct pya_block *best = fit_lower_bound(fit->heads[bin], bytes, 0);
        if (best != NULL) {
            return best;
        }
        bin++;
    }
    return fit_from_bin(fit, bin);
}

struct pya_block *
pya_fit_next(const struct pya_fit *fit, const struct pya_block *run) {
    unsigned bin = fit_bin(run->bytes);
    struct pya_block *next;
    if (bin < PYA_FIT_RINGS) {
        next = run->after != fit->heads[bin] ? run->after : NULL; /* alone: NULL too */
    } else {
        next = fit_lower_bound(fit->heads[bin], run->bytes, run->addr + 1);
    }
    return next != NULL ? next : fit_from_bin(fit, bin + 1);
}

/* As deep as a treap usually is: twice the logarithm of its runs. */
static void
fit_visit_tree(struct pya_block *node, void (*visit)(void *arg, struct pya_block *run), void *arg) {
    for (; node != NULL; node = node->right) {
        PYA_STEP();
        fit_visit_tree(node->left, visit, arg);
        visit(arg, node);
    }
}

void
pya_fit_visit_pages(
    const struct pya_fit *fit, void (*visit)(void *arg, struct pya_block *run), void *arg) {
    const struct pya_block *run = fit_from_bin(fit, fit_bin(PYA_PAGE));
    while (run != NULL) {
        unsigned bin = fit_bin(run->bytes);
        fit_visit_tree(fit->heads[bin], visit, arg);
        run = fit_from_bin(fit, bin + 1);
    }
}

struct pya_block *
pya_fit_largest(const struct pya_fit *fit) {
    if (fit->summary == 0) {
        return NULL;
    }
    unsigned word = 63U - (unsigned)__builtin_clzll(fit->summary);
    unsigned bin = word * 64 + 63U - (unsigned)__builtin_clzll(fit->filled[word]);
    struct pya_block *node = fit->heads[bin];
    while (bin >= PYA_FIT_RINGS && node->right != NULL) {
        PYA_STEP();
        node = node->right;
    }
    return node;
}

/* Checks a ring.  Only the lack of links tells that a run is alone. */
static bool
fit_is_linked(const struct pya_block *head, const struct pya_block *run) {
    if (run->after == NULL) {
        return run->before == NULL && run == head;
    }
    return run->after != run && run->after->before == run;
}

static size_t
fit_check_bin(const struct pya_fit *fit, unsigned bin, size_t *n_runs) {
    size_t n_wrong = 0;
    bool is_tree = bin >= PYA_FIT_RINGS;
    bool is_filled = (fit->filled[bin / 64] >> (bin % 64)) & 1;
    bool has_run = fit->heads[bin] != NULL;
    if (is_filled != has_run) {
        (void)fprintf(stderr, "fit: bin %u: bitmap says %d\n", bin, is_filled);
        return 1;
    }
    const struct pya_block *before = NULL;
    const struct pya_block *run = has_run ? fit_first(fit, bin) : NULL;
    for (; run != NULL && fit_bin(run->bytes) == bin; run = pya_fit_next(fit, run)) {
        ++*n_runs;
        bool is_ordered = before == NULL || !is_tree || fit_less(before, run->bytes, run->addr);
        bool is_linked = is_tree || fit_is_linked(fit->heads[bin], run);
        if (run->state != PYA_BLOCK_FREE || !is_ordered || !is_linked) {
            (void)fprintf(
                stderr, "fit: bin %u: run %#llx of %zu bytes is out of place\n", bin,
                (unsigned long long)run->addr, run->bytes);
            n_wrong++;
        }
        before = run;
    }
    return n_wrong;
}

size_t
pya_fit_check(const struct pya_fit *fit) {
    size_t n_wrong = 0;
    size_t n_runs = 0;
    for (unsigned bin = 0; bin < PYA_FIT_BINS; bin++) {
        n_wrong += fit_check_bin(fit, bin, &n_runs);
    }
    for (unsigned word = 0; word < PYA_FIT_WORDS; word++) {
        if (((fit->summary >> word) & 1) != (fit->filled[word] != 0)) {
            (void)fprintf(stderr, "fit: summary of word %u is wrong\n", word);
            n_wrong++;
        }
    }
    if (n_runs != fit->n_runs) {
        (void)fprintf(stderr, "fit: %zu runs found, %zu counted\n", n_runs, fit->n_runs);
        n_wrong++;
    }
    return n_wrong;
}
