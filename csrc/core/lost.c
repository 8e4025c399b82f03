#include "lost.h"

#include "pool.h"

/* Stands in for the device in a forked child, where no call may be made: the memory stays the parent's. */
static pya_status
gone_range(struct pya_device *dev, pya_dptr addr, size_t bytes) {
    (void)dev;
    (void)addr;
    (void)bytes;
    return PYA_OK;
}

static pya_status
gone_thing(struct pya_device *dev, uint64_t thing) {
    (void)dev;
    (void)thing;
    return PYA_OK;
}

static pya_status
gone_sync(struct pya_device *dev) {
    (void)dev;
    return PYA_OK;
}

void
pya_card_lose_device(struct pya_card *card) {
    static const struct pya_device_ops ops = {
        .name = "gone",
        .plain_free = gone_thing,
        .event_destroy = gone_thing,
        .device_sync = gone_sync,
        .page_release = gone_thing,
        .range_release = gone_range,
        .unmap = gone_range,
    };
    static struct pya_device gone = {.ops = &ops};
    pya_device_close(card->dev);
    card->dev = &gone;
    for (struct pya_pool *pool = card->pools; pool != NULL; pool = pool->next) {
        pool->source.alloc = NULL; /* its memory belongs to the device too */
    }
}
