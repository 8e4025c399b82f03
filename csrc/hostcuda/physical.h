#pragma once
/* Physical memory: one memfd per device, handed out in ranges of 2 MiB pages.  Floor 2. */

#include "state.h"

/* Takes bytes (a multiple of 2 MiB) of the device's capacity and of its file. */
int pya_hc_physical_take_locked(struct pya_hc_device *dev, size_t bytes, uint64_t *offset);
/* Drops the contents and gives the range back. */
void pya_hc_physical_give_locked(struct pya_hc_device *dev, uint64_t offset, size_t bytes);
/* The same without counting against the capacity. */
int pya_hc_physical_place_locked(struct pya_hc_device *dev, size_t bytes, uint64_t *offset);
void pya_hc_physical_drop_locked(struct pya_hc_device *dev, uint64_t offset, size_t bytes);
/* Maps a range of a file over address space of the window. */
int pya_hc_physical_map(int fd, uint64_t offset, uintptr_t address, size_t bytes, int protection);
int pya_hc_physical_fd(int device);

/* A range of another process's file, or of one's own. */
struct pya_hc_import {
    int fd; /* of all ranges of that file */
    int device;
    uint64_t offset;
    size_t bytes;
};

/* A descriptor that stands for the range, in other processes too and beyond this one's end. */
int pya_hc_physical_export(int device, uint64_t offset, size_t bytes, int *out);
int pya_hc_physical_import_locked(int fd, struct pya_hc_import *out);
/* One range fewer. */
void pya_hc_physical_forget_locked(int fd);
