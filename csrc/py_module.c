/* py_module.c: the module statekit._fast. See py.h. */
#include "py.h"

#define DEFINE(name) PyObject *sk_py_##name;
SK_PY_NAMES(DEFINE)

#define INTERN(name)                                                                               \
    if (sk_py_##name == NULL && (sk_py_##name = PyUnicode_InternFromString(#name)) == NULL)        \
        return -1;

static int make_names(void) {
    SK_PY_NAMES(INTERN)
    return 0;
}

PyObject *sk_py_no_default;

static int add_no_default(PyObject *module) {
    if (sk_py_no_default == NULL)
        sk_py_no_default = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    return sk_py_no_default == NULL ? -1
                                    : PyModule_AddObjectRef(module, "NO_DEFAULT", sk_py_no_default);
}

PyTypeObject *sk_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject *base) {
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, (PyObject *)base);
    if (type == NULL) return NULL;
    if (PyModule_AddType(module, type) == 0) return type;
    Py_DECREF(type);
    return NULL;
}

static int add_all(PyObject *module) {
    /* The types and names are global: another interpreter would share objects with this one. */
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(PyExc_ImportError,
                        "statekit works in the main interpreter only, and this is a subinterpreter."
                        " Import it there, or in another process.");
        return -1;
    }
    if (make_names() < 0 || add_no_default(module) < 0 || sk_py_add_codec(module) < 0 ||
        sk_py_add_keyed(module) < 0 || sk_py_add_number(module) < 0 ||
        sk_py_add_value(module) < 0 || sk_py_add_views(module) < 0 ||
        sk_py_add_containers(module) < 0)
        return -1;
    return 0;
}

static PyMethodDef functions[] = {
    {"set_address_of", sk_py_set_address_of, METH_O, "What makes an int of a pointer of cffi's."},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_all}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "statekit._fast",
    .m_doc = "Bases of the typed states, which do simple calls about one key in C.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__fast(void) { return PyModuleDef_Init(&definition); }
