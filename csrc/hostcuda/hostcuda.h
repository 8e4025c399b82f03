#pragma once
/* Floor 1.  Control of the host-memory CUDA runtime: settings and counters, for C and ctypes (load
 * "libcuda.so.1").  The settings are also environment variables:
 *
 *   PYALLOC_HOSTCUDA_MEMORY=24GB         capacity of each device (24GB,80GB: one per device)
 *   PYALLOC_HOSTCUDA_DEVICES=2           number of devices, 1 by default, 16 at most
 *   PYALLOC_HOSTCUDA_EVENT_DELAY=n       events complete n kernel launches later; 0: at once
 *   PYALLOC_HOSTCUDA_FAIL=n[:name[:code]] the n-th call (of that function) returns the error; n may be "every"
 *   PYALLOC_HOSTCUDA_COUNTERS=file       counters as JSON at exit; %p becomes the process id
 *
 * Bytes in use are physical bytes: what cudaMalloc, cuMemCreate and memory pools hold. */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Returns 0 or a CUDA error number. */
int pya_hostcuda_set_capacity(int device, size_t bytes);
void pya_hostcuda_set_event_delay(uint64_t n_launches);
/* The n-th call from now (1: the next) returns `error`; `name` NULL or "": any counted call. */
void pya_hostcuda_fail_nth(uint64_t n, const char *name, int error);

uint64_t pya_hostcuda_calls(const char *name); /* NULL: all calls together */
/* Nanoseconds spent, in all threads together, inside the entry points that get, map, return or wait for memory or ask whether
 * that is allowed, including the cost of timing; since the start or the last reset.  name: one of them, or NULL for all. */
uint64_t pya_hostcuda_device_ns(const char *name);
void pya_hostcuda_reset_calls(void); /* and their time */
size_t pya_hostcuda_used_bytes(int device);
size_t pya_hostcuda_peak_bytes(int device);
void pya_hostcuda_reset_peak(int device);
uint64_t pya_hostcuda_launches(int device);
/* Copies from device to host: their number and bytes. */
uint64_t pya_hostcuda_dtoh_copies(void);
uint64_t pya_hostcuda_dtoh_bytes(void);

/* Number of live objects, to find leaks: "plain", "handles", "reservations", "mappings", "streams", "events", "graphs",
 * "pinned"; also "stale_calls": calls with a stream that does not exist.  UINT64_MAX for an unknown word. */
uint64_t pya_hostcuda_live(const char *what);

/* Number of violated invariants of the allocated address ranges and file offsets. */
int pya_hostcuda_check(void);

/* Writes all counters as JSON.  Returns 0, or -1 with errno. */
int pya_hostcuda_write_counters(const char *path);

#ifdef __cplusplus
}
#endif
