/* The native model (segments from plain allocations), and the rules that both models share. */
#include "model.h"

#include <stdio.h>
#include <stdlib.h>

#include "model_internal.h"

/* ---- blocks ---- */

struct pya_model_block *
model_block_create(struct pya_model *model) {
    struct pya_model_block *block = model->spare;
    if (block != NULL) {
        model->spare = block->next;
    } else {
        block = malloc(sizeof *block);
        if (block == NULL) {
            return NULL;
        }
    }
    *block = (struct pya_model_block){.all_next = model->blocks};
    if (model->blocks != NULL) {
        model->blocks->all_prev = block;
    }
    model->blocks = block;
    return block;
}

void
model_block_destroy(struct pya_model *model, struct pya_model_block *block) {
    if (block->all_prev != NULL) {
        block->all_prev->all_next = block->all_next;
    } else {
        model->blocks = block->all_next;
    }
    if (block->all_next != NULL) {
        block->all_next->all_prev = block->all_prev;
    }
    block->next = model->spare;
    model->spare = block;
}

void
model_free_insert(struct pya_model *model, struct pya_model_block *block) {
    bits_set(model->caching, block->pool);
    bits_set(model->pools[block->pool]->caching, block->stream);
    block->node.key = block->bytes;
    block->node.addr = block->addr;
    tree_insert(&model_pool_of(model, block)->free, &block->node);
}

void
model_free_remove(struct pya_model *model, struct pya_model_block *block) {
    tree_remove(&model_pool_of(model, block)->free, &block->node);
}

void
model_unmapped_insert(struct pya_model *model, struct pya_model_block *block) {
    block->node.key = 0;
    block->node.addr = block->addr;
    tree_insert(&model_pool_of(model, block)->unmapped, &block->node);
}

void
model_unmapped_remove(struct pya_model *model, struct pya_model_block *block) {
    tree_remove(&model_pool_of(model, block)->unmapped, &block->node);
}

void
model_merge(
    struct pya_model *model, struct pya_model_block *block, struct pya_model_block *neighbour) {
    if (!model_is_idle(neighbour) || neighbour->is_mapped != block->is_mapped) {
        return;
    }
    if (neighbour->is_mapped) {
        model_free_remove(model, neighbour);
    } else {
        model_unmapped_remove(model, neighbour);
    }
    if (neighbour == block->prev) {
        block->addr = neighbour->addr;
        block->prev = neighbour->prev;
        if (block->prev != NULL) {
            block->prev->next = block;
        }
    } else {
        block->next = neighbour->next;
        if (block->next != NULL) {
            block->next->prev = block;
        }
    }
    block->bytes += neighbour->bytes;
    model_block_destroy(model, neighbour);
}

void
model_reserved(struct pya_model *model, size_t added, size_t removed) {
    struct pya_model_stats *stats = &model->stats;
    stats->reserved_bytes += added;
    stats->reserved_bytes -= removed;
    if (stats->reserved_bytes > stats->peak_reserved_bytes) {
        stats->peak_reserved_bytes = stats->reserved_bytes;
    }
}

static void
model_release_user(struct pya_model *model, struct pya_model_block *block) {
    model_merge(model, block, block->prev);
    model_merge(model, block, block->next);
    model_free_insert(model, block);
}

/* ---- events of blocks used on other streams ---- */

/* Records the event of a use on its stream.  On success the stream's queue owns entry; otherwise it is freed. */
static pya_status
model_event_add(struct pya_model *model, struct model_event *entry) {
    struct model_stream *on = &model->streams[entry->stream];
    pya_status status = pya_device_event_create(model->dev, on->stream, &entry->event);
    if (status != PYA_OK) {
        goto free_entry;
    }
    status = pya_device_event_record(model->dev, entry->event, on->stream);
    if (status != PYA_OK) {
        goto destroy_event;
    }
    entry->block->n_events++;
    entry->next = NULL;
    *on->last = entry;
    on->last = &entry->next;
    bits_set(model->waiting, entry->stream);
    return PYA_OK;

destroy_event:
    (void)!pya_device_event_destroy(model->dev, entry->event);
free_entry:
    free(entry);
    return status;
}

/* The oldest event of a stream has completed: removes it, and frees its block if that was the last one. */
static pya_status
model_event_pop(struct pya_model *model, unsigned stream) {
    struct model_stream *on = &model->streams[stream];
    struct model_event *entry = on->first;
    struct pya_model_block *block = entry->block;
    on->first = entry->next;
    if (on->first == NULL) {
        on->last = &on->first;
        bits_clear(model->waiting, stream);
    }
    pya_status status = pya_device_event_destroy(model->dev, entry->event);
    free(entry);
    if (--block->n_events == 0) {
        model_release_user(model, block);
    }
    return status;
}

static pya_status
model_process_stream(struct pya_model *model, unsigned stream, bool wait) {
    pya_status status = PYA_OK;
    while (status == PYA_OK && model->streams[stream].first != NULL) {
        bool done = true;
        pya_event event = model->streams[stream].first->event;
        status = wait ? pya_device_event_sync(model->dev, event)
                      : pya_device_event_query(model->dev, event, &done);
        if (status != PYA_OK || !done) {
            break;
        }
        status = model_event_pop(model, stream);
    }
    return status;
}

/* wait: waits for all events; otherwise only takes those that have completed, in each stream's order. */
static pya_status
model_process_events(struct pya_model *model, bool wait) {
    pya_status status = PYA_OK;
    const unsigned n = model->config.n_streams;
    for (unsigned stream = bits_next(model->waiting, n, 0); stream < n && status == PYA_OK;
         stream = bits_next(model->waiting, n, stream + 1)) {
        status = model_process_stream(model, stream, wait);
    }
    return status;
}

/* ---- releasing memory ---- */

static pya_status
model_release_segment(struct pya_model *model, struct pya_model_block *block) {
    pya_status status = pya_device_plain_free(model->dev, block->addr);
    if (status == PYA_OK) {
        model_free_remove(model, block);
        model_reserved(model, 0, block->bytes);
        model_block_destroy(model, block);
    }
    return status;
}

static pya_status
model_release_pool(struct pya_model *model, struct model_pool *pool) {
    pya_status status = PYA_OK;
    struct tree_node *at = tree_lower_bound(pool->free, 0, 0);
    while (at != NULL && status == PYA_OK) {
        struct pya_model_block *block = model_from_node(at);
        at = tree_next(pool->free, at);
        if (block->segment == NULL && block->prev == NULL && block->next == NULL) {
            status = model_release_segment(model, block);
        }
    }
    /* Shrinking changes the tree: afterwards the block is no longer in it, or too small to be shrunk again. */
    at = model->config.expandable ? tree_lower_bound(pool->free, 0, 0) : NULL;
    while (at != NULL && status == PYA_OK) {
        struct tree_node key = *at;
        status = model_shrink(model, model_from_node(at));
        at = tree_next(pool->free, &key);
    }
    return status;
}

/* *is_empty: it has no free block any more. */
static pya_status
model_release_set(struct pya_model *model, struct model_pool_set *set, bool *is_empty) {
    pya_status status = PYA_OK;
    *is_empty = true;
    for (unsigned s = bits_next(set->caching, PYA_MODEL_STREAMS, 0);
         s < PYA_MODEL_STREAMS && status == PYA_OK;
         s = bits_next(set->caching, PYA_MODEL_STREAMS, s + 1)) {
        struct model_pool *pool = set->by_stream[s];
        status = model_release_pool(model, &pool[1]);
        if (status == PYA_OK) {
            status = model_release_pool(model, &pool[0]);
        }
        if (pool[0].free == NULL && pool[1].free == NULL) {
            bits_clear(set->caching, s);
        } else {
            *is_empty = false;
        }
    }
    return status;
}

/* Asks only pools and streams that may have something: a hostile trace names thousands of each, and empties the cache
 * all the time. */
static pya_status
model_release_cached(struct pya_model *model) {
    pya_status status = model_process_events(model, true);
    for (unsigned p = bits_next(model->caching, PYA_MODEL_POOLS, 0);
         p < PYA_MODEL_POOLS && status == PYA_OK;
         p = bits_next(model->caching, PYA_MODEL_POOLS, p + 1)) {
        bool is_empty = false;
        if (model->pools[p]->n_users == 0) {
            status = model_release_set(model, model->pools[p], &is_empty);
        }
        if (is_empty && status == PYA_OK) {
            bits_clear(model->caching, p);
        }
    }
    return status;
}

pya_status
pya_model_empty_cache(struct pya_model *model) {
    return model_release_cached(model);
}

/* ---- requests ---- */

static size_t
model_segment_bytes(size_t bytes) {
    if (bytes <= PYA_SMALL_MAX) {
        return MODEL_SMALL_SEGMENT;
    }
    return bytes < MODEL_MIN_LARGE ? MODEL_LARGE_SEGMENT : pya_round_up(bytes, PYA_PAGE);
}

static pya_status
model_segment_alloc(
    struct pya_model *model, size_t bytes, unsigned stream, bool is_large,
    struct pya_model_block **out) {
    struct pya_model_block *block = model_block_create(model);
    if (block == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    size_t segment = model_segment_bytes(bytes);
    pya_status status = pya_device_plain_alloc(model->dev, segment, &block->addr);
    if (status != PYA_OK) {
        model_block_destroy(model, block);
        return status;
    }
    block->bytes = segment;
    block->stream = (uint16_t)stream;
    block->pool = (uint16_t)model->pool;
    block->is_large = is_large;
    block->is_mapped = true;
    model_reserved(model, segment, 0);
    *out = block;
    return PYA_OK;
}

/* The size that an expandable block could grow to in place. */
static size_t
model_reach(const struct pya_model_block *block) {
    bool grows = block->next != NULL && !block->next->is_mapped;
    return block->bytes + (grows ? block->next->bytes : 0);
}

/* Takes the best fit out of its tree; NULL if nothing fits. */
static struct pya_model_block *
model_fit(struct pya_model *model, size_t bytes, unsigned stream, bool is_large) {
    struct tree_node *root = model->pools[model->pool]->by_stream[stream][is_large].free;
    struct tree_node *at = tree_lower_bound(root, bytes, 0);
    if (at == NULL) {
        return NULL;
    }
    struct tree_node *next = tree_next(root, at);
    while (model->config.expandable && next != NULL &&
           model_reach(model_from_node(next)) < model_reach(model_from_node(at))) {
        at = next;
        next = tree_next(root, at);
    }
    struct pya_model_block *block = model_from_node(at);
    model_free_remove(model, block);
    return block;
}

static pya_status
model_obtain(
    struct pya_model *model, size_t bytes, unsigned stream, bool is_large,
    struct pya_model_block **out) {
    return model->config.expandable ? model_expand(model, bytes, stream, is_large, out)
                                    : model_segment_alloc(model, bytes, stream, is_large, out);
}

/* Splits off and frees the tail of a block if enough remains. */
static pya_status
model_split(struct pya_model *model, struct pya_model_block *block, size_t bytes) {
    size_t rest = block->bytes - bytes;
    bool splits =
        model->config.expandable || !block->is_large ? rest >= PYA_ALIGN : rest > MODEL_SPLIT_LARGE;
    if (!splits) {
        return PYA_OK;
    }
    struct pya_model_block *tail = model_block_create(model);
    if (tail == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    tail->addr = block->addr + bytes;
    tail->bytes = rest;
    tail->stream = block->stream;
    tail->pool = block->pool;
    tail->is_large = block->is_large;
    tail->is_mapped = true;
    tail->segment = block->segment;
    tail->prev = block;
    tail->next = block->next;
    if (tail->next != NULL) {
        tail->next->prev = tail;
    }
    block->next = tail;
    block->bytes = bytes;
    model_free_insert(model, tail);
    return PYA_OK;
}

pya_status
pya_model_alloc(
    struct pya_model *model, size_t bytes, unsigned stream, struct pya_model_block **out) {
    if (bytes == 0 || bytes > PYA_REQUEST_MAX || stream >= model->config.n_streams) {
        return PYA_E_INVAL;
    }
    size_t rounded = pya_round_up(bytes, PYA_ALIGN);
    bool is_large = rounded > PYA_SMALL_MAX;
    pya_status status = model_process_events(model, false);
    if (status != PYA_OK) {
        return status;
    }
    struct pya_model_block *block = model_fit(model, rounded, stream, is_large);
    if (block == NULL) {
        status = model_obtain(model, rounded, stream, is_large, &block);
    }
    if (status == PYA_E_NOMEM) {
        model->stats.n_retries++;
        status = model_release_cached(model);
        if (status == PYA_OK) {
            status = model_obtain(model, rounded, stream, is_large, &block);
        }
    }
    if (status != PYA_OK) {
        return status;
    }
    status = model_split(model, block, rounded);
    if (status != PYA_OK) {
        model_release_user(model, block);
        return status;
    }
    block->is_allocated = true;
    *out = block;
    return PYA_OK;
}

pya_status
pya_model_record_stream(struct pya_model_block *block, unsigned stream) {
    struct model_event **link = &block->uses;
    while (*link != NULL && (*link)->stream < stream) {
        link = &(*link)->next;
    }
    if (stream == block->stream || (*link != NULL && (*link)->stream == stream)) {
        return PYA_OK;
    }
    struct model_event *use = malloc(sizeof *use);
    if (use == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    *use = (struct model_event){.next = *link, .block = block, .stream = (uint16_t)stream};
    *link = use;
    return PYA_OK;
}

static struct model_event *
model_use_pop(struct pya_model_block *block) {
    struct model_event *use = block->uses;
    block->uses = use->next;
    return use;
}

pya_status
pya_model_free(struct pya_model *model, struct pya_model_block *block) {
    block->is_allocated = false;
    pya_status status = PYA_OK;
    while (block->uses != NULL && status == PYA_OK) {
        status = model_event_add(model, model_use_pop(block));
    }
    while (block->uses != NULL) {
        free(model_use_pop(block));
    }
    if (block->n_events == 0) {
        model_release_user(model, block);
    }
    return status;
}

/* ---- the rest ---- */

static struct model_pool_set *
model_pool_set_create(unsigned n_streams) {
    struct model_pool_set *set = NULL;
    return calloc(1, sizeof *set + n_streams * sizeof *set->by_stream);
}

pya_status
pya_model_pool_begin(struct pya_model *model, unsigned pool) {
    if (pool == 0 || pool >= PYA_MODEL_POOLS) {
        return PYA_E_INVAL;
    }
    if (model->pools[pool] == NULL) {
        model->pools[pool] = model_pool_set_create(model->config.n_streams);
        if (model->pools[pool] == NULL) {
            return PYA_E_HOST_NOMEM;
        }
    }
    model->pools[pool]->n_users++;
    model->pool = pool;
    return PYA_OK;
}

void
pya_model_pool_end(struct pya_model *model) {
    model->pool = 0;
}

void
pya_model_pool_release(struct pya_model *model, unsigned pool) {
    if (pool < PYA_MODEL_POOLS && model->pools[pool] != NULL && model->pools[pool]->n_users > 0) {
        model->pools[pool]->n_users--;
    }
}

pya_dptr
pya_model_addr(const struct pya_model_block *block) {
    return block->addr;
}

size_t
pya_model_bytes(const struct pya_model_block *block) {
    return block->bytes;
}

void
pya_model_query(const struct pya_model *model, struct pya_model_stats *out) {
    *out = model->stats;
}

size_t
pya_model_check(const struct pya_model *model) {
    size_t bad = 0;
    uint64_t mapped = 0;
    for (const struct pya_model_block *b = model->blocks; b != NULL; b = b->all_next) {
        const struct pya_model_block *next = b->next;
        mapped += b->is_mapped ? b->bytes : 0;
        if (next != NULL && (next->addr != b->addr + b->bytes || next->prev != b)) {
            fprintf(stderr, "model: a block does not touch its neighbour\n");
            bad++;
        }
        if (model_is_idle(b) && model_is_idle(next) && b->is_mapped == next->is_mapped) {
            fprintf(stderr, "model: two free neighbours\n");
            bad++;
        }
        const uint64_t *caching = model->pools[b->pool]->caching;
        if (model_is_idle(b) && b->is_mapped &&
            !(bits_has(model->caching, b->pool) && bits_has(caching, b->stream))) {
            fprintf(stderr, "model: a free block that a release would not find\n");
            bad++;
        }
    }
    if (mapped != model->stats.reserved_bytes) {
        fprintf(
            stderr, "model: %llu bytes in blocks, %llu counted\n", (unsigned long long)mapped,
            (unsigned long long)model->stats.reserved_bytes);
        bad++;
    }
    return bad;
}

pya_status
pya_model_create(
    struct pya_device *dev, const struct pya_model_config *config, struct pya_model **out) {
    if (config->n_streams == 0 || config->n_streams > PYA_MODEL_STREAMS) {
        return PYA_E_INVAL;
    }
    struct pya_device_caps caps;
    pya_status status = pya_device_caps(dev, &caps);
    if (status != PYA_OK) {
        return status;
    }
    struct pya_model *model = calloc(1, sizeof *model);
    if (model == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    model->streams = calloc(config->n_streams, sizeof *model->streams);
    model->pools[0] = model_pool_set_create(config->n_streams);
    if (model->streams == NULL || model->pools[0] == NULL) {
        free(model->streams);
        free(model->pools[0]);
        free(model);
        return PYA_E_HOST_NOMEM;
    }
    model->dev = dev;
    model->config = *config;
    model->config.streams = NULL; /* the caller's array need not outlive the call */
    model->total_bytes = caps.total_bytes;
    model->n_addresses = caps.address_bytes;
    for (unsigned s = 0; s < config->n_streams; s++) {
        model->streams[s].stream = config->streams[s];
        model->streams[s].last = &model->streams[s].first;
    }
    *out = model;
    return PYA_OK;
}

void
pya_model_destroy(struct pya_model *model) {
    /* Statuses are ignored: if the device takes nothing back, nothing more can be done. */
    (void)!model_process_events(model, true);
    struct pya_model_block *next = NULL;
    for (struct pya_model_block *b = model->blocks; b != NULL; b = next) {
        next = b->all_next;
        if (b->segment == NULL && b->prev == NULL) {
            (void)!pya_device_plain_free(model->dev, b->addr);
        }
    }
    while (model->segments != NULL) {
        struct model_segment *segment = model->segments;
        model->segments = segment->next;
        model_segment_destroy(model, segment);
    }
    for (struct pya_model_block *b = model->blocks; b != NULL; b = next) {
        next = b->all_next;
        while (b->uses != NULL) {
            free(model_use_pop(b));
        }
        free(b);
    }
    for (struct pya_model_block *b = model->spare; b != NULL; b = next) {
        next = b->next;
        free(b);
    }
    for (unsigned p = 0; p < PYA_MODEL_POOLS; p++) {
        free(model->pools[p]);
    }
    free(model->streams);
    free(model);
}
