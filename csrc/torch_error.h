/* torch's exceptions: out of memory is thrown by pya_torch_throw_text() (torch_slots.h), others are read.  Floor 5. */
#pragma once

#include <exception>
#include <string>

/* Finds out how to build the error in the torch that is loaded. */
void pya_torch_oom_prepare(void);
/* Can it be built?  *detail is what is thrown; static. */
bool pya_torch_oom_is_known(const char **detail);
/* The text of an exception.  what() of a c10::Error appends the C++ stack, and searches all symbols of torch's libraries for the
 * name of each frame, which takes 0.3 ms.  That part is left out where torch offers it. */
std::string pya_torch_text(const std::exception &error);
