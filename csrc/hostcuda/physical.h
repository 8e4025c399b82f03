#pragma once
/* Physical memory: one memfd per device, allocated in ranges of 2 MiB pages.  Floor 2. */

#include "state.h"

/* Takes bytes (a multiple of 2 MiB) from the device's capacity and its file. */
int pya_hc_physical_take_locked(struct pya_hc_device *dev, size_t bytes, uint64_t *offset);
/* Drops the contents and returns the range. */
void pya_hc_physical_give_locked(struct pya_hc_device *dev, uint64_t offset, size_t bytes);
/* The same two without counting against the capacity. */
int pya_hc_physical_place_locked(struct pya_hc_device *dev, size_t bytes, uint64_t *offset);
void pya_hc_physical_drop_locked(struct pya_hc_device *dev, uint64_t offset, size_t bytes);
/* Maps a range of a file at an address of the window. */
int pya_hc_physical_map(int fd, uint64_t offset, uintptr_t address, size_t bytes, int protection);
int pya_hc_physical_fd(int device);

/* A range of a device file, of another process or of this one. */
struct pya_hc_import {
    int fd; /* shared by all ranges of that file */
    int device;
    uint64_t offset;
    size_t bytes;
};

/* A descriptor that stands for the range, also in other processes and after this one ends. */
int pya_hc_physical_export(int device, uint64_t offset, size_t bytes, int *out);
int pya_hc_physical_import_locked(int fd, struct pya_hc_import *out);
/* Drops one imported range of the file. */
void pya_hc_physical_forget_locked(int fd);
