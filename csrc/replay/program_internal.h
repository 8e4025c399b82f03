/* Body of a program, for the driver.  Floor 2, private. */
#pragma once

#include "model.h"
#include "op_store.h"
#include "program.h"

/* Most streams, and most pools including the default one, of one program. */
#define PROGRAM_STREAMS PYA_MODEL_STREAMS
#define PROGRAM_POOLS PYA_MODEL_POOLS

/* More bytes alive on one device than this means damage or malice, and would need gigabytes of tables. */
#define PROGRAM_LIVE_MAX (UINT64_C(1) << 39)

struct program_block {
    uint64_t addr;
    uint64_t bytes; /* rounded to 512 */
    uint32_t next;  /* index + 1 of the next in its hash chain or in the free list */
    uint8_t device;
};

struct pya_program {
    struct op_store ops;          /* info.n_ops of them */
    struct program_block *blocks; /* live ones are in hash chains, by addr and device */
    uint32_t n_block_slots;
    uint32_t free_block;
    uint32_t *chains;
    uint32_t n_chains; /* power of two */
    pya_stream streams[PROGRAM_STREAMS];
    struct program_pool {
        uint64_t first;
        uint64_t second;
    } pools[PROGRAM_POOLS]; /* by number; 0 is the default pool */
    /* By stream: bit d is set once the stream has allocated on device d. */
    uint64_t asked[PROGRAM_STREAMS];
    uint64_t live_bytes[PYA_MAX_DEVICES];
    char **notes;
    size_t n_notes;
    struct pya_program_info info;
};
