/* One table for cudaDeviceGetAttribute, cuDeviceGetAttribute and both layouts of cudaDeviceProp.  The values are those of
 * an H100 (132 multiprocessors); attributes that are not listed are 0. */

#include "props.h"

#include <stdio.h>
#include <string.h>

#define BYTES_13 1008
#define BYTES_12 1032

struct prop_field {
    short attribute;  /* CU_DEVICE_ATTRIBUTE_* */
    short bytes;      /* 4 or 8 */
    short at13, at12; /* offset in cudaDeviceProp of CUDA 13 and 12; -1: no such field */
    int value;
};

static const struct prop_field prop_fields[] = {
    {1, 4, 320, 320, 1024},        {2, 4, 324, 324, 1024},        {3, 4, 328, 328, 1024},
    {4, 4, 332, 332, 64},          {5, 4, 336, 336, 2147483647},  {6, 4, 340, 340, 65535},
    {7, 4, 344, 344, 65535},       {8, 8, 296, 296, 49152},       {9, 8, 352, 352, 65536},
    {10, 4, 308, 308, 32},         {11, 8, 312, 312, 2147483647}, {12, 4, 304, 304, 65536},
    {13, 4, -1, 348, 1980000},     {14, 8, 368, 368, 512},        {15, 4, -1, -1, 1},
    {16, 4, 384, 388, 132},        {19, 4, 392, 400, 1},          {30, 8, 552, 568, 512},
    {31, 4, 560, 576, 1},          {32, 4, 564, 580, 1},          {36, 4, -1, 608, 2619000},
    {37, 4, 592, 612, 5120},       {38, 4, 596, 616, 52428800},   {39, 4, 604, 624, 2048},
    {40, 4, 584, 600, 3},          {41, 4, 588, 604, 1},          {51, 8, 376, 376, 32},
    {75, 4, 360, 360, 9},          {76, 4, 364, 364, 0},          {78, 4, 608, 628, 1},
    {79, 4, 612, 632, 1},          {80, 4, 616, 636, 1},          {81, 8, 624, 640, 233472},
    {82, 4, 632, 648, 65536},      {83, 4, 636, 652, 1},          {87, 4, -1, -1, 2},
    {89, 4, 656, 676, 1},          {90, 4, 660, 680, 1},          {95, 4, 668, 688, 1},
    {97, 8, 672, 696, 232448},     {99, 4, 704, 728, 1},          {102, 4, -1, -1, 1},
    {103, 4, -1, -1, 1},           {106, 4, 688, 712, 32},        {108, 4, 600, 620, 32768000},
    {109, 4, 692, 716, 134213632}, {110, 4, -1, -1, 1},           {111, 8, 696, 720, 1024},
    {115, 4, 720, 744, 1},         {120, 4, 748, 772, 1},         {122, 4, -1, -1, 1},
    {123, 4, -1, -1, 1},           {125, 4, 744, 768, 1},         {126, 4, -1, -1, 4},
    {127, 4, -1, -1, 1},           {129, 4, -1, -1, 1},
};

/* Fields that are not attributes, or differ by device. */
enum { AT_UUID = 256, AT_MEMORY = 288 };
enum { AT_PCI_BUS_13 = 568, AT_PCI_BUS_12 = 584 };
enum { ATTRIBUTE_PCI_BUS = 33 };

const char *
pya_hc_device_name(void) {
    return "pyalloc host-memory device (H100 figures)";
}

static int
prop_pci_bus(const struct pya_hc_device *dev) {
    return dev->physical + 1;
}

int
pya_hc_attribute(int device, int attribute, int *value) {
    const struct pya_hc_device *dev = pya_hc_device(device);
    if (dev == NULL) {
        return CU_INVALID_DEVICE;
    }
    if (value == NULL || attribute <= 0) {
        return CU_INVALID_VALUE;
    }
    *value = attribute == ATTRIBUTE_PCI_BUS ? prop_pci_bus(dev) : 0;
    for (size_t i = 0; i < sizeof prop_fields / sizeof prop_fields[0]; i++) {
        if (prop_fields[i].attribute == attribute) {
            *value = prop_fields[i].value;
        }
    }
    return CU_OK;
}

int
pya_hc_properties(int device, int major, void *out) {
    const struct pya_hc_device *dev = pya_hc_device(device);
    if (dev == NULL) {
        return CU_INVALID_DEVICE;
    }
    if (out == NULL) {
        return CU_INVALID_VALUE;
    }
    char *bytes = out;
    memset(bytes, 0, major >= 13 ? BYTES_13 : BYTES_12);
    (void)snprintf(bytes, AT_UUID, "%s", pya_hc_device_name());
    struct cuda_uuid uuid;
    pya_hc_device_uuid(dev, &uuid);
    memcpy(bytes + AT_UUID, &uuid, sizeof uuid);
    size_t capacity = dev->capacity;
    memcpy(bytes + AT_MEMORY, &capacity, sizeof capacity);
    int bus = prop_pci_bus(dev);
    memcpy(bytes + (major >= 13 ? AT_PCI_BUS_13 : AT_PCI_BUS_12), &bus, sizeof bus);
    for (size_t i = 0; i < sizeof prop_fields / sizeof prop_fields[0]; i++) {
        const struct prop_field *field = &prop_fields[i];
        int at = major >= 13 ? field->at13 : field->at12;
        int64_t value = field->value; /* little-endian: the low half is also the 4-byte form */
        if (at >= 0) {
            memcpy(bytes + at, &value, (size_t)field->bytes);
        }
    }
    return CU_OK;
}

bool
pya_hc_pci_bus_id(const struct pya_hc_device *dev, char *out, int length) {
    int n = snprintf(out, (size_t)length, "0000:%02X:00.0", (unsigned)prop_pci_bus(dev));
    return n < length;
}

struct pya_hc_device *
pya_hc_device_by_pci_bus_id(const char *text) {
    const char *colon = strchr(text, ':');
    unsigned bus = 0;
    if (colon == NULL || sscanf(colon + 1, "%x", &bus) != 1) {
        return NULL;
    }
    return pya_hc_physical((int)bus - 1);
}

void
pya_hc_device_uuid(const struct pya_hc_device *dev, struct cuda_uuid *out) {
    *out = (struct cuda_uuid){"pyalloc-hostcud"};
    out->bytes[15] = (char)dev->physical;
}
