/* Expandable segments: one address range of 9/8 of the device per (stream, pool), mapped as needed.  Where many have
 * taken most addresses, ranges are smaller and a (stream, pool) may get several: a device of ample memory is larger than
 * any card, and has no more addresses. */
#include <stdlib.h>
#include <string.h>

#include "model_internal.h"

/* A range has its full size as long as it takes at most the first share of the addresses that are left, and the second
 * one from then on. */
enum { SEGMENT_SHARE = 16, SEGMENT_SHARE_SMALL = 1024 };

/* ---- segments ---- */

/* It has at least least_bytes. */
static pya_status
segment_create(
    struct pya_model *model, size_t unit, size_t least_bytes, struct model_segment **out) {
    struct model_segment *segment = calloc(1, sizeof *segment);
    if (segment == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    size_t wanted = model->total_bytes + model->total_bytes / 8;
    if (wanted > model->n_addresses / SEGMENT_SHARE) {
        wanted = (size_t)(model->n_addresses / SEGMENT_SHARE_SMALL);
    }
    wanted = wanted > least_bytes ? wanted : least_bytes;
    segment->unit = unit;
    segment->bytes = (wanted + unit - 1) / unit * unit;
    segment->units = calloc(segment->bytes / unit, sizeof *segment->units);
    pya_status status = PYA_E_HOST_NOMEM;
    if (segment->units == NULL) {
        goto free_segment;
    }
    status = pya_device_range_reserve(model->dev, segment->bytes, &segment->base);
    if (status != PYA_OK) {
        goto free_units;
    }
    model->n_addresses -= segment->bytes;
    segment->next = model->segments;
    model->segments = segment;
    *out = segment;
    return PYA_OK;

free_units:
    free(segment->units);
free_segment:
    free(segment);
    return status;
}

static pya_dptr
segment_addr(const struct model_segment *segment, size_t unit) {
    return segment->base + unit * segment->unit;
}

/* Unmaps and releases units [first, last). */
static pya_status
segment_drop(struct pya_model *model, struct model_segment *segment, size_t first, size_t last) {
    pya_status status = PYA_OK;
    for (size_t i = first; i < last && status == PYA_OK; i++) {
        status = pya_device_unmap(model->dev, segment_addr(segment, i), segment->unit);
        if (status == PYA_OK) {
            status = pya_device_page_release(model->dev, segment->units[i]);
            segment->units[i] = 0;
        }
    }
    return status;
}

/* Creates and maps units [first, last), all or none. */
static pya_status
segment_fill(struct pya_model *model, struct model_segment *segment, size_t first, size_t last) {
    const size_t n_pages = segment->unit / PYA_PAGE;
    pya_dptr start = segment_addr(segment, first);
    pya_status status = PYA_OK;
    size_t created = first;
    size_t mapped = first;
    while (created < last) {
        status = pya_device_page_create(model->dev, n_pages, &segment->units[created]);
        if (status != PYA_OK) {
            goto undo;
        }
        created++;
    }
    while (mapped < last) {
        pya_dptr addr = segment_addr(segment, mapped);
        status = pya_device_map(model->dev, addr, segment->units[mapped], n_pages);
        if (status != PYA_OK) {
            goto undo;
        }
        mapped++;
    }
    status = pya_device_set_access(model->dev, start, (last - first) * segment->unit);
    if (status == PYA_OK) {
        return PYA_OK;
    }

undo:
    if (mapped > first) {
        (void)!pya_device_unmap(model->dev, start, (mapped - first) * segment->unit);
    }
    for (size_t i = first; i < created; i++) {
        (void)!pya_device_page_release(model->dev, segment->units[i]);
        segment->units[i] = 0;
    }
    return status;
}

void
model_segment_destroy(struct pya_model *model, struct model_segment *segment) {
    for (size_t i = 0; i < segment->bytes / segment->unit; i++) {
        if (segment->units[i] != 0) {
            (void)!segment_drop(model, segment, i, i + 1);
        }
    }
    (void)!pya_device_range_release(model->dev, segment->base, segment->bytes);
    free(segment->units);
    free(segment);
}

/* ---- blocks ---- */

/* Creates a neighbour after `block`, unmapped or free, in no tree yet. */
static struct pya_model_block *
expand_after(struct pya_model *model, struct pya_model_block *block, pya_dptr addr, size_t bytes) {
    struct pya_model_block *made = model_block_create(model);
    if (made == NULL) {
        return NULL;
    }
    made->addr = addr;
    made->bytes = bytes;
    made->stream = block->stream;
    made->pool = block->pool;
    made->is_large = block->is_large;
    made->segment = block->segment;
    made->prev = block;
    made->next = block->next;
    if (made->next != NULL) {
        made->next->prev = made;
    }
    block->next = made;
    return made;
}

/* Undoes expand_after(); accepts NULL. */
static void
expand_unlink(struct pya_model *model, struct pya_model_block *made) {
    if (made == NULL) {
        return;
    }
    made->prev->next = made->next;
    if (made->next != NULL) {
        made->next->prev = made->prev;
    }
    model_block_destroy(model, made);
}

/* Maps the first `bytes` of an unmapped block, in whole units, and merges it with its free neighbours; *block becomes the
 * resulting free block. */
static pya_status
expand_map(struct pya_model *model, struct pya_model_block **block, size_t bytes) {
    struct pya_model_block *b = *block;
    struct model_segment *segment = b->segment;
    size_t first = (b->addr - segment->base) / segment->unit;
    size_t wanted = (bytes + segment->unit - 1) / segment->unit * segment->unit;
    struct pya_model_block *rest = NULL;
    if (wanted < b->bytes) {
        rest = expand_after(model, b, b->addr + wanted, b->bytes - wanted);
        if (rest == NULL) {
            return PYA_E_HOST_NOMEM;
        }
        b->bytes = wanted;
    }
    pya_status status = segment_fill(model, segment, first, first + wanted / segment->unit);
    if (status != PYA_OK) {
        b->bytes += rest == NULL ? 0 : rest->bytes;
        expand_unlink(model, rest);
        return status;
    }
    model_unmapped_remove(model, b);
    b->is_mapped = true;
    if (rest != NULL) {
        model_unmapped_insert(model, rest);
    }
    model_merge(model, b, b->prev);
    model_merge(model, b, b->next);
    model_free_insert(model, b);
    model_reserved(model, wanted, 0);
    return PYA_OK;
}

static bool
expand_has_room(const struct pya_model_block *block, size_t bytes) {
    size_t room = 0;
    while (room < bytes && model_is_idle(block)) {
        room += block->bytes;
        block = block->next;
    }
    return room >= bytes;
}

/* The lowest place in the stream's ranges that can hold `bytes` once it is mapped. */
static pya_status
expand_place(
    struct pya_model *model, size_t bytes, unsigned stream, bool is_large,
    struct pya_model_block **out) {
    struct tree_node *root = model->pools[model->pool]->by_stream[stream][is_large].unmapped;
    for (struct tree_node *at = tree_lower_bound(root, 0, 0); at != NULL;
         at = tree_next(root, at)) {
        struct pya_model_block *block = model_from_node(at);
        if (model_is_idle(block->prev)) {
            block = block->prev;
        }
        if (expand_has_room(block, bytes)) {
            *out = block;
            return PYA_OK;
        }
    }
    struct pya_model_block *block = model_block_create(model);
    if (block == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    size_t unit = is_large ? MODEL_LARGE_SEGMENT : MODEL_SMALL_SEGMENT;
    pya_status status = segment_create(model, unit, bytes, &block->segment);
    if (status != PYA_OK) {
        model_block_destroy(model, block);
        return status;
    }
    block->addr = block->segment->base;
    block->bytes = block->segment->bytes;
    block->stream = (uint16_t)stream;
    block->pool = (uint16_t)model->pool;
    block->is_large = is_large;
    model_unmapped_insert(model, block);
    *out = block;
    return PYA_OK;
}

pya_status
model_expand(
    struct pya_model *model, size_t bytes, unsigned stream, bool is_large,
    struct pya_model_block **out) {
    struct pya_model_block *block = NULL;
    pya_status status = expand_place(model, bytes, stream, is_large, &block);
    if (status != PYA_OK) {
        return status;
    }
    if (!block->is_mapped) {
        status = expand_map(model, &block, bytes < block->bytes ? bytes : block->bytes);
    }
    while (status == PYA_OK && block->bytes < bytes) {
        size_t rest = bytes - block->bytes;
        struct pya_model_block *next = block->next;
        status = expand_map(model, &next, rest < next->bytes ? rest : next->bytes);
        block = next;
    }
    if (status != PYA_OK) {
        return status;
    }
    if (block->bytes < bytes) {
        return PYA_E_NOMEM;
    }
    model_free_remove(model, block);
    *out = block;
    return PYA_OK;
}

pya_status
model_shrink(struct pya_model *model, struct pya_model_block *block) {
    struct model_segment *segment = block->segment;
    size_t offset = block->addr - segment->base;
    size_t first = (offset + segment->unit - 1) / segment->unit * segment->unit;
    size_t last = (offset + block->bytes) / segment->unit * segment->unit;
    if (first >= last) {
        return PYA_OK;
    }
    pya_status status = pya_device_stream_sync(model->dev, model->streams[block->stream].stream);
    if (status != PYA_OK) {
        return status;
    }
    struct pya_model_block *middle = block;
    struct pya_model_block *tail = NULL;
    size_t end = offset + block->bytes;
    if (end > last) {
        tail = expand_after(model, block, segment->base + last, end - last);
        if (tail == NULL) {
            return PYA_E_HOST_NOMEM;
        }
    }
    if (first > offset) {
        middle = expand_after(model, block, segment->base + first, last - first);
        if (middle == NULL) {
            expand_unlink(model, tail);
            return PYA_E_HOST_NOMEM;
        }
    }
    status = segment_drop(model, segment, first / segment->unit, last / segment->unit);
    model_free_remove(model, block);
    if (middle != block) {
        block->bytes = first - offset;
        block->is_mapped = true;
        model_free_insert(model, block);
    }
    if (tail != NULL) {
        tail->is_mapped = true;
        model_free_insert(model, tail);
    }
    middle->bytes = last - first;
    middle->is_mapped = false;
    model_merge(model, middle, middle->prev);
    model_merge(model, middle, middle->next);
    model_unmapped_insert(model, middle);
    model_reserved(model, 0, last - first);
    return status;
}
