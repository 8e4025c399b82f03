#include "torch_exception.h"

#include "torch_symbols.h"

#include <cstring>
#include <typeinfo>

namespace {

bool
is_c10(const std::exception &error) {
    const char *type = typeid(error).name();
    return strcmp(type, "N3c105ErrorE") == 0 || strcmp(type, "N3c1016OutOfMemoryErrorE") == 0;
}

} // namespace

std::string
pya_torch_text(const std::exception &error) {
    /* A member function takes the object as its first parameter.  "cxx11" in the name tells that it returns a std::string as this
     * file knows it; a torch with old strings has no such function. */
    std::string (*compute_what)(const void *self, bool with_stack) = nullptr;
    if (is_c10(error) && pya_torch_find(compute_what, "_ZNK3c105Error12compute_whatB5cxx11Eb")) {
        return compute_what(&error, false);
    }
    return error.what();
}
