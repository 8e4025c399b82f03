/* The policy: if no free run fits, is new memory better, or a second mapping of existing pages?  Floor 10.
 *
 * The policy decides and keeps the accounts; the ladder acts. */
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

/* Could anything be better than growing by n_pages for a request of `bytes`?  If so, *mosaic tells how the request
 * would be stitched; finding this out examines all free memory. */
bool pya_policy_may_save(
    const struct pya_arena *arena, size_t bytes, size_t n_pages, struct pya_mosaic *mosaic);
/* A request and what each way to serve it would take. */
struct pya_plea {
    size_t bytes;
    size_t n;         /* new pages, if memory grows */
    size_t n_missing; /* new pages, if pages are stitched or a range extended; fewer */
    size_t n_there;   /* pages of the range to extend; 0: there is none */
    size_t n_handles; /* handles to map for stitching, at most */
};

/* Decides on a request for which pya_policy_may_save() is true.  May reset the arena's account. */
enum pya_plan pya_policy_plan(struct pya_arena *arena, const struct pya_plea *plea);
/* Is so little unused that a growth by n_pages for a request of `bytes` is better than using the nest (nest.h)? */
bool pya_policy_spares_nest(const struct pya_card *card, size_t bytes, size_t n_pages);
/* How many pages a growth that needs n_pages should create at least.  May be 0 for a pool that has little. */
size_t pya_policy_step(const struct pya_arena *arena, size_t bytes, size_t n_pages);
/* Charges the mapping of n_handles for a stitch or a move. */
void pya_policy_pay(struct pya_arena *arena, size_t n_handles);
/* May up to n_pages be taken from other streams once more?  If streams take pages from each other in turn, they pay
 * every time; at some point new pages are cheaper. */
bool pya_policy_may_transfer(struct pya_arena *arena, size_t n_pages);
void pya_policy_pay_transfer(struct pya_arena *arena, size_t n_handles);

#ifdef __cplusplus
}
#endif
