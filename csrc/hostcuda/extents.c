/* First fit in a sorted array of holes.  Taking the lowest keeps file offsets of successive pages adjacent, so that the
 * kernel merges their mappings (a process can have only 65,530). */

#include "extents.h"

#include <stdlib.h>
#include <string.h>

static bool
extents_insert(struct pya_hc_extents *line, size_t at, uint64_t start, uint64_t size) {
    if (line->n_holes == line->capacity) {
        size_t capacity = line->capacity == 0 ? 64 : 2 * line->capacity;
        struct pya_hc_extent *holes = realloc(line->holes, capacity * sizeof *holes);
        if (holes == NULL) {
            return false;
        }
        line->holes = holes;
        line->capacity = capacity;
    }
    memmove(&line->holes[at + 1], &line->holes[at], (line->n_holes - at) * sizeof *line->holes);
    line->holes[at] = (struct pya_hc_extent){start, size};
    line->n_holes++;
    return true;
}

static void
extents_remove(struct pya_hc_extents *line, size_t at) {
    line->n_holes--;
    memmove(&line->holes[at], &line->holes[at + 1], (line->n_holes - at) * sizeof *line->holes);
}

/* Index of the first hole that ends after `start`. */
static size_t
extents_find(const struct pya_hc_extents *line, uint64_t start) {
    size_t low = 0;
    size_t high = line->n_holes;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        bool is_behind = line->holes[mid].start + line->holes[mid].size > start;
        low = is_behind ? low : mid + 1;
        high = is_behind ? mid : high;
    }
    return low;
}

/* Cuts [start, start + size) out of hole i, which contains it. */
static bool
extents_carve(struct pya_hc_extents *line, size_t i, uint64_t start, uint64_t size) {
    struct pya_hc_extent *hole = &line->holes[i];
    uint64_t head = start - hole->start;
    uint64_t tail = hole->start + hole->size - (start + size);
    if (head > 0 && tail > 0) {
        if (!extents_insert(line, i + 1, start + size, tail)) {
            return false;
        }
        line->holes[i].size = head;
    } else if (head > 0) {
        hole->size = head;
    } else if (tail > 0) {
        hole->start = start + size;
        hole->size = tail;
    } else {
        extents_remove(line, i);
    }
    return true;
}

/* The first hole with enough room from its first aligned address on; n_holes if there is none. */
static size_t
extents_fit(const struct pya_hc_extents *line, uint64_t size, uint64_t align) {
    size_t i = 0;
    for (; i < line->n_holes; i++) {
        uint64_t at = (line->holes[i].start + align - 1) & ~(align - 1);
        uint64_t end = line->holes[i].start + line->holes[i].size;
        if (at < end && end - at >= size) {
            break;
        }
    }
    return i;
}

bool
pya_hc_extents_take(struct pya_hc_extents *line, uint64_t size, uint64_t align, uint64_t *start) {
    size_t i = extents_fit(line, size, align);
    if (i < line->n_holes) {
        *start = (line->holes[i].start + align - 1) & ~(align - 1);
        return extents_carve(line, i, *start, size);
    }
    uint64_t at = (line->end + align - 1) & ~(align - 1);
    if (at > line->limit || line->limit - at < size) {
        return false;
    }
    if (at > line->end && !extents_insert(line, line->n_holes, line->end, at - line->end)) {
        return false;
    }
    line->end = at + size;
    *start = at;
    return true;
}

bool
pya_hc_extents_take_at(struct pya_hc_extents *line, uint64_t start, uint64_t size) {
    if (start > line->limit || line->limit - start < size) {
        return false;
    }
    if (start >= line->end) {
        if (start > line->end &&
            !extents_insert(line, line->n_holes, line->end, start - line->end)) {
            return false;
        }
        line->end = start + size;
        return true;
    }
    size_t i = extents_find(line, start);
    if (i == line->n_holes || line->holes[i].start > start ||
        line->holes[i].start + line->holes[i].size < start + size) {
        return false;
    }
    return extents_carve(line, i, start, size);
}

bool
pya_hc_extents_give(struct pya_hc_extents *line, uint64_t start, uint64_t size) {
    size_t i = extents_find(line, start);
    bool joins_left = i > 0 && line->holes[i - 1].start + line->holes[i - 1].size == start;
    bool joins_right = i < line->n_holes && start + size == line->holes[i].start;
    if (joins_left && joins_right) {
        line->holes[i - 1].size += size + line->holes[i].size;
        extents_remove(line, i);
        i--;
    } else if (joins_left) {
        i--;
        line->holes[i].size += size;
    } else if (joins_right) {
        line->holes[i].start = start;
        line->holes[i].size += size;
    } else if (!extents_insert(line, i, start, size)) {
        return false;
    }
    if (line->holes[i].start + line->holes[i].size == line->end) {
        line->end = line->holes[i].start;
        extents_remove(line, i);
    }
    return true;
}

int
pya_hc_extents_check(const struct pya_hc_extents *line) {
    int n_bad = line->end > line->limit;
    for (size_t i = 0; i < line->n_holes; i++) {
        uint64_t end = line->holes[i].start + line->holes[i].size;
        uint64_t next = i + 1 < line->n_holes ? line->holes[i + 1].start : line->end;
        n_bad += line->holes[i].size == 0 || end >= next;
    }
    return n_bad;
}
