/* Replays trace files on the policies and prints one line of JSON for each.
 *
 *   make -C tests/c ubench && build/c/release/bench/replay [--min] [--policy NAME] [--capacity BYTES] [--passes N] [--check] FILE... */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "replay/replay.h"

struct arguments {
    struct pya_replay_settings settings;
    int policy; /* -1: all */
    bool find_min;
};

static int
replay_one(
    const char *path, const struct pya_program *program, const struct arguments *arguments,
    enum pya_replay_policy policy) {
    struct pya_replay_settings settings = arguments->settings;
    struct pya_program_info info;
    struct pya_replay_result result;
    settings.policy = policy;
    pya_program_query(program, &info);
    double began = now_ns();
    pya_status status = pya_replay_run(program, &settings, &result);
    double took = (now_ns() - began) / 1e9;
    if (status != PYA_OK) {
        fprintf(stderr, "%s: %s\n", path, pya_status_text(status));
        return 1;
    }
    double live = (double)info.peak_live_bytes;
    printf(
        "{\"trace\": \"%s\", \"policy\": \"%s\", \"ops\": %llu, \"live_mib\": %.0f, \"completed\": %s, "
        "\"peak_bytes\": %llu, \"peak_live\": %.4f, \"calls\": %llu, \"calls_second_half\": %llu, "
        "\"device_ms\": %.2f, \"calls_last_pass\": %llu, \"ms_last_pass\": %.2f, \"violations\": %llu, \"replay_ns_per_op\": %.0f",
        path, pya_replay_policy_name(policy), (unsigned long long)info.n_ops, live / 1048576,
        result.completed ? "true" : "false", (unsigned long long)result.peak_bytes,
        (double)result.peak_bytes / live, (unsigned long long)result.n_calls,
        (unsigned long long)result.n_calls_second_half, (double)result.device_ns * 1e-6,
        (unsigned long long)result.n_calls_last_pass, (double)result.device_ns_last_pass * 1e-6,
        (unsigned long long)result.n_violations, took * 1e9 / (double)(info.n_ops + 1));
    struct pya_replay_min min;
    if (arguments->find_min) {
        status = pya_replay_find_min(program, &settings, &min);
        if (status != PYA_OK) {
            fprintf(stderr, "%s: %s\n", path, pya_status_text(status));
            return 1;
        }
        printf(
            ", \"min_bytes\": %llu, \"safe_bytes\": %llu, \"min_live\": %.4f, \"holes\": %u, "
            "\"replays\": %u",
            (unsigned long long)min.bytes, (unsigned long long)min.safe_bytes,
            (double)min.bytes / live, min.n_holes, min.n_replays);
    }
    printf("}\n");
    fflush(stdout);
    return 0;
}

static int
replay_file(const char *path, const struct arguments *arguments) {
    char message[256] = "";
    struct pya_program *program = NULL;
    if (pya_program_load(path, NULL, &program, message, sizeof message) != PYA_OK) {
        fprintf(stderr, "%s\n", message);
        return 1;
    }
    int failed = 0;
    for (int policy = 0; policy < PYA_REPLAY_N_POLICIES; policy++) {
        if (arguments->policy < 0 || arguments->policy == policy) {
            failed |= replay_one(path, program, arguments, (enum pya_replay_policy)policy);
        }
    }
    pya_program_destroy(program);
    return failed;
}

int
main(int argc, char **argv) {
    struct arguments arguments = {.policy = -1};
    pya_options_init(&arguments.settings.options);
    int failed = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--min") == 0) {
            arguments.find_min = true;
        } else if (strcmp(argv[i], "--check") == 0) {
            arguments.settings.check = true;
        } else if (strcmp(argv[i], "--capacity") == 0 && i + 1 < argc) {
            arguments.settings.capacity_bytes = strtoull(argv[++i], NULL, 0);
        } else if (strcmp(argv[i], "--passes") == 0 && i + 1 < argc) {
            arguments.settings.n_passes = (unsigned)strtoul(argv[++i], NULL, 0);
        } else if (strcmp(argv[i], "--options") == 0 && i + 1 < argc) {
            char message[256];
            if (pya_options_parse(
                    &arguments.settings.options, argv[++i], message, sizeof message) != PYA_OK) {
                fprintf(stderr, "%s\n", message);
                return 2;
            }
        } else if (strcmp(argv[i], "--policy") == 0 && i + 1 < argc) {
            i++;
            for (int p = 0; p < PYA_REPLAY_N_POLICIES; p++) {
                if (strcmp(argv[i], pya_replay_policy_name((enum pya_replay_policy)p)) == 0) {
                    arguments.policy = p;
                }
            }
        } else {
            failed |= replay_file(argv[i], &arguments);
        }
    }
    return failed;
}
