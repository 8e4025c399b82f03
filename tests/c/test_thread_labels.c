/* Labels of a thread, with and without host memory: a push that was lost is undone by its own pop, not by another's. */
#include "thread_labels.h"

#include "check.h"
#include "fault.h"

#include <string.h>

static void
push_lost(const char *text) {
    fault_arm(1);
    pya_thread_push_compile_context(text);
    CHECK(fault_disarm());
}

static void
check_innermost(const char *expected) {
    const char *found = pya_thread_compile_context();
    CHECK(expected == NULL ? found == NULL : found != NULL && strcmp(found, expected) == 0);
}

static void
test_contexts_nest(void) {
    const size_t live = fault_live();
    check_innermost(NULL);
    pya_thread_push_compile_context("outer");
    pya_thread_push_compile_context("");
    check_innermost("");
    pya_thread_pop_compile_context();
    check_innermost("outer");
    pya_thread_pop_compile_context();
    check_innermost(NULL);
    pya_thread_pop_compile_context(); /* more pops than pushes */
    check_innermost(NULL);
    CHECK_EQ(fault_live(), live);
}

static void
test_contexts_without_memory(void) {
    const size_t live = fault_live();
    pya_thread_push_compile_context("outer");
    push_lost("lost");
    check_innermost("outer");
    pya_thread_push_compile_context("within what is lost");
    check_innermost("outer");
    pya_thread_pop_compile_context();
    pya_thread_pop_compile_context();
    check_innermost("outer");
    pya_thread_pop_compile_context();
    check_innermost(NULL);
    CHECK_EQ(fault_live(), live);
}

static void
check_metadata(const char *expected, size_t n_bytes) {
    const struct pya_text *text = pya_thread_metadata();
    CHECK(text != NULL && text->n_bytes == n_bytes && text->bytes[n_bytes] == '\0');
    CHECK(text != NULL && memcmp(text->bytes, expected, n_bytes) == 0);
}

static void
test_metadata(void) {
    const size_t live = fault_live();
    CHECK(pya_thread_metadata() == NULL);
    CHECK(pya_thread_set_metadata("a\0b", 3));
    check_metadata("a\0b", 3);
    fault_arm(1);
    CHECK(!pya_thread_set_metadata("new", 3));
    CHECK(fault_disarm());
    check_metadata("a\0b", 3); /* as before */
    CHECK(pya_thread_set_metadata("new", 2));
    check_metadata("ne", 2);
    fault_arm(1);
    CHECK(pya_thread_set_metadata("", 0)); /* none needs no memory */
    CHECK(!fault_disarm());
    CHECK(pya_thread_metadata() == NULL);
    CHECK_EQ(fault_live(), live);
}

static const struct check_case cases[] = {
    {"contexts nest", test_contexts_nest},
    {"contexts without memory", test_contexts_without_memory},
    {"metadata", test_metadata},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
