/* The device table: everything the allocator ever asks of a device.  Floor 1: includes base.h only.
 *
 * A struct pya_device is one GPU (or one simulated GPU).  Callers use the pya_device_*() wrappers, never
 * the table: the wrappers supply the default where an optional slot is NULL.
 * Every function may be called from any thread; a device does its own locking where it needs any.
 * Out-parameters are written only on success.
 * A failed call has changed nothing, except where it says otherwise.
 * Status: PYA_E_NOMEM when memory is missing (freeing something and trying again may help), PYA_E_CAPTURE
 * when a stream capture forbids it, PYA_E_NOTSUP when the device lacks it, PYA_E_STREAM from is_capturing and
 * stream_sync when there is no such stream (any more), PYA_E_DEVICE for all else; pya_device_error() then has the call's
 * name, the driver's code and its text. */
#pragma once

#include "../core/base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_device;
/* Physical memory of one or more pages of PYA_PAGE bytes; 0 is none. */
typedef uint64_t pya_page_handle;
typedef uint64_t pya_event; /* 0 is none */

struct pya_device_error {
    char call[48];  /* e.g. "cuMemCreate" */
    int code;       /* the driver's code, 0 when there is none */
    char text[160]; /* what the driver says of the code */
    uint64_t bytes; /* size the call was about, 0 when it has none */
    bool is_sticky; /* every later call of the process fails too */
};

struct pya_device_caps {
    bool has_vmm;           /* the page_ and range_ functions work */
    bool has_export;        /* page_export and page_import too */
    size_t total_bytes;     /* memory of the card */
    uint64_t address_bytes; /* how much address space one device may reserve in all */
};

struct pya_device_ops {
    const char *name;

    /* required */
    pya_status (*caps)(struct pya_device *dev, struct pya_device_caps *out);
    pya_status (*plain_alloc)(struct pya_device *dev, size_t bytes, pya_dptr *out);
    /* Waits for the device, as cudaFree does. */
    pya_status (*plain_free)(struct pya_device *dev, pya_dptr addr);
    /* For recording on this stream only, which may be another device's. */
    pya_status (*event_create)(struct pya_device *dev, pya_stream stream, pya_event *out);
    pya_status (*event_record)(struct pya_device *dev, pya_event event, pya_stream stream);
    /* *done = false while work before the record is unfinished; an error is never "done". */
    pya_status (*event_query)(struct pya_device *dev, pya_event event, bool *done);
    pya_status (*event_sync)(struct pya_device *dev, pya_event event);
    pya_status (*event_destroy)(struct pya_device *dev, pya_event event);
    pya_status (*stream_sync)(struct pya_device *dev, pya_stream stream);
    pya_status (*device_sync)(struct pya_device *dev);
    pya_status (*mem_info)(struct pya_device *dev, size_t *free_bytes, size_t *total_bytes);

    /* optional as a group: virtual memory, page granularity, present when caps.has_vmm.
     * Unmap, release and range_release are not stream-ordered: the caller has waited for the work. */
    /* n_pages of physical memory behind one handle, which is mapped, opened, unmapped and released as a whole: a driver
     * asks about as much time for each handle, whatever its size. */
    pya_status (*page_create)(struct pya_device *dev, size_t n_pages, pya_page_handle *out);
    /* The memory goes back when the last mapping of the handle is gone too. */
    pya_status (*page_release)(struct pya_device *dev, pya_page_handle page);
    pya_status (*range_reserve)(struct pya_device *dev, size_t bytes, pya_dptr *out);
    pya_status (*range_release)(struct pya_device *dev, pya_dptr addr, size_t bytes);
    /* The whole handle at addr; n_pages: those it was made with, by the process that made it.  Not accessible before
     * set_access. */
    pya_status (*map)(struct pya_device *dev, pya_dptr addr, pya_page_handle page, size_t n_pages);
    /* [addr, addr + bytes) is a row of whole mappings: of a part of one, unmap and set_access are refused. */
    pya_status (*unmap)(struct pya_device *dev, pya_dptr addr, size_t bytes);
    /* Once per range, not per mapping: read-write for this device and its enabled peers.  Of fresh mappings only: what is open
     * already may be in use, and a driver may take a mapping away before it makes it again. */
    pya_status (*set_access)(struct pya_device *dev, pya_dptr addr, size_t bytes);

    /* optional; default in brackets */
    pya_status (*is_capturing)(struct pya_device *dev, pya_stream stream, bool *out); /* [false] */
    /* A file descriptor, the caller's, by which another process may have the handle's memory too; and a handle of the
     * memory of such a descriptor, which stays the caller's to close.  How many pages it has, the descriptor does not
     * tell.  The memory lives until all processes have released it.  [PYA_E_NOTSUP] */
    pya_status (*page_export)(struct pya_device *dev, pya_page_handle page, int *fd);
    pya_status (*page_import)(struct pya_device *dev, int fd, pya_page_handle *out);
    /* Whether set_access lets `peer` access memory too, from now on.  [PYA_E_NOTSUP] */
    pya_status (*set_peer)(struct pya_device *dev, int peer, bool on);
    /* What is open already, for one more device.  [PYA_E_NOTSUP] */
    pya_status (*open_peer)(struct pya_device *dev, int peer, pya_dptr addr, size_t bytes);
    /* Around calls that follow one another on one thread, with nobody else's code between them: what each would do
     * before and after itself is done once.  May be nested.  [nothing] */
    void (*begin)(struct pya_device *dev);
    void (*end)(struct pya_device *dev);
    uint64_t (*clock_ns)(struct pya_device *dev); /* [CLOCK_MONOTONIC] */
    void (*last_error)(struct pya_device *dev, struct pya_device_error *out); /* [zeros] */
    /* Frees dev; memory still held is the caller's leak.  [nothing] */
    void (*close)(struct pya_device *dev);
};

/* First member of every implementation's own struct. */
struct pya_device {
    const struct pya_device_ops *ops;
    int index;
};

PYA_MUST_CHECK pya_status pya_device_caps(struct pya_device *dev, struct pya_device_caps *out);
PYA_MUST_CHECK pya_status
pya_device_plain_alloc(struct pya_device *dev, size_t bytes, pya_dptr *out);
PYA_MUST_CHECK pya_status pya_device_plain_free(struct pya_device *dev, pya_dptr addr);
PYA_MUST_CHECK pya_status
pya_device_event_create(struct pya_device *dev, pya_stream stream, pya_event *out);
PYA_MUST_CHECK pya_status
pya_device_event_record(struct pya_device *dev, pya_event event, pya_stream stream);
PYA_MUST_CHECK pya_status
pya_device_event_query(struct pya_device *dev, pya_event event, bool *done);
PYA_MUST_CHECK pya_status pya_device_event_sync(struct pya_device *dev, pya_event event);
PYA_MUST_CHECK pya_status pya_device_event_destroy(struct pya_device *dev, pya_event event);
PYA_MUST_CHECK pya_status pya_device_stream_sync(struct pya_device *dev, pya_stream stream);
PYA_MUST_CHECK pya_status pya_device_sync(struct pya_device *dev);
PYA_MUST_CHECK pya_status
pya_device_mem_info(struct pya_device *dev, size_t *free_bytes, size_t *total_bytes);
PYA_MUST_CHECK pya_status
pya_device_page_create(struct pya_device *dev, size_t n_pages, pya_page_handle *out);
PYA_MUST_CHECK pya_status pya_device_page_release(struct pya_device *dev, pya_page_handle page);
PYA_MUST_CHECK pya_status
pya_device_range_reserve(struct pya_device *dev, size_t bytes, pya_dptr *out);
PYA_MUST_CHECK pya_status
pya_device_range_release(struct pya_device *dev, pya_dptr addr, size_t bytes);
PYA_MUST_CHECK pya_status
pya_device_map(struct pya_device *dev, pya_dptr addr, pya_page_handle page, size_t n_pages);
PYA_MUST_CHECK pya_status pya_device_unmap(struct pya_device *dev, pya_dptr addr, size_t bytes);
PYA_MUST_CHECK pya_status
pya_device_set_access(struct pya_device *dev, pya_dptr addr, size_t bytes);
PYA_MUST_CHECK pya_status
pya_device_is_capturing(struct pya_device *dev, pya_stream stream, bool *out);
PYA_MUST_CHECK pya_status
pya_device_page_export(struct pya_device *dev, pya_page_handle page, int *fd);
PYA_MUST_CHECK pya_status
pya_device_page_import(struct pya_device *dev, int fd, pya_page_handle *out);
PYA_MUST_CHECK pya_status pya_device_set_peer(struct pya_device *dev, int peer, bool on);
PYA_MUST_CHECK pya_status
pya_device_open_peer(struct pya_device *dev, int peer, pya_dptr addr, size_t bytes);
void pya_device_begin(struct pya_device *dev);
void pya_device_end(struct pya_device *dev);
uint64_t pya_device_clock_ns(struct pya_device *dev);
void pya_device_error(struct pya_device *dev, struct pya_device_error *out);
void pya_device_close(struct pya_device *dev);

#ifdef __cplusplus
}
#endif
