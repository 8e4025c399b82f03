/* Callbacks that C++ code registered with torch to free memory when it runs short.  Floor 5. */
#pragma once

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Runs all callbacks; true if one reports that it freed memory.  False also if torch's registry has a layout we do not know.
 * Call it without holding our locks: callbacks free memory, and may allocate. */
bool pya_torch_callbacks_run(void);

#ifdef __cplusplus
}
#endif
