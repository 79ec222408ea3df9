/*
 * py_value.c: Values, the base of value states of any other type: an encoded value in a blob. See
 * py.h.
 *
 * A value that is bytes is copied once, from the blob into the object that is returned. Any other
 * value is copied out of the leaf first, and made when the lock has been released (rule 2 of py.h).
 */
#include "py.h"

static PyTypeObject *values_type;

/* What was read from a blob. */
typedef struct copied {
    PyObject *data; /* the encoded value, or if is_value the value itself, or NULL: see small */
    bool is_value;  /* it is decoded already */
    size_t len;     /* of what is in small */
    uint8_t small[SK_PY_SMALL];
} copied;

/* Copies the blob of a locked leaf: SK_OK, or SK_BUSY for the slow way. */
static int copy_blob(const sk_keyed *self, const sk_blob *blob, copied *out) {
    const char *data = (const char *)blob->data;
    size_t head;
    int64_t bin;
    out->data = NULL;
    out->is_value = false;
    if (self->codec->scalar == SK_PY_BYTES &&
        (bin = sk_py_bin(blob->data, blob->len, &head)) >= 0) {
        out->is_value = true;
        out->data = PyBytes_FromStringAndSize(data + head, (Py_ssize_t)bin);
    } else if (self->codec->scalar != SK_PY_OTHER && blob->len <= sizeof out->small) {
        memcpy(out->small, data, blob->len);
        out->len = blob->len;
        return SK_OK;
    } else {
        out->data = PyBytes_FromStringAndSize(data, (Py_ssize_t)blob->len);
    }
    return out->data != NULL ? SK_OK : SK_BUSY;
}

/* SK_OK with the value, SK_MISSING, or anything else for the slow way; no exception is set. */
static int read_value(sk_keyed *self, PyObject *given, PyObject **value) {
    sk_py_key encoded;
    sk_at at;
    sk_key key;
    sk_slot *slot;
    copied out;
    if (self->codec == NULL || !sk_py_key_of(&self->keys, given, &encoded)) return SK_BUSY;
    int status = sk_py_begin(self, &encoded, SK_READS, &at, &key);
    if (status != SK_OK) return status;
    status = sk_entry_find(&at, &key, &slot);
    if (status == SK_OK)
        status = slot->value.blob->len > SK_PY_BYTES_MAX ? SK_BUSY
                                                         : copy_blob(self, slot->value.blob, &out);
    if (status == SK_OK) sk_entry_read(&at, slot);
    sk_py_end(&at, status <= SK_MISSING);
    if (status != SK_OK) {
        if (status != SK_MISSING && PyErr_Occurred()) PyErr_Clear(); /* no memory for bytes */
        return status;
    }
    if (out.is_value) {
        *value = out.data;
        return SK_OK;
    }
    sk_py_codec *codec = (sk_py_codec *)Py_NewRef((PyObject *)self->codec);
    if (out.data == NULL) {
        *value = sk_py_unpack(codec->scalar, out.small, out.len);
    } else {
        *value = PyObject_CallFunctionObjArgs(codec->decode, out.data, NULL);
        Py_DECREF(out.data);
    }
    Py_DECREF((PyObject *)codec);
    if (*value != NULL) return SK_OK;
    /* What is stored is no such value: the slow way says so. (An exception that is not about the
     * value, an interrupt say, stays set.) */
    if (PyErr_Occurred() && !sk_py_clear_fault()) return SK_CHANGED;
    return SK_BUSY;
}

/* What a missing key gives: the state's default, made anew, or KeyError. */
static PyObject *missing_value(sk_keyed *self, PyObject *given) {
    if (self->missing == NULL) return sk_py_no_key(given);
    return PyObject_CallFunctionObjArgs(self->codec->decode, self->missing, NULL);
}

static PyObject *values_getitem(PyObject *object, PyObject *given) {
    sk_keyed *self = (sk_keyed *)object;
    PyObject *value;
    int status = read_value(self, given, &value);
    if (__builtin_expect(status == SK_OK, 1)) return value;
    if (status == SK_MISSING) return missing_value(self, given);
    if (status == SK_CHANGED) return NULL;
    return sk_py_slow_1(values_type, object, sk_py___getitem__, given);
}

static PyObject *values_get(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames) {
    sk_keyed *self = (sk_keyed *)object;
    PyObject *value;
    int status = SK_BUSY;
    if (kwnames == NULL && (nargs == 1 || nargs == 2)) status = read_value(self, args[0], &value);
    if (__builtin_expect(status == SK_OK, 1)) return value;
    if (status == SK_CHANGED) return NULL;
    if (status != SK_MISSING)
        return sk_py_slow(values_type, object, sk_py_get, args, nargs, kwnames);
    if (nargs == 2 && args[1] != sk_py_no_default) return Py_NewRef(args[1]);
    return self->missing != NULL ? missing_value(self, args[0]) : Py_NewRef(Py_None);
}

static int values_setitem(PyObject *object, PyObject *given, PyObject *value) {
    sk_keyed *self = (sk_keyed *)object;
    if (value == NULL) return sk_py_delitem(values_type, self, given);
    if (self->codec == NULL) return sk_py_slow_set(values_type, object, given, value);
    if (self->codec->scalar == SK_PY_OTHER)
        return sk_py_encode_and_put(values_type, self, given, value);
    uint8_t small[SK_PY_SMALL];
    size_t len = sk_py_pack(self->codec->scalar, value, small, sizeof small);
    if (len > 0 && sk_py_put_data(self, given, small, len)) return 0;
    if (len > 0) return sk_py_slow_set(values_type, object, given, value);
    return sk_py_encode_and_put(values_type, self, given, value);
}

/* _bind_values(codec[, missing]): the codec, and the encoded value of a missing key, if any. */
static PyObject *values_bind(PyObject *object, PyObject *args) {
    sk_keyed *self = (sk_keyed *)object;
    PyObject *codec, *missing = NULL;
    if (!PyArg_ParseTuple(args, "O!|O", sk_py_codec_type, &codec, &missing)) return NULL;
    PyObject *old[] = {(PyObject *)self->codec, self->missing};
    self->codec = (sk_py_codec *)Py_NewRef(codec);
    self->missing = Py_XNewRef(missing);
    Py_XDECREF(old[0]);
    Py_XDECREF(old[1]);
    if (sk_py_held(self) != SK_BLOB) self->kinds = 0; /* a kind that this file does not know */
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"get", (PyCFunction)(void (*)(void))values_get, METH_FASTCALL | METH_KEYWORDS,
     "get($self, key, default=None)\n--\n\n"
     "The value; else the default given here, else the state's default, else None."},
    {"_bind_values", values_bind, METH_VARARGS, "(codec[, missing])"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {{Py_mp_subscript, values_getitem},
                              {Py_mp_ass_subscript, values_setitem},
                              {Py_tp_methods, methods},
                              {Py_tp_doc, "Calls about one encoded value, in C."},
                              {0, NULL}};

static PyType_Spec spec = {.name = "statekit._fast.Values",
                           .basicsize = sizeof(sk_keyed),
                           .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                           .slots = slots};

int sk_py_add_value(PyObject *module) {
    values_type = sk_py_add_type(module, &spec, sk_py_single_type);
    return values_type == NULL ? -1 : 0;
}
