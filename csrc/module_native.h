/* What is at a return address of C or C++: looked up once for the life of the process.  Floor 4. */
#pragma once

#include <stdbool.h>

/* Whose is this frame?  From the interpreter's outwards the Python frames say more; those in this library are how the
 * stack was captured. */
enum pya_native_owner { PYA_NATIVE_OTHER = 1, PYA_NATIVE_INTERPRETER, PYA_NATIVE_OWN };

struct pya_native {
    void *address;
    enum pya_native_owner owner;
    char *
        name; /* demangled; "library.so+0x1234" where it has none, the address where it lies in no library */
    char *file; /* of the library; "??": it lies in none */
};

/* Valid until the next call; NULL when there is no host memory.  The GIL is held: it guards the table. */
const struct pya_native *pya_native_look_up(void *address);
