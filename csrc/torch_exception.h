/* What torch's exceptions say.  Floor 5. */
#pragma once

#include <exception>
#include <string>

/* The text of an exception.  what() of a c10::Error appends the C++ stack, and searches all symbols of torch's libraries for the
 * name of each frame, which takes 0.3 ms.  That part is left out where torch offers it. */
std::string pya_torch_text(const std::exception &error);
