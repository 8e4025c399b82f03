/* The device table: everything the allocator ever asks of a device.  Floor 1: includes base.h only.
 *
 * A struct pya_device is one GPU, real or simulated.  Call the pya_device_*() wrappers, never the table directly: the
 * wrappers supply the default if an optional slot is NULL.
 * Every function may be called from any thread; a device does its own locking where needed.
 * Out-parameters are written only on success.
 * A failed call has changed nothing, unless stated otherwise.
 * Status: PYA_E_NOMEM: memory is short, and freeing something and trying again may help; PYA_E_CAPTURE: a stream
 * capture forbids the call; PYA_E_NOTSUP: the device lacks the function; PYA_E_STREAM (only from is_capturing and
 * stream_sync): the stream does not exist (any more); PYA_E_DEVICE: everything else; pya_device_error() then tells
 * the call's name, the driver's code and its text. */
#pragma once

#include "../core/base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_device;
/* Physical memory of one or more pages of PYA_PAGE bytes; 0: none. */
typedef uint64_t pya_page_handle;
typedef uint64_t pya_event; /* 0: none */

struct pya_device_error {
    char call[48];  /* e.g. "cuMemCreate" */
    int code;       /* the driver's code; 0: none */
    char text[160]; /* the driver's text for the code */
    uint64_t bytes; /* size that the call was about; 0: none */
    uint64_t peers; /* bit per other device that the call was to give access; 0: none */
    bool is_sticky; /* every later call of the process fails too */
};

struct pya_device_caps {
    bool has_vmm;           /* the page_ and range_ functions work */
    bool has_export;        /* page_export and page_import work too */
    size_t total_bytes;     /* memory of the device */
    uint64_t address_bytes; /* address space that one device may reserve in all */
};

struct pya_device_ops {
    const char *name;

    /* required */
    pya_status (*caps)(struct pya_device *dev, struct pya_device_caps *out);
    pya_status (*plain_alloc)(struct pya_device *dev, size_t bytes, pya_dptr *out);
    /* Waits for the device, as cudaFree does. */
    pya_status (*plain_free)(struct pya_device *dev, pya_dptr addr);
    /* The event is recorded only on this stream, which may belong to another device. */
    pya_status (*event_create)(struct pya_device *dev, pya_stream stream, pya_event *out);
    pya_status (*event_record)(struct pya_device *dev, pya_event event, pya_stream stream);
    /* *done = false while work before the record is unfinished.  An error never means "done". */
    pya_status (*event_query)(struct pya_device *dev, pya_event event, bool *done);
    pya_status (*event_sync)(struct pya_device *dev, pya_event event);
    pya_status (*event_destroy)(struct pya_device *dev, pya_event event);
    pya_status (*stream_sync)(struct pya_device *dev, pya_stream stream);
    pya_status (*device_sync)(struct pya_device *dev);
    pya_status (*mem_info)(struct pya_device *dev, size_t *free_bytes, size_t *total_bytes);

    /* Optional as a group: virtual memory in whole pages.  Present if caps.has_vmm.
     * unmap, page_release and range_release are not stream-ordered: the caller has waited for the work. */
    /* Creates n_pages of physical memory behind one handle, which is mapped, made accessible, unmapped and released
     * as a whole.  A driver needs about the same time for each handle, whatever its size. */
    pya_status (*page_create)(struct pya_device *dev, size_t n_pages, pya_page_handle *out);
    /* The memory is released when the handle's last mapping is gone too. */
    pya_status (*page_release)(struct pya_device *dev, pya_page_handle page);
    pya_status (*range_reserve)(struct pya_device *dev, size_t bytes, pya_dptr *out);
    pya_status (*range_release)(struct pya_device *dev, pya_dptr addr, size_t bytes);
    /* Maps the whole handle at addr.  n_pages: as at its creation, in the process that created it.  Not accessible
     * before set_access. */
    pya_status (*map)(struct pya_device *dev, pya_dptr addr, pya_page_handle page, size_t n_pages);
    /* [addr, addr + bytes) must consist of whole mappings; unmap and set_access refuse a part of one. */
    pya_status (*unmap)(struct pya_device *dev, pya_dptr addr, size_t bytes);
    /* Grants read and write access to this device and its enabled peers; once per range, not per mapping.  Only for
     * fresh mappings: accessible ones may be in use, and a driver may remove a mapping before it makes it again. */
    pya_status (*set_access)(struct pya_device *dev, pya_dptr addr, size_t bytes);

    /* Optional; the default is in brackets. */
    pya_status (*is_capturing)(struct pya_device *dev, pya_stream stream, bool *out); /* [false] */
    /* page_export gives a file descriptor, which the caller must close, by which another process can use the handle's
     * memory. page_import makes a handle from such a descriptor, which stays the caller's to close.  The descriptor
     * does not tell the number of pages.  The memory lives until all processes have released it.  [PYA_E_NOTSUP] */
    pya_status (*page_export)(struct pya_device *dev, pya_page_handle page, int *fd);
    pya_status (*page_import)(struct pya_device *dev, int fd, pya_page_handle *out);
    /* From now on set_access also grants (on) or denies (never fails) access to `peer`.  [PYA_E_NOTSUP] */
    pya_status (*set_peer)(struct pya_device *dev, int peer, bool on);
    /* Gives one more device access to memory that is accessible already.  [PYA_E_NOTSUP] */
    pya_status (*open_peer)(struct pya_device *dev, int peer, pya_dptr addr, size_t bytes);
    /* Bracket consecutive calls of one thread with no foreign code between them: what each call would do before and
     * after itself is done only once.  May be nested.  [nothing] */
    void (*begin)(struct pya_device *dev);
    void (*end)(struct pya_device *dev);
    uint64_t (*clock_ns)(struct pya_device *dev); /* [CLOCK_MONOTONIC] */
    void (*last_error)(struct pya_device *dev, struct pya_device_error *out); /* [zeros] */
    /* Frees dev.  Memory still held is leaked by the caller.  [nothing] */
    void (*close)(struct pya_device *dev);
};

/* The first member of every implementation's own struct. */
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
