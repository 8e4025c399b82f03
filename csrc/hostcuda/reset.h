#pragma once
/* A device as before its first use.  Floor 5 (uses memory.h, pool.h, stream.h). */

/* Ends the device's work, memory, streams and events.  Virtual memory, which is of no context, and graphs stay. */
int pya_hc_device_reset(int device);
