/* A separate folder for a test program's files. */
#pragma once

#include "check.h"

/* Like check_main(), with an empty folder while the cases run.  The folder is removed afterwards with everything in
 * it. folder: its name, ending in six X. */
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
