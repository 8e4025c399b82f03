/* Shared by the two files of _core.Scan: the pass itself, and what was alive at its moments.  Floor 6. */
#pragma once

#include "module.h"

#include "replay/scan.h"

/* The scan in a _core.Scan, borrowed. */
const struct pya_scan *pya_module_scan_from(PyObject *self);
/* None for PYA_SCAN_NEVER. */
PyObject *pya_module_scan_event(uint64_t event);
PyObject *pya_module_scan_text(const struct pya_scan *scan, uint32_t text);

/* Methods of _core.Scan. */
PyObject *pya_module_scan_blocks(PyObject *self, PyObject *args);
PyObject *pya_module_scan_pending(PyObject *self, PyObject *args);
PyObject *pya_module_scan_spans(PyObject *self, PyObject *unused);
PyObject *pya_module_scan_stays(PyObject *self, PyObject *unused);
PyObject *pya_module_scan_told(PyObject *self, PyObject *unused);
PyObject *pya_module_scan_growths(PyObject *self, PyObject *unused);
PyObject *pya_module_scan_moments(PyObject *self, PyObject *unused);
PyObject *pya_module_scan_pieces(PyObject *self, PyObject *args);
PyObject *pya_module_scan_stack_sums(PyObject *self, PyObject *args);
PyObject *pya_module_scan_segment_pools(PyObject *self, PyObject *args);
PyObject *pya_module_scan_segment_requests(PyObject *self, PyObject *args);
