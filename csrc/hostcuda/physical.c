/* A file instead of anonymous memory: the same bytes can be mapped twice (aliases in virtual memory management, other
 * processes), untouched pages cost nothing, and holes can be told from data. */

#define _GNU_SOURCE
#include "physical.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* Followed by the device's number in the machine, since CUDA_VISIBLE_DEVICES may differ between the processes. */
#define FILE_NAME "pyalloc-hostcuda-"

static int
physical_open(struct pya_hc_device *dev) {
    if (dev->fd >= 0) {
        return CU_OK;
    }
    char name[32];
    (void)snprintf(name, sizeof name, FILE_NAME "%d", dev->physical);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0) {
        return CU_OUT_OF_MEMORY;
    }
    struct rlimit largest; /* `ulimit -f` */
    if (getrlimit(RLIMIT_FSIZE, &largest) == 0 && largest.rlim_cur < dev->file.limit) {
        dev->file.limit = largest.rlim_cur & ~(uint64_t)(PYA_HC_PAGE - 1);
    }
    if (ftruncate(fd, (off_t)dev->file.limit) != 0) {
        (void)close(fd);
        return CU_OUT_OF_MEMORY;
    }
    dev->fd = fd;
    return CU_OK;
}

int
pya_hc_physical_place_locked(struct pya_hc_device *dev, size_t bytes, uint64_t *offset) {
    int error = physical_open(dev);
    if (error != CU_OK) {
        return error;
    }
    bool is_taken = pya_hc_extents_take(&dev->file, bytes, PYA_HC_PAGE, offset);
    return is_taken ? CU_OK : CU_OUT_OF_MEMORY;
}

int
pya_hc_physical_take_locked(struct pya_hc_device *dev, size_t bytes, uint64_t *offset) {
    int error = pya_hc_charge_locked(dev, bytes);
    if (error != CU_OK) {
        return error;
    }
    error = pya_hc_physical_place_locked(dev, bytes, offset);
    if (error != CU_OK) {
        pya_hc_uncharge_locked(dev, bytes);
    }
    return error;
}

void
pya_hc_physical_drop_locked(struct pya_hc_device *dev, uint64_t offset, size_t bytes) {
    (void)fallocate(
        dev->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes);
    (void)pya_hc_extents_give(&dev->file, offset, bytes);
}

void
pya_hc_physical_give_locked(struct pya_hc_device *dev, uint64_t offset, size_t bytes) {
    pya_hc_physical_drop_locked(dev, offset, bytes);
    pya_hc_uncharge_locked(dev, bytes);
}

int
pya_hc_physical_map(int fd, uint64_t offset, uintptr_t address, size_t bytes, int protection) {
    void *at = mmap(
        (void *)address, bytes, protection, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd,
        (off_t)offset);
    if (at != MAP_FAILED) {
        return CU_OK;
    }
    static atomic_bool told;
    if (errno == ENOMEM && !atomic_exchange(&told, true)) {
        (void)fprintf(
            stderr,
            "pyalloc hostcuda: the kernel's limit of mappings per process is reached; raise it "
            "with: sysctl vm.max_map_count=1048576\n");
    }
    return CU_OUT_OF_MEMORY;
}

int
pya_hc_physical_fd(int device) {
    struct pya_hc_device *dev = pya_hc_device(device);
    return dev == NULL ? -1 : dev->fd;
}

/* The range is encoded in the descriptor's file position: the offset, and in its low bits (below 2 MiB) the number of pages. */
int
pya_hc_physical_export(int device, uint64_t offset, size_t bytes, int *out) {
    size_t n_pages = bytes / PYA_HC_PAGE;
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", pya_hc_physical_fd(device));
    int fd = n_pages < PYA_HC_PAGE ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) {
        return CU_OUT_OF_MEMORY;
    }
    if (lseek(fd, (off_t)(offset | n_pages), SEEK_SET) < 0) {
        (void)close(fd);
        return CU_OUT_OF_MEMORY;
    }
    *out = fd;
    return CU_OK;
}

/* The device that one of our files belongs to; -1 for any other file. */
static int
physical_of(int fd) {
    char path[64];
    char name[128] = "";
    int physical = -1;
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, name, sizeof name - 1) < 0 ||
        sscanf(name, "/memfd:" FILE_NAME "%d", &physical) != 1) {
        return -1;
    }
    return physical;
}

/* Files of other processes: one open file each, whatever the number of ranges.  It is opened anew, because the exported
 * descriptor's file position encodes its range. */
struct import_file {
    dev_t device;
    ino_t number;
    int fd;
    unsigned n_users;
    struct import_file *next;
};

static struct import_file *import_files;

static int
import_open_locked(int fd) {
    struct stat found;
    if (fstat(fd, &found) != 0) {
        return -1;
    }
    for (struct import_file *each = import_files; each != NULL; each = each->next) {
        if (each->device == found.st_dev && each->number == found.st_ino) {
            each->n_users++;
            return each->fd;
        }
    }
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    struct import_file *file = calloc(1, sizeof *file);
    int own = file == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (own < 0) {
        free(file);
        return -1;
    }
    *file = (struct import_file){
        .device = found.st_dev,
        .number = found.st_ino,
        .fd = own,
        .n_users = 1,
        .next = import_files};
    import_files = file;
    return own;
}

void
pya_hc_physical_forget_locked(int fd) {
    for (struct import_file **link = &import_files; *link != NULL; link = &(*link)->next) {
        struct import_file *file = *link;
        if (file->fd == fd) {
            if (--file->n_users == 0) {
                *link = file->next;
                (void)close(fd);
                free(file);
            }
            return;
        }
    }
}

int
pya_hc_physical_import_locked(int fd, struct pya_hc_import *out) {
    int physical = physical_of(fd);
    off_t place = lseek(fd, 0, SEEK_CUR);
    if (physical < 0 || place <= 0) {
        return CU_INVALID_VALUE;
    }
    const struct pya_hc_device *dev = pya_hc_physical(physical);
    if (dev == NULL || dev->ordinal < 0) {
        return CU_INVALID_DEVICE;
    }
    size_t n_pages = (uint64_t)place % PYA_HC_PAGE;
    int own = n_pages == 0 ? -1 : import_open_locked(fd);
    if (own < 0) {
        return n_pages == 0 ? CU_INVALID_VALUE : CU_OUT_OF_MEMORY;
    }
    *out = (struct pya_hc_import){
        .fd = own,
        .device = dev->ordinal,
        .offset = (uint64_t)place - n_pages,
        .bytes = n_pages * PYA_HC_PAGE,
    };
    return CU_OK;
}
