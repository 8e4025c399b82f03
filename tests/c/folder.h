/* A folder of its own for a test program's files. */
#pragma once

#include "check.h"

/* As check_main(), with an empty folder while the cases run, which goes with all that they left there; folder: its name, which
 * ends in six X. */
static inline int
check_main_in_folder(
    int argc, char **argv, const struct check_case *cases, size_t n, char *folder) {
    if (mkdtemp(folder) == NULL) {
        perror("mkdtemp");
        return 1;
    }
    const int result = check_main(argc, argv, cases, n);
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) != 0 ? 1 : result;
}
