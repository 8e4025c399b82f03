/* Settings are read from the environment when the first entry point is called, so that a launcher can set them without code.
 * The control functions (control.c) change them later. */

#define _GNU_SOURCE
#include "state.h"

#include "call.h"
#include "hostcuda.h"

#include <ctype.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define DEFAULT_CAPACITY ((size_t)80 << 30)
#define FILE_LIMIT ((uint64_t)1 << 46)

static pthread_mutex_t state_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t state_once = PTHREAD_ONCE_INIT;
static pthread_once_t visible_once = PTHREAD_ONCE_INIT;
static atomic_bool state_used;    /* an entry point was called in this process */
static atomic_bool state_foreign; /* this is a child forked after that */

static struct pya_hc_device devices[PYA_HC_MAX_DEVICES];
static int n_physical = 1;
static int n_devices = 1;
static struct pya_hc_device *visible[PYA_HC_MAX_DEVICES]; /* by ordinal */
static _Atomic uint64_t event_delay;

static _Thread_local int current = -1;

void
pya_hc_lock(void) {
    pthread_mutex_lock(&state_lock);
}

void
pya_hc_unlock(void) {
    pthread_mutex_unlock(&state_lock);
}

static void
state_after_fork(void) {
    if (atomic_load(&state_used)) {
        atomic_store(&state_foreign, true);
    }
}

static void
state_complain(const char *name, const char *text, const char *form) {
    (void)fprintf(
        stderr, "pyalloc hostcuda: %s=%s is not understood and is ignored (expected %s)\n", name,
        text, form);
}

/* "24GB", "512MiB", "1073741824"; powers of 1024, as on a card's label.  0 if malformed. */
static size_t
state_parse_bytes(const char *text, const char **rest) {
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || !(value > 0) || value > 1e18) {
        return 0;
    }
    double unit = 1;
    static const char letters[] = "KMGT";
    const char *letter = *end == '\0' ? NULL : strchr(letters, toupper((unsigned char)*end));
    if (letter != NULL) {
        unit = (double)((uint64_t)1 << (10 * (letter - letters + 1)));
        end++;
        end += strncasecmp(end, "iB", 2) == 0 ? 2 : strncasecmp(end, "B", 1) == 0;
    }
    *rest = end;
    double bytes = value * unit;
    return bytes < 1e18 ? (size_t)bytes : 0;
}

/* One size for all devices, or a list (the last one repeats). */
static void
state_read_memory(void) {
    const char *name = "PYALLOC_HOSTCUDA_MEMORY";
    const char *text = getenv(name);
    const char *at = text;
    size_t capacity = DEFAULT_CAPACITY;
    for (int i = 0; i < PYA_HC_MAX_DEVICES; i++) {
        size_t bytes = at == NULL || *at == '\0' ? capacity : state_parse_bytes(at, &at);
        if (bytes == 0 || (at != NULL && *at != '\0' && *at != ',')) {
            state_complain(name, text, "a size such as 24GB, or one per device: 24GB,80GB");
            at = NULL;
        } else {
            capacity = bytes;
            at += at != NULL && *at == ',';
        }
        devices[i].ordinal = -1;
        devices[i].physical = i;
        devices[i].capacity = capacity;
        devices[i].fd = -1;
        devices[i].file.limit = FILE_LIMIT;
    }
}

/* torch counts devices with NVML, which cannot name one that does not exist. */
static void
state_tell_absent(unsigned long n) {
    static bool told;
    if (!told) {
        told = true;
        (void)fprintf(
            stderr,
            "pyalloc hostcuda: CUDA_VISIBLE_DEVICES names device %lu, but there are %d: another one stands in for it, and "
            "torch.cuda.device_count() does not count it (pyalloc dryrun --devices %lu)\n",
            n, n_physical, n + 1);
    }
}

/* The device that an entry of CUDA_VISIBLE_DEVICES means.  If it is not a number, or there is no such device, or it is
 * taken, it is the first device not yet taken: programs that expect a larger machine run too. */
static struct pya_hc_device *
state_named(const char *entry) {
    char *end = NULL;
    unsigned long n = strtoul(entry, &end, 10);
    bool is_number = end != entry && (*end == ',' || *end == '\0');
    if (is_number && n >= (unsigned long)n_physical) {
        state_tell_absent(n);
    }
    if (!is_number || n >= (unsigned long)n_physical || devices[n].ordinal >= 0) {
        for (n = 0; devices[n].ordinal >= 0; n++) {
        }
    }
    return &devices[n];
}

/* Called when CUDA is first used. */
static void
state_read_visible(void) {
    const char *at = getenv("CUDA_VISIBLE_DEVICES");
    const int most = pya_hc_n_physical();
    for (n_devices = 0; n_devices < most; n_devices++) {
        if (at != NULL && (*at == '\0' || *at == '-')) {
            return;
        }
        visible[n_devices] = at == NULL ? &devices[n_devices] : state_named(at);
        visible[n_devices]->ordinal = n_devices;
        at += at == NULL ? 0 : strcspn(at, ",");
        at += at != NULL && *at == ',';
    }
}

/* Reads a whole number from 0 to `most`; *out is unchanged if the variable is not set. */
static void
state_read_number(const char *name, uint64_t most, uint64_t *out) {
    const char *text = getenv(name);
    if (text == NULL) {
        return;
    }
    char *end = NULL;
    unsigned long long n = strtoull(text, &end, 10);
    if (end == text || *end != '\0' || *text == '-' || n > most) {
        state_complain(name, text, "a whole number in range");
    } else {
        *out = n;
    }
}

static void
state_init(void) {
    state_read_memory();
    uint64_t n = 1;
    state_read_number("PYALLOC_HOSTCUDA_DEVICES", PYA_HC_MAX_DEVICES, &n);
    n_physical = (int)n;
    uint64_t delay = 0;
    state_read_number("PYALLOC_HOSTCUDA_EVENT_DELAY", UINT64_MAX, &delay);
    atomic_store(&event_delay, delay);
    const char *text = getenv("PYALLOC_HOSTCUDA_FAIL");
    if (text != NULL && !pya_hc_fail_parse(text)) {
        state_complain(
            "PYALLOC_HOSTCUDA_FAIL", text, "n, n:function or n:function:error; n may be every");
    }
    (void)pthread_atfork(pya_hc_lock, pya_hc_unlock, pya_hc_unlock);
    (void)pthread_atfork(NULL, NULL, state_after_fork);
}

int
pya_hc_state_use(void) {
    (void)pthread_once(&state_once, state_init);
    if (atomic_load(&state_foreign)) {
        return CU_NOT_INITIALIZED;
    }
    if (!atomic_load_explicit(&state_used, memory_order_relaxed)) {
        atomic_store(&state_used, true);
    }
    return CU_OK;
}

bool
pya_hc_state_is_foreign(void) {
    return atomic_load(&state_foreign);
}

int
pya_hc_n_physical(void) {
    (void)pthread_once(&state_once, state_init);
    return n_physical;
}

int
pya_hc_n_devices(void) {
    (void)pthread_once(&visible_once, state_read_visible);
    return n_devices;
}

struct pya_hc_device *
pya_hc_physical(int physical) {
    return physical >= 0 && physical < pya_hc_n_physical() ? &devices[physical] : NULL;
}

struct pya_hc_device *
pya_hc_device(int ordinal) {
    return ordinal >= 0 && ordinal < pya_hc_n_devices() ? visible[ordinal] : NULL;
}

uint64_t
pya_hc_event_delay(void) {
    return atomic_load_explicit(&event_delay, memory_order_relaxed);
}

int
pya_hc_current(void) {
    return current;
}

void
pya_hc_set_current(int ordinal) {
    current = ordinal;
}

struct pya_hc_device *
pya_hc_current_device(void) {
    struct pya_hc_device *dev = pya_hc_device(current < 0 ? 0 : current);
    if (dev != NULL) {
        current = dev->ordinal;
        atomic_store(&dev->active, true);
    }
    return dev;
}

int
pya_hc_charge_locked(struct pya_hc_device *dev, size_t bytes) {
    size_t capacity = dev->capacity;
    if (bytes > capacity || dev->used > capacity - bytes) {
        return CU_OUT_OF_MEMORY;
    }
    dev->used += bytes;
    if (dev->used > dev->peak) {
        dev->peak = dev->used;
    }
    return CU_OK;
}

size_t
pya_hc_free_locked(const struct pya_hc_device *dev) {
    size_t capacity = dev->capacity;
    return dev->used < capacity ? capacity - dev->used : 0;
}

void
pya_hc_uncharge_locked(struct pya_hc_device *dev, size_t bytes) {
    dev->used -= bytes;
}

/* Controls that only change settings. */

int
pya_hostcuda_set_capacity(int device, size_t bytes) {
    struct pya_hc_device *dev = pya_hc_device(device);
    if (dev == NULL) {
        return CU_INVALID_DEVICE;
    }
    pya_hc_lock();
    dev->capacity = bytes;
    pya_hc_unlock();
    return CU_OK;
}

void
pya_hostcuda_set_event_delay(uint64_t n_launches) {
    (void)pya_hc_n_physical();
    atomic_store(&event_delay, n_launches);
}
