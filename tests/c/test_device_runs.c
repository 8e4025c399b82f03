/* Handles of several pages, on each device there is: made, mapped, accessed, unmapped and released as a whole. */
#include <unistd.h>

#include "check.h"
#include "subject.h"

enum { N = 4, BYTES = N * PYA_PAGE };

/* How much less free memory the device has than `before`. */
static size_t
missing(struct pya_device *dev, size_t before) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    CHECK_OK(pya_device_mem_info(dev, &free_bytes, &total_bytes));
    return before > free_bytes ? before - free_bytes : 0;
}

/* A handle of N pages and room for two mappings of it. */
struct run {
    struct pya_device *dev;
    size_t free_before;
    pya_page_handle handle;
    pya_dptr home;
    pya_dptr view;
};

static void
run_make(struct run *run, struct pya_device *dev) {
    size_t total_bytes = 0;
    *run = (struct run){.dev = dev};
    CHECK_OK(pya_device_mem_info(dev, &run->free_before, &total_bytes));
    CHECK_OK(pya_device_page_create(dev, N, &run->handle));
    CHECK(run->handle != 0);
    CHECK_OK(pya_device_range_reserve(dev, 2 * BYTES, &run->home));
    CHECK_OK(pya_device_range_reserve(dev, 3 * BYTES, &run->view));
}

/* No other process used the card's memory: always so for the simulated device, to the byte. */
static void
run_end(struct run *run) {
    CHECK_OK(pya_device_range_release(run->dev, run->home, 2 * BYTES));
    CHECK_OK(pya_device_range_release(run->dev, run->view, 3 * BYTES));
    if (pya_sim_of(run->dev) != NULL) {
        CHECK_EQ(missing(run->dev, run->free_before), 0);
    }
}

static unsigned char
pattern(size_t i) {
    return (unsigned char)(i * 31 + (i >> 12) * 7 + (i >> 21));
}

/* Every byte written at home is read at the view, and the other way round. */
static void
check_alias(const struct subject *subject, pya_dptr home, pya_dptr view) {
    if (subject->copy_in == NULL) {
        return;
    }
    unsigned char *in = malloc(BYTES);
    unsigned char *out = calloc(1, BYTES);
    if (CHECK(in != NULL && out != NULL)) {
        for (size_t i = 0; i < BYTES; i++) {
            in[i] = pattern(i);
        }
        subject->copy_in(home, in, BYTES);
        subject->copy_out(out, view, BYTES);
        CHECK(memcmp(in, out, BYTES) == 0);
        subject->copy_in(view + BYTES - PYA_PAGE - 3, "across pages", 12);
        subject->copy_out(out, home + BYTES - PYA_PAGE - 3, 12);
        CHECK(memcmp(out, "across pages", 12) == 0);
    }
    free(in);
    free(out);
}

static void
suite_aliases(const struct subject *subject, struct pya_device *dev) {
    struct run run;
    run_make(&run, dev);
    pya_dptr view = run.view + PYA_PAGE; /* a mapping starts at any page */
    CHECK_OK(pya_device_map(dev, run.home, run.handle, N));
    CHECK_OK(pya_device_map(dev, view, run.handle, N));
    CHECK_OK(pya_device_set_access(dev, run.home, BYTES));
    CHECK_OK(pya_device_set_access(dev, view, BYTES));
    check_alias(subject, run.home, view);
    /* Released while mapped: all of its memory stays until the last mapping goes. */
    CHECK_OK(pya_device_page_release(dev, run.handle));
    CHECK_OK(pya_device_sync(dev));
    CHECK_OK(pya_device_unmap(dev, run.home, BYTES));
    if (subject->copy_out != NULL) {
        unsigned char last = 0;
        subject->copy_out(&last, view + BYTES - 1, 1);
        CHECK_EQ(last, pattern(BYTES - 1));
    }
    if (pya_sim_of(dev) != NULL) {
        CHECK_EQ(missing(dev, run.free_before), BYTES);
    }
    CHECK_OK(pya_device_unmap(dev, view, BYTES));
    run_end(&run);
}

/* What a driver refuses to do to a part, it refuses before it changes anything. */
static void
suite_parts(const struct subject *subject, struct pya_device *dev) {
    struct run run;
    run_make(&run, dev);
    CHECK(pya_device_map(dev, run.home, run.handle, 1) != PYA_OK);
    CHECK(pya_device_map(dev, run.home, run.handle, N - 1) != PYA_OK);
    CHECK(pya_device_map(dev, run.home, run.handle, N + 1) != PYA_OK);
    if (subject->copy_in !=
        cuda_in) { /* into the adjacent range, if there is one: drivers do not say */
        CHECK(pya_device_map(dev, run.home + BYTES + PYA_PAGE, run.handle, N) != PYA_OK);
    }
    CHECK_OK(pya_device_map(dev, run.home, run.handle, N));
    CHECK(pya_device_map(dev, run.home + (N - 1) * PYA_PAGE, run.handle, N) != PYA_OK);
    CHECK_OK(pya_device_map(dev, run.view, run.handle, N));
    CHECK_OK(pya_device_map(dev, run.view + BYTES, run.handle, N));
    for (size_t first = 0; first < N; first++) {
        for (size_t last = first + 1; last <= N; last++) {
            if (last - first < N) {
                pya_dptr at = run.home + first * PYA_PAGE;
                CHECK(pya_device_set_access(dev, at, (last - first) * PYA_PAGE) != PYA_OK);
                CHECK(pya_device_unmap(dev, at, (last - first) * PYA_PAGE) != PYA_OK);
            }
        }
    }
    /* a part of the second mapping after the whole of the first, and the other way round */
    CHECK(pya_device_set_access(dev, run.view, BYTES + PYA_PAGE) != PYA_OK);
    CHECK(pya_device_unmap(dev, run.view, BYTES + PYA_PAGE) != PYA_OK);
    CHECK(pya_device_set_access(dev, run.view + PYA_PAGE, 2 * BYTES - PYA_PAGE) != PYA_OK);
    CHECK(pya_device_unmap(dev, run.view + PYA_PAGE, 2 * BYTES - PYA_PAGE) != PYA_OK);
    CHECK_OK(pya_device_set_access(dev, run.home, BYTES));
    CHECK_OK(pya_device_set_access(dev, run.view, 2 * BYTES)); /* a row of whole ones */
    check_alias(subject, run.home, run.view);
    check_alias(subject, run.view + BYTES, run.home);
    CHECK_OK(pya_device_sync(dev));
    CHECK_OK(pya_device_unmap(dev, run.view, 2 * BYTES));
    CHECK_OK(pya_device_unmap(dev, run.home, BYTES));
    CHECK_OK(pya_device_page_release(dev, run.handle));
    run_end(&run);
}

/* Handles of several lengths side by side, made accessible in one call and unmapped in one. */
static void
suite_lengths(const struct subject *subject, struct pya_device *dev) {
    static const size_t lengths[] = {1, N, 2, 1};
    pya_page_handle handles[4];
    struct run run;
    run_make(&run, dev);
    pya_dptr at = run.home;
    for (size_t i = 0; i < 4; i++) {
        CHECK_OK(pya_device_page_create(dev, lengths[i], &handles[i]));
        CHECK_OK(pya_device_map(dev, at, handles[i], lengths[i]));
        at += lengths[i] * PYA_PAGE;
    }
    CHECK_EQ(at, run.home + 2 * BYTES);
    CHECK_OK(pya_device_map(dev, run.view, handles[1], N));
    CHECK_OK(pya_device_set_access(dev, run.home, 2 * BYTES));
    CHECK_OK(pya_device_set_access(dev, run.view, BYTES));
    check_alias(subject, run.home + PYA_PAGE, run.view);
    CHECK_OK(pya_device_sync(dev));
    CHECK_OK(pya_device_unmap(dev, run.home, 2 * BYTES));
    CHECK_OK(pya_device_unmap(dev, run.view, BYTES));
    for (size_t i = 0; i < 4; i++) {
        CHECK_OK(pya_device_page_release(dev, handles[i]));
    }
    CHECK_OK(pya_device_page_release(dev, run.handle)); /* never mapped */
    run_end(&run);
}

/* A handle of several pages as a descriptor: the same bytes under a second handle of the same length. */
static void
suite_export(const struct subject *subject, struct pya_device *dev) {
    struct pya_device_caps caps;
    pya_page_handle again = 0;
    struct run run;
    int fd = -1;
    CHECK_OK(pya_device_caps(dev, &caps));
    if (!caps.has_export) {
        return;
    }
    run_make(&run, dev);
    CHECK_OK(pya_device_map(dev, run.home, run.handle, N));
    CHECK_OK(pya_device_set_access(dev, run.home, BYTES));
    CHECK_OK(pya_device_page_export(dev, run.handle, &fd));
    CHECK_OK(pya_device_page_import(dev, fd, &again));
    CHECK_EQ(close(fd), 0);
    CHECK(pya_device_map(dev, run.view, again, 1) != PYA_OK);
    CHECK_OK(pya_device_map(dev, run.view, again, N));
    CHECK_OK(pya_device_set_access(dev, run.view, BYTES));
    check_alias(subject, run.home, run.view);
    CHECK_OK(pya_device_page_release(dev, run.handle));
    CHECK_OK(pya_device_sync(dev));
    CHECK_OK(pya_device_unmap(dev, run.home, BYTES));
    CHECK_OK(pya_device_unmap(dev, run.view, BYTES));
    CHECK_OK(pya_device_page_release(dev, again));
    run_end(&run);
}

static void
suite_refusals(struct pya_device *dev) {
    struct pya_device_caps caps;
    struct pya_device_error error;
    pya_page_handle untouched = 5;
    CHECK_OK(pya_device_caps(dev, &caps));
    CHECK(pya_device_page_create(dev, 0, &untouched) != PYA_OK);
    const size_t n_pages = caps.total_bytes / PYA_PAGE + 512;
    CHECK_EQ(pya_device_page_create(dev, n_pages, &untouched), PYA_E_NOMEM);
    CHECK_EQ(untouched, 5);
    pya_device_error(dev, &error);
    CHECK_EQ(error.bytes, n_pages * PYA_PAGE);
    CHECK(error.code != 0 && strcmp(error.call, "cuMemCreate") == 0);
}

static void
test_runs(void) {
    for (size_t i = 0; i < sizeof subjects / sizeof *subjects; i++) {
        struct pya_device *dev = subjects[i].open();
        struct pya_device_caps caps;
        if (dev == NULL) {
            continue;
        }
        printf("device: %s\n", subjects[i].name);
        if (CHECK_OK(pya_device_caps(dev, &caps)) && caps.has_vmm) {
            suite_aliases(&subjects[i], dev);
            suite_parts(&subjects[i], dev);
            suite_lengths(&subjects[i], dev);
            suite_export(&subjects[i], dev);
            suite_refusals(dev);
        }
        check_sim_clean(dev);
        pya_device_close(dev);
    }
}

static struct pya_sim_state
state_of(struct pya_device *dev) {
    struct pya_sim_state state;
    pya_sim_query(pya_sim_of(dev), &state);
    return state;
}

/* A handle of several pages is one thing: parts of it are seen, and the next one of its length holds what it held. */
static void
test_sim_sees_parts(void) {
    const struct pya_sim_config small = {
        .capacity_bytes = 8 * PYA_PAGE, .address_bytes = UINT64_C(1) << 32, .quiet = true};
    struct pya_sim *sim = NULL;
    if (!CHECK_OK(pya_sim_create(&small, 0, &sim))) {
        return;
    }
    struct pya_device *dev = pya_sim_device(sim);
    pya_dptr addr = 0;
    pya_page_handle run = 0;
    pya_page_handle page = 0;
    size_t seen = 0;
#define MISUSE(call)                                                                               \
    do {                                                                                           \
        CHECK_EQ((call), PYA_E_DEVICE);                                                            \
        CHECK_EQ(state_of(dev).n_violations, ++seen);                                              \
    } while (0)
    MISUSE(pya_device_page_create(dev, 0, &run));
    CHECK_EQ(pya_device_page_create(dev, 9, &run), PYA_E_NOMEM);
    CHECK_EQ(pya_device_page_create(dev, SIZE_MAX, &run), PYA_E_NOMEM);
    CHECK_OK(pya_device_page_create(dev, 4, &run));
    CHECK_OK(pya_device_page_create(dev, 1, &page));
    CHECK_EQ(state_of(dev).n_pages, 5);
    CHECK_EQ(state_of(dev).used_bytes, 5 * PYA_PAGE);
    CHECK_EQ(pya_device_page_create(dev, 4, &run), PYA_E_NOMEM);
    CHECK_OK(pya_device_range_reserve(dev, 8 * PYA_PAGE, &addr));
    MISUSE(pya_device_map(dev, addr, run, 1));
    MISUSE(pya_device_map(dev, addr, page, 4));
    MISUSE(pya_device_map(dev, addr, run + 1, 1)); /* its second page has no handle */
    CHECK_OK(pya_device_map(dev, addr, run, 4));
    CHECK_OK(pya_device_map(dev, addr + 4 * PYA_PAGE, page, 1));
    MISUSE(pya_device_map(dev, addr + 5 * PYA_PAGE, run, 4)); /* beyond the range */
    CHECK_EQ(state_of(dev).n_mappings, 5);
    MISUSE(pya_device_set_access(dev, addr, PYA_PAGE));
    MISUSE(pya_device_set_access(dev, addr + PYA_PAGE, 4 * PYA_PAGE));
    MISUSE(pya_device_unmap(dev, addr, 3 * PYA_PAGE));
    MISUSE(pya_device_unmap(dev, addr + 3 * PYA_PAGE, 2 * PYA_PAGE));
    CHECK_OK(pya_device_set_access(dev, addr, 5 * PYA_PAGE));
    MISUSE(pya_device_open_peer(dev, 1, addr, PYA_PAGE));
    CHECK_OK(pya_device_open_peer(dev, 1, addr, 5 * PYA_PAGE));
    CHECK_EQ(pya_sim_check(sim), 0);
    CHECK_OK(pya_sim_own(sim, addr + 3 * PYA_PAGE, PYA_PAGE));
    CHECK_OK(pya_device_page_release(dev, run));
    CHECK_EQ(state_of(dev).n_pages, 5);
    CHECK_OK(pya_device_unmap(dev, addr, 5 * PYA_PAGE));
    CHECK_EQ(state_of(dev).n_violations, ++seen); /* its last page was owned */
    CHECK_EQ(state_of(dev).n_pages, 1);
    MISUSE(pya_device_page_release(dev, run));
#undef MISUSE
    for (size_t n = 1; n <= 7; n++) {
        CHECK_OK(pya_device_page_create(dev, n, &run));
        CHECK_EQ(state_of(dev).n_pages, 1 + n);
        CHECK_EQ(pya_sim_check(sim), 0);
        CHECK_OK(pya_device_page_release(dev, run));
    }
    CHECK_OK(pya_device_page_release(dev, page));
    CHECK_EQ(state_of(dev).used_bytes, 0);
    CHECK_EQ(pya_sim_check(sim), 0);
    pya_device_close(dev);
}

/* The cost of a call depends on handles: one of four pages costs about as much as one of one page. */
static void
test_sim_costs(void) {
    struct pya_device *dev = open_counting();
    pya_page_handle run = 0;
    pya_page_handle page = 0;
    pya_dptr addr = 0;
    CHECK_OK(pya_device_range_reserve(dev, (N + 1) * PYA_PAGE, &addr));
    pya_sim_reset_counts(pya_sim_of(dev));
    uint64_t ns = 0;
#define COSTS(call, expected)                                                                      \
    CHECK_OK(call);                                                                                \
    CHECK_EQ(state_of(dev).device_ns - ns, expected);                                              \
    ns = state_of(dev).device_ns
    COSTS(pya_device_page_create(dev, N, &run), 8700 + N * 60);
    COSTS(pya_device_page_create(dev, 1, &page), 8700 + 60);
    COSTS(pya_device_map(dev, addr, run, N), 700);
    COSTS(pya_device_map(dev, addr + BYTES, page, 1), 700);
    COSTS(pya_device_set_access(dev, addr, BYTES + PYA_PAGE), 2 * 23000 + (N + 1) * 70);
    COSTS(pya_device_open_peer(dev, 1, addr, BYTES), 23000 + N * 70);
    COSTS(pya_device_unmap(dev, addr, BYTES + PYA_PAGE), 2 * 15000 + (N + 1) * 30);
    COSTS(pya_device_page_release(dev, run), 9700 + N * 800);
    COSTS(pya_device_page_release(dev, page), 9700 + 800);
#undef COSTS
    CHECK_OK(pya_device_range_release(dev, addr, BYTES + PYA_PAGE));
    check_sim_clean(dev);
    pya_device_close(dev);
}

static const struct check_case cases[] = {
    {"runs", test_runs},
    {"sim_sees_parts", test_sim_sees_parts},
    {"sim_costs", test_sim_costs},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
