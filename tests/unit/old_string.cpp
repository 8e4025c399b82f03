/* Compiled twice: as pyalloc's handling of std::string from torch's older wheels, and as that torch.  Each calls the
 * other. */
#include "torch_old_string.h"

#include <cstddef>
#include <string>

#if _GLIBCXX_USE_CXX11_ABI
using string = pya_torch_old_string;
#else
using string = std::string;
#endif

struct share {
    ptrdiff_t offset;
    string handle;
};

extern "C" {
share ours_makes(const char *text, size_t bytes);
bool ours_takes(string text, const char *expected, size_t bytes);
bool ours_gives(const char *text, size_t bytes);
bool theirs_takes(const void *self, string text, const char *expected, size_t bytes);
}

#if _GLIBCXX_USE_CXX11_ABI
share
ours_makes(const char *text, size_t bytes) {
    return {7, {text, bytes}};
}

bool
ours_takes(string text, const char *expected, size_t bytes) {
    return text.copy() == std::string(expected, bytes);
}

bool
ours_gives(const char *text, size_t bytes) {
    return theirs_takes(nullptr, {text, bytes}, text, bytes);
}
#else
static std::string kept;

bool
theirs_takes(const void *self, string text, const char *expected, size_t bytes) {
    const bool is_same = text == std::string(expected, bytes);
    kept = text;
    return self == nullptr && is_same;
}

int
main() {
    const std::string all[] = {"", std::string("a\0b", 3), std::string(1000, 'x')};
    for (const std::string &text : all) {
        share made = ours_makes(text.data(), text.size());
        const std::string copy = made.handle;
        made.handle += "more";
        const bool is_good = made.offset == 7 && copy == text && made.handle == text + "more" &&
                             ours_takes(text, text.data(), text.size()) &&
                             ours_gives(text.data(), text.size()) && kept == text;
        if (!is_good) {
            return 1;
        }
    }
    return 0;
}
#endif
