/* Describes return addresses in C and C++ code; each is looked up once per process.  Floor 4. */
#pragma once

#include <stdbool.h>

/* Whose code is the frame in?  From the interpreter's frames outwards the Python frames say more, and this library's own
 * frames only show how the stack was captured. */
enum pya_native_owner { PYA_NATIVE_OTHER = 1, PYA_NATIVE_INTERPRETER, PYA_NATIVE_OWN };

/* Both for free(). */
struct pya_native_texts {
    char *name; /* demangled; if it has none "library.so+0x1234", or the address if in no library */
    char *file; /* the library; "??" if in none */
};

/* PYA_NATIVE_OTHER if host memory is out. */
enum pya_native_owner pya_native_owner_of(void *address);
/* False if host memory is out; *out is then unchanged. */
bool pya_native_texts_of(void *address, struct pya_native_texts *out);
