#define _GNU_SOURCE /* clock_gettime under -std=c11 */
#include "device.h"

#include <string.h>
#include <time.h>

pya_status
pya_device_caps(struct pya_device *dev, struct pya_device_caps *out) {
    return dev->ops->caps(dev, out);
}

pya_status
pya_device_plain_alloc(struct pya_device *dev, size_t bytes, pya_dptr *out) {
    return dev->ops->plain_alloc(dev, bytes, out);
}

pya_status
pya_device_plain_free(struct pya_device *dev, pya_dptr addr) {
    return dev->ops->plain_free(dev, addr);
}

pya_status
pya_device_event_create(struct pya_device *dev, pya_stream stream, pya_event *out) {
    return dev->ops->event_create(dev, stream, out);
}

pya_status
pya_device_event_record(struct pya_device *dev, pya_event event, pya_stream stream) {
    return dev->ops->event_record(dev, event, stream);
}

pya_status
pya_device_event_query(struct pya_device *dev, pya_event event, bool *done) {
    return dev->ops->event_query(dev, event, done);
}

pya_status
pya_device_event_sync(struct pya_device *dev, pya_event event) {
    return dev->ops->event_sync(dev, event);
}

pya_status
pya_device_event_destroy(struct pya_device *dev, pya_event event) {
    return dev->ops->event_destroy(dev, event);
}

pya_status
pya_device_stream_sync(struct pya_device *dev, pya_stream stream) {
    return dev->ops->stream_sync(dev, stream);
}

pya_status
pya_device_sync(struct pya_device *dev) {
    return dev->ops->device_sync(dev);
}

pya_status
pya_device_mem_info(struct pya_device *dev, size_t *free_bytes, size_t *total_bytes) {
    return dev->ops->mem_info(dev, free_bytes, total_bytes);
}

pya_status
pya_device_page_create(struct pya_device *dev, size_t n_pages, pya_page_handle *out) {
    return dev->ops->page_create == NULL ? PYA_E_NOTSUP : dev->ops->page_create(dev, n_pages, out);
}

pya_status
pya_device_page_release(struct pya_device *dev, pya_page_handle page) {
    return dev->ops->page_release == NULL ? PYA_E_NOTSUP : dev->ops->page_release(dev, page);
}

pya_status
pya_device_range_reserve(struct pya_device *dev, size_t bytes, pya_dptr *out) {
    return dev->ops->range_reserve == NULL ? PYA_E_NOTSUP
                                           : dev->ops->range_reserve(dev, bytes, out);
}

pya_status
pya_device_range_release(struct pya_device *dev, pya_dptr addr, size_t bytes) {
    return dev->ops->range_release == NULL ? PYA_E_NOTSUP
                                           : dev->ops->range_release(dev, addr, bytes);
}

pya_status
pya_device_map(struct pya_device *dev, pya_dptr addr, pya_page_handle page, size_t n_pages) {
    return dev->ops->map == NULL ? PYA_E_NOTSUP : dev->ops->map(dev, addr, page, n_pages);
}

pya_status
pya_device_unmap(struct pya_device *dev, pya_dptr addr, size_t bytes) {
    return dev->ops->unmap == NULL ? PYA_E_NOTSUP : dev->ops->unmap(dev, addr, bytes);
}

pya_status
pya_device_set_access(struct pya_device *dev, pya_dptr addr, size_t bytes) {
    return dev->ops->set_access == NULL ? PYA_E_NOTSUP : dev->ops->set_access(dev, addr, bytes);
}

pya_status
pya_device_is_capturing(struct pya_device *dev, pya_stream stream, bool *out) {
    if (dev->ops->is_capturing == NULL) {
        *out = false;
        return PYA_OK;
    }
    return dev->ops->is_capturing(dev, stream, out);
}

pya_status
pya_device_page_export(struct pya_device *dev, pya_page_handle page, int *fd) {
    return dev->ops->page_export == NULL ? PYA_E_NOTSUP : dev->ops->page_export(dev, page, fd);
}

pya_status
pya_device_page_import(struct pya_device *dev, int fd, pya_page_handle *out) {
    return dev->ops->page_import == NULL ? PYA_E_NOTSUP : dev->ops->page_import(dev, fd, out);
}

pya_status
pya_device_set_peer(struct pya_device *dev, int peer, bool on) {
    return dev->ops->set_peer == NULL ? PYA_E_NOTSUP : dev->ops->set_peer(dev, peer, on);
}

pya_status
pya_device_open_peer(struct pya_device *dev, int peer, pya_dptr addr, size_t bytes) {
    return dev->ops->open_peer == NULL ? PYA_E_NOTSUP : dev->ops->open_peer(dev, peer, addr, bytes);
}

void
pya_device_begin(struct pya_device *dev) {
    if (dev->ops->begin != NULL) {
        dev->ops->begin(dev);
    }
}

void
pya_device_end(struct pya_device *dev) {
    if (dev->ops->end != NULL) {
        dev->ops->end(dev);
    }
}

uint64_t
pya_device_clock_ns(struct pya_device *dev) {
    if (dev->ops->clock_ns != NULL) {
        return dev->ops->clock_ns(dev);
    }
    struct timespec now;
    if (clock_gettime(CLOCK_MONOTONIC, &now) != 0) {
        return 0;
    }
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

void
pya_device_error(struct pya_device *dev, struct pya_device_error *out) {
    if (dev->ops->last_error == NULL) {
        memset(out, 0, sizeof *out);
        return;
    }
    dev->ops->last_error(dev, out);
}

void
pya_device_close(struct pya_device *dev) {
    if (dev != NULL && dev->ops->close != NULL) {
        dev->ops->close(dev);
    }
}
