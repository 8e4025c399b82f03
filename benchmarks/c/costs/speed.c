/* How fast memory is, by how it is mapped.  Its bytes are looked at first. */
#include "costs.h"

#include <stdio.h>

enum { MOST = 512, FAR = 32 /* pages from one to the next */ };

static const char SPEED[] = "speed";

static struct {
    size_t n;            /* pages of a buffer */
    int rounds, repeats; /* times in a row, between two events */
    cuda_stream stream;
    cuda_event begin, end;
    bool has_gather;
} it;

/* ---- bytes ---- */

static bool
has_word(pya_dptr addr, unsigned wanted) {
    unsigned word = ~wanted;
    WANT_MORE(cuMemcpyDtoH, &word, addr, sizeof word);
    return word == wanted;
}

/* First and last word of n pages `step` bytes apart. */
static bool
has_words(pya_dptr addr, size_t n, size_t step, unsigned wanted) {
    for (size_t i = 0; i < n; i++) {
        if (!has_word(addr + i * step, wanted) ||
            !has_word(addr + i * step + PYA_PAGE - 4, wanted)) {
            return false;
        }
    }
    return true;
}

static void
sync_all(void) {
    WANT(cuStreamSynchronize, it.stream);
}

static void
fill(pya_dptr addr, unsigned word) {
    WANT_MORE(cuMemsetD32Async, addr, word, it.n * PYA_PAGE / 4, it.stream);
}

/* Every page of `home` gets a word of its own, which is then to be found where
 * `view` has that page. */
static void
check_alias(pya_dptr home, pya_dptr view, size_t step, const size_t *page_at, const char *what) {
    for (size_t i = 0; i < it.n; i++) {
        WANT_MORE(
            cuMemsetD32Async, home + i * PYA_PAGE, (unsigned)i + 1000, PYA_PAGE / 4, it.stream);
    }
    sync_all();
    for (size_t i = 0; i < it.n; i++) {
        if (!has_words(view + i * step, 1, 0, (unsigned)page_at[i] + 1000)) {
            costs_wrong(what);
            return;
        }
    }
}

static void
check_copy(pya_dptr from, pya_dptr to, const char *what) {
    fill(from, 77);
    fill(to, 5);
    WANT_MORE(cuMemcpyDtoDAsync, to, from, it.n * PYA_PAGE, it.stream);
    sync_all();
    if (!has_words(from, it.n, PYA_PAGE, 77) || !has_words(to, it.n, PYA_PAGE, 77)) {
        costs_wrong(what);
    }
}

/* ---- times ---- */

static void
timed_bytes(const char *what, const char *unit, double bytes) {
    const double ms = costs_elapsed_ms(it.begin, it.end);
    costs_add(SPEED, what, it.n, unit, ms > 0 ? bytes / (1 << 30) / (ms / 1e3) : 0);
}

static void
timed(const char *what, const char *unit) {
    timed_bytes(what, unit, (double)((size_t)it.repeats * it.n * PYA_PAGE));
}

/* The pages hold nothing but `word`. */
static void
measure_reads(const char *what, pya_dptr addr, size_t step, unsigned word) {
    if (!it.has_gather) {
        return;
    }
    for (int round = -1; round < it.rounds; round++) { /* the first is no measure */
        double bytes = 0;
        WANT(cuEventRecord, it.begin, it.stream);
        for (int i = 0; i < it.repeats; i++) {
            bytes += costs_gather(addr, it.n, step, word, it.stream);
        }
        WANT(cuEventRecord, it.end, it.stream);
        if (round >= 0) {
            timed_bytes(what, "random reads GiB/s", bytes);
        }
    }
    if (!costs_gather_was_right()) {
        costs_wrong(what);
    }
}

static void
measure(const char *what, pya_dptr from, pya_dptr to) {
    check_copy(from, to, what); /* leaves 77 in either */
    measure_reads(what, from, PYA_PAGE, 77);
    for (int round = 0; round < it.rounds; round++) {
        WANT(cuEventRecord, it.begin, it.stream);
        for (int i = 0; i < it.repeats; i++) {
            fill(to, (unsigned)i);
        }
        WANT(cuEventRecord, it.end, it.stream);
        timed(what, "memset GiB/s");
        WANT(cuEventRecord, it.begin, it.stream);
        for (int i = 0; i < it.repeats; i++) {
            WANT_MORE(cuMemcpyDtoDAsync, to, from, it.n * PYA_PAGE, it.stream);
        }
        WANT(cuEventRecord, it.end, it.stream);
        timed(what, "copy GiB/s");
    }
}

/* Pages `step` bytes apart, in one call: one row each. */
static void
measure_rows(const char *what, pya_dptr addr, size_t step) {
    cuda_result result = CUDA_NOT_SUPPORTED;
    if (bench.more.cuMemsetD2D32Async != NULL) {
        result = bench.more.cuMemsetD2D32Async(addr, step, 9, PYA_PAGE / 4, it.n, it.stream);
    }
    if (result != CUDA_OK) {
        printf("no fill of rows, %s: %d\n\n", what, result);
        for (size_t i = 0; i < it.n; i++) {
            WANT_MORE(cuMemsetD32Async, addr + i * step, 9, PYA_PAGE / 4, it.stream);
        }
    }
    sync_all();
    if (!has_words(addr, it.n, step, 9)) {
        costs_wrong(what);
    }
    measure_reads(what, addr, step, 9);
    for (int round = 0; round < it.rounds && result == CUDA_OK; round++) {
        WANT(cuEventRecord, it.begin, it.stream);
        for (int i = 0; i < it.repeats; i++) {
            WANT_MORE(cuMemsetD2D32Async, addr, step, (unsigned)i, PYA_PAGE / 4, it.n, it.stream);
        }
        WANT(cuEventRecord, it.end, it.stream);
        timed(what, "memset GiB/s");
    }
}

/* ---- buffers ---- */

static void
measure_plain(void) {
    const pya_dptr from = costs_alloc(it.n * PYA_PAGE);
    const pya_dptr to = costs_alloc(it.n * PYA_PAGE);
    measure("cuMemAlloc", from, to);
    measure_rows("cuMemAlloc, rows of 2 MiB", to, PYA_PAGE);
    costs_free(from);
    costs_free(to);
}

/* Handles side by side, the first `shift` bytes after a multiple of their size.
 */
struct built {
    pya_dptr room, addr;
    uint64_t handles[MOST];
    size_t n, bytes; /* of one */
};

static size_t
built_room(const struct built *b) {
    return (b->n + 2) * b->bytes;
}

static pya_dptr
build(struct built *b, size_t bytes, size_t shift) {
    b->bytes = bytes;
    b->n = it.n * PYA_PAGE / bytes;
    b->room = costs_reserve(built_room(b));
    b->addr = (b->room + bytes - 1) / bytes * bytes + shift;
    for (size_t i = 0; i < b->n; i++) {
        b->handles[i] = costs_create(bytes);
        costs_map(b->addr + i * bytes, bytes, b->handles[i]);
    }
    costs_set_access(b->addr, b->n * bytes);
    return b->addr;
}

static void
tear_down(const struct built *b) {
    costs_unmap(b->addr, b->n * b->bytes);
    for (size_t i = 0; i < b->n; i++) {
        costs_release(b->handles[i]);
    }
    costs_unreserve(b->room, built_room(b));
}

/* The same pages again, page_at[i] at place i, places `step` bytes apart. */
static pya_dptr
build_view(const uint64_t *pages, const size_t *page_at, size_t step) {
    const pya_dptr view = costs_reserve(it.n * step);
    for (size_t i = 0; i < it.n; i++) {
        costs_map(view + i * step, PYA_PAGE, pages[page_at[i]]);
        if (step > PYA_PAGE) {
            costs_set_access(view + i * step, PYA_PAGE);
        }
    }
    if (step == PYA_PAGE) {
        costs_set_access(view, it.n * PYA_PAGE);
    }
    return view;
}

static void
tear_view(pya_dptr view, size_t step) {
    for (size_t i = 0; i < it.n; i++) {
        costs_unmap(view + i * step, PYA_PAGE);
    }
    costs_unreserve(view, it.n * step);
}

static void
shuffle(size_t *order) {
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < it.n; i++) {
        order[i] = i;
    }
    for (size_t i = it.n - 1; i > 0; i--) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        const size_t j = state % (i + 1);
        const size_t kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}

/* Pages at home, stitched in another order, and with holes between them. */
static void
measure_mapped(void) {
    static struct built from_pages, to_pages;
    static size_t order[MOST], place_of[MOST];
    shuffle(order);
    for (size_t i = 0; i < it.n; i++) {
        place_of[order[i]] = i;
    }
    const pya_dptr from = build(&from_pages, PYA_PAGE, 0);
    const pya_dptr to = build(&to_pages, PYA_PAGE, 0);
    measure("pages in order", from, to);
    measure_rows("pages in order, rows of 2 MiB", to, PYA_PAGE);
    const pya_dptr from_view = build_view(from_pages.handles, order, PYA_PAGE);
    const pya_dptr to_view = build_view(to_pages.handles, order, PYA_PAGE);
    check_alias(from, from_view, PYA_PAGE, order, "stitched, read");
    measure("stitched in shuffled order", from_view, to_view);
    check_alias(from_view, from, PYA_PAGE, place_of, "stitched, written");
    measure("stitched, as the pages at home", from, to);
    tear_view(from_view, PYA_PAGE);
    tear_view(to_view, PYA_PAGE);
    static const struct {
        const char *what;
        size_t step;
    } holes[] = {
        {"every second place, rows of 2 MiB", 2 * PYA_PAGE},
        {"every 32nd place, rows of 2 MiB", FAR * PYA_PAGE},
    };
    for (size_t i = 0; i < sizeof holes / sizeof *holes; i++) {
        const pya_dptr view = build_view(to_pages.handles, order, holes[i].step);
        check_alias(to, view, holes[i].step, order, holes[i].what);
        measure_rows(holes[i].what, view, holes[i].step);
        tear_view(view, holes[i].step);
    }
    tear_down(&from_pages);
    tear_down(&to_pages);
}

/* shift: as far as addresses are from where a card could keep a handle's by one
 * entry, as they are in a stitched range that begins within a grain. */
static void
measure_handles(size_t bytes, size_t shift, const char *what) {
    static struct built from, to;
    (void)build(&from, bytes, shift);
    (void)build(&to, bytes, shift);
    measure(what, from.addr, to.addr);
    tear_down(&from);
    tear_down(&to);
}

static void
print_speed(void) {
    static const char *const rows[] = {
        "cuMemAlloc",
        "one handle",
        "handles of 16 MiB",
        "handles of 32 MiB",
        "handles of 32 MiB, 2 MiB off",
        "handles of 32 MiB, 16 MiB off",
        "handles of 8 MiB",
        "handles of 8 MiB, 2 MiB off",
        "pages in order",
        "stitched in shuffled order",
        "stitched, as the pages at home",
        "cuMemAlloc, rows of 2 MiB",
        "pages in order, rows of 2 MiB",
        "every second place, rows of 2 MiB",
        "every 32nd place, rows of 2 MiB",
    };
    printf("buffers of %zu MiB; of a copy each byte counts once\n\n", it.n * 2);
    printf("| memory | memset GiB/s | copy GiB/s | random reads GiB/s "
           "|\n|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        printf(
            "| %s | %s | %s | %s |\n", rows[i], costs_cell(SPEED, rows[i], it.n, "memset GiB/s", 1),
            costs_cell(SPEED, rows[i], it.n, "copy GiB/s", 1),
            costs_cell(SPEED, rows[i], it.n, "random reads GiB/s", 1));
    }
}

void
costs_speed(void) {
    it.n = bench.is_small ? 16 : MOST;
    it.rounds = bench.is_small ? 2 : 11;
    it.repeats = bench.is_small ? 1 : 4;
    it.stream = costs_stream();
    it.begin = costs_event();
    it.end = costs_event();
    it.has_gather = costs_gather_load();
    measure_plain();
    if (bench.has_vmm) {
        measure_handles(it.n * PYA_PAGE, 0, "one handle");
        measure_handles(8 * PYA_PAGE, 0, "handles of 16 MiB");
        measure_handles(16 * PYA_PAGE, 0, "handles of 32 MiB");
        measure_handles(16 * PYA_PAGE, PYA_PAGE, "handles of 32 MiB, 2 MiB off");
        measure_handles(16 * PYA_PAGE, 8 * PYA_PAGE, "handles of 32 MiB, 16 MiB off");
        measure_handles(4 * PYA_PAGE, 0, "handles of 8 MiB");
        measure_handles(4 * PYA_PAGE, PYA_PAGE, "handles of 8 MiB, 2 MiB off");
        measure_mapped();
    }
    print_speed();
}
