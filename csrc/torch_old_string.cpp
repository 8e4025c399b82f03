#include "torch_old_string.h"

#include "torch_symbols.h"

extern "C" {
void old_string_make(void *self, const char *text, size_t bytes, const void *allocator) __asm__(
    "_ZNSsC1EPKcmRKSaIcE");
void old_string_drop(void *self) __asm__("_ZNSsD1Ev");
size_t old_string_size(const void *self) __asm__("_ZNKSs4sizeEv");
}

pya_torch_old_string::pya_torch_old_string(const char *text, size_t bytes) : data(nullptr) {
    const std::allocator<char> allocator;
    old_string_make(this, text, bytes, &allocator);
}

pya_torch_old_string::~pya_torch_old_string() {
    old_string_drop(this);
}

std::string
pya_torch_old_string::copy() const {
    return {data, old_string_size(this)};
}

bool
pya_torch_has_old_strings(void) {
    return pya_torch_symbol("_ZN3c105ErrorC1ENS_14SourceLocationESs") != nullptr;
}
