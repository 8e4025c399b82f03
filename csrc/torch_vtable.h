/* Inspects a C++ class whose header is not at hand: its vtable, and what its methods do.  Floor 5. */
#pragma once

#include <cstddef>
#include <string>

/* Itanium C++ ABI: offset-to-top and typeinfo precede the first slot. */
constexpr size_t PYA_VTABLE_HEADER_WORDS = 2;

/* Number of words in an exported vtable; 0 if unknown.  Use it for only one vtable per process. */
size_t pya_torch_vtable_words(void **vtable);
/* The only slot that holds address; 0 (a header word) if none or several do. */
size_t pya_torch_slot_find(void *const *vtable, size_t words, const void *address);
/* Calls an inherited method that does nothing but throw, whatever it returns, and returns the text of its exception; "" if
 * it throws none. */
std::string pya_torch_probe(void *object, void *method);
/* Judged by the machine code: does it only return, or only return true? */
bool pya_torch_does_nothing(const void *method);
bool pya_torch_returns_true(const void *method);
