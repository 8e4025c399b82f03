/* What C++ code registered with torch to free memory when there is too little.  Floor 5. */
#pragma once

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Runs them all; true where one says that it freed memory.  False too where torch keeps them in a way we do not know.
 * Called without a lock of ours: they free, and may allocate. */
bool pya_torch_callbacks_run(void);

#ifdef __cplusplus
}
#endif
