/*
 * py_number.c: Numbers, the base of value states of int and float: a number in its slot. See py.h.
 */
#include "py.h"

static PyTypeObject *numbers_type;

/* The number of an object of exactly the state's type. An int that has an equal float is as good as
 * that float. */
static bool number_of(const sk_keyed *self, PyObject *value, sk_value *number) {
    int overflow;
    if (self->is_float && PyFloat_CheckExact(value)) {
        number->f64 = PyFloat_AsDouble(value);
        return true;
    }
    if (!PyLong_CheckExact(value)) return false;
    int64_t whole = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0) return false;
    if (!self->is_float) {
        number->i64 = whole;
        return true;
    }
    number->f64 = (double)whole;
    return whole >= -(1ll << 53) && whole <= 1ll << 53;
}

static PyObject *object_of(const sk_keyed *self, sk_value number) {
    return self->is_float ? PyFloat_FromDouble(number.f64) : PyLong_FromLongLong(number.i64);
}

/* SK_OK with the number, SK_MISSING, or anything else for the slow way. */
static int read_number(sk_keyed *self, PyObject *given, sk_value *number) {
    sk_py_key encoded;
    sk_at at;
    sk_key key;
    sk_slot *slot;
    if (!sk_py_key_of(&self->keys, given, &encoded)) return SK_BUSY;
    int status = sk_py_begin(self, &encoded, SK_READS, &at, &key);
    if (status != SK_OK) return status;
    status = sk_entry_find(&at, &key, &slot);
    if (status == SK_OK) {
        *number = slot->value;
        sk_entry_read(&at, slot);
    }
    sk_py_end(&at, status <= SK_MISSING);
    return status;
}

static PyObject *numbers_getitem(PyObject *object, PyObject *given) {
    sk_keyed *self = (sk_keyed *)object;
    sk_value number;
    int status = read_number(self, given, &number);
    if (__builtin_expect(status == SK_OK, 1)) return object_of(self, number);
    if (status != SK_MISSING) return sk_py_slow_1(numbers_type, object, sk_py___getitem__, given);
    return self->missing != NULL ? Py_NewRef(self->missing) : sk_py_no_key(given);
}

static PyObject *numbers_get(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames) {
    sk_keyed *self = (sk_keyed *)object;
    sk_value number;
    int status = SK_BUSY;
    if (kwnames == NULL && (nargs == 1 || nargs == 2)) status = read_number(self, args[0], &number);
    if (__builtin_expect(status == SK_OK, 1)) return object_of(self, number);
    if (status != SK_MISSING)
        return sk_py_slow(numbers_type, object, sk_py_get, args, nargs, kwnames);
    bool is_given = nargs == 2 && args[1] != sk_py_no_default;
    PyObject *missing = is_given ? args[1] : self->missing;
    return Py_NewRef(missing != NULL ? missing : Py_None);
}

static int numbers_setitem(PyObject *object, PyObject *given, PyObject *value) {
    sk_keyed *self = (sk_keyed *)object;
    sk_py_key encoded;
    sk_at at;
    sk_key key;
    sk_value number;
    if (value == NULL) return sk_py_delitem(numbers_type, self, given);
    if (number_of(self, value, &number) && sk_py_key_of(&self->keys, given, &encoded) &&
        sk_py_begin(self, &encoded, SK_WRITES, &at, &key) == SK_OK) {
        int status = sk_entry_put(&at, &key, number);
        sk_py_end(&at, status == SK_OK);
        if (__builtin_expect(status == SK_OK, 1)) return 0;
    }
    return sk_py_slow_set(numbers_type, object, given, value);
}

static PyObject *numbers_add(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames) {
    sk_keyed *self = (sk_keyed *)object;
    sk_py_key encoded;
    sk_at at;
    sk_key key;
    sk_value amount, sum;
    if (kwnames == NULL && (nargs == 1 || nargs == 2)) {
        bool fits = true;
        if (nargs == 2)
            fits = number_of(self, args[1], &amount);
        else if (self->is_float)
            amount.f64 = 1.0;
        else
            amount.i64 = 1;
        if (fits && sk_py_key_of(&self->keys, args[0], &encoded) &&
            sk_py_begin(self, &encoded, SK_WRITES, &at, &key) == SK_OK) {
            int status = self->is_float
                             ? sk_entry_add_f64(&at, &key, amount.f64, self->zero_f64, &sum.f64)
                             : sk_entry_add_i64(&at, &key, amount.i64, self->zero_i64, &sum.i64);
            sk_py_end(&at, status == SK_OK);
            if (__builtin_expect(status == SK_OK, 1)) return object_of(self, sum);
        }
    }
    return sk_py_slow(numbers_type, object, sk_py_add, args, nargs, kwnames);
}

/* _bind_numbers(zero, missing): what add() adds to, and what a missing key gives, if anything. */
static PyObject *numbers_bind(PyObject *object, PyObject *args) {
    sk_keyed *self = (sk_keyed *)object;
    PyObject *zero, *missing = NULL;
    sk_value number;
    if (!PyArg_ParseTuple(args, "O|O", &zero, &missing)) return NULL;
    if (!number_of(self, zero, &number)) {
        PyErr_Format(PyExc_TypeError, "%R is no number of this state", zero);
        return NULL;
    }
    if (self->is_float)
        self->zero_f64 = number.f64;
    else
        self->zero_i64 = number.i64;
    /* A kind that this file does not know goes the slow way. */
    if (sk_py_held(self) != SK_IN_SLOT ||
        sk_kinds[__builtin_ctz(self->kinds)]->column != (self->is_float ? SK_COL_F64 : SK_COL_I64))
        self->kinds = 0;
    PyObject *old = self->missing;
    self->missing = Py_XNewRef(missing);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

#define FAST(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"get", FAST(numbers_get),
     "get($self, key, default=None)\n--\n\n"
     "The value; else the default given here, else the state's default, else None."},
    {"add", FAST(numbers_add),
     "add($self, key, amount=1)\n--\n\n"
     "Adds to the number, or to the default (0 if there is none). Returns the new number."},
    {"_bind_numbers", numbers_bind, METH_VARARGS, "(zero[, missing])"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {{Py_mp_subscript, numbers_getitem},
                              {Py_mp_ass_subscript, numbers_setitem},
                              {Py_tp_methods, methods},
                              {Py_tp_doc, "Calls about one number, in C."},
                              {0, NULL}};

static PyType_Spec spec = {.name = "statekit._fast.Numbers",
                           .basicsize = sizeof(sk_keyed),
                           .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                           .slots = slots};

int sk_py_add_number(PyObject *module) {
    numbers_type = sk_py_add_type(module, &spec, sk_py_single_type);
    return numbers_type == NULL ? -1 : 0;
}
