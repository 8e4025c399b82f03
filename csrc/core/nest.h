/* The nest: the idle range of a growing tensor, kept free for its next size.  Floor 7.
 *
 * A program that appends to a tensor makes the next one a little larger and drops the last one, whose idle range is
 * then extended.  That takes all of the range's bytes.  But what the program makes in between, such as the rows to
 * append, would come to lie in the range's pages, and then a new range is stitched each time.  So the range's free
 * bytes are hidden: they are in no index, until a request needs them that memory should not grow for.  Where that was
 * in vain several times in a row, few of the next ones are hidden. */
#pragma once

#include "stitch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns a STITCHED block's bytes home and frees its record.  If a tensor grows, its range becomes the nest. */
void pya_nest_give(struct pya_block *block);
/* Makes the hidden bytes free runs.  Call it where pya_card_unpark() is not enough: before memory is given back or
 * described, and when it is short. */
void pya_nest_open(struct pya_card *card);
/* Hides what is free of the nest again, after a request had to take some of it. */
void pya_nest_close(struct pya_card *card);

#ifdef __cplusplus
}
#endif
