/* The trace ring.  Floor 2. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "history.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef PYA_TEST_TINY
enum { HISTORY_FIRST_ROOM = 2 };
#else
enum { HISTORY_FIRST_ROOM = 1024 };
#endif

const char *
pya_action_name(enum pya_action action) {
    static const char *const names[] = {
#define X(name, text) text,
        PYA_ACTION_TABLE(X)
#undef X
    };
    return (unsigned)action < PYA_N_ACTIONS ? names[action] : "unknown";
}

/* Makes room for one more entry.  False: the ring is full, or host memory is short. */
static bool
history_grow(struct pya_history *history) {
    if (history->n_items < history->n_room) {
        return true;
    }
    size_t n_room =
        history->n_room * 2 > HISTORY_FIRST_ROOM ? history->n_room * 2 : (size_t)HISTORY_FIRST_ROOM;
    n_room = n_room < history->max_entries ? n_room : history->max_entries;
    if (n_room <= history->n_items) {
        return false;
    }
    struct pya_entry *items = realloc(history->items, n_room * sizeof *items);
    if (items == NULL) {
        return false;
    }
    history->items = items;
    history->n_room = n_room;
    return true;
}

static void
history_drop(struct pya_history *history, struct pya_entry *entry) {
    if (entry->context != NULL) {
        history->owner.release(history->owner.arg, entry->context);
        entry->context = NULL;
    }
}

/* Queried once per thread: a system call for each entry would double its cost.  A forked child keeps its parent's
 * number, but no history is recorded there. */
static uint32_t
thread_number(void) {
    static _Thread_local uint32_t number;
    if (number == 0) {
        number = (uint32_t)syscall(SYS_gettid);
    }
    return number;
}

void
pya_history_add(
    struct pya_history *history, enum pya_action action, pya_dptr addr, size_t bytes,
    struct pya_place place, void *context) {
    if ((history->skip_mask >> action) & 1) {
        return;
    }
    struct pya_entry *entry;
    /* Only a ring that never wrapped may grow: its entries are in order from 0. */
    if (history->first == 0 && history_grow(history)) {
        entry = &history->items[history->n_items++];
    } else if (history->n_items > 0) {
        history->n_lost++;
        entry = &history->items[history->first];
        history->first = (history->first + 1) % history->n_items;
        history_drop(history, entry);
    } else {
        history->n_lost++;
        return;
    }
    context = context != NULL ? context : history->current;
    if (context != NULL) {
        history->owner.retain(history->owner.arg, context);
    }
    *entry = (struct pya_entry){
        .addr = addr,
        .bytes = bytes,
        .place = place,
        .time_ns = pya_device_clock_ns(history->dev),
        .context = context,
        .thread = thread_number(),
        .action = (uint8_t)action,
        .has_stack = history->level >= PYA_RECORD_ALLOC,
    };
}

void *
pya_context_of_free(const struct pya_context_owner *owner, void *here, void *allocation) {
    if (allocation != NULL && owner->of_free != NULL) {
        return owner->of_free(owner->arg, here, allocation);
    }
    if (allocation != NULL && here == NULL) {
        owner->retain(owner->arg, allocation);
        return allocation;
    }
    return here;
}

void
pya_history_move(struct pya_history *history, struct pya_history_part *out) {
    *out = (struct pya_history_part){
        .items = history->items,
        .n = history->n_items,
        .first = history->first,
        .n_lost = history->n_lost,
    };
    history->items = NULL;
    history->n_items = 0;
    history->n_room = 0;
    history->first = 0;
    history->n_lost = 0;
}

void
pya_history_clear(struct pya_history *history) {
    for (size_t i = 0; i < history->n_items; i++) {
        history_drop(history, &history->items[i]);
    }
    history->n_items = 0;
    history->first = 0;
    history->n_lost = 0;
}

/* Puts the entries in order from 0 first; only then may the ring grow. */
void
pya_history_resize(struct pya_history *history, size_t max_entries) {
    size_t n = history->n_items < max_entries ? history->n_items : max_entries;
    struct pya_entry *items = n == 0 ? NULL : malloc(n * sizeof *items);
    size_t n_old = history->n_items - (items == NULL ? 0 : n);
    for (size_t i = 0; i < history->n_items; i++) {
        struct pya_entry *entry = &history->items[(history->first + i) % history->n_items];
        if (i < n_old) {
            history_drop(history, entry);
        } else {
            items[i - n_old] = *entry;
        }
    }
    free(history->items);
    history->items = items;
    history->n_items -= n_old;
    history->n_room = history->n_items;
    history->first = 0;
    history->n_lost += n_old;
    history->max_entries = max_entries;
}

void
pya_history_fini(struct pya_history *history) {
    pya_history_clear(history);
    free(history->items);
    free(history);
}
