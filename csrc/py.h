/*
 * py.h: one key a call, from Python, without a Python frame: the module statekit._fast.
 *
 * cffi is the binding of the store. A call through it costs 200 ns and more, several times the work
 * of a call about one key. The types here are bases of the typed states and views of
 * statekit/state/; their slots do such a call directly, if it is simple. They are in the same shared
 * object as the cffi module, so both work on the same stores:
 *
 *     visits["alice"]                                     type->mp_subscript
 *       -> py_number.c   a key of the exact type? the store is open? the leaf is free? here it is
 *       -> else: super().__getitem__("alice")             statekit/state/value.py, through cffi
 *
 *   py_module.c   the module                     py_keyed.c    what all states share; the slow way
 *   py_number.c   states of ints and floats      py_value.c    states of encoded values
 *   py_container.c  states of containers         py_view.c     the views of their containers
 *   py_scalar.c   scalars as MessagePack; Codec, Plan
 *
 * There is one slow way: the method of the same name in the next class, in Python. It is taken for
 * everything unusual: another class than the declared one (a subclass of str, True for an int), a
 * number that does not fit, a closed store, SK_BUSY, SK_UNKNOWN, every error. Nothing has happened
 * before it is taken, so it decides alone what is right, and says what is wrong. Only answers and
 * changes that succeed are made here, by the same functions that the calls of statekit.h use.
 *
 * Rules
 *  1. The GIL is held all the time, so a leaf's lock is only tried (SK_TRIES): a thread that has
 *     the lock may be waiting for the GIL, or encode a whole leaf.
 *  2. While a leaf's lock is held, nothing here calls what might run Python code: that code could
 *     use the same leaf, and wait for the lock for ever. A collection of garbage runs Python code,
 *     and so may making any object that the collector tracks. Making bytes does not.
 *  3. Whatever may run Python code may close the store. After it the store is looked up again.
 *     Else a store lives as long as the handle in sk_keyed.ptr, which the GIL guards.
 *  4. What would take long with the GIL held goes the slow way, which releases it: values of more
 *     than SK_PY_BYTES_MAX bytes.
 *  5. Only the limited API of 3.11. Only the main interpreter: the module has global variables.
 */
#ifndef SK_PY_H
#define SK_PY_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include "entry.h"

#define SK_PY_BYTES_MAX 65536 /* of an encoded value that is copied with the GIL held */
#define SK_PY_SMALL 512       /* bytes of keys and scalars that are encoded on the stack */

/* What a codec encodes, if C can do that too (py_scalar.c). The numbers are used in fast.py. */
typedef enum sk_py_scalar {
    SK_PY_OTHER = 0, /* only the codec can */
    SK_PY_INT = 1,
    SK_PY_FLOAT = 2,
    SK_PY_BOOL = 3,
    SK_PY_STR = 4,
    SK_PY_BYTES = 5
} sk_py_scalar;

#define SK_PY_FIELDS_MAX 32

/* What the value of a record's field must be for the record to be packed as it is (fit.py). */
typedef struct sk_py_field {
    PyObject *name;
    PyTypeObject *cls; /* its class, exactly; an int must have 64 bits, too. NULL: see test */
    PyObject *test;    /* value -> bool */
} sk_py_field;

/* A codec as C sees it. */
typedef struct sk_py_codec {
    PyObject ob_base;
    int scalar;       /* sk_py_scalar */
    PyObject *encode; /* value -> bytes */
    PyObject *decode; /* bytes -> value */
    /* Exact values of these need only be packed (fit.py): records, lists and dicts. */
    PyObject *pack;    /* else NULL */
    PyTypeObject *cls; /* of records, or list, or dict */
    int field_count;
    sk_py_field fields[SK_PY_FIELDS_MAX];
    struct sk_py_codec *key, *item; /* of lists (item) and dicts */
} sk_py_codec;

/* How the parts of a live container are encoded: the keys of a map or the members of a set, and the
 * items of a list or the values of a map. NULL: there are none, or they are containers. */
typedef struct sk_py_plan {
    PyObject ob_base;
    sk_py_codec *key, *item;
    /* Items that are containers, each given as a view: its class, shape and plan, and the letter of
     * what a write creates. Else NULL. */
    PyTypeObject *views;
    PyObject *shape;
    struct sk_py_plan *below;
    char letter;
} sk_py_plan;

/* A typed state. */
typedef struct sk_keyed {
    PyObject ob_base;
    PyObject *ptr;     /* the store's cffi handle, which keeps it alive; None: closed */
    sk_store *store;   /* what it points to; NULL: closed, or not bound yet */
    unsigned state;    /* its id */
    unsigned kinds;    /* SK_ONLY(its kind); 0: not bound, all goes the slow way */
    bool is_float;     /* of numbers */
    sk_key_type keys;  /* how keys are encoded */
    PyObject *missing; /* what a missing key gives: numbers as they are, values encoded; or NULL */
    int64_t zero_i64;  /* what add() adds to for a missing key */
    double zero_f64;
    sk_py_codec *codec;  /* of whole values; NULL for numbers */
    PyTypeObject *views; /* containers: the class of its views, else NULL */
    PyObject *shape;     /* containers: what its views get (views.py) */
    PyObject *levels;
    sk_py_plan *plan;
} sk_keyed;

extern PyTypeObject *sk_py_keyed_type;  /* Keyed */
extern PyTypeObject *sk_py_single_type; /* Single */
extern PyTypeObject *sk_py_codec_type;  /* Codec */
extern PyTypeObject *sk_py_plan_type;   /* Plan */
extern PyTypeObject *sk_py_place_type;  /* Place */

extern PyObject *sk_py_no_default; /* what get() is given for "no default" (value.py) */

PyObject *sk_py_set_address_of(PyObject *module, PyObject *function);

/* A key, encoded as keys.py does. */
typedef struct sk_py_key {
    const uint8_t *data; /* in the key object itself, which the caller keeps, or in `made` */
    size_t len;
    uint8_t made[SK_PY_SMALL];
} sk_py_key;

/* An encoded tuple, in key->made; false as below. */
bool sk_py_key_tuple(const sk_key_type *type, PyObject *given, sk_py_key *key);

/* False, without an exception, for a key that the slow way is to look at. */
static inline bool sk_py_key_of(const sk_key_type *type, PyObject *given, sk_py_key *key) {
    if (type->is_tuple) return sk_py_key_tuple(type, given, key);
    if (type->part[0] == 's') {
        if (!PyUnicode_CheckExact(given)) return false;
        Py_ssize_t len;
        key->data = (const uint8_t *)PyUnicode_AsUTF8AndSize(given, &len);
        if (key->data == NULL) PyErr_Clear(); /* lone surrogates */
        key->len = (size_t)len;
        return key->data != NULL;
    }
    if (type->part[0] == 'i') {
        int overflow;
        if (!PyLong_CheckExact(given)) return false;
        int64_t number = PyLong_AsLongLongAndOverflow(given, &overflow);
        if (overflow != 0) return false;
        sk_store64(key->made, (uint64_t)number);
        key->data = key->made;
        key->len = 8;
        return true;
    }
    if (!PyBytes_CheckExact(given)) return false;
    key->data = (const uint8_t *)PyBytes_AsString(given);
    key->len = (size_t)PyBytes_Size(given);
    return true;
}

/* How the values of the state's kind are held; 0 if it is not bound. */
static inline int sk_py_held(const sk_keyed *self) {
    return self->kinds == 0 ? 0 : sk_kinds[__builtin_ctz(self->kinds)]->held;
}

/* Begins a call: SK_OK with the leaf locked, or another status, without an exception, for the slow
 * way. sk_py_end follows SK_OK. */
static inline int sk_py_begin(sk_keyed *self, const sk_py_key *key, int access, sk_at *at,
                              sk_key *routed) {
    if (self->store == NULL || self->kinds == 0) return SK_BUSY;
    return sk_call_begin(self->store, self->state, self->kinds, key->data, key->len,
                         access | SK_TRIES, at, routed);
}

/* Ends a call. One that got an answer is counted; for any other the slow way follows, which counts
 * for itself. */
static inline void sk_py_end(sk_at *at, bool is_answered) {
    if (is_answered) sk_count_operation(at);
    sk_call_end(at);
}

/* The names of methods, as objects. */
#define SK_PY_NAMES(NAME)                                                                          \
    NAME(__getitem__)                                                                              \
    NAME(__setitem__)                                                                              \
    NAME(__delitem__)                                                                              \
    NAME(__contains__)                                                                             \
    NAME(__len__)                                                                                  \
    NAME(_put_data)                                                                                \
    NAME(add)                                                                                      \
    NAME(append)                                                                                   \
    NAME(copy)                                                                                     \
    NAME(discard)                                                                                  \
    NAME(drop)                                                                                     \
    NAME(get)
#define SK_PY_DECLARE(name) extern PyObject *sk_py_##name;
SK_PY_NAMES(SK_PY_DECLARE)

/* The slow way: super(type, self).name(...). */
PyObject *sk_py_slow(PyTypeObject *type, PyObject *self, PyObject *name, PyObject *const *args,
                     Py_ssize_t nargs, PyObject *kwnames);
PyObject *sk_py_slow_1(PyTypeObject *type, PyObject *self, PyObject *name, PyObject *arg);
int sk_py_slow_set(PyTypeObject *type, PyObject *self, PyObject *key, PyObject *value);
int sk_py_slow_contains(PyTypeObject *type, PyObject *self, PyObject *key);

/* Sets KeyError(key), and returns NULL. */
PyObject *sk_py_no_key(PyObject *key);
/* Puts an encoded value: true if that was done, else the slow way is to do it. */
bool sk_py_put_data(sk_keyed *self, PyObject *key, const uint8_t *data, size_t len);
/* Encodes a value with the state's codec and puts that; type is for the slow way. */
int sk_py_encode_and_put(PyTypeObject *type, sk_keyed *self, PyObject *key, PyObject *value);
/* Clears the exception if it is one of VALUE_FAULTS (exact.py): the slow way will meet it again.
 * False for any other. */
bool sk_py_clear_fault(void);
/* Removes a key's value that is not large: SK_OK, SK_MISSING, or anything else for the slow way.
 * blind: without asking whether it is there. */
int sk_py_delete(sk_keyed *self, PyObject *key, bool blind);
/* del self[key]; type is for the slow way. */
int sk_py_delitem(PyTypeObject *type, sk_keyed *self, PyObject *key);

/* ---- Scalars (py_scalar.c) ---- */

/* Appends a value's MessagePack, as the codec's encode would, at p, where there is room for `room`
 * bytes. Returns how many bytes, or 0, without an exception, for the slow way. Runs no Python
 * code. */
size_t sk_py_pack(int scalar, PyObject *value, uint8_t *p, size_t room);
/* The value from its MessagePack, as the codec's decode would. NULL without an exception for the
 * slow way. Not while a leaf's lock is held. */
PyObject *sk_py_unpack(int scalar, const uint8_t *p, size_t len);
/* If p holds nothing but a bin: its length, and *head is how long its head is. Else -1. */
int64_t sk_py_bin(const uint8_t *p, size_t len, size_t *head);
/* What the codec's encode gives: bytes, or NULL with an exception. */
PyObject *sk_py_encode_any(sk_py_codec *codec, PyObject *value);
/* The value of a codec from a part of a container: made here, or else by the codec's decode. NULL
 * with an exception. */
PyObject *sk_py_decode(sk_py_codec *codec, const uint8_t *p, size_t len);

/* ---- Views (py_view.c) ---- */

/* A place in a container (statekit/state/views.py); all are set but while it is made. */
typedef struct sk_view {
    PyObject ob_base;
    PyObject *state; /* a Keyed */
    PyObject *key;   /* as it was given */
    PyObject *k;     /* bytes: encoded */
    PyObject *steps; /* bytes: the path */
    PyObject *shape;
    PyObject *levels; /* bytes: what a write creates */
    sk_py_plan *plan;
} sk_view;

/* A view, or NULL with an exception. Takes the references to steps and levels, which may be NULL
 * after an exception. */
PyObject *sk_py_new_view(PyTypeObject *type, PyObject *state, PyObject *key, PyObject *k,
                         PyObject *steps, PyObject *shape, PyObject *levels, sk_py_plan *plan);
/* Encodes `value` with a codec: at *data, in `small` or in the bytes *owner, which the caller
 * releases. 0, or -1 with an exception or (VALUE_FAULTS) without one, for the slow way. */
int sk_py_encode(sk_py_codec *codec, PyObject *value, uint8_t *small, const uint8_t **data,
                 size_t *len, PyObject **owner);
/* Does a write that gives nothing back: true if that was done, else the slow way is to do it. */
bool sk_py_write(sk_keyed *state, const sk_py_key *key, int op, const uint8_t *path,
                 size_t path_len, const char *levels, const uint8_t *arg, size_t arg_len);
/* Reads the whole value of a key: SK_OK with what the codec makes of it, SK_MISSING, SK_CHANGED with
 * an exception, or anything else for the slow way. */
int sk_py_read_whole(sk_keyed *state, const sk_py_key *key, sk_py_codec *codec, PyObject **value);

/* ---- Types, each added to the module by its file: 0, or -1 with an exception ---- */

int sk_py_add_codec(PyObject *module);      /* py_scalar.c */
int sk_py_add_keyed(PyObject *module);      /* py_keyed.c; before the following */
int sk_py_add_number(PyObject *module);     /* py_number.c */
int sk_py_add_value(PyObject *module);      /* py_value.c */
int sk_py_add_views(PyObject *module);      /* py_view.c; before the following */
int sk_py_add_containers(PyObject *module); /* py_container.c */

/* PyModule_AddType, of a spec whose name begins with "statekit._fast."; bases: NULL or a type. */
PyTypeObject *sk_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject *base);

#endif
