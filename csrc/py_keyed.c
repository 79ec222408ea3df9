/*
 * py_keyed.c: what all typed states share, and the slow way. See py.h.
 *
 *   Keyed    the store that a state works on, and its keys: what C must know. It has no operation.
 *            KeyedState (statekit/state/keyed.py) is derived from it.
 *   Single   Keyed with the operations that every kind has. The classes of statekit/state/fast.py
 *            have it in front of KeyedState, whose methods are the slow way.
 */
#include "py.h"

#include <structmember.h>

PyTypeObject *sk_py_keyed_type;
PyTypeObject *sk_py_single_type;

/* ---- Keys ---- */

bool sk_py_key_tuple(const sk_key_type *type, PyObject *given, sk_py_key *key) {
    if (!PyTuple_CheckExact(given) || PyTuple_Size(given) != type->parts) return false;
    size_t at = 0;
    for (int i = 0; i < type->parts; i++) {
        sk_key_type single = {.parts = 1, .part = {type->part[i]}};
        const uint8_t *data;
        Py_ssize_t len;
        PyObject *part = PyTuple_GetItem(given, i);
        int overflow = 0;
        uint8_t number[8];
        if (single.part[0] == 's') {
            if (!PyUnicode_CheckExact(part)) return false;
            data = (const uint8_t *)PyUnicode_AsUTF8AndSize(part, &len);
            if (data == NULL) {
                PyErr_Clear(); /* lone surrogates */
                return false;
            }
        } else if (single.part[0] == 'b') {
            if (!PyBytes_CheckExact(part)) return false;
            data = (const uint8_t *)PyBytes_AsString(part);
            len = PyBytes_Size(part);
        } else {
            if (!PyLong_CheckExact(part)) return false;
            sk_store64(number, (uint64_t)PyLong_AsLongLongAndOverflow(part, &overflow));
            if (overflow != 0) return false;
            data = number;
            len = 8;
        }
        size_t head = single.part[0] == 'i' ? 0 : 4;
        if ((size_t)len + head > sizeof key->made - at) return false;
        if (head > 0) sk_store32(key->made + at, (uint32_t)len);
        memcpy(key->made + at + head, data, (size_t)len);
        at += head + (size_t)len;
    }
    key->data = key->made;
    key->len = at;
    return true;
}

/* ---- The slow way ---- */

static PyObject *next_method(PyTypeObject *type, PyObject *self, PyObject *name) {
    PyObject *super =
        PyObject_CallFunctionObjArgs((PyObject *)&PySuper_Type, (PyObject *)type, self, NULL);
    if (super == NULL) return NULL;
    PyObject *method = PyObject_GetAttr(super, name);
    Py_DECREF(super);
    return method;
}

PyObject *sk_py_slow(PyTypeObject *type, PyObject *self, PyObject *name, PyObject *const *args,
                     Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *method = next_method(type, self, name), *positional = NULL, *named = NULL;
    PyObject *result = NULL;
    if (method == NULL) return NULL;
    if ((positional = PyTuple_New(nargs)) == NULL) goto done;
    for (Py_ssize_t i = 0; i < nargs; i++)
        if (PyTuple_SetItem(positional, i, Py_NewRef(args[i])) < 0) goto done;
    if (kwnames != NULL) {
        if ((named = PyDict_New()) == NULL) goto done;
        for (Py_ssize_t i = 0; i < PyTuple_Size(kwnames); i++)
            if (PyDict_SetItem(named, PyTuple_GetItem(kwnames, i), args[nargs + i]) < 0) goto done;
    }
    result = PyObject_Call(method, positional, named);
done:
    Py_DECREF(method);
    Py_XDECREF(positional);
    Py_XDECREF(named);
    return result;
}

PyObject *sk_py_slow_1(PyTypeObject *type, PyObject *self, PyObject *name, PyObject *arg) {
    return sk_py_slow(type, self, name, &arg, 1, NULL);
}

int sk_py_slow_set(PyTypeObject *type, PyObject *self, PyObject *key, PyObject *value) {
    PyObject *args[] = {key, value};
    PyObject *name = value == NULL ? sk_py___delitem__ : sk_py___setitem__;
    PyObject *none = sk_py_slow(type, self, name, args, value == NULL ? 1 : 2, NULL);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

int sk_py_slow_contains(PyTypeObject *type, PyObject *self, PyObject *key) {
    PyObject *answer = sk_py_slow_1(type, self, sk_py___contains__, key);
    if (answer == NULL) return -1;
    int is_there = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return is_there;
}

PyObject *sk_py_no_key(PyObject *key) {
    /* Not PyErr_SetObject alone, which would take a tuple for the arguments of KeyError. */
    PyObject *error = PyObject_CallFunctionObjArgs(PyExc_KeyError, key, NULL);
    if (error == NULL) return NULL;
    PyErr_SetObject(PyExc_KeyError, error);
    Py_DECREF(error);
    return NULL;
}

bool sk_py_clear_fault(void) {
    PyObject *faults[] = {PyExc_TypeError, PyExc_ValueError, PyExc_OverflowError,
                          PyExc_AttributeError, PyExc_RecursionError};
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
        if (PyErr_ExceptionMatches(faults[i])) {
            PyErr_Clear();
            return true;
        }
    return false;
}

/* ---- Keyed ---- */

static PyObject *get_ptr(PyObject *object, void *closure) {
    (void)closure;
    PyObject *ptr = ((sk_keyed *)object)->ptr;
    return Py_NewRef(ptr != NULL ? ptr : Py_None);
}

static PyObject *address_of; /* what makes an int of a cffi pointer */

static int set_ptr(PyObject *object, PyObject *ptr, void *closure) {
    (void)closure;
    sk_keyed *self = (sk_keyed *)object;
    sk_store *store = NULL;
    if (ptr != NULL && ptr != Py_None) {
        PyObject *address = PyObject_CallFunctionObjArgs(address_of, ptr, NULL);
        if (address == NULL) return -1;
        store = PyLong_AsVoidPtr(address);
        Py_DECREF(address);
        if (PyErr_Occurred()) return -1;
    }
    /* Both at once, and before the old handle goes: letting it go may run Python code. */
    PyObject *old = self->ptr;
    self->ptr = Py_XNewRef(ptr);
    self->store = store;
    Py_XDECREF(old);
    return 0;
}

/* _bind_native(key_type, kind, is_float): from now on the simple calls are done here. */
static PyObject *keyed_bind(PyObject *object, PyObject *args) {
    sk_keyed *self = (sk_keyed *)object;
    const char *key_type;
    int kind, is_float;
    if (!PyArg_ParseTuple(args, "sip", &key_type, &kind, &is_float)) return NULL;
    if (!sk_kind_is_known(kind) || sk_key_type_parse(key_type, &self->keys) != SK_OK) {
        PyErr_Format(PyExc_ValueError, "there is no kind %d with keys %s", kind, key_type);
        return NULL;
    }
    self->is_float = is_float != 0;
    self->kinds = SK_ONLY((unsigned)kind);
    Py_RETURN_NONE;
}

PyObject *sk_py_set_address_of(PyObject *module, PyObject *function) {
    (void)module;
    PyObject *old = address_of;
    address_of = Py_NewRef(function);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static int keyed_traverse(PyObject *object, visitproc visit, void *arg) {
    sk_keyed *self = (sk_keyed *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->ptr);
    Py_VISIT(self->missing);
    Py_VISIT((PyObject *)self->codec);
    Py_VISIT((PyObject *)self->views);
    Py_VISIT(self->shape);
    Py_VISIT(self->levels);
    Py_VISIT((PyObject *)self->plan);
    return 0;
}

static int keyed_clear(PyObject *object) {
    sk_keyed *self = (sk_keyed *)object;
    self->store = NULL; /* it goes with ptr */
    Py_CLEAR(self->ptr);
    Py_CLEAR(self->missing);
    Py_CLEAR(self->codec);
    Py_CLEAR(self->views);
    Py_CLEAR(self->shape);
    Py_CLEAR(self->levels);
    Py_CLEAR(self->plan);
    return 0;
}

static void keyed_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    keyed_clear(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyGetSetDef keyed_properties[] = {
    {"_ptr", get_ptr, set_ptr, "The store's cffi handle; None once it is closed.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMemberDef keyed_members[] = {
    {"_id", T_UINT, offsetof(sk_keyed, state), 0, "The state's number in the store."},
    {NULL, 0, 0, 0, NULL}};

static PyMethodDef keyed_methods[] = {
    {"_bind_native", keyed_bind, METH_VARARGS, "(key type, kind, is_float)"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot keyed_slots[] = {
    {Py_tp_traverse, keyed_traverse},         {Py_tp_clear, keyed_clear},
    {Py_tp_dealloc, keyed_dealloc},           {Py_tp_getset, keyed_properties},
    {Py_tp_members, keyed_members},           {Py_tp_methods, keyed_methods},
    {Py_tp_doc, "The base of typed states."}, {0, NULL}};

static PyType_Spec keyed_spec = {.name = "statekit._fast.Keyed",
                                 .basicsize = sizeof(sk_keyed),
                                 .flags =
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                                 .slots = keyed_slots};

/* ---- Single ---- */

static int single_contains(PyObject *object, PyObject *given) {
    sk_keyed *self = (sk_keyed *)object;
    sk_py_key encoded;
    sk_at at;
    sk_key key;
    sk_slot *slot;
    if (!sk_py_key_of(&self->keys, given, &encoded) ||
        sk_py_begin(self, &encoded, SK_READS, &at, &key) != SK_OK)
        return sk_py_slow_contains(sk_py_single_type, object, given);
    int status = sk_entry_find(&at, &key, &slot);
    if (status == SK_OK) sk_entry_read(&at, slot);
    sk_py_end(&at, status <= SK_MISSING);
    if (status > SK_MISSING) return sk_py_slow_contains(sk_py_single_type, object, given);
    return status == SK_OK;
}

/* Whether a container is under the key that takes long to free. */
static bool is_large(sk_at *at, const sk_key *key) {
    sk_slot *slot;
    return sk_kinds[at->env.kind]->held == SK_OWN && sk_entry_find(at, key, &slot) == SK_OK &&
           sk_node_size(slot->value.obj) > SK_PY_BYTES_MAX;
}

int sk_py_delete(sk_keyed *self, PyObject *given, bool blind) {
    sk_py_key encoded;
    sk_at at;
    sk_key key;
    if (!sk_py_key_of(&self->keys, given, &encoded)) return SK_BUSY;
    int status = sk_py_begin(self, &encoded, SK_WRITES, &at, &key);
    if (status != SK_OK) return status;
    status = is_large(&at, &key) ? SK_BUSY : sk_entry_delete(&at, &key, blind);
    sk_py_end(&at, status <= SK_MISSING);
    return status;
}

int sk_py_delitem(PyTypeObject *type, sk_keyed *self, PyObject *given) {
    int status = sk_py_delete(self, given, false);
    if (status == SK_OK) return 0;
    if (status != SK_MISSING) return sk_py_slow_set(type, (PyObject *)self, given, NULL);
    sk_py_no_key(given);
    return -1;
}

bool sk_py_put_data(sk_keyed *self, PyObject *given, const uint8_t *data, size_t len) {
    sk_py_key encoded;
    sk_at at;
    sk_key key;
    if (len > SK_PY_BYTES_MAX || !sk_py_key_of(&self->keys, given, &encoded) ||
        sk_py_begin(self, &encoded, SK_WRITES, &at, &key) != SK_OK)
        return false;
    int status = is_large(&at, &key) ? SK_BUSY : sk_entry_put_encoded(&at, &key, data, len);
    sk_py_end(&at, status == SK_OK);
    return status == SK_OK;
}

int sk_py_encode_and_put(PyTypeObject *type, sk_keyed *self, PyObject *given, PyObject *value) {
    PyObject *data = sk_py_encode_any(self->codec, value);
    if (data == NULL) {
        if (!sk_py_clear_fault()) return -1;
        return sk_py_slow_set(type, (PyObject *)self, given, value);
    }
    int result = 0;
    if (!PyBytes_CheckExact(data) ||
        !sk_py_put_data(self, given, (const uint8_t *)PyBytes_AsString(data),
                        (size_t)PyBytes_Size(data))) {
        PyObject *args[] = {given, data};
        PyObject *none = sk_py_slow(type, (PyObject *)self, sk_py__put_data, args, 2, NULL);
        Py_XDECREF(none);
        result = none == NULL ? -1 : 0;
    }
    Py_DECREF(data);
    return result;
}

static PyObject *single_discard(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                                PyObject *kwnames) {
    if (nargs == 1 && kwnames == NULL) {
        int status = sk_py_delete((sk_keyed *)object, args[0], false);
        if (status == SK_OK) Py_RETURN_TRUE;
        if (status == SK_MISSING) Py_RETURN_FALSE;
    }
    return sk_py_slow(sk_py_single_type, object, sk_py_discard, args, nargs, kwnames);
}

static PyObject *single_drop(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames) {
    if (nargs == 1 && kwnames == NULL &&
        sk_py_delete((sk_keyed *)object, args[0], true) <= SK_MISSING)
        Py_RETURN_NONE;
    return sk_py_slow(sk_py_single_type, object, sk_py_drop, args, nargs, kwnames);
}

static PyMethodDef single_methods[] = {
    {"discard", (PyCFunction)(void (*)(void))single_discard, METH_FASTCALL | METH_KEYWORDS,
     "discard($self, key)\n--\n\nRemoves the entry if there is one; True if there was."},
    {"drop", (PyCFunction)(void (*)(void))single_drop, METH_FASTCALL | METH_KEYWORDS,
     "drop($self, key)\n--\n\n"
     "Removes the entry, if there is one. Unlike discard(), it does not ask the home."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot single_slots[] = {{Py_sq_contains, single_contains},
                                     {Py_tp_methods, single_methods},
                                     {Py_tp_doc, "Calls about one key, in C."},
                                     {0, NULL}};

static PyType_Spec single_spec = {.name = "statekit._fast.Single",
                                  .basicsize = sizeof(sk_keyed),
                                  .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                                  .slots = single_slots};

int sk_py_add_keyed(PyObject *module) {
    sk_py_keyed_type = sk_py_add_type(module, &keyed_spec, NULL);
    if (sk_py_keyed_type == NULL) return -1;
    sk_py_single_type = sk_py_add_type(module, &single_spec, sk_py_keyed_type);
    return sk_py_single_type == NULL ? -1 : 0;
}
