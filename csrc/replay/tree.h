/* An ordered set of intrusive nodes by (key, addr), as a treap: O(log n) expected, no memory of its own.  Floor 1. */
#pragma once

#include "../core/base.h"

/* (key, addr) is unique in a tree and does not change while the node is in it. */
struct tree_node {
    uint64_t key;
    uint64_t addr;
    struct tree_node *left;
    struct tree_node *right;
    uint32_t priority;
};

void tree_insert(struct tree_node **root, struct tree_node *node);
void tree_remove(struct tree_node **root, struct tree_node *node);
/* Smallest node >= (key, addr); NULL if there is none. */
struct tree_node *tree_lower_bound(struct tree_node *root, uint64_t key, uint64_t addr);
/* Smallest node > node; node need not be in the tree. */
struct tree_node *tree_next(struct tree_node *root, const struct tree_node *node);
