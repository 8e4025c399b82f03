/* torch.OutOfMemoryError is thrown, and c10::Error read, without torch's headers.
 *
 * The class of the former is built from symbols of the loaded libc10 (and libc10_cuda, where older versions keep its vtable).  Each way of
 * building it is tested once at install, by throwing and catching, before it is used.  The last resort is a
 * std::runtime_error with the same text, which still says "out of memory". */
#include "torch_error.h"

#include "torch_old_string.h"
#include "torch_slots.h"
#include "torch_symbols.h"

#include <cstdint>
#include <cstring>
#include <cxxabi.h>
#include <exception>
#include <stdexcept>
#include <string>
#include <typeinfo>

namespace {

/* Passed by value in c10's signatures; at three words every ABI passes it in memory. */
struct source_location {
    const char *function;
    const char *file;
    uint32_t line;
};

using error_constructor = void (*)(void *self, source_location where, std::string text);
using old_constructor = void (*)(void *self, source_location where, pya_torch_old_string text);
using destructor = void (*)(void *self);

/* Larger than any c10::Error so far; the self-test below runs the constructor in this much room. */
constexpr size_t EXCEPTION_BYTES = 1024;

struct oom_class {
    void *construct; /* an error_constructor */
    void **vtable;   /* of OutOfMemoryError */
    std::type_info *type;
    bool is_base; /* construct makes a plain c10::Error, whose vtable we then overwrite */
    bool is_old;  /* construct is an old_constructor */
};

oom_class oom_known = {};
const char *oom_detail = "not looked up yet";

#define SIGNATURE "C1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
#define OLD_SIGNATURE "C1ENS_14SourceLocationESs"

oom_class
oom_find() {
    oom_class found = {};
    found.vtable = static_cast<void **>(pya_torch_symbol("_ZTVN3c1016OutOfMemoryErrorE"));
    found.type = static_cast<std::type_info *>(pya_torch_symbol("_ZTIN3c1016OutOfMemoryErrorE"));
    found.is_old = pya_torch_has_old_strings();
    found.construct = pya_torch_symbol(
        found.is_old ? "_ZN3c1016OutOfMemoryError" OLD_SIGNATURE
                     : "_ZN3c1016OutOfMemoryError" SIGNATURE);
    found.is_base = found.construct == nullptr;
    if (found.is_base) {
        found.construct = pya_torch_symbol(
            found.is_old ? "_ZN3c105Error" OLD_SIGNATURE : "_ZN3c105Error" SIGNATURE);
    }
    return found;
}

void
oom_construct(const oom_class &kind, void *object, const std::string &text) {
    const source_location where = {"pya_torch_alloc", "pyalloc", 0};
    if (kind.is_old) {
        reinterpret_cast<old_constructor>(kind.construct)(
            object, where, {text.data(), text.size()});
    } else {
        reinterpret_cast<error_constructor>(kind.construct)(object, where, text);
    }
}

[[noreturn]] void
oom_throw_as(const oom_class &kind, const std::string &text) {
    void *object = abi::__cxa_allocate_exception(EXCEPTION_BYTES);
    memset(object, 0, EXCEPTION_BYTES);
    oom_construct(kind, object, text);
    void **first_slot = kind.vtable + 2; /* past offset-to-top and typeinfo */
    if (kind.is_base) {
        memcpy(object, &first_slot, sizeof first_slot);
    }
    abi::__cxa_throw(object, kind.type, reinterpret_cast<destructor>(*first_slot));
}

bool
oom_try(const oom_class &kind) {
    if (kind.construct == nullptr || kind.vtable == nullptr || kind.type == nullptr) {
        return false;
    }
    const std::string text = "CUDA out of memory (a test by pyalloc)";
    try {
        oom_throw_as(kind, text);
    } catch (const std::exception &error) {
        return typeid(error) == *kind.type && pya_torch_text(error).find(text) != std::string::npos;
    } catch (...) {
        return false;
    }
}

bool
is_c10(const std::exception &error) {
    const char *type = typeid(error).name();
    return strcmp(type, "N3c105ErrorE") == 0 || strcmp(type, "N3c1016OutOfMemoryErrorE") == 0;
}

} // namespace

void
pya_torch_oom_prepare() {
    const oom_class found = oom_find();
    if (oom_try(found)) {
        oom_known = found;
        oom_detail =
            found.is_base ? "torch.OutOfMemoryError, through c10::Error" : "torch.OutOfMemoryError";
    } else {
        oom_known = {};
        oom_detail =
            "RuntimeError with torch's text: c10::OutOfMemoryError was not found in libc10";
    }
}

bool
pya_torch_oom_is_known(const char **detail) {
    *detail = oom_detail;
    return oom_known.construct != nullptr;
}

void
pya_torch_throw_text(const char *text, bool is_oom) {
    if (is_oom && oom_known.construct != nullptr) {
        oom_throw_as(oom_known, text);
    }
    throw std::runtime_error(text);
}

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
