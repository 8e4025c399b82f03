/* Programs whose places were planned: each request gets its place, and the pages that lie there. */
#include "world.h"

#include <stdlib.h>
#include <string.h>

#include "core/debug.h"
#include "core/repeat.h"
#include "sweep.h"

#ifdef PYA_TEST_TINY
enum { N_LAYERS = 6 };
#else
enum { N_LAYERS = 40 };
#endif

/* A training step, which begins with a large request.  What each layer kept is freed as the next one ends.  It runs
 * twice, because an optimizer's state, made in the first step, stays. */
enum { N_STEPS = 5, N_REQUESTS = 8 * N_LAYERS };

/* A program written down while it runs without a layout: what it requests, and when it frees that. */
struct op {
    bool is_alloc;
    size_t request; /* number of it */
};

struct script {
    size_t bytes[N_STEPS * N_REQUESTS];
    size_t born[N_STEPS * N_REQUESTS]; /* by operation */
    size_t died[N_STEPS * N_REQUESTS];
    struct op ops[2 * N_STEPS * N_REQUESTS];
    size_t n;     /* requests */
    size_t n_ops; /* those and frees */
    size_t first; /* request of the second step */
    size_t period;
};

static size_t
script_take(struct script *s, size_t bytes) {
    s->bytes[s->n] = bytes;
    s->born[s->n] = s->n_ops;
    s->died[s->n] = SIZE_MAX;
    s->ops[s->n_ops++] = (struct op){true, s->n};
    return s->n++;
}

static void
script_give(struct script *s, size_t request) {
    s->died[request] = s->n_ops;
    s->ops[s->n_ops++] = (struct op){false, request};
}

static size_t
layer_bytes(size_t layer, size_t kind) {
    return ((layer * 7 + kind * 5) % 11 + 1) * (MIB / 2) + layer * 512 * 16;
}

static void
script_step(struct script *s, int step) {
    size_t kept[N_LAYERS];
    size_t little[N_LAYERS];
    for (size_t i = 0; i < N_LAYERS; i++) {
        kept[i] = script_take(s, layer_bytes(i, 0));
        little[i] = script_take(s, 512 * (i % 5 + 1));
        script_give(s, script_take(s, layer_bytes(i, 1)));
    }
    for (size_t i = N_LAYERS; i-- > 0;) {
        size_t gradient = script_take(s, layer_bytes(i, 2));
        script_give(s, kept[i]);
        script_give(s, script_take(s, layer_bytes(i, 3)));
        if (step == 0) {
            (void)script_take(s, layer_bytes(i, 2)); /* the optimizer's */
        }
        script_give(s, gradient);
        script_give(s, little[i]);
    }
}

static void
script_write(struct script *s) {
    *s = (struct script){0};
    for (int step = 0; step < N_STEPS; step++) {
        if (step == 1) {
            s->first = s->n;
        }
        script_step(s, step);
        if (step == 1) {
            s->period = s->n - s->first;
        }
    }
}

static bool
script_meet(const struct script *s, size_t a, size_t b) {
    return s->born[a] < s->died[b] && s->born[b] < s->died[a];
}

/* Plans the first two steps: each request at the lowest place that no earlier one has while it lives. */
static void
script_lay(const struct script *s, struct pya_layout_place *places, struct pya_layout *layout) {
    size_t n = s->first + s->period;
    for (size_t i = 0; i < n; i++) {
        size_t life = 0;
        for (size_t k = i; s->died[i] != SIZE_MAX && s->born[k] < s->died[i]; k++) {
            life += s->bytes[k] >= PYA_REPEAT_FROM;
        }
        uint64_t offset = 0;
        for (bool moved = true; moved;) {
            moved = false;
            for (size_t k = 0; k < i; k++) {
                if (script_meet(s, i, k) && offset < places[k].offset + places[k].bytes &&
                    places[k].offset < offset + s->bytes[i]) {
                    offset = places[k].offset + places[k].bytes;
                    moved = true;
                }
            }
        }
        places[i] = (struct pya_layout_place){offset, s->bytes[i], life};
    }
    *layout = (struct pya_layout){places, n, s->period, PYA_LAYOUT_EVERY_DEVICE, NULL};
}

/* Where the layout places the request; past the layout's end, where it lay one period ago. */
static uint64_t
script_offset(const struct script *s, const struct pya_layout *layout, size_t request) {
    size_t i = request;
    while (i >= layout->n) {
        i -= s->period;
    }
    return layout->places[i].offset;
}

struct fixture {
    struct script script;
    struct pya_layout_place places[2 * N_REQUESTS];
    struct pya_layout layout;
    struct world world;
    pya_dptr ptrs[N_STEPS * N_REQUESTS];
    pya_dptr base; /* of the layout */
};

static struct fixture *
fixture_new(const char *text) {
    struct fixture *f = calloc(1, sizeof *f);
    CHECK(f != NULL);
    script_write(&f->script);
    script_lay(&f->script, f->places, &f->layout);
    f->world.layouts = &f->layout;
    world_init(&f->world, text);
    return f;
}

static void
fixture_free(struct fixture *f) {
    world_fini(&f->world);
    free(f);
}

/* Runs operations [from, to); counts the requests that lie elsewhere than planned. */
static size_t
fixture_run(struct fixture *f, size_t from, size_t to) {
    size_t n_elsewhere = 0;
    for (size_t i = from; i < to; i++) {
        size_t request = f->script.ops[i].request;
        if (!f->script.ops[i].is_alloc) {
            give(&f->world, f->ptrs[request]);
            continue;
        }
        pya_dptr ptr = take(&f->world, f->script.bytes[request], 0);
        uint64_t offset = script_offset(&f->script, &f->layout, request);
        f->base = request == 0 ? ptr - offset : f->base;
        n_elsewhere += ptr != f->base + offset;
        f->ptrs[request] = ptr;
    }
    return n_elsewhere;
}

static void
fixture_end(struct fixture *f, size_t n_ops) {
    for (size_t i = 0; i < f->script.n; i++) {
        if (f->script.born[i] < n_ops && f->script.died[i] >= n_ops) {
            give(&f->world, f->ptrs[i]);
        }
    }
}

static void
test_each_request_gets_its_place(void) {
    struct fixture *f = fixture_new("");
    size_t extent;
    CHECK(pya_layout_measure(&f->layout, &extent));
    size_t third = f->script.born[f->script.first + f->script.period];
    CHECK_EQ(fixture_run(f, 0, third), 0);
    uint64_t n = all_calls(&f->world);
    CHECK_EQ(fixture_run(f, third, f->script.n_ops), 0);
    CHECK_EQ(all_calls(&f->world), n);
    CHECK_EQ(reserved(&f->world), pya_round_up(extent, PYA_PAGE));
    CHECK_EQ(stat_of(f->world.heap, 0, "pyalloc_planned"), (int64_t)f->layout.n);
    fixture_end(f, f->script.n_ops);
    fixture_free(f);
}

static void
test_memory_comes_as_it_is_needed(void) {
    struct fixture *f = fixture_new("");
    for (size_t i = 0; i < f->script.n_ops; i++) {
        size_t before = reserved(&f->world);
        (void)fixture_run(f, i, i + 1);
        size_t request = f->script.ops[i].request;
        uint64_t end = script_offset(&f->script, &f->layout, request) + f->script.bytes[request];
        size_t most = before > end ? before : (size_t)pya_round_up(end, PYA_PAGE);
        CHECK(reserved(&f->world) <= most);
    }
    fixture_end(f, f->script.n_ops);
    fixture_free(f);
}

/* Now and then a request that was not there when the layout was made, like a library's workspace. */
static void
test_what_is_unforeseen_does_no_harm(void) {
    struct fixture *f = fixture_new("");
    size_t extent;
    CHECK(pya_layout_measure(&f->layout, &extent));
    size_t n_elsewhere = 0;
    for (size_t i = 0; i < f->script.n_ops; i++) {
        if (i % (2 * N_LAYERS) == N_LAYERS) {
            give(&f->world, take(&f->world, 3 * MIB + 512 * 77, 0));
        }
        n_elsewhere += fixture_run(f, i, i + 1);
    }
    CHECK(n_elsewhere <= f->script.n / 4);
    CHECK(reserved(&f->world) <= extent + 8 * MIB);
    fixture_end(f, f->script.n_ops);
    fixture_free(f);
}

static void
test_an_emptied_cache_comes_back(void) {
    struct fixture *f = fixture_new("");
    size_t second = f->script.born[f->script.first];
    size_t third = f->script.born[f->script.first + f->script.period];
    CHECK_EQ(fixture_run(f, 0, second), 0);
    size_t before = reserved(&f->world);
    CHECK_OK(pya_empty_cache(f->world.heap, 0));
    CHECK(reserved(&f->world) < before);
    CHECK_EQ(fixture_run(f, second, third), 0);
    CHECK(reserved(&f->world) >= before);
    CHECK_OK(pya_empty_cache(f->world.heap, 0));
    CHECK_EQ(fixture_run(f, third, f->script.n_ops), 0);
    fixture_end(f, f->script.n_ops);
    fixture_free(f);
}

/* Within steps, as cudnn.benchmark does: a place may then consist of several holes with free memory between them. */
static void
test_a_cache_emptied_all_the_time_comes_back(void) {
    struct fixture *f = fixture_new("");
    size_t extent;
    CHECK(pya_layout_measure(&f->layout, &extent));
    for (size_t i = 0; i < f->script.n_ops; i++) {
        if (i % 5 == 0) {
            CHECK_OK(pya_empty_cache(f->world.heap, 0));
        }
        CHECK_EQ(fixture_run(f, i, i + 1), 0);
        CHECK(reserved(&f->world) <= pya_round_up(extent, PYA_PAGE));
    }
    CHECK_EQ(pya_heap_check(f->world.heap, 0), 0);
    fixture_end(f, f->script.n_ops);
    fixture_free(f);
}

/* A card on which the layout does not fit: the same as without one, down to what is just enough. */
static void
test_a_smaller_card_does_without(void) {
    struct fixture *f = fixture_new("limit:1");
    size_t extent;
    CHECK(pya_layout_measure(&f->layout, &extent));
    pya_dptr ptr;
    CHECK_EQ(pya_alloc(f->world.heap, 0, MIB, 0, &ptr), PYA_E_NOMEM);
    fixture_free(f);
    f = fixture_new("");
    CHECK_OK(pya_set_limit(f->world.heap, 0, false, extent + 6 * MIB));
    for (size_t i = 0; i < f->layout.n; i++) {
        f->places[i].offset += extent; /* all above what may be reserved */
    }
    CHECK(fixture_run(f, 0, f->script.n_ops) > 0);
    CHECK(reserved(&f->world) <= extent + 6 * MIB);
    fixture_end(f, f->script.n_ops);
    fixture_free(f);
}

/* Places that the card cannot have, or for which others leave no room: no page is made in vain. */
static void
test_no_memory_is_made_in_vain(void) {
    enum { N = 100 };
    static struct pya_layout_place places[N];
    const struct pya_layout layout = {places, N, N, PYA_LAYOUT_EVERY_DEVICE, NULL};
    const size_t capacity = 1024 * MIB;
    for (int is_larger = 0; is_larger < 2; is_larger++) {
        size_t offset = is_larger ? 20000 * PYA_PAGE : capacity - 2 * PYA_PAGE;
        uint64_t n_calls[2];
        for (size_t i = 0; i < N; i++) {
            places[i] = (struct pya_layout_place){i == 0 ? 0 : offset, 2 * PYA_PAGE, 1};
        }
        for (int is_laid = 0; is_laid < 2; is_laid++) {
            struct world world = {
                .config = {.capacity_bytes = capacity}, .layouts = is_laid ? &layout : NULL};
            world_init(&world, "");
            give(&world, take(&world, 2 * PYA_PAGE, 0));
            pya_sim_set_capacity(world.sim, capacity / 2); /* others have the rest */
            uint64_t before = all_calls(&world);
            for (size_t i = 1; i < 5 * N; i++) {
                give(&world, take(&world, 2 * PYA_PAGE, 0));
            }
            n_calls[is_laid] = all_calls(&world) - before;
            CHECK(reserved(&world) <= 4 * PYA_PAGE);
            world_fini(&world);
        }
        CHECK(
            n_calls[1] <= n_calls[0] + (is_larger ? 0 : 5 * N)); /* it may be asked what is free */
    }
}

/* Memory above a soft limit is taken only if nothing else serves, with a layout too. */
static void
test_a_soft_limit_comes_first(void) {
    struct fixture *f = fixture_new("");
    size_t extent;
    CHECK(pya_layout_measure(&f->layout, &extent));
    CHECK_OK(pya_set_limit(f->world.heap, 0, true, extent + 8 * MIB));
    for (size_t i = 0; i < f->layout.n; i++) {
        f->places[i].offset += extent;
    }
    (void)fixture_run(f, 0, f->script.n_ops);
    CHECK(reserved(&f->world) <= extent + 8 * MIB);
    fixture_end(f, f->script.n_ops);
    fixture_free(f);
}

static void
test_a_second_stream_has_none(void) {
    struct fixture *f = fixture_new("");
    (void)fixture_run(f, 0, f->script.n_ops);
    fixture_end(f, f->script.n_ops);
    int64_t n = stat_of(f->world.heap, 0, "pyalloc_planned");
    for (size_t i = 0; i < 100; i++) {
        give(&f->world, take(&f->world, layer_bytes(i, 0), 7));
    }
    CHECK_EQ(stat_of(f->world.heap, 0, "pyalloc_planned"), n);
    fixture_free(f);
}

/* reserve() first: what it makes lies where the layout begins. */
static void
test_reserved_memory_is_used(void) {
    struct fixture *f = fixture_new("");
    size_t extent;
    CHECK(pya_layout_measure(&f->layout, &extent));
    CHECK_OK(pya_reserve(f->world.heap, 0, extent, 0));
    uint64_t n = all_calls(&f->world);
    CHECK_EQ(fixture_run(f, 0, f->script.n_ops), 0);
    CHECK_EQ(all_calls(&f->world), n);
    fixture_end(f, f->script.n_ops);
    fixture_free(f);
}

static void
test_without_virtual_memory_it_is_left_aside(void) {
    struct fixture *f = fixture_new("vmm:False");
    (void)fixture_run(f, 0, f->script.n_ops);
    CHECK_EQ(stat_of(f->world.heap, 0, "pyalloc_planned"), 0);
    fixture_end(f, f->script.n_ops);
    fixture_free(f);
}

#if PYA_ASSERT_LEVEL >= 2
/* Whether pages can be made at a place that is taken is not looked up in each of the holes. */
static void
test_many_holes_cost_nothing(void) {
    enum { N = PYA_LAYOUT_MOST < 2000 ? PYA_LAYOUT_MOST : 2000 };
    static struct pya_layout_place places[N];
    static pya_dptr ptrs[N];
    const struct pya_layout layout = {places, N, 0, PYA_LAYOUT_EVERY_DEVICE, NULL};
    struct world world = {.layouts = &layout};
    for (size_t i = 0; i + 1 < N; i++) {
        places[i] = (struct pya_layout_place){i * 2 * MIB, 2 * MIB, 0};
    }
    places[N - 1] = (struct pya_layout_place){0, MIB, 1}; /* where the first one lies */
    world_init(&world, "memory:tight");                   /* no grains: each page can go */
    for (size_t i = 0; i + 1 < N; i++) {
        ptrs[i] = take(&world, 2 * MIB, 0);
    }
    for (size_t i = 1; i + 1 < N; i += 2) {
        give(&world, ptrs[i]);
    }
    CHECK_OK(pya_empty_cache(world.heap, 0));
    give(&world, take(&world, MIB + 512, 0)); /* not planned: makes a page */
    uint64_t before = pya_debug_steps;
    ptrs[N - 1] = take(&world, MIB, 0);
    CHECK(pya_debug_steps - before < 100);
    CHECK(ptrs[N - 1] != ptrs[0]);
    world_fini(&world);
}

/* Some hundred small blocks in one page, of two alternating sizes that lie apart: no walk past all of them. */
static void
test_small_blocks_are_found_in_few_steps(void) {
    enum { N_SMALL = 400, FEW = 80 };
    static struct pya_layout_place places[N_SMALL + 1];
    places[0] = (struct pya_layout_place){PYA_PAGE, MIB, 1};
    for (size_t i = 0; i < N_SMALL; i++) {
        size_t bytes = 512 * (1 + i % 2);
        places[i + 1] = (struct pya_layout_place){i % 2 * MIB + i / 2 * bytes, bytes, 0};
    }
    struct pya_layout layout = {places, N_SMALL + 1, N_SMALL + 1, 0, NULL};
    struct world world = {.layouts = &layout};
    world_init(&world, "");
    pya_dptr ptrs[N_SMALL + 1];
    for (int step = 0; step < 4; step++) {
        for (size_t i = 0; i <= N_SMALL; i++) {
            unsigned long before = pya_debug_steps;
            ptrs[i] = take(&world, (size_t)places[i].bytes, 0);
            CHECK(pya_debug_steps - before <= FEW);
            CHECK_EQ(ptrs[i] - ptrs[0], places[i].offset - places[0].offset);
        }
        for (size_t i = 0; i <= N_SMALL; i++) {
            give(&world, ptrs[i]);
        }
        CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    }
    world_fini(&world);
}
#endif

/* Layouts that make no sense: places overlap, sizes come in any order.  Wherever blocks end up, no two live ones
 * overlap (pya_heap_check() and the simulated device look). */
static void
test_nonsense_does_no_harm(void) {
    enum { N = 200, N_LIVE = 64, N_OPS = 4000 };
    for (uint64_t seed = 1; seed <= 8; seed++) {
        struct pya_layout_place places[N];
        uint64_t rng = seed;
        for (size_t i = 0; i < N; i++) {
            uint64_t n = check_random(&rng) >> 40;
            places[i].bytes = (n % 7 == 0 ? n % 60 + 1 : n % 40 * 512 + 128) * 512;
            places[i].offset = (check_random(&rng) >> 40) % 65536 * 512;
            places[i].offset = n % 11 == 0 ? PYA_LAYOUT_ANYWHERE : places[i].offset;
            places[i].life = n % 13;
        }
        const struct pya_layout layout = {places, N, seed % 2 == 0 ? 0 : 70, 0, NULL};
        struct world world = {.layouts = &layout};
        pya_dptr live[N_LIVE] = {0};
        world_init(&world, seed % 3 == 0 ? "memory:tight" : "");
        for (size_t i = 0; i < N_OPS; i++) {
            size_t k = check_random(&rng) % N_LIVE;
            if (live[k] != 0) {
                give(&world, live[k]);
                live[k] = 0;
            }
            /* Often as planned, from some place on. */
            size_t bytes = (size_t)places[i % N].bytes;
            live[k] = take(&world, check_random(&rng) % 8 == 0 ? bytes + 512 : bytes, i % 500 == 0);
            if (i % 16 == 0) {
                CHECK_EQ(pya_heap_check(world.heap, 0), 0);
            }
            if (i % 900 == 899) {
                CHECK_OK(pya_empty_cache(world.heap, 0));
            }
        }
        for (size_t k = 0; k < N_LIVE; k++) {
            give(&world, live[k]);
        }
        world_fini(&world);
    }
}

/* Each device follows its own layout, or the one for every device; without either it behaves as if there were none. */
static void
test_devices_have_their_own(void) {
    const struct pya_layout_place low_first[] = {{0, 2 * MIB, 0}, {2 * MIB, MIB, 0}};
    const struct pya_layout_place high_first[] = {{2 * MIB, 2 * MIB, 0}, {0, MIB, 0}};
    for (int last = PYA_LAYOUT_EVERY_DEVICE; last <= 1; last++) {
        const struct pya_layout second = {high_first, 2, 0, last, NULL};
        const struct pya_layout first = {low_first, 2, 0, 2, &second};
        struct world world = {.layouts = &first};
        world_init(&world, "");
        for (int device = 0; device < 3; device++) {
            pya_dptr ptrs[2];
            CHECK_OK(pya_alloc(world.heap, device, 2 * MIB, 0, &ptrs[0]));
            CHECK_OK(pya_alloc(world.heap, device, MIB, 0, &ptrs[1]));
            bool is_second = device != 2 && (last == device || last == PYA_LAYOUT_EVERY_DEVICE);
            CHECK_EQ(ptrs[0] > ptrs[1], is_second);
            bool is_laid = is_second || device == 2;
            CHECK_EQ(stat_of(world.heap, device, "pyalloc_planned"), is_laid ? 2 : 0);
            give(&world, ptrs[0]);
            give(&world, ptrs[1]);
            CHECK_EQ(pya_heap_check(world.heap, device), 0);
        }
        world_fini(&world);
    }
}

static void
test_impossible_ones_are_refused(void) {
    static struct pya_layout_place places[PYA_LAYOUT_MOST + 1];
    struct pya_layout layout = {places, 1, 0, 0, NULL};
    struct world world = {0};
    struct pya_options options;
    pya_options_init(&options);
    options.layouts = &layout;
    world.hooks.open_device = world_open;
    const struct pya_layout_place wrong[] = {
        {0, 0, 0}, {0, 513, 0}, {1, 512, 0}, {0, (uint64_t)1 << 61, 0}, {(uint64_t)1 << 60, 512, 0},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        places[0] = wrong[i];
        CHECK_EQ(pya_heap_create(&options, &world.hooks, &world.heap), PYA_E_INVAL);
    }
    for (size_t i = 0; i <= PYA_LAYOUT_MOST; i++) {
        places[i] = (struct pya_layout_place){0, PYA_REPEAT_FROM, 0};
    }
    const struct pya_layout sound = {places, 1, 0, 0, &layout};
    options.layouts = &sound;
    layout.n_period = 2;
    CHECK_EQ(pya_heap_create(&options, &world.hooks, &world.heap), PYA_E_INVAL);
    layout = (struct pya_layout){places, PYA_LAYOUT_MOST + 1, 0, 0, NULL};
    CHECK_EQ(pya_heap_create(&options, &world.hooks, &world.heap), PYA_E_INVAL);
    layout.n = PYA_LAYOUT_MOST;
    CHECK_OK(pya_heap_create(&options, &world.hooks, &world.heap));
    pya_heap_destroy(world.heap);
}

/* Every device call and host allocation fails once: the program goes on or gets an error, and nothing is lost. */
static bool
sweep_once(const char *options, unsigned long nth, bool host, pya_status with) {
    struct fixture *f = calloc(1, sizeof *f);
    size_t live_before = fault_live();
    script_write(&f->script);
    script_lay(&f->script, f->places, &f->layout);
    f->world.layouts = &f->layout;
    f->world.config = (struct pya_sim_config){.capacity_bytes = 4096 * MIB, .quiet = true};
    world_init(&f->world, options);
    size_t n_done = 0;
    size_t n_failed = 0;
    /* This opens the card without a request to the arena. */
    CHECK_OK(pya_set_limit(f->world.heap, 0, false, 4096 * MIB));
    sweep_arm(f->world.sim, nth, host, with);
    for (; n_done < f->script.born[f->script.first]; n_done++) {
        size_t request = f->script.ops[n_done].request;
        if (!f->script.ops[n_done].is_alloc) {
            CHECK_OK(pya_free(f->world.heap, f->ptrs[request]));
        } else if (
            pya_alloc(f->world.heap, 0, f->script.bytes[request], 0, &f->ptrs[request]) != PYA_OK) {
            n_failed++;
            f->ptrs[request] = 0;
        }
    }
    bool fired = sweep_disarm(f->world.sim, host);
    CHECK(fired || n_failed == 0);
    CHECK(n_failed <= 1);
    CHECK_EQ(pya_heap_check(f->world.heap, 0), 0);
    fixture_end(f, n_done);
    sweep_check_empty(f->world.heap, f->world.sim);
    world_fini(&f->world);
    CHECK_EQ(fault_live(), live_before);
    free(f);
    return fired;
}

static void
test_sweep(void) {
    sweep_all(sweep_once, "");
}

static const struct check_case cases[] = {
    {"each_request_gets_its_place", test_each_request_gets_its_place},
    {"memory_comes_as_it_is_needed", test_memory_comes_as_it_is_needed},
    {"what_is_unforeseen_does_no_harm", test_what_is_unforeseen_does_no_harm},
    {"an_emptied_cache_comes_back", test_an_emptied_cache_comes_back},
    {"a_cache_emptied_all_the_time_comes_back", test_a_cache_emptied_all_the_time_comes_back},
    {"a_smaller_card_does_without", test_a_smaller_card_does_without},
    {"a_soft_limit_comes_first", test_a_soft_limit_comes_first},
    {"a_second_stream_has_none", test_a_second_stream_has_none},
    {"reserved_memory_is_used", test_reserved_memory_is_used},
    {"without_virtual_memory_it_is_left_aside", test_without_virtual_memory_it_is_left_aside},
#if PYA_ASSERT_LEVEL >= 2
    {"many_holes_cost_nothing", test_many_holes_cost_nothing},
    {"small_blocks_are_found_in_few_steps", test_small_blocks_are_found_in_few_steps},
#endif
    {"nonsense_does_no_harm", test_nonsense_does_no_harm},
    {"devices_have_their_own", test_devices_have_their_own},
    {"no_memory_is_made_in_vain", test_no_memory_is_made_in_vain},
    {"impossible_ones_are_refused", test_impossible_ones_are_refused},
    {"sweep", test_sweep},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
