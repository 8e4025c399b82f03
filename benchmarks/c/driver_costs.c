/* What the driver's calls cost on the machine at hand, beside what the simulated device takes them to cost; which of them
 * wait while the card works; and how fast memory is, by how it is mapped.
 *
 *     make -C tests/c ubench && build/c/release/bench/driver_costs [--small] [--json FILE]
 *
 * Takes about 15 seconds and 4 GiB of the card, with little free memory or --small a few MiB; the driver is all it needs.
 * FILE is written anew after each section.  Exit code 1: a call was refused, or bytes were wrong.  On the host-memory
 * runtime (LD_LIBRARY_PATH=pyalloc/lib/hostcuda) the figures say nothing about a card. */
#include <stdio.h>
#include <string.h>

#include "costs/costs.h"

static const size_t NEEDED = (size_t)6 << 30;

static const struct {
    const char *name;
    void (*run)(void);
} sections[] = {
    {"idle, pages", costs_idle_pages},
    {"idle, calls", costs_idle_calls},
    {"ways", costs_ways},
    {"busy", costs_busy},
    {"beside", costs_beside},
    {"speed", costs_speed},
};

static void
warn_of_little_memory(void) {
    size_t free_bytes = 0;
    size_t total = 0;
    WANT(cuMemGetInfo, &free_bytes, &total);
    if (free_bytes < NEEDED && !bench.is_small) {
        printf("small: %zu MiB are free\n", free_bytes >> 20);
        bench.is_small = true;
    }
    printf(
        "%s, driver %d, %zu of %zu MiB free%s\n", bench.name, bench.version, free_bytes >> 20,
        total >> 20, bench.is_small ? ", small: figures of no meaning" : "");
}

int
main(int argc, char **argv) {
    const char *json = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--small") == 0) {
            bench.is_small = true;
        } else if (strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
            json = argv[++i];
        } else {
            (void)fprintf(stderr, "usage: %s [--small] [--json FILE]\n", argv[0]);
            return 2;
        }
    }
    if (!costs_open()) {
        return 1;
    }
    costs_section("device", warn_of_little_memory);
    bool is_written = true;
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++) {
        costs_section(sections[i].name, sections[i].run);
        is_written = json == NULL || costs_write_json(json);
    }
    costs_summary();
    pya_device_close(bench.dev);
    return costs_n_failed() > 0 || !is_written;
}
