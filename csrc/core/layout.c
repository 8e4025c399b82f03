/* Layouts: are they possible at all?  Floor 1. */
#include "layout.h"

static bool
is_large(const struct pya_layout_place *place) {
    return place->bytes >= PYA_REPEAT_FROM;
}

bool
pya_layout_measure(const struct pya_layout *layout, size_t *bytes) {
    size_t n_large = 0;
    uint64_t end = 0;
    for (size_t i = 0; i < layout->n; i++) {
        const struct pya_layout_place *place = &layout->places[i];
        n_large += is_large(place);
        if (place->bytes == 0 || place->bytes % PYA_ALIGN != 0 || place->bytes > PYA_REQUEST_MAX) {
            return false;
        }
        if (place->offset == PYA_LAYOUT_ANYWHERE) {
            continue;
        }
        if (place->offset % PYA_ALIGN != 0 || place->offset > PYA_REQUEST_MAX - place->bytes) {
            return false;
        }
        end = place->offset + place->bytes > end ? place->offset + place->bytes : end;
    }
    *bytes = (size_t)end;
    return layout->n_period <= layout->n && n_large <= PYA_LAYOUT_MOST &&
           layout->n - n_large <= PYA_LAYOUT_MOST;
}

bool
pya_layouts_are_sound(const struct pya_layout *first) {
    size_t bytes;
    for (const struct pya_layout *layout = first; layout != NULL; layout = layout->next) {
        if (!pya_layout_measure(layout, &bytes)) {
            return false;
        }
    }
    return true;
}

const struct pya_layout *
pya_layout_of(const struct pya_layout *first, int device) {
    const struct pya_layout *layout = first;
    while (layout != NULL && layout->device != PYA_LAYOUT_EVERY_DEVICE &&
           layout->device != device) {
        layout = layout->next;
    }
    return layout;
}
