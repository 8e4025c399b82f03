#pragma once
/* The properties that the devices report: those of a Hopper card.  Floor 2 (uses state.h). */

#include "state.h"

/* By CUdevice_attribute's numbers, which are cudaDeviceAttr's too. */
int pya_hc_attribute(int device, int attribute, int *value);
/* Fills cudaDeviceProp as CUDA `major` (12 or 13) lays it out. */
int pya_hc_properties(int device, int major, void *out);
const char *pya_hc_device_name(void);
/* "0000:01:00.0" for the machine's first device; false if it does not fit. */
bool pya_hc_pci_bus_id(const struct pya_hc_device *dev, char *out, int length);
/* NULL: no device of the machine. */
struct pya_hc_device *pya_hc_device_by_pci_bus_id(const char *text);
void pya_hc_device_uuid(const struct pya_hc_device *dev, struct cuda_uuid *out);
