/* What can be told of a C++ class whose header is not at hand: its vtable, and methods by what they do.  Floor 5. */
#pragma once

#include <cstddef>
#include <string>

/* Itanium C++ ABI: offset to top and typeinfo stand before the first slot. */
constexpr size_t PYA_VTABLE_HEADER_WORDS = 2;

/* Words in an exported vtable; 0 when unknown.  Of one vtable in a process. */
size_t pya_torch_vtable_words(void **vtable);
/* The only slot that holds address, or 0 (a header word) when there is none or more than one. */
size_t pya_torch_slot_find(void *const *vtable, size_t words, const void *address);
/* What an inherited method says when it is called with nothing: the text of its exception, "" when it raises none. */
std::string pya_torch_probe(void *object, void *method);
/* By its code: does it only return, or only return true? */
bool pya_torch_does_nothing(const void *method);
bool pya_torch_returns_true(const void *method);
