/*
 * py_scalar.c: scalars as MessagePack, and Codec, which tells C what a codec (codecs.py) is of.
 *
 * What is packed here has the bytes that msgspec would write, the shortest there are: as keys of
 * maps, equal values must be equal bytes. What is unpacked here is what the codec would return.
 * Whatever is less simple is left to the codec: another class than the declared one, a number that
 * does not fit, an int that is stored where a float is declared.
 */
#include "msgpack.h"
#include "py.h"

#include <structmember.h>

PyTypeObject *sk_py_codec_type;

/* ---- Packing ---- */

/* The room for a head and a body, or 0. */
static size_t with_body(uint8_t *p, size_t room, size_t head, const void *body, size_t len) {
    if (head + len > room) return 0;
    memcpy(p + head, body, len);
    return head + len;
}

size_t sk_py_pack(int scalar, PyObject *value, uint8_t *p, size_t room) {
    int overflow;
    int64_t number;
    Py_ssize_t len;
    const char *text;
    if (room < 9) return 0;
    switch (scalar) {
    case SK_PY_INT:
        if (!PyLong_CheckExact(value)) return 0;
        number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return overflow != 0 ? 0 : sk_mp_write_int(p, number);
    case SK_PY_FLOAT:
        return PyFloat_CheckExact(value) ? sk_mp_write_f64(p, PyFloat_AsDouble(value)) : 0;
    case SK_PY_BOOL:
        if (value != Py_True && value != Py_False) return 0;
        *p = value == Py_True ? 0xc3 : 0xc2;
        return 1;
    case SK_PY_STR:
        if (!PyUnicode_CheckExact(value)) return 0;
        text = PyUnicode_AsUTF8AndSize(value, &len);
        if (text == NULL) {
            PyErr_Clear(); /* lone surrogates */
            return 0;
        }
        if ((size_t)len > room) return 0;
        return with_body(p, room, sk_mp_write_str(p, (uint32_t)len), text, (size_t)len);
    case SK_PY_BYTES:
        if (!PyBytes_CheckExact(value)) return 0;
        len = PyBytes_Size(value);
        if ((size_t)len > room) return 0;
        return with_body(p, room, sk_mp_write_bin(p, (uint32_t)len), PyBytes_AsString(value),
                         (size_t)len);
    default:
        return 0;
    }
}

/* ---- Unpacking ---- */

static uint64_t big_endian(const uint8_t *p, size_t width) {
    uint64_t value = 0;
    for (size_t i = 0; i < width; i++) value = value << 8 | p[i];
    return value;
}

/* The length of the body if p holds one value whose head is `first`, or one with a length of 1, 2
 * or 4 bytes whose head is `sized` (+ 0, 1, 2). Else -1. */
static int64_t body_of(const uint8_t *p, size_t len, uint8_t sized, size_t *head) {
    if (len < 1 || *p < sized || *p > sized + 2) return -1;
    size_t width = (size_t)1 << (*p - sized);
    if (len < 1 + width) return -1;
    uint64_t body = big_endian(p + 1, width);
    *head = 1 + width;
    return body == len - *head ? (int64_t)body : -1;
}

int64_t sk_py_bin(const uint8_t *p, size_t len, size_t *head) {
    return body_of(p, len, 0xc4, head);
}

static PyObject *unpack_str(const uint8_t *p, size_t len) {
    size_t head = 1;
    int64_t body = len > 0 && (*p & 0xe0) == 0xa0
                       ? ((size_t)(*p & 0x1f) == len - 1 ? (int64_t)(len - 1) : -1)
                       : body_of(p, len, 0xd9, &head);
    if (body < 0) return NULL;
    PyObject *text = PyUnicode_DecodeUTF8((const char *)p + head, (Py_ssize_t)body, NULL);
    if (text == NULL) PyErr_Clear(); /* the codec will say what is wrong */
    return text;
}

static PyObject *unpack_int(const uint8_t *p, size_t len) {
    if (len == 1 && (*p < 0x80 || *p >= 0xe0)) return PyLong_FromLongLong((int8_t)*p);
    if (len < 2 || *p < 0xcc || *p > 0xd3) return NULL;
    size_t width = (size_t)1 << ((*p - 0xcc) & 3);
    if (len != 1 + width) return NULL;
    uint64_t bits = big_endian(p + 1, width);
    if (*p <= 0xcf) return bits <= INT64_MAX ? PyLong_FromLongLong((int64_t)bits) : NULL;
    unsigned shift = 64 - 8 * (unsigned)width; /* to extend the sign */
    return PyLong_FromLongLong((int64_t)(bits << shift) >> shift);
}

PyObject *sk_py_unpack(int scalar, const uint8_t *p, size_t len) {
    size_t head;
    PyObject *value = NULL;
    switch (scalar) {
    case SK_PY_INT:
        value = unpack_int(p, len);
        break;
    case SK_PY_FLOAT:
        if (len == 9 && *p == 0xcb) {
            uint64_t bits = big_endian(p + 1, 8);
            double number;
            memcpy(&number, &bits, 8);
            value = PyFloat_FromDouble(number);
        }
        break;
    case SK_PY_BOOL:
        if (len == 1 && (*p == 0xc2 || *p == 0xc3)) value = PyBool_FromLong(*p == 0xc3);
        break;
    case SK_PY_STR:
        return unpack_str(p, len);
    case SK_PY_BYTES: {
        int64_t body = sk_py_bin(p, len, &head);
        if (body >= 0) value = PyBytes_FromStringAndSize((const char *)p + head, (Py_ssize_t)body);
        break;
    }
    default:
        break;
    }
    if (value == NULL) PyErr_Clear();
    return value;
}

/* A list of scalars; NULL without an exception for the codec. What is stored in a container was
 * checked when it came in, so an item ends where its head says. */
static PyObject *unpack_list(const sk_py_codec *codec, const uint8_t *p) {
    sk_mp_head head = sk_mp_head_of(p);
    if (head.type != SK_MP_ARRAY) return NULL;
    PyObject *list = PyList_New((Py_ssize_t)head.count);
    p += head.head_len;
    for (Py_ssize_t i = 0; list != NULL && i < (Py_ssize_t)head.count; i++) {
        const uint8_t *next = sk_mp_next(p);
        PyObject *item = sk_py_unpack(codec->item->scalar, p, (size_t)(next - p));
        if (item == NULL) Py_CLEAR(list);
        if (item != NULL) PyList_SetItem(list, i, item);
        p = next;
    }
    if (list == NULL) PyErr_Clear();
    return list;
}

PyObject *sk_py_decode(sk_py_codec *codec, const uint8_t *p, size_t len) {
    bool is_list = codec->cls == &PyList_Type && codec->item->scalar != SK_PY_OTHER && len > 0;
    PyObject *value = is_list ? unpack_list(codec, p) : sk_py_unpack(codec->scalar, p, len);
    if (value != NULL) return value;
    PyObject *data = PyBytes_FromStringAndSize((const char *)p, (Py_ssize_t)len);
    if (data == NULL) return NULL;
    value = PyObject_CallFunctionObjArgs(codec->decode, data, NULL);
    Py_DECREF(data);
    return value;
}

/* ---- Exact values ---- */

static bool is_exact(const sk_py_codec *codec, PyObject *value);

/* The same for an object that only a container holds: what is tested may run code that takes it out
 * of there. */
static bool is_exact_part(const sk_py_codec *codec, PyObject *part) {
    Py_INCREF(part);
    bool fits = is_exact(codec, part);
    Py_DECREF(part);
    return fits;
}

static bool is_exact_int(PyObject *value) {
    int overflow;
    if (!PyLong_CheckExact(value)) return false;
    PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow == 0;
}

static bool is_exact_scalar(int scalar, PyObject *value) {
    switch (scalar) {
    case SK_PY_INT:
        return is_exact_int(value);
    case SK_PY_FLOAT:
        return PyFloat_CheckExact(value);
    case SK_PY_BOOL:
        return value == Py_True || value == Py_False;
    case SK_PY_STR:
        return PyUnicode_CheckExact(value);
    case SK_PY_BYTES:
        return PyBytes_CheckExact(value);
    default:
        return false;
    }
}

static bool is_exact_field(const sk_py_field *field, PyObject *part) {
    if (field->cls == &PyLong_Type) return is_exact_int(part);
    if (field->cls != NULL) return Py_TYPE(part) == field->cls;
    PyObject *answer = PyObject_CallFunctionObjArgs(field->test, part, NULL);
    bool fits = answer == Py_True;
    if (answer == NULL) sk_py_clear_fault();
    Py_XDECREF(answer);
    return fits;
}

static bool is_exact_record(const sk_py_codec *codec, PyObject *value) {
    for (int i = 0; i < codec->field_count; i++) {
        PyObject *part = PyObject_GetAttr(value, codec->fields[i].name);
        if (part == NULL) sk_py_clear_fault(); /* the encoder says what is missing */
        bool fits = part != NULL && is_exact_field(&codec->fields[i], part);
        Py_XDECREF(part);
        if (!fits) return false;
    }
    return true;
}

/* Whether a value is exact: it and all its parts are of the declared classes. False with an
 * exception if one was raised that is no VALUE_FAULT. */
static bool is_exact(const sk_py_codec *codec, PyObject *value) {
    if (codec->scalar != SK_PY_OTHER) return is_exact_scalar(codec->scalar, value);
    if (codec->pack == NULL || Py_TYPE(value) != codec->cls) return false;
    if (codec->item == NULL) return is_exact_record(codec, value);
    if (codec->key == NULL) {
        for (Py_ssize_t i = 0; i < PyList_Size(value); i++)
            if (!is_exact_part(codec->item, PyList_GetItem(value, i))) return false;
        return true;
    }
    PyObject *key, *item;
    for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item);) {
        Py_INCREF(item);
        bool fits = is_exact_part(codec->key, key) && is_exact(codec->item, item);
        Py_DECREF(item);
        if (!fits) return false;
    }
    return true;
}

PyObject *sk_py_encode_any(sk_py_codec *given, PyObject *value) {
    /* Code of the user's runs, which may let go of the codec. */
    sk_py_codec *codec = (sk_py_codec *)Py_NewRef((PyObject *)given);
    PyObject *data = NULL;
    if (codec->pack != NULL && is_exact(codec, value)) {
        data = PyObject_CallFunctionObjArgs(codec->pack, value, NULL);
        if (data == NULL) sk_py_clear_fault(); /* the encoder says what is wrong */
    }
    if (data == NULL && !PyErr_Occurred())
        data = PyObject_CallFunctionObjArgs(codec->encode, value, NULL);
    Py_DECREF((PyObject *)codec);
    return data;
}

/* ---- Codec ---- */

static int codec_clear(PyObject *object) {
    sk_py_codec *self = (sk_py_codec *)object;
    self->field_count = 0;
    Py_CLEAR(self->encode);
    Py_CLEAR(self->decode);
    Py_CLEAR(self->pack);
    Py_CLEAR(self->cls);
    Py_CLEAR(self->key);
    Py_CLEAR(self->item);
    for (int i = 0; i < SK_PY_FIELDS_MAX; i++) {
        Py_CLEAR(self->fields[i].name);
        Py_CLEAR(self->fields[i].cls);
        Py_CLEAR(self->fields[i].test);
    }
    return 0;
}

/* One field: (name, its class or None, its test or None). */
static bool read_field(PyObject *given, sk_py_field *field) {
    PyObject *name, *cls, *test;
    if (!PyArg_ParseTuple(given, "UOO", &name, &cls, &test)) return false;
    bool has_class = PyType_Check(cls);
    if (!has_class && !PyCallable_Check(test)) {
        PyErr_Format(PyExc_TypeError, "the field %R has neither a class nor a test", name);
        return false;
    }
    field->name = Py_NewRef(name);
    field->cls = has_class ? (PyTypeObject *)Py_NewRef(cls) : NULL;
    field->test = has_class ? NULL : Py_NewRef(test);
    return true;
}

/* Codec(scalar, encode, decode[, pack, class, fields]) */
static int codec_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    sk_py_codec *self = (sk_py_codec *)object;
    PyObject *encode, *decode, *pack = NULL, *cls = NULL, *fields = NULL;
    int scalar;
    if (self->encode != NULL || (kwargs != NULL && PyDict_Size(kwargs) > 0)) {
        PyErr_SetString(PyExc_TypeError, "a Codec is made once, and its arguments have no names");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "iOO|OO!O!", &scalar, &encode, &decode, &pack, &PyType_Type, &cls,
                          &PyTuple_Type, &fields))
        return -1;
    self->scalar = scalar;
    self->encode = Py_NewRef(encode);
    self->decode = Py_NewRef(decode);
    /* A record with more fields is left to its encoder. */
    Py_ssize_t count = fields == NULL ? -1 : PyTuple_Size(fields);
    if (count < 0 || count > SK_PY_FIELDS_MAX) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *field = PyTuple_GetItem(fields, i);
        if (!PyTuple_Check(field) || !read_field(field, &self->fields[i])) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a field is a tuple");
            codec_clear(object);
            return -1;
        }
    }
    self->field_count = (int)count;
    self->pack = Py_NewRef(pack);
    self->cls = (PyTypeObject *)Py_NewRef((PyObject *)cls);
    return 0;
}

static int codec_traverse(PyObject *object, visitproc visit, void *arg) {
    sk_py_codec *self = (sk_py_codec *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->encode);
    Py_VISIT(self->decode);
    Py_VISIT(self->pack);
    Py_VISIT((PyObject *)self->cls);
    Py_VISIT((PyObject *)self->key);
    Py_VISIT((PyObject *)self->item);
    for (int i = 0; i < self->field_count; i++) {
        Py_VISIT((PyObject *)self->fields[i].cls);
        Py_VISIT(self->fields[i].test);
    }
    return 0;
}

static void codec_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    codec_clear(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* pack(value), unpack(data): what C does without the codec; None where it leaves it to the codec.
 * For tests. */
static PyObject *codec_pack(PyObject *object, PyObject *value) {
    uint8_t data[SK_PY_SMALL];
    size_t len = sk_py_pack(((sk_py_codec *)object)->scalar, value, data, sizeof data);
    if (len == 0) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)len);
}

static PyObject *codec_unpack(PyObject *object, PyObject *data) {
    char *p;
    Py_ssize_t len;
    if (PyBytes_AsStringAndSize(data, &p, &len) < 0) return NULL;
    PyObject *value =
        sk_py_unpack(((sk_py_codec *)object)->scalar, (const uint8_t *)p, (size_t)len);
    if (value == NULL) Py_RETURN_NONE;
    return value;
}

/* _of_parts(pack, key, item): of lists (key None) or dicts whose parts have these Codecs. */
static PyObject *codec_of_parts(PyObject *object, PyObject *args) {
    sk_py_codec *self = (sk_py_codec *)object;
    PyObject *pack, *key, *item;
    if (!PyArg_ParseTuple(args, "OOO!", &pack, &key, sk_py_codec_type, &item)) return NULL;
    if (self->pack != NULL || (key != Py_None && !PyObject_TypeCheck(key, sk_py_codec_type))) {
        PyErr_SetString(PyExc_TypeError, "_of_parts() is for Codecs, and once");
        return NULL;
    }
    self->cls =
        (PyTypeObject *)Py_NewRef((PyObject *)(key == Py_None ? &PyList_Type : &PyDict_Type));
    self->key = key == Py_None ? NULL : (sk_py_codec *)Py_NewRef(key);
    self->item = (sk_py_codec *)Py_NewRef(item);
    self->pack = Py_NewRef(pack);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"_of_parts", codec_of_parts, METH_VARARGS, "(pack, key, item)"},
    {"pack", codec_pack, METH_O, "The MessagePack of a scalar; None for the codec to encode."},
    {"unpack", codec_unpack, METH_O, "The scalar; None for the codec to decode."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {{Py_tp_init, codec_init},
                              {Py_tp_traverse, codec_traverse},
                              {Py_tp_clear, codec_clear},
                              {Py_tp_dealloc, codec_dealloc},
                              {Py_tp_methods, methods},
                              {Py_tp_doc, "Codec(scalar, encode, decode): a codec, as C uses it."},
                              {0, NULL}};

static PyType_Spec spec = {.name = "statekit._fast.Codec",
                           .basicsize = sizeof(sk_py_codec),
                           .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                           .slots = slots};

/* ---- Plan ---- */

static bool codec_or_none(PyObject *given, sk_py_codec **codec) {
    if (given != Py_None && !PyObject_TypeCheck(given, sk_py_codec_type)) {
        PyErr_Format(PyExc_TypeError, "%R is no Codec", given);
        return false;
    }
    sk_py_codec *old = *codec;
    *codec = given == Py_None ? NULL : (sk_py_codec *)Py_NewRef(given);
    Py_XDECREF((PyObject *)old);
    return true;
}

static int plan_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    sk_py_plan *self = (sk_py_plan *)object;
    PyObject *key, *item;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO", &key, &item)) return -1;
    return codec_or_none(key, &self->key) && codec_or_none(item, &self->item) ? 0 : -1;
}

/* _give_views(views, shape, plan, letter): of items that are containers. */
static PyObject *plan_give_views(PyObject *object, PyObject *args) {
    sk_py_plan *self = (sk_py_plan *)object;
    PyObject *views, *shape, *plan;
    int letter;
    if (!PyArg_ParseTuple(args, "O!OO!C", &PyType_Type, &views, &shape, sk_py_plan_type, &plan,
                          &letter))
        return NULL;
    bool is_view = PyType_IsSubtype((PyTypeObject *)views, sk_py_place_type);
    if (self->item != NULL || !is_view || letter > 127) {
        PyErr_SetString(PyExc_TypeError, "_give_views() is for a class of views");
        return NULL;
    }
    if (self->views != NULL) Py_RETURN_NONE; /* another state has the same shape */
    self->shape = Py_NewRef(shape);
    self->below = (sk_py_plan *)Py_NewRef(plan);
    self->letter = (char)letter;
    self->views = (PyTypeObject *)Py_NewRef(views);
    Py_RETURN_NONE;
}

static PyMethodDef plan_methods[] = {
    {"_give_views", plan_give_views, METH_VARARGS, "(views, shape, plan, letter)"},
    {NULL, NULL, 0, NULL}};

static int plan_traverse(PyObject *object, visitproc visit, void *arg) {
    sk_py_plan *self = (sk_py_plan *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)self->key);
    Py_VISIT((PyObject *)self->item);
    Py_VISIT((PyObject *)self->views);
    Py_VISIT(self->shape);
    Py_VISIT((PyObject *)self->below);
    return 0;
}

static int plan_clear(PyObject *object) {
    sk_py_plan *self = (sk_py_plan *)object;
    Py_CLEAR(self->key);
    Py_CLEAR(self->item);
    Py_CLEAR(self->views);
    Py_CLEAR(self->shape);
    Py_CLEAR(self->below);
    return 0;
}

static void plan_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    plan_clear(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyType_Slot plan_slots[] = {
    {Py_tp_init, plan_init},
    {Py_tp_traverse, plan_traverse},
    {Py_tp_clear, plan_clear},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_methods, plan_methods},
    {Py_tp_doc, "Plan(key, item): the Codecs of a live container's parts, or None."},
    {0, NULL}};

static PyType_Spec plan_spec = {.name = "statekit._fast.Plan",
                                .basicsize = sizeof(sk_py_plan),
                                .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                .slots = plan_slots};

PyTypeObject *sk_py_plan_type;

int sk_py_add_codec(PyObject *module) {
    sk_py_codec_type = sk_py_add_type(module, &spec, NULL);
    if (sk_py_codec_type == NULL) return -1;
    sk_py_plan_type = sk_py_add_type(module, &plan_spec, NULL);
    return sk_py_plan_type == NULL ? -1 : 0;
}
