#pragma once
/* Returns a device to its state before first use.  Floor 5 (uses memory.h, pool.h, stream.h). */

/* Ends the device's work, memory, streams and events.  Graphs stay, and so does virtual memory, which belongs to no context. */
int pya_hc_device_reset(int device);
