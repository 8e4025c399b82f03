#pragma once
// Part of emulate.cpp: finds numbers that two threads of a block, or two blocks of a launch, use without a barrier in
// between, one of them writing.  Built with -DPYA_RACES and -fsanitize=thread, whose calls for each read and write come
// here instead of to that sanitizer's library.  Warp shuffles and tensor-core instructions do not order memory.
#include "emulate_threads.hpp"

#include <string>
#include <unordered_map>

#ifdef PYA_RACES

enum { NUMBER = 4, MOST_SHARED = 256 << 10 };

// Who used a number: threads of the running block, with its barrier count then, and blocks of the launch.
struct race_cell {
    unsigned block, launch;
    bool is_written, is_read, is_read_by_others;
    unsigned writer, written_at, reader, read_at;
    bool by_blocks_written, by_blocks_read, by_many_blocks_read;
    unsigned writing_block, reading_block;
};
static race_cell of_dynamic[MOST_SHARED]; // where a number begins; most accesses are here
static std::unordered_map<const char *, race_cell> of_others;
static std::unordered_map<std::string, std::string> races; // what, and who
static const char *racing_kernel;
static unsigned racing_block, launches;

// Threads that write the same number do no harm: its value, until the second has written.
static struct {
    const char *at;
    char was[NUMBER];
    int bytes;
    unsigned one, other;
} pending;

// Where compilers put a template's shared memory, which has no section of its own.
extern "C" char __bss_start[] __attribute__((visibility("hidden")));
extern "C" char _end[] __attribute__((visibility("hidden")));

static RACE_UNSEEN bool
race_is_shared(const char *at) {
    const char *const room = (const char *)dynamic;
    return (at >= room && at < room + dynamic_bytes) ||
           (at >= __start_emu_shared && at < __stop_emu_shared) || (at >= __bss_start && at < _end);
}

static race_cell *
race_elsewhere(const char *at) {
    return &of_others.emplace(at, race_cell{racing_block, launches}).first->second;
}

static RACE_UNSEEN race_cell *
race_cell_of(const char *at) {
    const char *const room = (const char *)dynamic;
    const bool is_dynamic = at >= room && at < room + dynamic_bytes;
    return is_dynamic ? of_dynamic + (at - room) : race_elsewhere(at);
}

// The first of each kind.
static void
race_found(const char *what, bool is_shared, unsigned one, unsigned other) {
    const std::string kind = std::string(racing_kernel) + ": " + what +
                             (is_shared ? " in shared memory" : " in global memory");
    races.emplace(kind, ": " + std::to_string(one) + " and " + std::to_string(other));
}

static void
race_settle() {
    if (pending.at != nullptr && memcmp(pending.at, pending.was, (size_t)pending.bytes) != 0) {
        race_found("threads write", race_is_shared(pending.at), pending.one, pending.other);
    }
    pending.at = nullptr;
}

static RACE_UNSEEN void
race_write(race_cell *c, const char *at, int bytes) {
    const unsigned now = barriers_passed;
    if (c->is_written && c->written_at == now && c->writer != current) {
        pending.at = at;
        pending.bytes = bytes;
        memcpy(pending.was, at, (size_t)bytes);
        pending.one = c->writer;
        pending.other = current;
    }
    if (c->is_read && c->read_at == now && (c->is_read_by_others || c->reader != current)) {
        race_found("a thread writes what another read", race_is_shared(at), current, c->reader);
    }
    if ((c->by_blocks_written && c->writing_block != racing_block) ||
        (c->by_blocks_read && (c->by_many_blocks_read || c->reading_block != racing_block))) {
        race_found("a block writes what another used", false, racing_block, c->writing_block);
    }
    c->is_written = c->by_blocks_written = true;
    c->writer = current;
    c->written_at = now;
    c->writing_block = racing_block;
}

static RACE_UNSEEN void
race_read(race_cell *c, const char *at) {
    const unsigned now = barriers_passed;
    if (c->is_written && c->written_at == now && c->writer != current) {
        race_found("a thread reads what another wrote", race_is_shared(at), current, c->writer);
    }
    if (c->by_blocks_written && c->writing_block != racing_block) {
        race_found("a block reads what another wrote", false, racing_block, c->writing_block);
    }
    const bool goes_on = c->is_read && c->read_at == now;
    c->is_read_by_others = goes_on && (c->is_read_by_others || c->reader != current);
    c->by_many_blocks_read |= c->by_blocks_read && c->reading_block != racing_block;
    c->is_read = c->by_blocks_read = true;
    c->reader = goes_on ? c->reader : current;
    c->read_at = now;
    c->reading_block = racing_block;
}

// Shared memory begins anew with each block, the rest with each launch.
static RACE_UNSEEN void
race_enter_block(race_cell *c, bool is_shared) {
    if (is_shared) {
        *c = {};
    }
    c->is_written = c->is_read = false;
    c->block = racing_block;
    c->launch = launches;
}

static RACE_UNSEEN void
race_look(const void *first, int bytes, bool writes) {
    const char *const p = (const char *)first;
    if (pending.at != nullptr) {
        race_settle();
    }
    if (p >= stack_now && p < stack_now + STACK) {
        return;
    }
    const int step = bytes < NUMBER ? 1 : NUMBER;
    for (int i = 0; i < bytes; i += step) {
        race_cell *const c = race_cell_of(p + i);
        if (c->block != racing_block || c->launch != launches) {
            race_enter_block(c, race_is_shared(p + i));
        }
        if (writes) {
            race_write(c, p + i, step);
        } else {
            race_read(c, p + i);
        }
    }
}

static void
race_begin(const char *kernel) {
    racing_kernel = kernel;
    launches++;
    of_others.clear();
}

static void
race_enter(unsigned block) {
    racing_block = block;
}

// Returns what was found, a line each, and forgets it.
extern "C" const char *
emu_races() {
    static std::string text;
    text.clear();
    for (const auto &race : races) {
        text += race.first + race.second + "\n";
    }
    races.clear();
    return text.c_str();
}

static RACE_UNSEEN void
race_hook(const void *at, int bytes, bool writes) {
    if (is_kernel) {
        const emulating here;
        race_look(at, bytes, writes);
    }
}

#define RACE_HOOKS(bytes)                                                                          \
    extern "C" void __tsan_read##bytes(void *at) {                                                 \
        race_hook(at, bytes, false);                                                               \
    }                                                                                              \
    extern "C" void __tsan_write##bytes(void *at) {                                                \
        race_hook(at, bytes, true);                                                                \
    }                                                                                              \
    extern "C" void __tsan_unaligned_read##bytes(void *at) {                                       \
        race_hook(at, bytes, false);                                                               \
    }                                                                                              \
    extern "C" void __tsan_unaligned_write##bytes(void *at) {                                      \
        race_hook(at, bytes, true);                                                                \
    }
RACE_HOOKS(1)
RACE_HOOKS(2)
RACE_HOOKS(4)
RACE_HOOKS(8)
RACE_HOOKS(16)

extern "C" void
__tsan_read_range(void *at, unsigned long bytes) {
    race_hook(at, (int)bytes, false);
}

extern "C" void
__tsan_write_range(void *at, unsigned long bytes) {
    race_hook(at, (int)bytes, true);
}

extern "C" void *
__tsan_memcpy(void *to, const void *from, unsigned long bytes) {
    race_hook(from, (int)bytes, false);
    race_hook(to, (int)bytes, true);
    return __builtin_memcpy(to, from, bytes);
}

extern "C" void *
__tsan_memset(void *to, int value, unsigned long bytes) {
    race_hook(to, (int)bytes, true);
    return __builtin_memset(to, value, bytes);
}

// Nothing in a kernel is atomic, and calls and returns do not matter.
extern "C" RACE_UNSEEN unsigned char
__tsan_atomic8_load(const volatile unsigned char *at, int) {
    return *at;
}

extern "C" RACE_UNSEEN void
__tsan_func_entry(void *) {}

extern "C" RACE_UNSEEN void
__tsan_func_exit() {}

extern "C" RACE_UNSEEN void
__tsan_init() {}

#else

static void
race_look(const void *, int, bool) {}

static void
race_begin(const char *) {}

static void
race_enter(unsigned) {}

static void
race_settle() {}

#endif
