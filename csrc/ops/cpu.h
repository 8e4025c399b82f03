#pragma once
/* Which instruction sets this build and this machine have.  Floor 1. */
#include "ops.h"

/* The set in use: the widest common to build and machine, unless a narrower one was selected. */
pya_ops_isa pya_cpu_isa(void);
