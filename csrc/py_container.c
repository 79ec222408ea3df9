/*
 * py_container.c: Containers, the base of list, map and set states: views, and whole values. See
 * py.h.
 */
#include "py.h"

static PyTypeObject *containers_type, *lists_type;

/* The view of a key's container, or NULL with an exception. */
static PyObject *new_view(sk_keyed *self, PyObject *given, const sk_py_key *key) {
    PyObject *k = PyBytes_FromStringAndSize((const char *)key->data, (Py_ssize_t)key->len);
    if (k == NULL) return NULL;
    PyObject *steps = PyBytes_FromStringAndSize(NULL, 0); /* one object, always the same */
    PyObject *view = sk_py_new_view(self->views, (PyObject *)self, given, k, steps, self->shape,
                                    Py_NewRef(self->levels), self->plan);
    Py_DECREF(k);
    return view;
}

static bool is_bound(const sk_keyed *self) { return self->views != NULL && self->store != NULL; }

static PyObject *containers_getitem(PyObject *object, PyObject *given) {
    sk_keyed *self = (sk_keyed *)object;
    sk_py_key key;
    if (is_bound(self) && sk_py_key_of(&self->keys, given, &key))
        return new_view(self, given, &key);
    return sk_py_slow_1(containers_type, object, sk_py___getitem__, given);
}

static PyObject *containers_get(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                                PyObject *kwnames) {
    sk_keyed *self = (sk_keyed *)object;
    sk_py_key encoded;
    sk_at at;
    sk_key key;
    sk_slot *slot;
    if ((nargs == 1 || nargs == 2) && kwnames == NULL && is_bound(self) &&
        sk_py_key_of(&self->keys, args[0], &encoded) &&
        sk_py_begin(self, &encoded, SK_READS, &at, &key) == SK_OK) {
        int status = sk_entry_find(&at, &key, &slot);
        if (status == SK_OK) sk_entry_read(&at, slot);
        sk_py_end(&at, status <= SK_MISSING);
        if (status == SK_OK) return new_view(self, args[0], &encoded);
        if (status == SK_MISSING) return Py_NewRef(nargs == 2 ? args[1] : Py_None);
    }
    return sk_py_slow(containers_type, object, sk_py_get, args, nargs, kwnames);
}

static int containers_setitem(PyObject *object, PyObject *given, PyObject *value) {
    sk_keyed *self = (sk_keyed *)object;
    if (value == NULL) return sk_py_delitem(containers_type, self, given);
    /* A view may be of this very place, and then it is there already. */
    bool is_plain =
        PyList_CheckExact(value) || PyDict_CheckExact(value) || Py_IS_TYPE(value, &PySet_Type);
    if (is_plain && self->codec != NULL)
        return sk_py_encode_and_put(containers_type, self, given, value);
    return sk_py_slow_set(containers_type, object, given, value);
}

static PyObject *containers_copy(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                                 PyObject *kwnames) {
    sk_keyed *self = (sk_keyed *)object;
    sk_py_key key;
    PyObject *value;
    if (nargs == 1 && kwnames == NULL && self->codec != NULL &&
        sk_py_key_of(&self->keys, args[0], &key)) {
        int status = sk_py_read_whole(self, &key, self->codec, &value);
        if (status == SK_OK) return value;
        if (status == SK_CHANGED) return NULL;
    }
    return sk_py_slow(containers_type, object, sk_py_copy, args, nargs, kwnames);
}

static PyObject *lists_append(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames) {
    sk_keyed *self = (sk_keyed *)object;
    if (nargs == 2 && kwnames == NULL && self->plan != NULL && self->plan->item != NULL) {
        uint8_t small[SK_PY_SMALL];
        const uint8_t *data;
        size_t len;
        PyObject *owner;
        sk_py_key key;
        if (sk_py_encode(self->plan->item, args[1], small, &data, &len, &owner) == 0) {
            bool is_done =
                sk_py_key_of(&self->keys, args[0], &key) &&
                sk_py_write(self, &key, SK_W_APPEND, (const uint8_t *)"", 0, "l", data, len);
            Py_XDECREF(owner);
            if (is_done) Py_RETURN_NONE;
        } else if (PyErr_Occurred()) {
            return NULL;
        }
    }
    return sk_py_slow(lists_type, object, sk_py_append, args, nargs, kwnames);
}

/* _bind_containers(codec, views, shape, levels, plan): what views of this state have. */
static PyObject *containers_bind(PyObject *object, PyObject *args) {
    sk_keyed *self = (sk_keyed *)object;
    PyObject *codec, *views, *shape, *levels, *plan;
    if (!PyArg_ParseTuple(args, "O!O!OSO!", sk_py_codec_type, &codec, &PyType_Type, &views, &shape,
                          &levels, sk_py_plan_type, &plan))
        return NULL;
    if (self->views != NULL || !PyType_IsSubtype((PyTypeObject *)views, sk_py_place_type)) {
        PyErr_SetString(PyExc_TypeError, "_bind_containers() is for a class of views, and once");
        return NULL;
    }
    self->codec = (sk_py_codec *)Py_NewRef(codec);
    self->shape = Py_NewRef(shape);
    self->levels = Py_NewRef(levels);
    self->plan = (sk_py_plan *)Py_NewRef(plan);
    self->views = (PyTypeObject *)Py_NewRef(views);
    Py_RETURN_NONE;
}

#define FAST(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"get", FAST(containers_get),
     "get($self, key, default=None)\n--\n\nThe view if something is there, else the default."},
    {"copy", FAST(containers_copy),
     "copy($self, key)\n--\n\nA plain copy of what is under a key; empty if nothing is there."},
    {"_bind_containers", containers_bind, METH_VARARGS, "(codec, views, shape, levels, plan)"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {{Py_mp_subscript, containers_getitem},
                              {Py_mp_ass_subscript, containers_setitem},
                              {Py_tp_methods, methods},
                              {Py_tp_doc, "Calls about one container, in C."},
                              {0, NULL}};

static PyType_Spec spec = {.name = "statekit._fast.Containers",
                           .basicsize = sizeof(sk_keyed),
                           .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                           .slots = slots};

static PyMethodDef lists_methods[] = {
    {"append", FAST(lists_append),
     "append($self, key, value)\n--\n\nAppends one item: state[key].append(value)."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot lists_slots[] = {{Py_tp_methods, lists_methods}, {0, NULL}};

static PyType_Spec lists_spec = {.name = "statekit._fast.Lists",
                                 .basicsize = sizeof(sk_keyed),
                                 .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                                 .slots = lists_slots};

int sk_py_add_containers(PyObject *module) {
    containers_type = sk_py_add_type(module, &spec, sk_py_single_type);
    if (containers_type == NULL) return -1;
    lists_type = sk_py_add_type(module, &lists_spec, containers_type);
    return lists_type == NULL ? -1 : 0;
}
