/* The lock, and what threads do without one, in every order of their steps on the memory of interleave.h.
 *
 * The code is the library's: lock.c, cards.h and refcount.h, compiled once more here.  A case passes only if the model
 * also rejects each of its mutants: the same code with one kind of mistake. */
#include "check.h"

#include "interleave.h"

#define PYA_LOCK_SPINS 1
#include "core/cards.h"
#include "core/lock.c" // NOLINT(bugprone-suspicious-include): the code under test
#include "core/refcount.h"

struct mutant {
    const char *name;
    interleave_mutate *mutate;
};

/* More states than valgrind or a sanitizer has time for. */
static bool
is_patient(void) {
    return !check_is_slow();
}

static void
check_sound(const struct interleave_scenario *scenario) {
    struct interleave_result result = interleave_try(scenario, NULL);
    printf(
        "       %s: %zu states, %zu ends, %zu sleeps%s%s\n", scenario->name, result.n_states,
        result.n_ends, result.n_sleeps, result.why == NULL ? "" : ": ",
        result.why == NULL ? "" : result.why);
    CHECK(result.why == NULL);
    CHECK(result.n_ends > 0);
}

static void
check_mutants(const struct interleave_scenario *scenario, const struct mutant *mutants, size_t n) {
    for (size_t i = 0; i < n; i++) {
        struct interleave_result result = interleave_try(scenario, mutants[i].mutate);
        printf(
            "       %s, %s: %s\n", scenario->name, mutants[i].name,
            result.why == NULL ? "NOT FOUND" : result.why);
        CHECK(result.why != NULL && !result.is_too_large);
    }
}

#define CHECK_MUTANTS(scenario, mutants)                                                           \
    check_mutants(scenario, mutants, sizeof(mutants) / sizeof(mutants)[0])

/* ---- the lock: a counter that only its holder touches ---- */

static struct pya_lock lock;
static size_t counter;
static uint64_t n_counted;

static void
lock_declare(void) {
    interleave_place(&lock.state, 0);
    interleave_place(&counter, 0);
}

static void
lock_run(int thread, int round) {
    (void)thread;
    (void)round;
    pya_lock_acquire(&lock);
    size_t value = __atomic_load_n(&counter, __ATOMIC_RELAXED);
    __atomic_store_n(&counter, value + 1, __ATOMIC_RELAXED);
    pya_lock_release(&lock);
}

static void
lock_check_end(void) {
    interleave_expect(interleave_newest(&counter) == n_counted, "an update under the lock is lost");
    interleave_expect(interleave_newest(&lock.state) == 0, "the lock is held by nobody");
}

static struct interleave_scenario
lock_scenario(const char *name, int n_threads, int n_rounds, int n_spurious) {
    n_counted = (uint64_t)(n_threads * n_rounds);
    return (struct interleave_scenario){name,         n_threads, n_rounds,      n_spurious,
                                        lock_declare, lock_run,  lock_check_end};
}

static void
release_without_look(struct interleave_op *op, enum interleave_kind last) {
    (void)last;
    op->is_blind = op->kind == EXCHANGE && op->order == __ATOMIC_RELEASE;
}

static void
waiter_says_held(struct interleave_op *op, enum interleave_kind last) {
    (void)last;
    if (op->kind == EXCHANGE && op->value == 2) {
        op->value = 1;
    } else if (op->kind == WAIT) {
        op->expected = 1;
    }
}

static void
woken_says_held(struct interleave_op *op, enum interleave_kind last) {
    if (op->kind == EXCHANGE && last == WAIT && interleave_newest(op->address) == 0) {
        op->value = 1;
    }
}

static void
woken_believes(struct interleave_op *op, enum interleave_kind last) {
    op->is_blind = op->kind == EXCHANGE && last == WAIT;
}

static void
nobody_woken(struct interleave_op *op, enum interleave_kind last) {
    (void)last;
    if (op->kind == WAKE) {
        op->value = 0;
    }
}

static void
sleep_without_look(struct interleave_op *op, enum interleave_kind last) {
    (void)last;
    op->is_blind = op->kind == WAIT;
}

static void
compare_torn(struct interleave_op *op, enum interleave_kind last) {
    (void)last;
    op->is_torn = op->kind == COMPARE;
}

static void
exchange_torn(struct interleave_op *op, enum interleave_kind last) {
    (void)last;
    op->is_torn = op->kind == EXCHANGE;
}

static void
release_torn(struct interleave_op *op, enum interleave_kind last) {
    (void)last;
    op->is_torn = op->kind == EXCHANGE && op->order == __ATOMIC_RELEASE;
}

static void
acquire_relaxed(struct interleave_op *op, enum interleave_kind last) {
    (void)last;
    op->order = op->order == __ATOMIC_ACQUIRE   ? __ATOMIC_RELAXED
                : op->order == __ATOMIC_ACQ_REL ? __ATOMIC_RELEASE
                                                : op->order;
}

static void
release_relaxed(struct interleave_op *op, enum interleave_kind last) {
    (void)last;
    op->order = op->order == __ATOMIC_RELEASE   ? __ATOMIC_RELAXED
                : op->order == __ATOMIC_ACQ_REL ? __ATOMIC_ACQUIRE
                                                : op->order;
}

static void
test_lock(void) {
    static const struct mutant mutants[] = {
        {"released without a look for sleepers", release_without_look},
        {"a waiter that says 1, not 2", waiter_says_held},
        {"a sleeper that thinks the lock its own", woken_believes},
        {"nobody woken", nobody_woken},
        {"sleeping without a look", sleep_without_look},
        {"compare and exchange in two steps", compare_torn},
        {"exchange in two steps", exchange_torn},
        {"release in two steps", release_torn},
        {"acquire relaxed", acquire_relaxed},
        {"release relaxed", release_relaxed},
    };
    static const struct mutant of_three[] = {
        {"a woken waiter that forgets the others", woken_says_held}};
    struct interleave_scenario two = lock_scenario("two threads, twice", 2, 2, 1);
    check_sound(&two);
    CHECK_MUTANTS(&two, mutants);
    struct interleave_scenario three = lock_scenario("three threads", 3, 1, 1);
    check_sound(&three);
    CHECK_MUTANTS(&three, of_three);
    if (is_patient()) {
        struct interleave_scenario more = lock_scenario("two threads, three times", 2, 3, 2);
        check_sound(&more);
    }
}

/* ---- cards: opened once, whole when seen ---- */

enum { OPENED_BY = 5, CONTENT = 7 };
#define CLAIMED_ADDRESS ((pya_dptr)3 << PYA_CLAIM_SHIFT)

struct pya_card {
    size_t content;
};

static struct pya_cards cards;
static struct pya_card card;
static size_t n_opened;

static void
cards_declare(void) {
    interleave_place(&lock.state, 0);
    interleave_place(&cards.open[1], 0);
    interleave_place(&cards.n_open, 0);
    interleave_place(&cards.fork_count, 0);
    interleave_place(&cards.claims[3], 0);
    interleave_place(&card.content, 0);
    interleave_place(&n_opened, 0);
}

static pya_status
cards_opener(void *arg, int device, struct pya_card **out) {
    struct pya_card *opened = arg;
    (void)device;
    __atomic_store_n(&opened->content, (size_t)CONTENT, __ATOMIC_RELAXED);
    __atomic_store_n(&n_opened, __atomic_load_n(&n_opened, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
    *out = opened;
    return PYA_OK;
}

static struct pya_card *
cards_use(void) {
    struct pya_card *found = pya_cards_get(&cards, 1);
    pya_status st = PYA_OK;
    if (found == NULL) {
        struct pya_card_opener opener = {&card, cards_opener, OPENED_BY};
        st = pya_cards_open(&cards, &lock, 1, opener, &found);
    }
    interleave_expect(st == PYA_OK && found == &card, "no card");
    interleave_expect(
        __atomic_load_n(&found->content, __ATOMIC_RELAXED) == CONTENT,
        "a card in the making is used");
    return found;
}

static void
opening_run(int thread, int round) {
    (void)round;
    if (thread < 2) {
        (void)cards_use();
    } else {
        interleave_expect(
            !pya_cards_are_forked(&cards, OPENED_BY), "a process takes itself for its child");
    }
}

static void
claiming_run(int thread, int round) {
    (void)round;
    if (thread == 0) {
        (void)cards_use();
        pya_cards_claim(&cards, 1, CLAIMED_ADDRESS, 1);
        return;
    }
    uint64_t claiming = pya_cards_claiming(&cards, CLAIMED_ADDRESS);
    if (claiming != 0) {
        struct pya_card *found = pya_cards_lowest(&cards, claiming);
        interleave_expect(found == &card, "a claim is seen before its card");
        if (found != NULL) {
            interleave_expect(
                __atomic_load_n(&found->content, __ATOMIC_RELAXED) == CONTENT,
                "a claim is seen before what the card holds");
        }
    }
}

static void
cards_check_end(void) {
    interleave_expect(interleave_newest(&n_opened) == 1, "a card is opened twice");
    interleave_expect(interleave_newest(&cards.n_open) == 1, "a card is counted twice");
}

static void
no_second_look(struct interleave_op *op, enum interleave_kind last) {
    (void)last;
    op->is_blind =
        op->kind == LOAD && op->address == &cards.open[1] && op->order == __ATOMIC_RELAXED;
}

/* One place at a time, to show that each memory order is needed. */
static void
relax(struct interleave_op *op, const volatile void *address, int order) {
    if (op->address == address && op->order == order) {
        op->order = __ATOMIC_RELAXED;
    }
}

#define RELAXED_AT(name, address, order)                                                           \
    static void name(struct interleave_op *op, enum interleave_kind last) {                        \
        (void)last;                                                                                \
        relax(op, address, order);                                                                 \
    }
RELAXED_AT(publish_relaxed, &cards.open[1], __ATOMIC_RELEASE)
RELAXED_AT(get_relaxed, &cards.open[1], __ATOMIC_ACQUIRE)
RELAXED_AT(count_relaxed, &cards.n_open, __ATOMIC_RELEASE)
RELAXED_AT(forked_relaxed, &cards.n_open, __ATOMIC_ACQUIRE)
RELAXED_AT(claim_relaxed, &cards.claims[3], __ATOMIC_RELEASE)
RELAXED_AT(claiming_relaxed, &cards.claims[3], __ATOMIC_ACQUIRE)

static void
test_cards(void) {
    static const struct interleave_scenario opening = {
        "opening a card", 3, 1, 1, cards_declare, opening_run, cards_check_end};
    static const struct mutant of_opening[] = {
        {"published relaxed", publish_relaxed},
        {"read relaxed", get_relaxed},
        {"counted relaxed", count_relaxed},
        {"count read relaxed", forked_relaxed},
        {"no second look in the lock", no_second_look},
    };
    static const struct interleave_scenario claiming = {
        "claiming addresses", 2, 1, 0, cards_declare, claiming_run, cards_check_end};
    static const struct mutant of_claiming[] = {
        {"claimed relaxed", claim_relaxed}, {"claims read relaxed", claiming_relaxed}};
    check_sound(&opening);
    CHECK_MUTANTS(&opening, of_opening);
    check_sound(&claiming);
    CHECK_MUTANTS(&claiming, of_claiming);
}

/* ---- reference counts: the last owner sees everything, what is dead is found once ---- */

static struct pya_refcount things[2];
static struct pya_refcount *dead;
static size_t marks[3], n_last, n_found[2], n_pushed;

static void
owners_declare(void) {
    interleave_place(&things[0].n_owners, 2);
    interleave_place(&marks[0], 0);
    interleave_place(&marks[1], 0);
    interleave_place(&n_last, 0);
}

static void
owner_leaves(void) {
    if (pya_refcount_drop(&things[0])) {
        bool is_all = __atomic_load_n(&marks[0], __ATOMIC_RELAXED) == 1 &&
                      __atomic_load_n(&marks[1], __ATOMIC_RELAXED) == 1;
        interleave_expect(is_all, "the last owner does not see what another did");
        (void)__atomic_fetch_add(&n_last, 1, __ATOMIC_RELAXED);
    }
}

static void
owners_run(int thread, int round) {
    (void)round;
    if (thread == 0) {
        pya_refcount_retain(&things[0]);
    }
    __atomic_store_n(&marks[thread], (size_t)1, __ATOMIC_RELAXED);
    owner_leaves();
    if (thread == 0) {
        owner_leaves();
    }
}

static void
owners_check_end(void) {
    interleave_expect(interleave_newest(&n_last) == 1, "not one last owner");
}

static void
add_torn(struct interleave_op *op, enum interleave_kind last) {
    (void)last;
    op->is_torn = op->kind == ADD && op->address == &things[0].n_owners;
}

static void
dead_declare(void) {
    interleave_place(&dead, 0);
    for (int i = 0; i < 2; i++) {
        interleave_place(&things[i].next_dead, 0);
        interleave_place(&marks[i], 0);
        interleave_place(&n_found[i], 0);
    }
    interleave_place(&n_pushed, 0);
}

static void
push(int i) {
    (void)__atomic_fetch_add(&n_pushed, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&marks[i], (size_t)1, __ATOMIC_RELAXED);
    pya_refcount_push_dead(&dead, &things[i]);
}

/* Takes the list apart; true if things[0] was on it. */
static bool
take_all(void) {
    bool has_first = false;
    struct pya_refcount *thing = pya_refcount_take_dead(&dead);
    for (int n = 0; thing != NULL; n++) {
        int i = (int)(thing - things);
        if (n == 2) {
            interleave_expect(false, "the list is a circle");
            return has_first;
        }
        interleave_expect(
            __atomic_load_n(&marks[i], __ATOMIC_RELAXED) == 1, "what was pushed is not seen whole");
        struct pya_refcount *next = pya_refcount_next_dead(thing);
        __atomic_store_n(&marks[i], (size_t)0, __ATOMIC_RELAXED);
        (void)__atomic_fetch_add(&n_found[i], 1, __ATOMIC_RELAXED);
        has_first = has_first || i == 0;
        thing = next;
    }
    return has_first;
}

/* The first thing is used again at the same address, which may come back while the other is being pushed. */
static void
dead_run(int thread, int round) {
    (void)round;
    if (thread == 0) {
        push(0);
        if (take_all()) {
            push(0);
        }
    } else if (thread == 1) {
        push(1);
    } else {
        (void)take_all();
    }
}

static void
dead_check_end(void) {
    uint64_t n = interleave_newest(&n_found[0]) + interleave_newest(&n_found[1]);
    uint64_t left = interleave_newest(&dead);
    for (int i = 0; left != 0 && i <= 2; i++) {
        const struct pya_refcount *thing = (const struct pya_refcount *)(uintptr_t)left;
        left = interleave_newest(&thing->next_dead);
        n++;
    }
    interleave_expect(n == interleave_newest(&n_pushed), "pushed once, found never or twice");
}

RELAXED_AT(push_relaxed, &dead, __ATOMIC_RELEASE)
RELAXED_AT(take_relaxed, &dead, __ATOMIC_ACQUIRE)

static void
test_refcounts(void) {
    static const struct interleave_scenario owners = {
        "owners", 2, 1, 0, owners_declare, owners_run, owners_check_end};
    static const struct mutant of_owners[] = {
        {"acquire relaxed", acquire_relaxed},
        {"release relaxed", release_relaxed},
        {"count in two steps", add_torn}};
    static const struct interleave_scenario dying = {"dying",       3, 1, 1, dead_declare, dead_run,
                                                     dead_check_end};
    static const struct mutant of_dying[] = {
        {"pushed relaxed", push_relaxed},
        {"taken relaxed", take_relaxed},
        {"pushed in two steps", compare_torn},
        {"taken in two steps", exchange_torn}};
    check_sound(&owners);
    CHECK_MUTANTS(&owners, of_owners);
    check_sound(&dying);
    CHECK_MUTANTS(&dying, of_dying);
}

static const struct check_case cases[] = {
    {"lock", test_lock},
    {"cards", test_cards},
    {"refcounts", test_refcounts},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
