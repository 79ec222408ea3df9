/*
 * py_view.c: Place and what is derived from it: the bases of live lists, maps and sets. See py.h.
 *
 * A view's slots encode the position or the key, append it to the view's path, and read or write
 * there. Items that are containers themselves go the slow way: they are given as views.
 */
#include "msgpack.h"
#include "py.h"

#include <structmember.h>

PyTypeObject *sk_py_place_type;
static PyTypeObject *list_type, *map_type, *set_type;

/* What was read last: one buffer for all reads, since decode_scratch takes it away before Python
 * code runs, which may read something else. */
static sk_buf scratch;

#define SCRATCH_KEPT (1u << 20)

/* ---- Calls at a path ---- */

static sk_keyed *state_of(const sk_view *view) {
    bool is_state = view->state != NULL && PyObject_TypeCheck(view->state, sk_py_keyed_type);
    return is_state ? (sk_keyed *)view->state : NULL;
}

static bool bytes_of(PyObject *object, const uint8_t **data, size_t *len) {
    if (object == NULL || !PyBytes_CheckExact(object)) return false;
    *data = (const uint8_t *)PyBytes_AsString(object);
    *len = (size_t)PyBytes_Size(object);
    return true;
}

static bool key_of(const sk_view *view, sk_py_key *key) {
    return bytes_of(view->k, &key->data, &key->len);
}

/* A path: the view's, and a step, which is in step->made. */
typedef struct path {
    const uint8_t *data;
    size_t len;
    uint8_t made[2 * SK_PY_SMALL];
} path;

/* The view's own path, with room for a step behind it. */
static bool path_of(const sk_view *view, path *out) {
    const uint8_t *steps;
    if (!bytes_of(view->steps, &steps, &out->len) || out->len > SK_PY_SMALL) return false;
    memcpy(out->made, steps, out->len);
    out->data = out->made;
    return true;
}

/* Appends a step that is not encoded yet: a key of a map, or a position in a list. */
static bool path_add(path *out, int scalar, PyObject *step) {
    size_t len = sk_py_pack(scalar, step, out->made + out->len, sizeof out->made - out->len);
    out->len += len;
    return len > 0;
}

/* A step that its codec may have to encode: 0, or -1 as sk_py_encode. */
static int path_encode(path *out, sk_py_codec *codec, PyObject *step) {
    if (path_add(out, codec->scalar, step)) return 0;
    if (codec->scalar != SK_PY_OTHER) return -1;
    uint8_t small[SK_PY_SMALL];
    const uint8_t *data;
    size_t len;
    PyObject *owner;
    if (sk_py_encode(codec, step, small, &data, &len, &owner) < 0) return -1;
    bool fits = len <= sizeof out->made - out->len;
    if (fits) memcpy(out->made + out->len, data, len);
    out->len += fits ? len : 0;
    Py_XDECREF(owner);
    return fits ? 0 : -1;
}

int sk_py_encode(sk_py_codec *codec, PyObject *value, uint8_t *small, const uint8_t **data,
                 size_t *len, PyObject **owner) {
    *owner = NULL;
    *data = small;
    *len = sk_py_pack(codec->scalar, value, small, SK_PY_SMALL);
    if (*len > 0) return 0;
    *owner = sk_py_encode_any(codec, value);
    if (*owner == NULL) {
        sk_py_clear_fault();
        return -1;
    }
    if (bytes_of(*owner, data, len) && *len <= SK_PY_BYTES_MAX) return 0;
    Py_CLEAR(*owner);
    return -1;
}

bool sk_py_write(sk_keyed *state, const sk_py_key *encoded, int op, const uint8_t *steps,
                 size_t steps_len, const char *levels, const uint8_t *arg, size_t arg_len) {
    sk_at at;
    sk_key key;
    sk_buf none = {0};
    if (sk_py_begin(state, encoded, SK_WRITES, &at, &key) != SK_OK) return false;
    int64_t result =
        sk_entry_write(&at, &key, op, steps, steps_len, levels, arg, arg_len, 0, 0, &none);
    sk_py_end(&at, result >= 0);
    return result >= 0;
}

/* A write through a view, with an argument that is encoded here: 0, 1 for the slow way, or -1 with
 * an exception. */
static int write_value(sk_view *view, int op, const path *at, bool creates, sk_py_codec *codec,
                       PyObject *value) {
    uint8_t small[SK_PY_SMALL];
    const uint8_t *data, *levels = NULL;
    size_t len, levels_len;
    PyObject *owner;
    sk_py_key key;
    sk_keyed *state = state_of(view);
    if (state == NULL || codec == NULL || !key_of(view, &key) ||
        (creates && !bytes_of(view->levels, &levels, &levels_len)) ||
        PyObject_TypeCheck(value, sk_py_place_type))
        return 1;
    if (sk_py_encode(codec, value, small, &data, &len, &owner) < 0)
        return PyErr_Occurred() ? -1 : 1;
    bool is_done = sk_py_write(state, &key, op, at->data, at->len, (const char *)levels, data, len);
    Py_XDECREF(owner);
    return is_done ? 0 : 1;
}

/* Reads into scratch: what sk_read gives, or -SK_BUSY. */
static int64_t read_at(sk_keyed *state, const sk_py_key *encoded, int op, const path *steps) {
    sk_at at;
    sk_key key;
    sk_slot *slot;
    if (state == NULL) return -SK_BUSY;
    int status = sk_py_begin(state, encoded, SK_READS, &at, &key);
    if (status != SK_OK) return -SK_BUSY;
    scratch.len = 0;
    status = sk_entry_find(&at, &key, &slot);
    int64_t result = -status;
    bool is_whole = op == SK_R_GET && steps->len == 0;
    if (status == SK_OK && is_whole && sk_node_size(slot->value.obj) > SK_PY_BYTES_MAX)
        result = -SK_BUSY;
    else if (status == SK_OK)
        result =
            sk_node_read(slot->value.obj, op, steps->data, steps->len, NULL, 0, 0, 0, &scratch);
    bool is_answered = result >= 0 || result == -SK_MISSING;
    if (status == SK_OK && is_answered) sk_entry_read(&at, slot);
    sk_py_end(&at, is_answered);
    return result;
}

/* What a codec makes of scratch: the value, or NULL with an exception. Python code may run in a
 * collection of garbage, too: for a list, or the exception that bad UTF-8 raises. */
static PyObject *decode_scratch(sk_py_codec *codec) {
    PyObject *owner = Py_NewRef((PyObject *)codec);
    sk_buf taken = scratch;
    scratch = (sk_buf){0};
    PyObject *value = sk_py_decode(codec, taken.data, taken.len);
    Py_DECREF(owner);
    if (scratch.data == NULL && taken.cap <= SCRATCH_KEPT)
        scratch = taken;
    else
        sk_buf_free(&taken);
    return value;
}

int sk_py_read_whole(sk_keyed *state, const sk_py_key *key, sk_py_codec *codec, PyObject **value) {
    path root = {.data = (const uint8_t *)"", .len = 0};
    int64_t length = read_at(state, key, SK_R_GET, &root);
    if (length == -SK_MISSING) return SK_MISSING;
    if (length < 0) return SK_BUSY;
    *value = decode_scratch(codec);
    if (*value != NULL) return SK_OK;
    return sk_py_clear_fault() ? SK_BUSY : SK_CHANGED;
}

/* The item at a path: 0 with the value, 1 for the slow way, 2 if there is none, or -1 with an
 * exception. */
static int read_item(sk_view *view, const path *at, PyObject **value) {
    sk_py_key key;
    if (!key_of(view, &key)) return 1;
    int64_t length = read_at(state_of(view), &key, SK_R_GET, at);
    if (length == -SK_MISSING) return 2;
    if (length < 0) return 1;
    *value = decode_scratch(view->plan->item);
    return *value == NULL ? -1 : 0;
}

PyObject *sk_py_new_view(PyTypeObject *type, PyObject *state, PyObject *key, PyObject *k,
                         PyObject *steps, PyObject *shape, PyObject *levels, sk_py_plan *plan) {
    sk_view *view = NULL;
    if (steps != NULL && levels != NULL) view = (sk_view *)PyType_GenericAlloc(type, 0);
    if (view == NULL) {
        Py_XDECREF(steps);
        Py_XDECREF(levels);
        return NULL;
    }
    view->state = Py_NewRef(state);
    view->key = Py_NewRef(key);
    view->k = Py_NewRef(k);
    view->steps = steps;
    view->shape = Py_NewRef(shape);
    view->levels = levels;
    view->plan = (sk_py_plan *)Py_NewRef((PyObject *)plan);
    return (PyObject *)view;
}

/* Whether all that view_below needs is there. */
static bool gives_views(const sk_view *view) {
    return view->plan != NULL && view->plan->views != NULL && view->state != NULL &&
           view->key != NULL && view->k != NULL && view->levels != NULL &&
           PyBytes_CheckExact(view->levels);
}

/* The view of the item at a path, or NULL with an exception. */
static PyObject *view_below(const sk_view *view, const path *at) {
    sk_py_plan *plan = view->plan;
    Py_ssize_t depth = PyBytes_Size(view->levels);
    PyObject *levels = PyBytes_FromStringAndSize(NULL, depth + 1);
    if (levels == NULL) return NULL;
    char *letters = PyBytes_AsString(levels);
    memcpy(letters, PyBytes_AsString(view->levels), (size_t)depth);
    letters[depth] = plan->letter;
    PyObject *steps = PyBytes_FromStringAndSize((const char *)at->data, (Py_ssize_t)at->len);
    return sk_py_new_view(plan->views, view->state, view->key, view->k, steps, plan->shape, levels,
                          plan->below);
}

static Py_ssize_t length_of(PyTypeObject *type, PyObject *object) {
    sk_view *view = (sk_view *)object;
    sk_py_key key;
    path at;
    int64_t length = -SK_BUSY;
    if (key_of(view, &key) && path_of(view, &at))
        length = read_at(state_of(view), &key, SK_R_LEN, &at);
    if (length >= 0) return (Py_ssize_t)length;
    if (length == -SK_MISSING) return 0;
    PyObject *number = sk_py_slow(type, object, sk_py___len__, NULL, 0, NULL);
    if (number == NULL) return -1;
    length = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    return (Py_ssize_t)length;
}

/* A plain copy of the whole value, if this is a view of one. */
static PyObject *copy_of(PyTypeObject *type, PyObject *object, PyObject *const *args,
                         Py_ssize_t nargs, PyObject *kwnames) {
    sk_view *view = (sk_view *)object;
    sk_keyed *state = state_of(view);
    const uint8_t *steps;
    size_t steps_len;
    sk_py_key key;
    PyObject *value;
    if (nargs == 0 && kwnames == NULL && state != NULL && state->codec != NULL &&
        bytes_of(view->steps, &steps, &steps_len) && steps_len == 0 && key_of(view, &key)) {
        int status = sk_py_read_whole(state, &key, state->codec, &value);
        if (status == SK_OK) return value;
        if (status == SK_CHANGED) return NULL;
    }
    return sk_py_slow(type, object, sk_py_copy, args, nargs, kwnames);
}

#define COPY(NAME, TYPE)                                                                           \
    static PyObject *NAME(PyObject *object, PyObject *const *args, Py_ssize_t nargs,               \
                          PyObject *kwnames) {                                                     \
        return copy_of(TYPE, object, args, nargs, kwnames);                                        \
    }

COPY(list_copy, list_type)
COPY(map_copy, map_type)
COPY(set_copy, set_type)

/* ---- Lists ---- */

static bool is_position(PyObject *at) {
    return PyLong_CheckExact(at); /* a slice and all else go the slow way */
}

/* The view of an item, or NULL: with an exception, or without one for the slow way. */
static PyObject *list_view(sk_view *view, PyObject *at) {
    sk_py_key key;
    path steps;
    int overflow;
    if (!gives_views(view) || !key_of(view, &key) || !path_of(view, &steps)) return NULL;
    int64_t length = read_at(state_of(view), &key, SK_R_LEN, &steps);
    int64_t position = PyLong_AsLongLongAndOverflow(at, &overflow);
    if (overflow != 0 || length < 0) return NULL;
    if (position < 0) position += length;
    if (position < 0 || position >= length) return NULL;
    if (sizeof steps.made - steps.len < 9) return NULL;
    steps.len += sk_mp_write_int(steps.made + steps.len, position);
    return view_below(view, &steps);
}

static PyObject *list_getitem(PyObject *object, PyObject *at) {
    sk_view *view = (sk_view *)object;
    PyObject *value;
    path steps;
    if (is_position(at)) {
        value = list_view(view, at);
        if (value != NULL || PyErr_Occurred()) return value;
    }
    if (is_position(at) && view->plan != NULL && view->plan->item != NULL &&
        path_of(view, &steps) && path_add(&steps, SK_PY_INT, at)) {
        int outcome = read_item(view, &steps, &value);
        if (__builtin_expect(outcome == 0, 1)) return value;
        if (outcome < 0) return NULL;
    }
    return sk_py_slow_1(list_type, object, sk_py___getitem__, at);
}

static int list_setitem(PyObject *object, PyObject *at, PyObject *value) {
    sk_view *view = (sk_view *)object;
    path steps;
    if (value != NULL && is_position(at) && view->plan != NULL && path_of(view, &steps) &&
        path_add(&steps, SK_PY_INT, at)) {
        int outcome = write_value(view, SK_W_SET, &steps, false, view->plan->item, value);
        if (outcome <= 0) return outcome;
    }
    return sk_py_slow_set(list_type, object, at, value);
}

static PyObject *list_append(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames) {
    sk_view *view = (sk_view *)object;
    path steps;
    if (nargs == 1 && kwnames == NULL && view->plan != NULL && path_of(view, &steps)) {
        int outcome = write_value(view, SK_W_APPEND, &steps, true, view->plan->item, args[0]);
        if (outcome == 0) Py_RETURN_NONE;
        if (outcome < 0) return NULL;
    }
    return sk_py_slow(list_type, object, sk_py_append, args, nargs, kwnames);
}

static Py_ssize_t list_length(PyObject *object) { return length_of(list_type, object); }

/* ---- Maps ---- */

/* 0 with the value, 1 for the slow way, 2 if there is none, or -1 with an exception. is_asked: a
 * value that is a container must be there, or there is none. */
static int map_read(sk_view *view, PyObject *given, bool is_asked, PyObject **value) {
    path at;
    sk_py_key key;
    bool is_view = gives_views(view);
    if (view->plan == NULL || view->plan->key == NULL || (view->plan->item == NULL && !is_view) ||
        !path_of(view, &at))
        return 1;
    if (path_encode(&at, view->plan->key, given) < 0) return PyErr_Occurred() ? -1 : 1;
    if (!is_view) return read_item(view, &at, value);
    if (is_asked) {
        int64_t answer =
            key_of(view, &key) ? read_at(state_of(view), &key, SK_R_TYPE, &at) : -SK_BUSY;
        if (answer < 0) return answer == -SK_MISSING ? 2 : 1;
    }
    *value = view_below(view, &at);
    return *value == NULL ? -1 : 0;
}

static PyObject *map_getitem(PyObject *object, PyObject *given) {
    PyObject *value;
    int outcome = map_read((sk_view *)object, given, false, &value);
    if (__builtin_expect(outcome == 0, 1)) return value;
    if (outcome < 0) return NULL;
    return outcome == 2 ? sk_py_no_key(given)
                        : sk_py_slow_1(map_type, object, sk_py___getitem__, given);
}

static PyObject *map_get(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames) {
    PyObject *value;
    if ((nargs == 1 || nargs == 2) && kwnames == NULL) {
        int outcome = map_read((sk_view *)object, args[0], true, &value);
        if (__builtin_expect(outcome == 0, 1)) return value;
        if (outcome < 0) return NULL;
        if (outcome == 2) return Py_NewRef(nargs == 2 ? args[1] : Py_None);
    }
    return sk_py_slow(map_type, object, sk_py_get, args, nargs, kwnames);
}

static int map_setitem(PyObject *object, PyObject *given, PyObject *value) {
    sk_view *view = (sk_view *)object;
    path at;
    if (value != NULL && view->plan != NULL && view->plan->key != NULL && path_of(view, &at)) {
        int outcome = path_encode(&at, view->plan->key, given);
        if (outcome < 0 && PyErr_Occurred()) return -1;
        if (outcome == 0) outcome = write_value(view, SK_W_SET, &at, true, view->plan->item, value);
        if (outcome == 0) return 0;
        if (outcome < 0 && PyErr_Occurred()) return -1;
    }
    return sk_py_slow_set(map_type, object, given, value);
}

/* Whether a map has a key, or a set a member. */
static int has_key(PyTypeObject *type, PyObject *object, PyObject *given) {
    sk_view *view = (sk_view *)object;
    path at;
    sk_py_key key;
    /* Without its value: SK_R_TYPE answers SK_MISSING if nothing is there. */
    if (view->plan != NULL && view->plan->key != NULL && path_of(view, &at) &&
        path_add(&at, view->plan->key->scalar, given) && key_of(view, &key)) {
        int64_t answer = read_at(state_of(view), &key, SK_R_TYPE, &at);
        if (answer >= 0 || answer == -SK_MISSING) return answer >= 0;
    }
    return sk_py_slow_contains(type, object, given);
}

static int map_contains(PyObject *object, PyObject *given) {
    return has_key(map_type, object, given);
}

static Py_ssize_t map_length(PyObject *object) { return length_of(map_type, object); }

/* ---- Sets ---- */

static int set_contains(PyObject *object, PyObject *given) {
    return has_key(set_type, object, given);
}

static Py_ssize_t set_length(PyObject *object) { return length_of(set_type, object); }

static PyObject *set_add(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames) {
    static const uint8_t nil = 0xc0;
    sk_view *view = (sk_view *)object;
    sk_keyed *state = state_of(view);
    const uint8_t *levels;
    size_t levels_len;
    sk_py_key key;
    path at;
    if (nargs == 1 && kwnames == NULL && state != NULL && view->plan != NULL &&
        view->plan->key != NULL && path_of(view, &at) &&
        path_add(&at, view->plan->key->scalar, args[0]) && key_of(view, &key) &&
        bytes_of(view->levels, &levels, &levels_len) &&
        sk_py_write(state, &key, SK_W_SET, at.data, at.len, (const char *)levels, &nil, 1))
        Py_RETURN_NONE;
    return sk_py_slow(set_type, object, sk_py_add, args, nargs, kwnames);
}

/* ---- Place ---- */

static int place_traverse(PyObject *object, visitproc visit, void *arg) {
    sk_view *view = (sk_view *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(view->state);
    Py_VISIT(view->key);
    Py_VISIT(view->shape);
    Py_VISIT((PyObject *)view->plan);
    return 0; /* the others are bytes */
}

static int place_clear(PyObject *object) {
    sk_view *view = (sk_view *)object;
    Py_CLEAR(view->state);
    Py_CLEAR(view->key);
    Py_CLEAR(view->k);
    Py_CLEAR(view->steps);
    Py_CLEAR(view->shape);
    Py_CLEAR(view->levels);
    Py_CLEAR(view->plan);
    return 0;
}

static void place_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    place_clear(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *get_plan(PyObject *object, void *closure) {
    (void)closure;
    sk_py_plan *plan = ((sk_view *)object)->plan;
    return Py_NewRef(plan != NULL ? (PyObject *)plan : Py_None);
}

static int set_plan(PyObject *object, PyObject *plan, void *closure) {
    (void)closure;
    sk_view *view = (sk_view *)object;
    if (plan != NULL && plan != Py_None && !PyObject_TypeCheck(plan, sk_py_plan_type)) {
        PyErr_Format(PyExc_TypeError, "%R is no Plan", plan);
        return -1;
    }
    sk_py_plan *old = view->plan;
    view->plan = plan == Py_None ? NULL : (sk_py_plan *)Py_XNewRef(plan);
    Py_XDECREF((PyObject *)old);
    return 0;
}

static PyMemberDef place_members[] = {{"_state", T_OBJECT_EX, offsetof(sk_view, state), 0, NULL},
                                      {"_key", T_OBJECT_EX, offsetof(sk_view, key), 0, NULL},
                                      {"_k", T_OBJECT_EX, offsetof(sk_view, k), 0, NULL},
                                      {"_steps", T_OBJECT_EX, offsetof(sk_view, steps), 0, NULL},
                                      {"_shape", T_OBJECT_EX, offsetof(sk_view, shape), 0, NULL},
                                      {"_levels", T_OBJECT_EX, offsetof(sk_view, levels), 0, NULL},
                                      {NULL, 0, 0, 0, NULL}};

static PyGetSetDef place_properties[] = {{"_plan", get_plan, set_plan, NULL, NULL},
                                         {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot place_slots[] = {{Py_tp_traverse, place_traverse},
                                    {Py_tp_clear, place_clear},
                                    {Py_tp_dealloc, place_dealloc},
                                    {Py_tp_members, place_members},
                                    {Py_tp_getset, place_properties},
                                    {Py_tp_doc, "The base of views: a place in a container."},
                                    {0, NULL}};

#define SPEC(variable, NAME, FLAGS, SLOTS)                                                         \
    static PyType_Spec variable = {.name = "statekit._fast." NAME,                                 \
                                   .basicsize = sizeof(sk_view),                                   \
                                   .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | (FLAGS),    \
                                   .slots = SLOTS}

SPEC(place_spec, "Place", Py_TPFLAGS_HAVE_GC, place_slots);

#define FAST(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL | METH_KEYWORDS

static PyMethodDef list_methods[] = {
    {"append", FAST(list_append), "append($self, value)\n--\n\nAdds an item to the end."},
    {"copy", FAST(list_copy), "copy($self)\n--\n\nA plain list of what is here now."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot list_slots[] = {{Py_mp_subscript, list_getitem},
                                   {Py_mp_ass_subscript, list_setitem},
                                   {Py_mp_length, list_length},
                                   {Py_tp_methods, list_methods},
                                   {0, NULL}};
SPEC(list_spec, "ListPlace", 0, list_slots);

static PyMethodDef map_methods[] = {
    {"get", FAST(map_get),
     "get($self, key, default=None)\n--\n\nThe value of a key; the default if it is not there."},
    {"copy", FAST(map_copy), "copy($self)\n--\n\nA plain dict of what is here now."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot map_slots[] = {
    {Py_mp_subscript, map_getitem}, {Py_mp_ass_subscript, map_setitem}, {Py_mp_length, map_length},
    {Py_sq_contains, map_contains}, {Py_tp_methods, map_methods},       {0, NULL}};
SPEC(map_spec, "MapPlace", 0, map_slots);

static PyMethodDef set_methods[] = {
    {"add", FAST(set_add), "add($self, value)\n--\n\nAdds a member."},
    {"copy", FAST(set_copy), "copy($self)\n--\n\nA plain set of what is here now."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot set_slots[] = {{Py_mp_length, set_length},
                                  {Py_sq_contains, set_contains},
                                  {Py_tp_methods, set_methods},
                                  {0, NULL}};
SPEC(set_spec, "SetPlace", 0, set_slots);

int sk_py_add_views(PyObject *module) {
    sk_py_place_type = sk_py_add_type(module, &place_spec, NULL);
    if (sk_py_place_type == NULL) return -1;
    list_type = sk_py_add_type(module, &list_spec, sk_py_place_type);
    map_type = sk_py_add_type(module, &map_spec, sk_py_place_type);
    set_type = sk_py_add_type(module, &set_spec, sk_py_place_type);
    return list_type == NULL || map_type == NULL || set_type == NULL ? -1 : 0;
}
