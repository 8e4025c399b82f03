/* The policy: when no free run fits, is new memory better or a second mapping of what there is?  Floor 10.
 *
 * It decides and keeps the accounts; the ladder does. */
#pragma once

#include "mosaic.h"

#ifdef __cplusplus
extern "C" {
#endif

enum pya_plan {
    PYA_PLAN_GROW,   /* new pages where they extend a free run best */
    PYA_PLAN_STITCH, /* map free pages side by side at a fresh address */
    PYA_PLAN_MOVE,   /* give free pages a new home at the end of the arena */
};

/* Could anything but growing be better for `bytes` that it would serve with n_pages new pages?  *mosaic: where it could, what
 * they would be stitched of; to know takes a look at all that is free. */
bool pya_policy_may_save(
    const struct pya_arena *arena, size_t bytes, size_t n_pages, struct pya_mosaic *mosaic);
/* What is asked for, and what it would take. */
struct pya_plea {
    size_t bytes;
    size_t n;         /* new pages, if memory grows */
    size_t n_missing; /* and if free pages are stitched, or added to a range: fewer */
    size_t n_there;   /* pages of that range; 0: there is none */
    size_t n_handles; /* to be mapped for it, at most */
};

/* For a request of which pya_policy_may_save() says so.  May reset the arena's account. */
enum pya_plan pya_policy_plan(struct pya_arena *arena, const struct pya_plea *plea);
/* Was each of the last large requests a little larger than the one before, as when one tensor grows? */
bool pya_policy_is_growing(const struct pya_arena *arena);
/* How many pages a growth that needs n_pages for a request should make at least; may be 0 for a pool that has little. */
size_t pya_policy_step(const struct pya_arena *arena, size_t bytes, size_t n_pages);
/* So many handles were mapped for a stitch or a move. */
void pya_policy_pay(struct pya_arena *arena, size_t n_handles);
/* May up to n_pages come from other streams once more?  Streams that take them from each other in turn pay
 * every time; at some point pages of their own are cheaper. */
bool pya_policy_may_transfer(struct pya_arena *arena, size_t n_pages);
void pya_policy_pay_transfer(struct pya_arena *arena, size_t n_handles);

#ifdef __cplusplus
}
#endif
