/* The simulated device on its own: counts, costs, injected failures, pending work, and that every misuse is seen. */
#include "check.h"
#include "fault.h"

#include "device/sim.h"

static const struct pya_sim_config small = {
    .capacity_bytes = 8 * PYA_PAGE, .address_bytes = UINT64_C(1) << 32, .quiet = true};

static struct pya_sim *
open_sim(struct pya_sim_config config) {
    struct pya_sim *sim = NULL;
    if (!CHECK_OK(pya_sim_create(&config, 0, &sim))) {
        exit(1);
    }
    return sim;
}

static struct pya_sim_state
state_of(struct pya_sim *sim) {
    struct pya_sim_state state;
    pya_sim_query(sim, &state);
    return state;
}

/* n pages mapped at *addr, accessible. */
static void
map_pages(struct pya_sim *sim, size_t n, pya_dptr *addr, pya_page_handle *pages) {
    struct pya_device *dev = pya_sim_device(sim);
    CHECK_OK(pya_device_range_reserve(dev, n * PYA_PAGE, addr));
    for (size_t i = 0; i < n; i++) {
        CHECK_OK(pya_device_page_create(dev, 1, &pages[i]));
        CHECK_OK(pya_device_map(dev, *addr + i * PYA_PAGE, pages[i], 1));
    }
    CHECK_OK(pya_device_set_access(dev, *addr, n * PYA_PAGE));
}

static void
test_counts_and_cost(void) {
    struct pya_sim *sim = open_sim(small);
    struct pya_device *dev = pya_sim_device(sim);
    pya_dptr addr = 0;
    pya_page_handle pages[4];
    map_pages(sim, 4, &addr, pages);
    struct pya_sim_state state = state_of(sim);
    CHECK_EQ(state.n_calls[PYA_SIM_PAGE_CREATE], 4);
    CHECK_EQ(state.n_calls[PYA_SIM_MAP], 4);
    CHECK_EQ(state.n_calls[PYA_SIM_SET_ACCESS], 1);
    CHECK_EQ(state.n_calls[PYA_SIM_RANGE_RESERVE], 1);
    CHECK_EQ(state.n_memory_calls, 10);
    /* the typical figures, by hand */
    CHECK_EQ(state.device_ns, 1900 + 4 * (8700 + 60) + 4 * 700 + 4 * (23000 + 70));
    CHECK_EQ(state.used_bytes, 4 * PYA_PAGE);
    pya_sim_reset_counts(sim);
    CHECK_OK(pya_device_unmap(dev, addr, 4 * PYA_PAGE));
    CHECK_EQ(state_of(sim).n_memory_calls, 1);
    CHECK_EQ(state_of(sim).device_ns, 4 * (15000 + 30));
    CHECK_EQ(state_of(sim).n_pages, 4);
    for (int i = 0; i < 4; i++) {
        CHECK_OK(pya_device_page_release(dev, pages[i]));
    }
    CHECK_EQ(state_of(sim).used_bytes, 0);
    CHECK_EQ(state_of(sim).peak_bytes, 4 * PYA_PAGE);
    pya_sim_reset_counts(sim);
    pya_dptr plain = 0;
    CHECK_OK(pya_device_plain_alloc(dev, 2 * PYA_PAGE + 1, &plain));
    CHECK_EQ(state_of(sim).device_ns, 40000 + 3 * 250);
    CHECK_EQ(state_of(sim).used_bytes, 3 * PYA_PAGE);
    CHECK_OK(pya_device_plain_free(dev, plain));
    CHECK_EQ(state_of(sim).device_ns, 40000 + 3 * 250 + 30000 + 3 * 800);
    CHECK_EQ(pya_sim_check(sim), 0);
    CHECK_EQ(state_of(sim).n_violations, 0);
    pya_device_close(dev);
}

static void
test_cost_ranges(void) {
    for (int i = 0; i < PYA_SIM_N_CALLS; i++) {
        const enum pya_sim_call call = (enum pya_sim_call)i;
        for (uint64_t n_pages = 1; n_pages <= 4096; n_pages *= 16) {
            uint64_t low = pya_sim_call_ns(PYA_SIM_LOW, call, 1, n_pages);
            uint64_t typical = pya_sim_call_ns(PYA_SIM_TYPICAL, call, 1, n_pages);
            CHECK(low <= typical);
            CHECK(typical <= pya_sim_call_ns(PYA_SIM_HIGH, call, 1, n_pages));
            CHECK(typical == 0 || strcmp(pya_sim_calls[i].source, "no source") != 0);
        }
        CHECK(pya_sim_calls[i].name[0] != '\0');
    }
    /* the published extremes for 2 MiB, without what was measured for each page */
    CHECK_EQ(pya_sim_call_ns(PYA_SIM_HIGH, PYA_SIM_PLAIN_ALLOC, 0, 1), 1000000);
    CHECK_EQ(pya_sim_call_ns(PYA_SIM_LOW, PYA_SIM_SET_ACCESS, 1, 1), 21000);
    CHECK_EQ(pya_sim_call_ns(PYA_SIM_HIGH, PYA_SIM_SET_ACCESS, 1, 0), 36000);
}

static void
test_misuse(void) {
    struct pya_sim *sim = open_sim(small);
    struct pya_device *dev = pya_sim_device(sim);
    pya_dptr addr = 0;
    pya_page_handle pages[2];
    map_pages(sim, 2, &addr, pages);
    size_t seen = 0;
#define MISUSE(call)                                                                               \
    do {                                                                                           \
        CHECK_EQ((call), PYA_E_DEVICE);                                                            \
        CHECK_EQ(state_of(sim).n_violations, ++seen);                                              \
    } while (0)
    MISUSE(pya_device_map(dev, addr, pages[0], 1));                 /* onto mapped */
    MISUSE(pya_device_map(dev, addr + 64 * PYA_PAGE, pages[0], 1)); /* not reserved */
    MISUSE(pya_device_map(dev, addr + 512, pages[0], 1));           /* not a page boundary */
    MISUSE(pya_device_unmap(dev, addr + 8 * PYA_PAGE, PYA_PAGE));   /* not mapped */
    MISUSE(pya_device_unmap(dev, addr, 3 * PYA_PAGE));              /* beyond */
    MISUSE(pya_device_unmap(dev, addr, 0));                         /* empty */
    MISUSE(pya_device_range_release(dev, addr, 2 * PYA_PAGE));      /* still mapped */
    MISUSE(pya_device_range_reserve(dev, 512, &(pya_dptr){0}));     /* not whole pages */
    MISUSE(pya_device_plain_free(dev, addr));                       /* not plain */
    MISUSE(pya_device_event_record(dev, 77, 0));                    /* no such event */
    CHECK_OK(pya_device_page_release(dev, pages[0]));
    MISUSE(pya_device_page_release(dev, pages[0])); /* twice */
    MISUSE(pya_device_map(dev, addr, pages[0], 1)); /* released */
    /* released while mapped: the memory stays until the mapping goes */
    CHECK_EQ(state_of(sim).n_pages, 2);
    CHECK_OK(pya_device_unmap(dev, addr, 2 * PYA_PAGE));
    CHECK_EQ(state_of(sim).n_pages, 1);
    MISUSE(pya_device_unmap(dev, addr, PYA_PAGE));
    MISUSE(pya_device_set_access(dev, addr, PYA_PAGE));
    MISUSE(pya_device_range_release(dev, addr, PYA_PAGE)); /* part of it */
    CHECK_OK(pya_device_range_release(dev, addr, 2 * PYA_PAGE));
    MISUSE(pya_device_range_release(dev, addr, 2 * PYA_PAGE)); /* twice */
    CHECK_OK(pya_device_page_release(dev, pages[1]));
    pya_dptr plain = 0;
    CHECK_OK(pya_device_plain_alloc(dev, 1, &plain));
    MISUSE(pya_device_unmap(dev, plain, PYA_PAGE));
    CHECK_OK(pya_device_plain_free(dev, plain));
    MISUSE(pya_device_plain_free(dev, plain));
#undef MISUSE
    struct pya_device_error error;
    pya_device_error(dev, &error);
    CHECK(strcmp(error.call, "cudaFree") == 0);
    CHECK(error.code != 0 && error.text[0] != '\0');
    CHECK_EQ(pya_sim_check(sim), 0);
    pya_device_close(dev);
}

static void
test_capacity(void) {
    struct pya_sim *sim = open_sim(small);
    struct pya_device *dev = pya_sim_device(sim);
    pya_dptr plain = 0;
    pya_dptr untouched = 7;
    CHECK_EQ(pya_device_plain_alloc(dev, 9 * PYA_PAGE, &untouched), PYA_E_NOMEM);
    CHECK_EQ(pya_device_plain_alloc(dev, SIZE_MAX - 5, &untouched), PYA_E_NOMEM);
    CHECK_EQ(pya_device_range_reserve(dev, UINT64_C(1) << 33, &untouched), PYA_E_NOMEM);
    CHECK_EQ(untouched, 7);
    CHECK_OK(pya_device_plain_alloc(dev, 7 * PYA_PAGE, &plain));
    pya_page_handle page = 0;
    pya_page_handle more = 0;
    CHECK_OK(pya_device_page_create(dev, 1, &page));
    CHECK_EQ(pya_device_page_create(dev, 1, &more), PYA_E_NOMEM);
    size_t free_bytes = 1;
    size_t total_bytes = 0;
    CHECK_OK(pya_device_mem_info(dev, &free_bytes, &total_bytes));
    CHECK_EQ(free_bytes, 0);
    CHECK_EQ(total_bytes, small.capacity_bytes);
    CHECK_OK(pya_device_plain_free(dev, plain));
    CHECK_OK(pya_device_page_create(dev, 1, &more));
    CHECK_EQ(pya_sim_check(sim), 0);
    pya_device_close(dev);
}

/* Random ranges against a list: never two at one address, and all of the space comes back. */
static void
test_ranges(void) {
    struct pya_sim_config config = small;
    config.address_bytes = 256 * PYA_PAGE;
    struct pya_sim *sim = open_sim(config);
    struct pya_device *dev = pya_sim_device(sim);
    uint64_t rng = check_seed();
    struct {
        pya_dptr addr;
        size_t bytes;
    } held[64];
    size_t n = 0;
    uint64_t steps = check_budget(20000);
    for (uint64_t step = 0; step < steps; step++) {
        size_t bytes = (1 + check_below(&rng, 24)) * PYA_PAGE;
        pya_dptr addr = 0;
        if (n < 64 && check_below(&rng, 2) == 0 &&
            pya_device_range_reserve(dev, bytes, &addr) == PYA_OK) {
            for (size_t i = 0; i < n; i++) {
                CHECK(addr + bytes <= held[i].addr || held[i].addr + held[i].bytes <= addr);
            }
            held[n].addr = addr;
            held[n++].bytes = bytes;
        } else if (n > 0) {
            size_t i = check_below(&rng, n);
            CHECK_OK(pya_device_range_release(dev, held[i].addr, held[i].bytes));
            held[i] = held[--n];
        }
    }
    while (n > 0) {
        n--;
        CHECK_OK(pya_device_range_release(dev, held[n].addr, held[n].bytes));
    }
    pya_dptr all = 0;
    CHECK_OK(pya_device_range_reserve(dev, 256 * PYA_PAGE, &all));
    CHECK_EQ(pya_sim_check(sim), 0);
    pya_device_close(dev);
}

static void
test_fail_nth(void) {
    struct pya_sim *sim = open_sim(small);
    struct pya_device *dev = pya_sim_device(sim);
    pya_page_handle page = 0;
    pya_sim_fail(sim, UINT32_C(1) << PYA_SIM_PAGE_CREATE, 2, PYA_E_NOMEM, false);
    CHECK_OK(pya_device_page_create(dev, 1, &page));
    CHECK_EQ(pya_device_stream_sync(dev, 0), PYA_OK);
    CHECK_EQ(pya_device_page_create(dev, 1, &page), PYA_E_NOMEM);
    CHECK_OK(pya_device_page_create(dev, 1, &page));
    CHECK(pya_sim_fail_clear(sim));
    CHECK_EQ(state_of(sim).n_pages, 2);
    pya_sim_fail(sim, PYA_SIM_ANY_CALL, 1, PYA_E_DEVICE, true);
    CHECK_EQ(pya_device_stream_sync(dev, 0), PYA_E_DEVICE);
    CHECK_EQ(pya_device_page_release(dev, page), PYA_E_DEVICE);
    CHECK(pya_sim_fail_clear(sim));
    CHECK_OK(pya_device_page_release(dev, page));
    CHECK_EQ(state_of(sim).n_violations, 0);
    pya_device_close(dev);
}

static void
test_events_by_hand(void) {
    struct pya_sim_config config = small;
    config.work = PYA_SIM_WORK_BY_HAND;
    struct pya_sim *sim = open_sim(config);
    struct pya_device *dev = pya_sim_device(sim);
    pya_event event = 0;
    bool done = false;
    CHECK_OK(pya_device_event_create(dev, 0, &event));
    CHECK_OK(pya_device_event_query(dev, event, &done));
    CHECK(done); /* never recorded */
    CHECK_OK(pya_device_event_record(dev, event, 5));
    CHECK_OK(pya_device_event_query(dev, event, &done));
    CHECK(!done);
    pya_sim_finish(sim, 6);
    CHECK_OK(pya_device_event_query(dev, event, &done));
    CHECK(!done);
    pya_sim_finish(sim, 5);
    CHECK_OK(pya_device_event_query(dev, event, &done));
    CHECK(done);
    CHECK_OK(pya_device_event_record(dev, event, 5));
    CHECK_OK(pya_device_event_sync(dev, event));
    CHECK_OK(pya_device_event_query(dev, event, &done));
    CHECK(done);
    CHECK_OK(pya_device_event_destroy(dev, event));
    CHECK_EQ(pya_device_event_query(dev, event, &done), PYA_E_DEVICE);
    CHECK_EQ(state_of(sim).n_events, 0);
    pya_device_close(dev);
}

static void
test_events_delayed(void) {
    struct pya_sim_config config = small;
    config.work = PYA_SIM_WORK_DELAYED;
    config.work_delay = 2;
    struct pya_sim *sim = open_sim(config);
    struct pya_device *dev = pya_sim_device(sim);
    pya_event a = 0;
    pya_event b = 0;
    bool done = true;
    CHECK_OK(pya_device_event_create(dev, 0, &a));
    CHECK_OK(pya_device_event_create(dev, 0, &b));
    CHECK_OK(pya_device_event_record(dev, a, 1));
    CHECK_OK(pya_device_event_record(dev, b, 2));
    CHECK_OK(pya_device_event_query(dev, a, &done));
    CHECK(!done);
    CHECK_OK(pya_device_event_record(dev, b, 2));
    CHECK_OK(pya_device_event_query(dev, a, &done));
    CHECK(done);
    pya_device_close(dev);
}

static void
test_capturing(void) {
    struct pya_sim *sim = open_sim(small);
    struct pya_device *dev = pya_sim_device(sim);
    bool on = true;
    CHECK_OK(pya_device_is_capturing(dev, 3, &on));
    CHECK(!on);
    pya_sim_set_capturing(sim, 3, true);
    CHECK_OK(pya_device_is_capturing(dev, 3, &on));
    CHECK(on);
    pya_event event = 0;
    CHECK_OK(pya_device_event_create(dev, 0, &event));
    CHECK_EQ(pya_device_event_record(dev, event, 3), PYA_E_CAPTURE);
    CHECK_EQ(pya_device_stream_sync(dev, 3), PYA_E_CAPTURE);
    CHECK_EQ(pya_device_sync(dev), PYA_E_CAPTURE);
    CHECK_OK(pya_device_event_record(dev, event, 4));
    pya_sim_set_capturing(sim, 3, false);
    CHECK_OK(pya_device_sync(dev));
    pya_device_close(dev);
}

static void
test_unfinished_work(void) {
    struct pya_sim_config config = small;
    config.work = PYA_SIM_WORK_BY_HAND;
    struct pya_sim *sim = open_sim(config);
    struct pya_device *dev = pya_sim_device(sim);
    pya_dptr addr = 0;
    pya_page_handle pages[2];
    map_pages(sim, 2, &addr, pages);
    CHECK_OK(pya_sim_use(sim, 1, addr, 2 * PYA_PAGE));
    CHECK_OK(pya_sim_use(sim, 1, addr, PYA_PAGE)); /* the same stream: in order */
    CHECK_EQ(state_of(sim).n_violations, 0);
    CHECK_OK(pya_sim_use(sim, 2, addr + PYA_PAGE - 512, 512));
    CHECK_EQ(state_of(sim).n_violations, 1);
    pya_sim_finish_all(sim);
    CHECK_OK(pya_sim_use(sim, 2, addr, PYA_PAGE));
    CHECK_EQ(state_of(sim).n_violations, 1);
    /* the race is seen through an alias too, but only unmapping the address in use is a fault */
    pya_dptr alias = 0;
    CHECK_OK(pya_device_range_reserve(dev, PYA_PAGE, &alias));
    CHECK_OK(pya_device_map(dev, alias, pages[0], 1));
    CHECK_OK(pya_sim_use(sim, 1, alias, 512)); /* no access yet */
    CHECK_EQ(state_of(sim).n_violations, 2);
    CHECK_OK(pya_device_set_access(dev, alias, PYA_PAGE));
    CHECK_OK(pya_sim_use(sim, 1, alias, 512));
    CHECK_EQ(state_of(sim).n_violations, 3);
    pya_sim_finish(sim, 1);
    CHECK_OK(pya_device_unmap(dev, alias, PYA_PAGE));
    CHECK_EQ(state_of(sim).n_violations, 3);
    CHECK_OK(pya_device_unmap(dev, addr, PYA_PAGE));
    CHECK_EQ(state_of(sim).n_violations, 4);
    CHECK_OK(pya_device_sync(dev));
    CHECK_OK(pya_device_unmap(dev, addr + PYA_PAGE, PYA_PAGE));
    CHECK_EQ(state_of(sim).n_violations, 4);
    pya_device_close(dev);
}

static void
test_shadow(void) {
    struct pya_sim *sim = open_sim(small);
    struct pya_device *dev = pya_sim_device(sim);
    pya_dptr addr = 0;
    pya_page_handle pages[3];
    map_pages(sim, 3, &addr, pages);
    pya_dptr alias = 0;
    CHECK_OK(pya_device_range_reserve(dev, 2 * PYA_PAGE, &alias));
    CHECK_OK(pya_device_map(dev, alias, pages[2], 1));
    CHECK_OK(pya_device_map(dev, alias + PYA_PAGE, pages[0], 1));
    CHECK_OK(pya_device_set_access(dev, alias, 2 * PYA_PAGE));
    CHECK_OK(pya_sim_own(sim, addr, 3 * PYA_PAGE / 2)); /* pages 0 and half of 1 */
    CHECK_OK(pya_sim_own(sim, alias, PYA_PAGE));        /* page 2 */
    CHECK_EQ(state_of(sim).n_violations, 0);
    CHECK_OK(pya_sim_own(sim, alias + PYA_PAGE + 512 * 70, 512)); /* page 0 again */
    CHECK_EQ(state_of(sim).n_violations, 1);
    pya_sim_disown(sim, addr, 3 * PYA_PAGE / 2);
    pya_sim_disown(sim, alias, PYA_PAGE);
    CHECK_EQ(state_of(sim).n_violations, 1);
    pya_sim_disown(sim, alias, 512);
    CHECK_EQ(state_of(sim).n_violations, 2);
    CHECK_OK(pya_sim_own(sim, addr, 512 * 131));
    CHECK_OK(pya_device_unmap(dev, alias + PYA_PAGE, PYA_PAGE));
    CHECK_EQ(state_of(sim).n_violations, 2);
    CHECK_OK(pya_device_page_release(dev, pages[0]));
    CHECK_OK(pya_device_unmap(dev, addr, PYA_PAGE));
    CHECK_EQ(state_of(sim).n_violations, 3); /* gone while owned */
    pya_device_close(dev);
}

/* Each step of 512 bytes has its owner, wherever the owners' ranges begin and end. */
static void
test_shadow_by_the_step(void) {
    struct pya_sim *sim = open_sim(small);
    pya_dptr addr = 0;
    pya_page_handle pages[2];
    uint64_t n_wrong = 0;
    map_pages(sim, 2, &addr, pages);
    for (size_t first = 60; first < 70; first++) {
        for (size_t last = first; last < first + 200; last += 33) {
            const size_t bytes = (last - first + 1) * 512;
            CHECK_OK(pya_sim_own(sim, addr + first * 512, bytes));
            for (size_t step = first; step <= last; step++) {
                CHECK_OK(pya_sim_own(sim, addr + step * 512, 512));
                CHECK_EQ(state_of(sim).n_violations, ++n_wrong);
            }
            CHECK_OK(pya_sim_own(sim, addr + (first - 1) * 512, 512));
            CHECK_OK(pya_sim_own(sim, addr + (last + 1) * 512, 512));
            pya_sim_disown(sim, addr + (first - 1) * 512, bytes + 1024);
            CHECK_EQ(state_of(sim).n_violations, n_wrong);
        }
    }
    pya_device_close(pya_sim_device(sim));
}

/* Work that is finished when it is queued waits for nobody, and what is known of a page's work goes with the page. */
static void
test_work_that_is_over(void) {
    struct pya_sim_config config = small;
    struct pya_sim *sim = open_sim(config);
    pya_dptr addr = 0;
    pya_page_handle page = 0;
    map_pages(sim, 1, &addr, &page);
    for (pya_stream stream = 1; stream < 4; stream++) {
        CHECK_OK(pya_sim_use(sim, stream, addr, PYA_PAGE));
    }
    CHECK_EQ(state_of(sim).n_violations, 0);
    pya_device_close(pya_sim_device(sim));

    config.work = PYA_SIM_WORK_BY_HAND;
    sim = open_sim(config);
    struct pya_device *dev = pya_sim_device(sim);
    map_pages(sim, 1, &addr, &page);
    CHECK_OK(pya_sim_use(sim, 1, addr, PYA_PAGE));
    CHECK_OK(pya_device_unmap(dev, addr, PYA_PAGE));
    CHECK_EQ(state_of(sim).n_violations, 1); /* in use */
    CHECK_OK(pya_device_page_release(dev, page));
    map_pages(sim, 1, &addr, &page);
    CHECK_OK(pya_sim_use(sim, 2, addr, PYA_PAGE));
    CHECK_EQ(
        state_of(sim).n_violations,
        1); /* the next owner of these bytes has nothing to do with it */
    pya_device_close(dev);
}

static void
test_backed_aliasing(void) {
    struct pya_sim_config config = small;
    config.backed = true;
    struct pya_sim *sim = open_sim(config);
    struct pya_device *dev = pya_sim_device(sim);
    pya_dptr addr = 0;
    pya_page_handle pages[2];
    map_pages(sim, 2, &addr, pages);
    pya_dptr alias = 0;
    CHECK_OK(pya_device_range_reserve(dev, 2 * PYA_PAGE, &alias));
    CHECK_OK(pya_device_map(dev, alias, pages[1], 1));
    CHECK_OK(pya_device_map(dev, alias + PYA_PAGE, pages[0], 1));
    CHECK_OK(pya_device_set_access(dev, alias, 2 * PYA_PAGE));
    unsigned char *home = (unsigned char *)(uintptr_t)addr;
    unsigned char *view = (unsigned char *)(uintptr_t)alias;
    memset(home, 1, PYA_PAGE);
    memset(home + PYA_PAGE, 2, PYA_PAGE);
    CHECK_EQ(view[0], 2);
    CHECK_EQ(view[PYA_PAGE - 1], 2);
    CHECK_EQ(view[PYA_PAGE], 1);
    view[PYA_PAGE + 9] = 77;
    CHECK_EQ(home[9], 77);
    CHECK_OK(pya_device_unmap(dev, addr, 2 * PYA_PAGE));
    CHECK_EQ(view[PYA_PAGE + 9], 77);
    CHECK_OK(pya_device_unmap(dev, alias, 2 * PYA_PAGE));
    CHECK_OK(pya_device_page_release(dev, pages[0]));
    CHECK_OK(pya_device_page_release(dev, pages[1]));
    pya_dptr plain = 0;
    CHECK_OK(pya_device_plain_alloc(dev, 3 * PYA_PAGE, &plain));
    memset((void *)(uintptr_t)plain, 9, 3 * PYA_PAGE);
    CHECK_OK(pya_device_plain_free(dev, plain));
    CHECK_EQ(state_of(sim).n_violations, 0);
    CHECK_EQ(pya_sim_check(sim), 0);
    pya_device_close(dev);
}

static pya_status
scenario(struct pya_sim *sim) {
    struct pya_device *dev = pya_sim_device(sim);
    pya_dptr addr = 0;
    pya_dptr plain = 0;
    pya_page_handle page = 0;
    pya_event event = 0;
    pya_status status = pya_device_plain_alloc(dev, 70 * PYA_PAGE, &plain);
    if (status != PYA_OK) {
        return status;
    }
    status = pya_device_range_reserve(dev, PYA_PAGE, &addr);
    if (status != PYA_OK) {
        goto free_plain;
    }
    status = pya_device_page_create(dev, 1, &page);
    if (status != PYA_OK) {
        goto release_range;
    }
    status = pya_device_map(dev, addr, page, 1);
    if (status != PYA_OK) {
        goto release_page;
    }
    status = pya_device_set_access(dev, addr, PYA_PAGE);
    if (status == PYA_OK) {
        status = pya_device_event_create(dev, 0, &event);
    }
    if (status == PYA_OK) {
        status = pya_device_event_record(dev, event, 9);
        CHECK_OK(pya_device_event_destroy(dev, event));
    }
    CHECK_OK(pya_device_unmap(dev, addr, PYA_PAGE));
release_page:
    CHECK_OK(pya_device_page_release(dev, page));
release_range:
    CHECK_OK(pya_device_range_release(dev, addr, PYA_PAGE));
free_plain:
    CHECK_OK(pya_device_plain_free(dev, plain));
    return status;
}

/* Each host allocation of the sim fails once. */
static void
test_host_memory_sweep(void) {
    struct pya_sim_config config = small;
    config.capacity_bytes = 256 * PYA_PAGE;
    for (unsigned nth = 1;; nth++) {
        size_t live = fault_live();
        struct pya_sim *sim = NULL;
        fault_arm(nth);
        pya_status status = pya_sim_create(&config, 0, &sim);
        if (status == PYA_OK) {
            status = scenario(sim);
        }
        bool fired = fault_disarm();
        if (sim != NULL) {
            struct pya_sim_state state = state_of(sim);
            CHECK_EQ(
                state.n_pages + state.n_ranges + state.n_mappings + state.n_plain + state.n_events,
                0);
            CHECK_EQ(state.n_violations, 0);
            CHECK_EQ(pya_sim_check(sim), 0);
            pya_device_close(pya_sim_device(sim));
        }
        CHECK_EQ(fault_live(), live);
        CHECK_EQ(status, fired ? PYA_E_HOST_NOMEM : PYA_OK);
        if (!fired) {
            CHECK(nth > 7);
            break;
        }
    }
}

static const struct check_case cases[] = {
    {"counts_and_cost", test_counts_and_cost},
    {"cost_ranges", test_cost_ranges},
    {"misuse", test_misuse},
    {"capacity", test_capacity},
    {"ranges", test_ranges},
    {"fail_nth", test_fail_nth},
    {"events_by_hand", test_events_by_hand},
    {"events_delayed", test_events_delayed},
    {"capturing", test_capturing},
    {"unfinished_work", test_unfinished_work},
    {"shadow", test_shadow},
    {"shadow_by_the_step", test_shadow_by_the_step},
    {"work_that_is_over", test_work_that_is_over},
    {"backed_aliasing", test_backed_aliasing},
    {"host_memory_sweep", test_host_memory_sweep},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
