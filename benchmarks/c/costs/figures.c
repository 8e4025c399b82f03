/* The figures: samples by name, their medians, and all of them as JSON. */
#include "costs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct costs_figure figures[400];
static size_t n_figures;

static struct costs_figure *
figure_find(const char *section, const char *what, uint64_t pages, const char *unit) {
    for (size_t i = 0; i < n_figures; i++) {
        struct costs_figure *each = &figures[i];
        if (each->pages == pages && strcmp(each->what, what) == 0 &&
            strcmp(each->section, section) == 0 && strcmp(each->unit, unit) == 0) {
            return each;
        }
    }
    return NULL;
}

void
costs_add(const char *section, const char *what, uint64_t pages, const char *unit, double sample) {
    struct costs_figure *figure = figure_find(section, what, pages, unit);
    if (figure == NULL && n_figures < sizeof figures / sizeof *figures) {
        figure = &figures[n_figures++];
        *figure =
            (struct costs_figure){.section = section, .what = what, .unit = unit, .pages = pages};
    }
    if (figure != NULL && figure->n < COSTS_ROUNDS) {
        figure->samples[figure->n++] = sample;
    }
}

static int
compare(const void *a, const void *b) {
    const double *x = a;
    const double *y = b;
    return (*x > *y) - (*x < *y);
}

static struct costs_summed
figure_sum(const struct costs_figure *figure) {
    struct costs_summed out = {.n = figure->n};
    double sorted[COSTS_ROUNDS];
    memcpy(sorted, figure->samples, sizeof sorted);
    qsort(sorted, figure->n, sizeof *sorted, compare);
    out.min = sorted[0];
    out.median = sorted[figure->n / 2];
    out.max = sorted[figure->n - 1];
    for (size_t i = 0; i < figure->n; i++) {
        out.mean += sorted[i] / (double)figure->n;
    }
    return out;
}

struct costs_summed
costs_sum(const char *section, const char *what, uint64_t pages, const char *unit) {
    const struct costs_figure *figure = figure_find(section, what, pages, unit);
    return figure == NULL ? (struct costs_summed){.n = 0} : figure_sum(figure);
}

const char *
costs_cell(const char *section, const char *what, uint64_t pages, const char *unit, double times) {
    static char cells[8][64]; /* one printf's worth */
    static unsigned next;
    char *cell = cells[next++ % 8];
    const struct costs_summed sum = costs_sum(section, what, pages, unit);
    if (sum.n == 0) {
        return "-";
    }
    (void)snprintf(
        cell, sizeof *cells, "%.2f (%.2f-%.2f)", sum.median * times, sum.min * times,
        sum.max * times);
    return cell;
}

bool
costs_write_json(const char *path) {
    FILE *out = fopen(path, "w");
    if (out == NULL) {
        perror(path);
        return false;
    }
    for (char *each = bench.name; *each != '\0'; each++) {
        if (*each == '"' || *each == '\\' || (unsigned char)*each < ' ') {
            *each = ' ';
        }
    }
    (void)fprintf(
        out, "{\"device\": \"%s\", \"driver\": %d, \"small\": %s, \"failed\": %d, \"figures\": [",
        bench.name, bench.version, bench.is_small ? "true" : "false", costs_n_failed());
    for (size_t i = 0; i < n_figures; i++) {
        const struct costs_figure *each = &figures[i];
        const struct costs_summed sum = figure_sum(each);
        (void)fprintf(
            out,
            "%s\n{\"section\": \"%s\", \"what\": \"%s\", \"pages\": %llu, \"unit\": \"%s\", "
            "\"rounds\": %zu, \"median\": %.6g, \"min\": %.6g, \"max\": %.6g, \"mean\": %.6g}",
            i > 0 ? "," : "", each->section, each->what, (unsigned long long)each->pages,
            each->unit, sum.n, sum.median, sum.min, sum.max, sum.mean);
    }
    (void)fprintf(out, "\n]}\n");
    return fclose(out) == 0;
}
