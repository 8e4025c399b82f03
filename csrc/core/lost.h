/* A card without its device, as in a forked child.  Floor 7. */
#pragma once

#include "card.h"

/* From now on calls of the device do nothing: the memory stays the parent's. */
void pya_card_lose_device(struct pya_card *card);
