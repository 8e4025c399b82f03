/* The allocator under everything at once, for as long as you like: 16 threads, 4 streams, 2 devices, captures, trims,
 * and one failure in 1000 driver calls, on the host-memory CUDA runtime.  Every block is filled when it is allocated
 * and checked when it is freed.
 *
 * LD_LIBRARY_PATH=pyalloc/lib/hostcuda soak [SECONDS [SEED]]
 *
 * Exits with 0 if no block changed another's bytes, every check of the structures passed, nothing is left on the
 * devices, and host memory stayed flat.  Prints a line for each of 20 samples. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "core/heap.h"
#include "device/cuda.h"
#include "hostcuda/hostcuda.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
size_t
__sanitizer_get_current_allocated_bytes(void); /* gcc comes without the header that declares it */
#endif

enum {
    N_THREADS = 16,
    N_DEVICES = 2,
    N_STREAMS = 4,
    N_SHELF = 512,
    N_SAMPLES = 20,
    CALLS_PER_FAULT = 1000
};
static const size_t device_bytes = (size_t)192 << 20;

struct driver {
    int (*stream_create)(void **stream, unsigned flags);
    int (*set_device)(void *context);
    int (*launch_host)(void *stream, void (*fn)(void *), void *data);
    int (*retain)(void **context, int device);
    void (*fail_nth)(uint64_t n, const char *name, int error);
    uint64_t (*calls)(const char *name);
    size_t (*used_bytes)(int device);
    uint64_t (*live)(const char *what);
};

struct item {
    pya_dptr ptr;
    size_t bytes;
    uint64_t stamp;
    int device;
};

static struct {
    struct driver driver;
    struct pya_heap *heap;
    void *streams[N_DEVICES][N_STREAMS];
    struct item shelf[N_SHELF];
    pthread_mutex_t locks[N_SHELF];
    atomic_bool is_over;
    atomic_ulong n_allocs, n_ooms, n_failed, n_faults, n_bytes, n_stamps;
    atomic_ulong next_fault;
    pthread_mutex_t fault_lock;
} soak;

static void *
symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(
            stderr,
            "soak: %s is missing: it runs on pyalloc's host-memory runtime only (make soak)\n",
            name);
        exit(2);
    }
    return found;
}

#define LOAD(library, field, name)                                                                 \
    do {                                                                                           \
        void *found_ = symbol(library, name);                                                      \
        memcpy(&soak.driver.field, &found_, sizeof found_);                                        \
    } while (0)

static void
driver_load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "soak: %s\n", dlerror());
        exit(2);
    }
    LOAD(library, fail_nth, "pya_hostcuda_fail_nth");
    LOAD(library, calls, "pya_hostcuda_calls");
    LOAD(library, used_bytes, "pya_hostcuda_used_bytes");
    LOAD(library, live, "pya_hostcuda_live");
    LOAD(library, stream_create, "cuStreamCreate");
    LOAD(library, set_device, "cuCtxSetCurrent");
    LOAD(library, launch_host, "cuLaunchHostFunc");
    LOAD(library, retain, "cuDevicePrimaryCtxRetain");
}

static pya_status
soak_open(void *arg, int index, struct pya_device **out) {
    (void)arg;
    return pya_cuda_open(index, out);
}

/* ---- bytes ---- */

static uint64_t
word_of(uint64_t stamp, size_t i) {
    return (stamp + i) * UINT64_C(0x9E3779B97F4A7C15);
}

static uint64_t *
words_of(const struct item *item) {
    return (uint64_t *)(uintptr_t)item->ptr; // NOLINT: device memory is host memory here
}

static void
item_fill(const struct item *item) {
    uint64_t *words = words_of(item);
    for (size_t i = 0; i < item->bytes / 8; i++) {
        words[i] = word_of(item->stamp, i);
    }
}

static void
item_verify(const struct item *item) {
    const uint64_t *words = words_of(item);
    size_t n_wrong = 0;
    for (size_t i = 0; i < item->bytes / 8; i++) {
        n_wrong += words[i] != word_of(item->stamp, i);
    }
    if (!CHECK_EQ(n_wrong, 0)) {
        fprintf(stderr, "    %zu words of a block of %zu bytes changed\n", n_wrong, item->bytes);
    }
}

/* ---- threads ---- */

static void
noop(void *data) {
    (void)data;
}

/* Makes the next call fail if 1000 calls were made since the last failure. */
static void
maybe_fail(uint64_t *seed) {
    static const int errors[] = {2, 2, 999, 700, 1};
    if (soak.driver.calls(NULL) < atomic_load(&soak.next_fault) ||
        pthread_mutex_trylock(&soak.fault_lock) != 0) {
        return;
    }
    uint64_t n_calls = soak.driver.calls(NULL);
    if (n_calls >= atomic_load(&soak.next_fault)) {
        atomic_store(&soak.next_fault, n_calls + CALLS_PER_FAULT);
        soak.driver.fail_nth(1 + check_below(seed, 3), NULL, errors[check_below(seed, 5)]);
        atomic_fetch_add(&soak.n_faults, 1);
    }
    pthread_mutex_unlock(&soak.fault_lock);
}

static void
item_drop(struct item *item, uint64_t *seed) {
    if (item->ptr == 0) {
        return;
    }
    item_verify(item);
    if (check_below(seed, 4) == 0) {
        void *other = soak.streams[item->device][check_below(seed, N_STREAMS)];
        CHECK_OK(pya_record_stream(soak.heap, item->ptr, (pya_stream)(uintptr_t)other));
    }
    CHECK_OK(pya_free(soak.heap, item->ptr));
    *item = (struct item){0};
}

static void
replace(uint64_t *seed) {
    size_t slot = check_below(seed, N_SHELF);
    struct item fresh = {
        .device = (int)check_below(seed, N_DEVICES),
        .bytes = check_log_size(seed, 8, (size_t)1 << 22) & ~(size_t)7,
        .stamp = atomic_fetch_add(&soak.n_stamps, 1) << 32,
    };
    void *stream = soak.streams[fresh.device][check_below(seed, N_STREAMS)];
    pya_status st =
        pya_alloc(soak.heap, fresh.device, fresh.bytes, (pya_stream)(uintptr_t)stream, &fresh.ptr);
    if (st == PYA_OK) {
        item_fill(&fresh);
        (void)soak.driver.launch_host(stream, noop, NULL); /* events complete as work goes on */
        atomic_fetch_add(&soak.n_allocs, 1);
        atomic_fetch_add(&soak.n_bytes, fresh.bytes);
    } else {
        CHECK(st == PYA_E_NOMEM || st == PYA_E_DEVICE);
        atomic_fetch_add(st == PYA_E_NOMEM ? &soak.n_ooms : &soak.n_failed, 1);
        fresh = (struct item){0};
    }
    pthread_mutex_lock(&soak.locks[slot]);
    struct item old = soak.shelf[slot];
    soak.shelf[slot] = fresh;
    pthread_mutex_unlock(&soak.locks[slot]);
    item_drop(&old, seed);
}

static bool
match_one(void *arg, pya_stream stream) {
    return stream == *(const pya_stream *)arg;
}

/* Takes some memory of a private pool, as a graph would. */
static void
use_pool(uint64_t *seed, uint64_t thread) {
    struct pya_pool_id id = {thread + 1, check_below(seed, 3)};
    int device = (int)check_below(seed, N_DEVICES);
    pya_stream stream = (pya_stream)(uintptr_t)soak.streams[device][check_below(seed, N_STREAMS)];
    struct item items[4] = {{0}};
    if (pya_pool_begin(
            soak.heap, device, id, (struct pya_stream_filter){match_one, NULL, &stream, stream}) !=
        PYA_OK) {
        return;
    }
    for (size_t i = 0; i < 4; i++) {
        struct item item = {
            .device = device,
            .bytes = (size_t)65536 << i,
            .stamp = atomic_fetch_add(&soak.n_stamps, 1) << 32};
        if (pya_alloc(soak.heap, device, item.bytes, stream, &item.ptr) == PYA_OK) {
            items[i] = item;
            item_fill(&item);
        }
    }
    CHECK_OK(pya_pool_end(soak.heap, device, id));
    for (size_t i = 0; i < 4; i++) {
        item_drop(&items[i], seed);
    }
    CHECK_OK(pya_pool_release(soak.heap, device, id));
}

static void
steer(uint64_t *seed) {
    int device = (int)check_below(seed, N_DEVICES);
    pya_status st;
    switch (check_below(seed, 3)) {
    case 0:
        st = pya_empty_cache(soak.heap, -1);
        break;
    case 1:
        st = pya_trim(soak.heap, device, check_below(seed, device_bytes));
        break;
    default:
        st = pya_set_fraction(soak.heap, device, check_below(seed, 2) == 0 ? 1.0 : 0.8);
        break;
    }
    CHECK(st == PYA_OK || st == PYA_E_NOMEM || st == PYA_E_DEVICE);
}

static void *
thread_run(void *arg) {
    uint64_t thread = (uint64_t)(uintptr_t)arg;
    uint64_t seed = check_seed() * 1000 + thread;
    for (uint64_t i = 0; !atomic_load(&soak.is_over) && check_failures < 20; i++) {
        maybe_fail(&seed);
        uint64_t dice = check_below(&seed, 4000);
        if (dice == 0) {
            steer(&seed);
        } else if (dice < 4) {
            use_pool(&seed, thread);
        } else {
            replace(&seed);
        }
    }
    return NULL;
}

/* ---- the whole ---- */

/* KiB of this process's own memory; the devices' memory is shared memory, which does not count.  A sanitizer holds back
 * what was freed, so there only what malloc has handed out counts. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static long
host_kib(void) {
    return (long)(__sanitizer_get_current_allocated_bytes() >> 10);
}
#else
static long
host_kib(void) {
    char line[256];
    long kib = -1;
    FILE *file = fopen("/proc/self/status", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "RssAnon: %ld", &kib) == 1) {
            break;
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return kib;
}
#endif

static void
start(void) {
    char capacity[40];
    (void)snprintf(capacity, sizeof capacity, "%zu", device_bytes);
    (void)setenv("PYALLOC_HOSTCUDA_MEMORY", capacity, 1);
    (void)setenv("PYALLOC_HOSTCUDA_DEVICES", "2", 1);
    (void)setenv("PYALLOC_HOSTCUDA_EVENT_DELAY", "5", 1);
    driver_load();
    struct pya_options options;
    struct pya_hooks hooks = {.open_device = soak_open};
    pya_options_init(&options);
    CHECK_OK(pya_heap_create(&options, &hooks, &soak.heap));
    for (int d = 0; d < N_DEVICES; d++) {
        pya_dptr ptr;
        void *context;
        CHECK_OK(pya_alloc(soak.heap, d, 512, 0, &ptr));
        CHECK_OK(pya_free(soak.heap, ptr));
        CHECK_OK(soak.driver.retain(&context, d));
        CHECK_OK(soak.driver.set_device(context));
        for (int s = 0; s < N_STREAMS; s++) {
            CHECK_OK(soak.driver.stream_create(&soak.streams[d][s], 1));
        }
    }
    for (size_t i = 0; i < N_SHELF; i++) {
        pthread_mutex_init(&soak.locks[i], NULL);
    }
    pthread_mutex_init(&soak.fault_lock, NULL);
    atomic_store(&soak.next_fault, soak.driver.calls(NULL) + CALLS_PER_FAULT);
}

static void
finish(void) {
    uint64_t seed = 1;
    soak.driver.fail_nth(0, NULL, 0);
    for (size_t i = 0; i < N_SHELF; i++) {
        item_drop(&soak.shelf[i], &seed);
    }
    CHECK_OK(pya_empty_cache(soak.heap, -1));
    for (int d = 0; d < N_DEVICES; d++) {
        CHECK_EQ(pya_heap_check(soak.heap, d), 0);
        CHECK_EQ(soak.driver.used_bytes(d), 0);
        CHECK_EQ(pya_pool_list(soak.heap, d, NULL, 0), 0);
    }
    CHECK_EQ(soak.driver.live("handles"), 0);
    CHECK_EQ(soak.driver.live("mappings"), 0);
    CHECK_EQ(soak.driver.live("plain"), 0);
    pya_heap_destroy(soak.heap);
    /* An event or a range whose destruction was made to fail is lost: no more of them than faults, and no memory. */
    uint64_t n_lost = soak.driver.live("events") + soak.driver.live("reservations");
    CHECK(n_lost <= atomic_load(&soak.n_faults));
    printf("lost to failed destructions: %" PRIu64 " events and address ranges\n", n_lost);
}

int
main(int argc, char **argv) {
    double seconds = argc > 1 ? strtod(argv[1], NULL) : 10;
    pthread_t threads[N_THREADS];
    long kib[N_SAMPLES];
    if (argc > 2) {
        (void)setenv("PYA_TEST_SEED", argv[2], 1);
    }
    start();
    for (uintptr_t i = 0; i < N_THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, thread_run, (void *)i), 0);
    }
    for (int i = 0; i < N_SAMPLES && check_failures == 0; i++) {
        (void)usleep((useconds_t)(seconds * 1e6 / N_SAMPLES));
        kib[i] = host_kib();
        for (int d = 0; d < N_DEVICES; d++) {
            CHECK_EQ(pya_heap_check(soak.heap, d), 0);
        }
        printf(
            "%6.0f s: %lu blocks, %lu MiB checked, %lu out of memory, %lu failed calls seen, %lu faults, host %ld KiB\n",
            (i + 1) * seconds / N_SAMPLES, atomic_load(&soak.n_allocs),
            atomic_load(&soak.n_bytes) >> 20, atomic_load(&soak.n_ooms),
            atomic_load(&soak.n_failed), atomic_load(&soak.n_faults), kib[i]);
        fflush(stdout);
    }
    atomic_store(&soak.is_over, true);
    for (int i = 0; i < N_THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    finish();
    CHECK(atomic_load(&soak.n_allocs) > 100 && atomic_load(&soak.n_faults) > 0);
    if (check_failures == 0) { /* flat: in the second half only malloc's slack grows */
        long middle = kib[N_SAMPLES / 2], last = kib[N_SAMPLES - 1];
        printf("host memory: %ld KiB in the middle, %ld KiB at the end\n", middle, last);
        CHECK(last <= middle + middle / 5 + 4096);
    }
    printf("seed %" PRIu64 ": %lu checks, %lu failed\n", check_seed(), check_count, check_failures);
    return check_failures != 0;
}
