/* The fault injection itself: a sweep that silently injects nothing would make every other sweep pass. */
#include "check.h"
#include "fault.h"

static void
test_counts(void) {
    size_t live = fault_live();
    void *volatile a = malloc(10);
    void *volatile b = calloc(2, 10);
    CHECK_EQ(fault_live(), live + 2);
    a = realloc(a, 100);
    CHECK_EQ(fault_live(), live + 2);
    free(a);
    free(b);
    CHECK_EQ(fault_live(), live);
}

static void
test_nth(void) {
    fault_arm(2);
    void *volatile a = malloc(10);
    void *volatile b = malloc(10);
    void *volatile c = malloc(10);
    CHECK(a != NULL);
    CHECK(b == NULL);
    CHECK(c != NULL);
    CHECK(fault_disarm());
    free(a);
    free(c);
    fault_arm(5);
    free(malloc(1));
    CHECK(!fault_disarm());
}

static void
test_sticky(void) {
    fault_arm_sticky(1);
    void *volatile a = malloc(10);
    void *volatile b = calloc(1, 10);
    CHECK(a == NULL);
    CHECK(b == NULL);
    CHECK(fault_disarm());
    free(a);
    free(b);
}

static const struct check_case cases[] = {
    {"counts", test_counts},
    {"nth", test_nth},
    {"sticky", test_sticky},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
