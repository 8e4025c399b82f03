#include "module_dlpack.h"

enum { DLPACK_MAJOR = 1 };

const struct pya_dlpack_api *
pya_module_dlpack(PyObject *tensor_type) {
    PyObject *capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    const struct pya_dlpack_api *api = NULL;
    if (capsule != NULL) {
        api = (const struct pya_dlpack_api *)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    }
    Py_XDECREF(capsule); /* the table lives as long as torch */
    PyErr_Clear();
    return api != NULL && api->major == DLPACK_MAJOR && api->view != NULL ? api : NULL;
}
