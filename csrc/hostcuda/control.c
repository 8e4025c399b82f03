/* The control functions of hostcuda.h and the counters as JSON. */

#define _GNU_SOURCE
#include "hostcuda.h"

#include "bytes.h"
#include "call.h"
#include "graph.h"
#include "region.h"
#include "vmm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void
pya_hostcuda_fail_nth(uint64_t n, const char *name, int error) {
    pya_hc_fail_nth(n, name, error);
}

uint64_t
pya_hostcuda_calls(const char *name) {
    return name == NULL ? pya_hc_calls_total() : pya_hc_calls_of(name);
}

uint64_t
pya_hostcuda_device_ns(const char *name) {
    return pya_hc_calls_ns(name);
}

void
pya_hostcuda_reset_calls(void) {
    pya_hc_calls_reset();
}

size_t
pya_hostcuda_used_bytes(int device) {
    const struct pya_hc_device *dev = pya_hc_device(device);
    pya_hc_lock();
    size_t bytes = dev == NULL ? 0 : dev->used;
    pya_hc_unlock();
    return bytes;
}

size_t
pya_hostcuda_peak_bytes(int device) {
    const struct pya_hc_device *dev = pya_hc_device(device);
    pya_hc_lock();
    size_t bytes = dev == NULL ? 0 : dev->peak;
    pya_hc_unlock();
    return bytes;
}

void
pya_hostcuda_reset_peak(int device) {
    struct pya_hc_device *dev = pya_hc_device(device);
    if (dev != NULL) {
        pya_hc_lock();
        dev->peak = dev->used;
        pya_hc_unlock();
    }
}

uint64_t
pya_hostcuda_launches(int device) {
    const struct pya_hc_device *dev = pya_hc_device(device);
    pya_hc_lock();
    uint64_t n = dev == NULL ? 0 : dev->n_launches;
    pya_hc_unlock();
    return n;
}

uint64_t
pya_hostcuda_dtoh_copies(void) {
    return pya_hc_bytes_dtoh_copies();
}

uint64_t
pya_hostcuda_dtoh_bytes(void) {
    return pya_hc_bytes_dtoh_bytes();
}

uint64_t
pya_hostcuda_live(const char *what) {
    uint64_t n = UINT64_MAX;
    pya_hc_lock();
    if (strcmp(what, "plain") == 0) {
        n = pya_hc_region_count_locked(REGION_PLAIN) + pya_hc_region_count_locked(REGION_MANAGED);
    } else if (strcmp(what, "reservations") == 0) {
        n = pya_hc_region_count_locked(REGION_RESERVED);
    } else if (strcmp(what, "pinned") == 0) {
        n = pya_hc_region_count_locked(REGION_PINNED);
    } else if (strcmp(what, "handles") == 0) {
        n = pya_hc_vmm_n_handles_locked();
    } else if (strcmp(what, "mappings") == 0) {
        n = pya_hc_vmm_n_mappings_locked();
    } else if (strcmp(what, "streams") == 0) {
        n = pya_hc_stream_count_locked();
    } else if (strcmp(what, "stale_calls") == 0) {
        n = pya_hc_stream_stale_locked();
    } else if (strcmp(what, "events") == 0) {
        n = pya_hc_event_count_locked();
    } else if (strcmp(what, "graphs") == 0) {
        n = pya_hc_graph_count_locked();
    }
    pya_hc_unlock();
    return n;
}

int
pya_hostcuda_check(void) {
    const int n_devices = pya_hc_n_devices();
    pya_hc_lock();
    int n_bad = pya_hc_address_check_locked();
    for (int i = 0; i < n_devices; i++) {
        n_bad += pya_hc_extents_check(&pya_hc_device(i)->file);
    }
    pya_hc_unlock();
    return n_bad;
}

struct json_list {
    FILE *file;
    const char *separator;
};

static void
control_write_call(const char *name, uint64_t n, void *data) {
    struct json_list *list = data;
    (void)fprintf(list->file, "%s\n    \"%s\": %llu", list->separator, name, (unsigned long long)n);
    list->separator = ",";
}

/* Does Python find pyalloc's sitecustomize?  Not if the program replaced PYTHONPATH for a child. */
static bool
control_is_on_python_path(void) {
    const char *path = getenv("PYTHONPATH");
    return path != NULL && strstr(path, "/pyalloc/_bootstrap/path") != NULL;
}

static void
control_write_json(FILE *file) {
    (void)fprintf(file, "{\n  \"pid\": %ld,\n  \"devices\": [", (long)getpid());
    for (int i = 0; i < pya_hc_n_devices(); i++) {
        pya_hc_lock();
        const struct pya_hc_device dev = *pya_hc_device(i);
        pya_hc_unlock();
        (void)fprintf(
            file,
            "%s\n    {\"physical\": %d, \"capacity\": %zu, \"used_bytes\": %zu, \"peak_bytes\": %zu, "
            "\"peak_managed_bytes\": %zu, \"launches\": %llu}",
            i == 0 ? "" : ",", dev.physical, dev.capacity, dev.used, dev.peak, dev.managed_peak,
            (unsigned long long)dev.n_launches);
    }
    pya_hc_lock();
    bool is_refused = pya_hc_address_is_refused_locked();
    pya_hc_unlock();
    (void)fprintf(
        file,
        "\n  ],\n  \"addresses_refused\": %s,\n  \"on_python_path\": %s,\n  \"dtoh_copies\": %llu,\n"
        "  \"dtoh_bytes\": %llu,\n  \"device_ns\": %llu,\n  \"calls\": {",
        is_refused ? "true" : "false", control_is_on_python_path() ? "true" : "false",
        (unsigned long long)pya_hc_bytes_dtoh_copies(),
        (unsigned long long)pya_hc_bytes_dtoh_bytes(), (unsigned long long)pya_hc_calls_ns(NULL));
    struct json_list list = {file, ""};
    pya_hc_calls_each(control_write_call, &list);
    (void)fprintf(file, "\n  }\n}\n");
}

int
pya_hostcuda_write_counters(const char *path) {
    char partial[4096];
    int n = snprintf(partial, sizeof partial, "%s.%ld.partial", path, (long)getpid());
    if (n < 0 || (size_t)n >= sizeof partial) {
        errno = ENAMETOOLONG;
        return -1;
    }
    (void)unlink(partial); /* left by a killed process with the same id */
    int fd = open(partial, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd >= 0) {
        (void)fchmod(fd, 0600); /* the umask may have removed the owner's rights */
    }
    FILE *file = fd < 0 ? NULL : fdopen(fd, "w");
    if (file == NULL) {
        if (fd >= 0) {
            (void)close(fd);
        }
        return -1;
    }
    control_write_json(file);
    if (fclose(file) != 0 || rename(partial, path) != 0) {
        (void)unlink(partial);
        return -1;
    }
    return 0;
}

/* Runs at exit; a destructor also runs if the program unloads nothing itself. */
__attribute__((destructor)) static void
control_at_exit(void) {
    const char *form = getenv("PYALLOC_HOSTCUDA_COUNTERS");
    if (form == NULL || form[0] == '\0' || pya_hc_calls_total() == 0 || pya_hc_state_is_foreign()) {
        return;
    }
    char path[3072];
    const char *mark = strstr(form, "%p");
    int head = mark == NULL ? (int)strlen(form) : (int)(mark - form);
    char pid[24] = "";
    if (mark != NULL) {
        (void)snprintf(pid, sizeof pid, "%ld", (long)getpid());
    }
    int n = snprintf(path, sizeof path, "%.*s%s%s", head, form, pid, mark == NULL ? "" : mark + 2);
    errno = ENAMETOOLONG;
    bool fits = n >= 0 && (size_t)n < sizeof path;
    /* ENOENT: the folder of a dry run that did not wait for this process is gone; nobody reads them. */
    if (!fits || (pya_hostcuda_write_counters(path) != 0 && errno != ENOENT)) {
        (void)fprintf(
            stderr, "pyalloc hostcuda: cannot write the counters to %s: %s\n", path,
            strerror(errno));
    }
}
