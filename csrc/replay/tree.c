#include "tree.h"

static bool
tree_below(const struct tree_node *node, uint64_t key, uint64_t addr) {
    return node->key < key || (node->key == key && node->addr < addr);
}

/* Priorities need only look random; mixing the address is good enough and the same in every run. */
static uint32_t
tree_mix(uint64_t addr) {
    uint64_t z = (addr >> 9) * UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)(z >> 32) ^ (uint32_t)z;
}

void
tree_insert(struct tree_node **root, struct tree_node *node) {
    node->priority = tree_mix(node->addr);
    struct tree_node **link = root;
    while (*link != NULL && (*link)->priority >= node->priority) {
        link = tree_below(*link, node->key, node->addr) ? &(*link)->right : &(*link)->left;
    }
    /* Everything below here has a lower priority: split it around the node. */
    struct tree_node *rest = *link;
    struct tree_node **low = &node->left;
    struct tree_node **high = &node->right;
    *link = node;
    while (rest != NULL) {
        if (tree_below(rest, node->key, node->addr)) {
            *low = rest;
            low = &rest->right;
            rest = rest->right;
        } else {
            *high = rest;
            high = &rest->left;
            rest = rest->left;
        }
    }
    *low = NULL;
    *high = NULL;
}

void
tree_remove(struct tree_node **root, struct tree_node *node) {
    struct tree_node **link = root;
    while (*link != node) {
        link = tree_below(*link, node->key, node->addr) ? &(*link)->right : &(*link)->left;
    }
    struct tree_node *a = node->left;
    struct tree_node *b = node->right;
    while (a != NULL && b != NULL) {
        if (a->priority >= b->priority) {
            *link = a;
            link = &a->right;
            a = a->right;
        } else {
            *link = b;
            link = &b->left;
            b = b->left;
        }
    }
    *link = a != NULL ? a : b;
}

struct tree_node *
tree_lower_bound(struct tree_node *root, uint64_t key, uint64_t addr) {
    struct tree_node *best = NULL;
    while (root != NULL) {
        if (tree_below(root, key, addr)) {
            root = root->right;
        } else {
            best = root;
            root = root->left;
        }
    }
    return best;
}

struct tree_node *
tree_next(struct tree_node *root, const struct tree_node *node) {
    return tree_lower_bound(root, node->key, node->addr + 1);
}
