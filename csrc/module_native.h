/* What is at a return address of C or C++: looked up once for the life of the process.  Floor 4. */
#pragma once

#include <stdbool.h>

/* Whose is this frame?  From the interpreter's outwards the Python frames say more; those in this library are how the
 * stack was captured. */
enum pya_native_owner { PYA_NATIVE_OTHER = 1, PYA_NATIVE_INTERPRETER, PYA_NATIVE_OWN };

/* Both for free(). */
struct pya_native_texts {
    char *
        name; /* demangled; "library.so+0x1234" where it has none, the address where it lies in no library */
    char *file; /* of the library; "??": it lies in none */
};

/* Without host memory PYA_NATIVE_OTHER. */
enum pya_native_owner pya_native_owner_of(void *address);
/* False without host memory: nothing was written. */
bool pya_native_texts_of(void *address, struct pya_native_texts *out);
