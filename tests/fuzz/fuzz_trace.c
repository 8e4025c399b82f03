/* Everything that reads trace files: the reader, the scan, programs and their replay.
 *
 * If the first byte is even, the rest is a file.  If it is odd, the rest is chunks: two bytes of length, one that says
 * what to corrupt, and the payload.  Headers, event counts and checksums are generated, so that mutations get past the
 * checksum. */
#include <sys/mman.h>
#include <unistd.h>

#include "fault.h"
#include "fuzz.h"
#include "replay/replay.h"
#include "replay/scan.h"
#include "replay/trace_format.h"

enum { FILE_ROOM = 1 << 18, MAX_OPS_REPLAYED = 400, MAX_BLOCK_PAGES = 512 };

struct file {
    uint8_t bytes[FILE_ROOM];
    size_t n;
};

/* ---- making a file ---- */

static void
file_add(struct file *file, const void *bytes, size_t n) {
    REQUIRE(file->n + n <= FILE_ROOM);
    if (n > 0) {
        memcpy(file->bytes + file->n, bytes, n);
    }
    file->n += n;
}

static void
file_header(struct file *file) {
    uint8_t header[TRACE_HEADER_BYTES] = {0};
    trace_put64(header, TRACE_MAGIC);
    trace_put32(header + 8, PYA_TRACE_VERSION);
    file_add(file, header, sizeof header);
}

static void
file_chunk(
    struct file *file, const uint8_t *payload, size_t n, uint32_t n_events, uint64_t n_before) {
    uint8_t header[TRACE_CHUNK_HEADER_BYTES] = {0};
    trace_put32(header, TRACE_CHUNK_MAGIC);
    trace_put32(header + 4, (uint32_t)n);
    trace_put32(header + 8, n_events);
    trace_put64(header + 16, n_before * 1000);
    trace_put64(header + 24, n_before);
    trace_put32(header + 12, trace_chunk_crc(header, payload, n));
    file_add(file, header, sizeof header);
    file_add(file, payload, n);
}

/* Counts the events in a payload, as far as it can be read. */
static uint32_t
count_events(const uint8_t *at, const uint8_t *end) {
    uint32_t n = 0;
    while (at != NULL && at < end) {
        uint8_t head = *at++;
        int kind = head & TRACE_KIND_MASK;
        uint64_t value = 0;
        if (head == TRACE_DEFINE_STRING) {
            at = varint_get(at, end, &value);
            at = at == NULL || value > (uint64_t)(end - at) ? NULL : at + value;
            continue;
        }
        int n_fields = 4;
        if (head != TRACE_DEFINE_STACK) {
            int fields = trace_fields(kind);
            if (fields < 0) {
                break;
            }
            n_fields = 1 + __builtin_popcount(head & 0xE0U) + __builtin_popcount((unsigned)fields);
            n++;
        }
        for (int i = 0; i < n_fields && at != NULL; i++) {
            at = varint_get(at, end, &value);
        }
    }
    return n;
}

static void
file_make(struct file *file, const uint8_t *data, size_t n) {
    struct fuzz_input in = {data, data + n};
    uint64_t n_events = 0;
    file->n = 0;
    if (fuzz_byte(&in) % 2 == 0) {
        file_add(file, in.at, fuzz_left(&in) < FILE_ROOM ? fuzz_left(&in) : FILE_ROOM);
        return;
    }
    file_header(file);
    while (fuzz_left(&in) > 3 && file->n < FILE_ROOM / 2) {
        size_t n_chunk = (size_t)fuzz_number(&in, 2);
        uint8_t spoil = fuzz_byte(&in);
        n_chunk = n_chunk < fuzz_left(&in) ? n_chunk : fuzz_left(&in);
        uint32_t n_here = count_events(in.at, in.at + n_chunk);
        if (n_chunk == 0) {
            continue;
        }
        file_chunk(file, in.at, n_chunk, n_here + (spoil == 1), n_events + (spoil == 2));
        if (spoil == 3) {
            file->bytes[file->n - 1] ^= 1;
        }
        in.at += n_chunk;
        n_events += n_here;
    }
    file_chunk(file, NULL, 0, 0, n_events);
    file->n -= fuzz_left(&in); /* 0 to 3 bytes: cut off */
}

/* ---- reading it ---- */

/* A number that depends on everything that was read. */
static pya_status
read_all(struct pya_trace_reader *reader, uint64_t *out) {
    uint64_t sum = 14695981039346656037U;
    for (;;) {
        struct pya_trace_event e;
        bool more = false;
        pya_status st = pya_trace_next(reader, &e, &more);
        if (st != PYA_OK || !more) {
            *out = sum;
            return st;
        }
        REQUIRE(pya_trace_kind_name(e.kind) != NULL && e.device >= 0 && e.device < PYA_MAX_DEVICES);
        const char *text = pya_trace_text(reader, e.text);
        REQUIRE((text == NULL) == (e.text == 0));
        uint32_t stack = e.stack;
        for (struct pya_trace_frame frame; stack != 0; stack = frame.parent) {
            REQUIRE(pya_trace_frame(reader, stack, &frame) && frame.parent < stack);
            sum = sum * 31 + frame.line +
                  (frame.name == 0 ? 0 : strlen(pya_trace_text(reader, frame.name)));
        }
        sum = (sum ^ (uint64_t)e.kind ^ e.addr ^ e.bytes ^ e.arg ^ e.time_ns) * 1099511628211U;
        sum += text == NULL ? 0 : strlen(text);
    }
}

static pya_status
read_file(const char *path, uint64_t *out) {
    struct pya_trace_reader *reader;
    *out = 0;
    pya_status st = pya_trace_open(path, &reader);
    if (st != PYA_OK) {
        REQUIRE(st == PYA_E_CORRUPT);
        return st;
    }
    uint64_t at, total;
    st = read_all(reader, out);
    REQUIRE(st == PYA_OK || st == PYA_E_CORRUPT);
    REQUIRE((st == PYA_OK) == (pya_trace_error(reader)[0] == '\0'));
    pya_trace_position(reader, &at, &total);
    REQUIRE(at <= total && (st == PYA_OK || !pya_trace_is_complete(reader)));
    pya_trace_reader_destroy(reader);
    return st;
}

static bool
read_twice(const char *path) {
    uint64_t first, second;
    pya_status st = read_file(path, &first);
    REQUIRE_EQ(read_file(path, &second), st);
    REQUIRE(first == second);
    return st == PYA_OK;
}

static bool
scan_progress(void *arg, uint64_t done, uint64_t all) {
    (void)arg;
    REQUIRE(done <= all);
    return true;
}

static void
scan(const char *path, size_t n_bins, int device, bool is_good) {
    uint64_t moments[] = {0, 1, 3, 3, 17, 1000};
    struct pya_scan_settings settings = {
        .device = device,
        .n_bins = n_bins,
        .moments = moments,
        .n_moments = 6,
        .ranges = &(struct pya_scan_range){moments[0], moments[5]},
        .n_ranges = 1,
        .short_life = n_bins % 8,
        .progress = scan_progress};
    struct pya_scan *scan = NULL;
    size_t n;
    pya_status st = pya_scan_run(path, &settings, &scan);
    REQUIRE((st == PYA_OK) == is_good);
    if (scan == NULL) {
        return;
    }
    const struct pya_scan_totals *totals = pya_scan_totals(scan);
    REQUIRE(totals->end_bytes <= totals->peak_bytes && totals->n_live <= totals->n_allocs);
    for (size_t i = 0; i < PYA_MAX_DEVICES; i++) {
        REQUIRE(totals->device_peak_lasting[i] <= totals->device_peak[i]);
    }
    (void)pya_scan_bins(scan, &n);
    REQUIRE(n <= 2 * n_bins);
    const struct pya_scan_moment *moment = pya_scan_moments(scan, &n);
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < moment[i].n_blocks; k++) {
            REQUIRE(moment[i].blocks[k].alloc_event < moment[i].event);
        }
    }
    const struct pya_scan_phase *phases = pya_scan_phases(scan, &n);
    for (size_t i = 0; i < n; i++) {
        REQUIRE(phases[i].begin <= phases[i].end && phases[i].begin_bytes <= phases[i].peak_bytes);
    }
    (void)pya_scan_steps(scan, &n);
    (void)pya_scan_stacks(scan, &n);
    (void)pya_scan_ooms(scan, &n);
    (void)pya_scan_notes(scan, &n);
    REQUIRE(st == PYA_OK || pya_scan_error(scan)[0] != '\0');
    pya_scan_destroy(scan);
}

/* Small programs on each policy: whatever the program, each byte has one owner. */
static void
replay(const char *path, uint8_t how) {
    char message[200] = "";
    struct pya_program *program;
    pya_status st = pya_program_load(path, NULL, &program, message, sizeof message);
    if (st != PYA_OK) {
        REQUIRE(message[0] != '\0');
        return;
    }
    struct pya_program_info info;
    pya_program_query(program, &info);
    REQUIRE(info.n_allocs <= info.n_events + 1 && info.n_streams > 0);
    if (info.n_ops <= MAX_OPS_REPLAYED && info.peak_live_bytes <= MAX_BLOCK_PAGES * PYA_PAGE) {
        struct pya_replay_settings settings = {
            .policy = (enum pya_replay_policy)(how % PYA_REPLAY_N_POLICIES),
            .capacity_bytes = (how & 0x40) != 0 ? (size_t)64 << 20 : 0,
            .work_delay = how >> 4 & 3,
            .no_vmm = (how & 0x80) != 0,
            .check = true,
        };
        struct pya_replay_result result;
        pya_options_init(&settings.options);
        st = pya_replay_run(program, &settings, &result);
        REQUIRE(st == PYA_OK || st == PYA_E_NOTSUP || st == PYA_E_INVAL);
        REQUIRE(st != PYA_OK || result.n_violations == 0);
    }
    pya_program_destroy(program);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static struct file file;
    size_t n_host = fault_live();
    char path[40];
    int fd = memfd_create("trace", MFD_CLOEXEC);
    REQUIRE(fd >= 0);
    file_make(&file, data, n);
    REQUIRE(write(fd, file.bytes, file.n) == (ssize_t)file.n);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    uint8_t how = n == 0 ? 0 : data[n - 1];
    bool is_good = read_twice(path);
    scan(path, 2 + how % 40, how % 4 == 0 ? -1 : how % 4 - 1, is_good);
    replay(path, how);
    (void)close(fd);
    REQUIRE_EQ(fault_live(), n_host);
    return 0;
}
