#pragma once
/* Legacy IPC handles of plain allocations.  Floor 4 (uses memory.h).
 *
 * A handle names the process, its device file and the range; the opener maps that file through
 * /proc/<pid>/fd.  Memory of cuMemCreate and of pools refuses, as on a device. */

#include "region.h"

bool pya_hc_ipc_can_export(const void *ptr);
int pya_hc_ipc_export(const void *ptr, struct cuda_ipc_handle *out);
int pya_hc_ipc_open(const struct cuda_ipc_handle *handle, void **out);
int pya_hc_ipc_close(void *ptr);
