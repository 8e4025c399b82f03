/* A fuzzer that needs gcc only: mutates inputs, keeps those that reach new code, stops at the first finding.
 *
 *   fuzz_core [--seconds N] [--runs N] [--seed N] [--max-bytes N] [--keep FOLDER] [--minimise FOLDER] FILE|FOLDER...
 *
 * Files are the first inputs.  Without --seconds and --runs each is run once.  The input being run lies in
 * "<program>.input" (removed at a good end): run that file alone to see a finding again.  --keep writes inputs that
 * reached new code; --minimise writes few of the given ones that reach all code that they reach together.
 * The objects under test are built with -fsanitize-coverage=trace-pc. */
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "fuzz.h"

enum { MAP_BYTES = 1 << 16, INPUT_MAX = 1 << 16, BYTES_PER_EDGE = 256 };
/* Of the processor, and on the clock: on a loaded machine an input may wait long for its turn. */
enum { RUN_SECONDS = 60, RUN_CLOCK_SECONDS = 20 * RUN_SECONDS };

struct blob {
    uint8_t *bytes;
    size_t n;
    size_t n_edges;
};

static struct {
    uint64_t seconds, runs, random;
    size_t max_bytes;
    const char *keep, *minimise;
    char input_path[512];
    int input_fd;
    struct blob *corpus;
    size_t n_corpus, corpus_room;
    uint64_t n_runs;
    size_t n_edges;
} fuzz = {.max_bytes = 4096, .input_fd = -1};

/* Edges of the current run, and all so far; the bits of a byte: 1, 2, 3, 4-7, 8-15, 16-31, 32-127, 128+ times. */
static uint8_t edge_counts[MAP_BYTES], edge_seen[MAP_BYTES];
static uintptr_t edge_last;
extern const char __executable_start;
void __sanitizer_cov_trace_pc(void);

void
__sanitizer_cov_trace_pc(void) {
    uintptr_t pc = (uintptr_t)__builtin_return_address(0) - (uintptr_t)&__executable_start;
    pc = (pc ^ (pc >> 16)) * UINT32_C(0x9E3779B1) >> 8 & (MAP_BYTES - 1);
    uint8_t *count = &edge_counts[pc ^ edge_last];
    *count = (uint8_t)(*count + (*count < 255));
    edge_last = pc >> 1;
}

static uint8_t
edge_bucket(uint8_t count) {
    static const uint8_t ends[] = {1, 2, 3, 7, 15, 31, 127};
    unsigned bit = 0;
    while (bit < sizeof ends && count > ends[bit]) {
        bit++;
    }
    return count == 0 ? 0 : (uint8_t)(1U << bit);
}

/* Adds the run's edges to those seen.  Returns how many were new.  Few words of the map are not 0. */
static size_t
edges_merge(void) {
    size_t n_new = 0;
    for (size_t word = 0; word < MAP_BYTES; word += 8) {
        uint64_t any;
        memcpy(&any, edge_counts + word, sizeof any);
        for (size_t i = word; any != 0 && i < word + 8; i++) {
            uint8_t bits = edge_bucket(edge_counts[i]);
            bits =
                bits != 0 && fuzz.minimise != NULL ? 1 : bits; /* then the count does not matter */
            n_new += (bits & ~edge_seen[i]) != 0;
            edge_seen[i] |= bits;
        }
    }
    return n_new;
}

static size_t
edges_of_run(void) {
    size_t n = 0;
    for (size_t i = 0; i < MAP_BYTES; i++) {
        n += edge_counts[i] != 0;
    }
    return n;
}

static uint64_t
random_next(void) {
    uint64_t z = (fuzz.random += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static size_t
random_below(size_t n) {
    return n == 0 ? 0 : (size_t)(random_next() % n);
}

static void
die(const char *what, const char *name) {
    fprintf(stderr, "%s: %s\n", name, what);
    exit(2);
}

static void
write_file(const char *folder, const struct blob *blob) {
    char path[600];
    uint64_t hash = UINT64_C(0xCBF29CE484222325);
    for (size_t i = 0; i < blob->n; i++) {
        hash = (hash ^ blob->bytes[i]) * UINT64_C(0x100000001B3);
    }
    snprintf(path, sizeof path, "%s/%016" PRIx64, folder, hash);
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(blob->bytes, 1, blob->n, file) != blob->n || fclose(file) != 0) {
        die("cannot be written", path);
    }
}

/* A hang is a finding: the signal ends the program and leaves the input. */
static void
run_limit(unsigned seconds, unsigned clock_seconds) {
    const struct itimerval limit = {.it_value.tv_sec = seconds};
    if (setitimer(ITIMER_PROF, &limit, NULL) != 0) {
        die("cannot be set", "the time limit");
    }
    alarm(clock_seconds);
}

static void
run_one(const uint8_t *bytes, size_t n) {
    if (pwrite(fuzz.input_fd, bytes, n, 0) != (ssize_t)n ||
        ftruncate(fuzz.input_fd, (off_t)n) != 0) {
        die("cannot be written", fuzz.input_path);
    }
    memset(edge_counts, 0, sizeof edge_counts);
    edge_last = 0;
    run_limit(RUN_SECONDS, RUN_CLOCK_SECONDS);
    (void)LLVMFuzzerTestOneInput(bytes, n);
    run_limit(0, 0);
    fuzz.n_runs++;
}

static void
corpus_add(const uint8_t *bytes, size_t n) {
    if (fuzz.n_corpus == fuzz.corpus_room) {
        fuzz.corpus_room = fuzz.corpus_room * 2 + 64;
        fuzz.corpus = realloc(fuzz.corpus, fuzz.corpus_room * sizeof *fuzz.corpus);
    }
    struct blob *blob = &fuzz.corpus[fuzz.n_corpus++];
    *blob = (struct blob){.bytes = malloc(n + 1), .n = n, .n_edges = edges_of_run()};
    memcpy(blob->bytes, bytes, n);
}

static void
try_one(const uint8_t *bytes, size_t n) {
    run_one(bytes, n);
    size_t n_new = edges_merge();
    if (n_new == 0) {
        return;
    }
    fuzz.n_edges += n_new;
    corpus_add(bytes, n);
    if (fuzz.keep != NULL) {
        write_file(fuzz.keep, &fuzz.corpus[fuzz.n_corpus - 1]);
    }
}

/* ---- mutation ---- */

static void
put_number(uint8_t *bytes, size_t n) {
    static const uint64_t special[] = {0,      1,      0x7F,       0x80,       0xFF,
                                       0x7FFF, 0xFFFF, 0x7FFFFFFF, UINT32_MAX, UINT64_MAX};
    uint64_t value = special[random_below(sizeof special / sizeof *special)];
    size_t width = (size_t)1 << random_below(4);
    size_t at = random_below(n);
    for (size_t i = 0; i < width && at + i < n; i++) {
        bytes[at + i] = (uint8_t)(value >> (8 * i));
    }
}

static size_t
insert_bytes(uint8_t *bytes, size_t n, const uint8_t *from, size_t n_from) {
    size_t room = fuzz.max_bytes - n;
    n_from = n_from < room ? n_from : room;
    size_t at = random_below(n + 1);
    memmove(bytes + at + n_from, bytes + at, n - at);
    memcpy(bytes + at, from, n_from);
    return n + n_from;
}

static size_t
remove_bytes(uint8_t *bytes, size_t n) {
    size_t at = random_below(n);
    size_t n_gone = 1 + random_below(n - at < 64 ? n - at : 64);
    memmove(bytes + at, bytes + at + n_gone, n - at - n_gone);
    return n - n_gone;
}

/* One mutation; from: another input to take a piece of. */
static size_t
mutate(uint8_t *bytes, size_t n, const struct blob *from) {
    uint8_t fresh[16];
    for (size_t i = 0; i < sizeof fresh; i++) {
        fresh[i] = (uint8_t)random_next();
    }
    if (n == 0) {
        return insert_bytes(bytes, n, fresh, sizeof fresh);
    }
    size_t at = from->n == 0 ? 0 : random_below(from->n);
    size_t n_piece = random_below(from->n - at < 128 ? from->n - at : 128);
    switch (random_below(8)) {
    case 0:
        bytes[random_below(n)] ^= (uint8_t)(1U << random_below(8));
        return n;
    case 1:
        bytes[random_below(n)] = (uint8_t)random_next();
        return n;
    case 2:
        put_number(bytes, n);
        return n;
    case 3:
        bytes[random_below(n)] += (uint8_t)(random_below(2) == 0 ? 1 : 255);
        return n;
    case 4:
        return insert_bytes(bytes, n, fresh, 1 + random_below(sizeof fresh));
    case 5:
        return remove_bytes(bytes, n);
    case 6:
        return insert_bytes(bytes, n, from->bytes + at, n_piece);
    default:
        n_piece = n_piece < n ? n_piece : n;
        memcpy(bytes + random_below(n - n_piece + 1), from->bytes + at, n_piece);
        return n;
    }
}

static void
fuzz_for_a_while(void) {
    uint8_t *bytes = malloc(fuzz.max_bytes);
    time_t end = time(NULL) + (time_t)fuzz.seconds;
    uint64_t last = fuzz.n_runs + fuzz.runs;
    while (fuzz.seconds > 0 ? time(NULL) < end : fuzz.n_runs < last) {
        /* Later inputs more often: they are at the border of what is known. */
        size_t i = random_below(2) == 0 ? random_below(fuzz.n_corpus)
                                        : fuzz.n_corpus - 1 - random_below((fuzz.n_corpus + 3) / 4);
        size_t n = fuzz.corpus[i].n < fuzz.max_bytes ? fuzz.corpus[i].n : fuzz.max_bytes;
        memcpy(bytes, fuzz.corpus[i].bytes, n);
        size_t n_changes = (size_t)1 << random_below(6);
        for (size_t k = 0; k < n_changes; k++) {
            n = mutate(bytes, n, &fuzz.corpus[random_below(fuzz.n_corpus)]);
        }
        try_one(bytes, n);
    }
    free(bytes);
}

/* ---- inputs given ---- */

static void
load_file(const char *path) {
    uint8_t *bytes = malloc(INPUT_MAX);
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        die("cannot be read", path);
    }
    size_t n = fread(bytes, 1, INPUT_MAX, file);
    (void)fclose(file);
    if (fuzz.minimise != NULL) {
        run_one(bytes, n);
        corpus_add(bytes, n);
    } else {
        try_one(bytes, n);
    }
    free(bytes);
}

static void
load(const char *path) {
    struct stat info;
    if (stat(path, &info) != 0) {
        die("does not exist", path);
    }
    if (!S_ISDIR(info.st_mode)) {
        load_file(path);
        return;
    }
    struct dirent **names;
    int n = scandir(path, &names, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        char name[1024];
        snprintf(name, sizeof name, "%s/%s", path, names[i]->d_name);
        if (names[i]->d_name[0] != '.') {
            load_file(name);
        }
        free(names[i]);
    }
    if (n >= 0) {
        free(names);
    }
}

static int
by_reach(const void *a, const void *b) {
    const struct blob *x = a, *y = b;
    if (x->n_edges != y->n_edges) {
        return x->n_edges < y->n_edges ? 1 : -1;
    }
    return (x->n > y->n) - (x->n < y->n);
}

/* Widest coverage first; an input that adds nothing to those before it is left out. */
static void
minimise(void) {
    size_t n_kept = 0;
    qsort(fuzz.corpus, fuzz.n_corpus, sizeof *fuzz.corpus, by_reach);
    for (size_t i = 0; i < fuzz.n_corpus; i++) {
        run_one(fuzz.corpus[i].bytes, fuzz.corpus[i].n);
        uint8_t before[MAP_BYTES];
        memcpy(before, edge_seen, sizeof before);
        size_t n_new = edges_merge();
        if (n_new * BYTES_PER_EDGE < fuzz.corpus[i].n) { /* not worth its size */
            memcpy(edge_seen, before, sizeof before);
            continue;
        }
        fuzz.n_edges += n_new;
        if (n_new > 0) {
            write_file(fuzz.minimise, &fuzz.corpus[i]);
            n_kept++;
        }
    }
    printf("%zu of %zu inputs kept\n", n_kept, fuzz.n_corpus);
}

static uint64_t
number_of(const char *text) {
    char *end;
    uint64_t value = strtoull(text, &end, 0);
    if (end == text || *end != '\0') {
        die("is not a number", text);
    }
    return value;
}

static int
parse(int argc, char **argv) {
    int i = 1;
    for (; i + 1 < argc && strncmp(argv[i], "--", 2) == 0; i += 2) {
        if (strcmp(argv[i], "--keep") == 0) {
            fuzz.keep = argv[i + 1];
        } else if (strcmp(argv[i], "--minimise") == 0) {
            fuzz.minimise = argv[i + 1];
        } else if (strcmp(argv[i], "--seconds") == 0) {
            fuzz.seconds = number_of(argv[i + 1]);
        } else if (strcmp(argv[i], "--runs") == 0) {
            fuzz.runs = number_of(argv[i + 1]);
        } else if (strcmp(argv[i], "--seed") == 0) {
            fuzz.random = number_of(argv[i + 1]);
        } else if (strcmp(argv[i], "--max-bytes") == 0) {
            fuzz.max_bytes = number_of(argv[i + 1]);
        } else {
            die("is not an option; see the first comment of tests/fuzz/main.c", argv[i]);
        }
    }
    if (fuzz.max_bytes < 16 || fuzz.max_bytes > INPUT_MAX) {
        die("is out of range (16 to 65536)", "--max-bytes");
    }
    return i;
}

int
main(int argc, char **argv) {
    int i = parse(argc, argv);
    uint64_t seed = fuzz.random;
    const char *name = strrchr(argv[0], '/') == NULL ? argv[0] : strrchr(argv[0], '/') + 1;
    snprintf(fuzz.input_path, sizeof fuzz.input_path, "%s.input", argv[0]);
    fuzz.input_fd = open(fuzz.input_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fuzz.input_fd < 0) {
        die("cannot be written", fuzz.input_path);
    }
    for (; i < argc; i++) {
        load(argv[i]);
    }
    if (fuzz.minimise != NULL) {
        minimise();
    } else if (fuzz.seconds > 0 || fuzz.runs > 0) {
        if (fuzz.n_corpus == 0) {
            run_one((const uint8_t *)"", 0);
            corpus_add((const uint8_t *)"", 0);
        }
        fuzz_for_a_while();
    }
    (void)unlink(fuzz.input_path);
    printf(
        "%s: %" PRIu64
        " inputs, %zu edge counts reached, %zu inputs that reach new ones; seed %" PRIu64 "\n",
        name, fuzz.n_runs, fuzz.n_edges, fuzz.n_corpus, seed);
    for (size_t k = 0; k < fuzz.n_corpus; k++) {
        free(fuzz.corpus[k].bytes);
    }
    free(fuzz.corpus);
    return 0;
}
